"""Gradients made shorter: by how much, the same for any number of processes, and after being killed."""

import json
import math

import pytest
import torch
from _plain_training import train_plainly
from _process_pairs import assert_close, finish_pair
from _runs import SMALL, SMALL_FLAGS, Interrupted, Interrupter, same_bytes
from torch import nn

from onelip.training import Diverged, Recipe, RecipeError, load_run, preset, train
from onelip.training.objective import Objective

CLIP = 0.26  # among the lengths of SMALL's gradients: some are shortened, some are not
ONE_EPOCH = SMALL.replace(epochs=1, gradient_clip=CLIP)


@pytest.fixture(scope="module")
def clipped(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs") / "clipped"
    train(ONE_EPOCH, out)
    return out


def test_the_whole_gradient_is_shortened_and_keeps_its_direction(clipped):
    """Written out: one length over all parameters, biases too, and only what is longer is changed."""
    lengths = []

    def shorten(model):
        gradients = [p.grad for p in model.parameters()]
        length = math.sqrt(sum(float(g.double().square().sum()) for g in gradients))
        lengths.append(length)
        if length > CLIP:
            for g in gradients:
                g.mul_(CLIP / length)

    model = train_plainly(ONE_EPOCH, shorten)
    assert min(lengths) < CLIP < max(lengths) / 1.1  # else nothing was tried
    trained = load_run(clipped).model.state_dict()
    for name, tensor in model.state_dict().items():
        torch.testing.assert_close(tensor, trained[name], rtol=1e-5, atol=1e-6)


def test_short_gradients_are_unchanged(tmp_path, clipped):
    train(SMALL.replace(epochs=1), tmp_path / "off")
    train(SMALL.replace(epochs=1, gradient_clip=1e6), tmp_path / "far")
    assert same_bytes(tmp_path / "off", tmp_path / "far")
    assert not same_bytes(tmp_path / "off", clipped)


def test_a_run_that_was_killed_ends_with_the_same_bits(tmp_path, clipped):
    with pytest.raises(Interrupted):
        train(ONE_EPOCH, tmp_path / "run", display=Interrupter(4), save_steps=3)
    with pytest.raises(RecipeError, match="gradient-clip"):
        train(ONE_EPOCH.replace(gradient_clip=0.0), tmp_path / "run", resume=True)
    train(ONE_EPOCH, tmp_path / "run", resume=True)
    assert same_bytes(tmp_path / "run", clipped)


def test_two_processes_shorten_what_they_have_together(tmp_path):
    recipe = preset("digits").replace(
        augment=True, model_options=SMALL.model_options, batch_size=241, epochs=1, gradient_clip=CLIP
    )
    flags = [*SMALL_FLAGS, "--batch-size", "241", "--epochs", "1", "--gradient-clip", str(CLIP)]
    finish_pair(tmp_path / "log", "train", *flags, "--out", tmp_path / "two")
    train(recipe, tmp_path / "one")
    assert_close(tmp_path / "two", tmp_path / "one")


def test_the_papers_recipe_does_not_clip_and_older_recipes_are_read():
    assert preset("paper").gradient_clip == 0.0
    older = {key: value for key, value in Recipe().to_json().items() if key != "gradient_clip"}
    assert Recipe.from_json(json.loads(json.dumps(older))) == Recipe()


@pytest.mark.parametrize("value", [-1.0, math.inf, math.nan, True, "3"])
def test_what_is_no_length_is_refused(value):
    with pytest.raises(RecipeError, match="gradient_clip"):
        Recipe(gradient_clip=value)


def test_a_gradient_that_is_not_finite_is_not_hidden(tmp_path, monkeypatch):
    """Infinity divided by infinity is no number: the run ends with an error."""
    real = Objective.__call__

    def broken(self, *args, **kwargs):
        loss = real(self, *args, **kwargs)
        return loss + sum(p.sum() for p in self.model.parameters() if isinstance(p, nn.Parameter)) * math.inf

    monkeypatch.setattr(Objective, "__call__", broken)
    with pytest.raises(Diverged):
        train(ONE_EPOCH, tmp_path / "run")
