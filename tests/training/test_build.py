"""The plain network of a config, built without weights."""

import pytest
import torch
from torch import nn

from onelip.core.bake import bake
from onelip.core.errors import RecipeError
from onelip.methods.registry import list_methods
from onelip.models import register_model, registry
from onelip.training.build import build_model, build_plain, load_run
from onelip.training.recipe import Recipe, preset
from onelip.training.run_directory import RunConfig
from onelip.training.trainer import train

OPTIONS = ("width=2", "channels=8", "convs=2", "linears=2")


@pytest.mark.parametrize("method", ["default", "none", *(name for name in list_methods() if name != "lln")])
def test_filled_with_baked_weights_it_computes_the_same(method):
    """In training mode too, in which a power iteration must not move, and after the weights have changed."""
    torch.manual_seed(0)
    recipe = Recipe(model="patchwise-tiny", method=method, model_options=OPTIONS)
    model = build_model(recipe, 10, (1, 8, 8))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01 * torch.randn_like(parameter))
    plain = bake(model).eval()
    empty = build_plain(RunConfig(recipe, "digits", "", tuple("0123456789"), (1, 8, 8)))
    empty.load_state_dict(plain.state_dict(), assign=True)
    images = torch.rand(2, 1, 8, 8)
    assert torch.equal(empty.eval()(images), plain(images))


def test_batch_normalisation_is_folded_without_weights(monkeypatch):
    monkeypatch.setattr(registry, "_MODELS", dict(registry._MODELS))

    @register_model
    def with_batch_norm(*, num_classes=10, image_size=(8, 8), in_channels=1, method=None):
        """A convolution with batch normalisation, which can be folded, and one before it, which cannot."""
        layers = [nn.BatchNorm2d(in_channels), nn.Conv2d(in_channels, 4, 3), nn.BatchNorm2d(4), nn.Flatten()]
        return nn.Sequential(*layers, nn.Linear(144, num_classes))

    recipe = Recipe(model="with-batch-norm", method="none")
    model = build_model(recipe, 10, (1, 8, 8))
    model(torch.rand(8, 1, 8, 8))
    plain = bake(model).eval()
    empty = build_plain(RunConfig(recipe, "digits", "", tuple("0123456789"), (1, 8, 8)))
    empty.load_state_dict(plain.state_dict(), assign=True)
    images = torch.rand(2, 1, 8, 8)
    assert torch.equal(empty.eval()(images), plain(images))


def test_unknown_methods_are_named():
    config = RunConfig(Recipe(model="patchwise-tiny", method="aoll"), "digits", "", ("a", "b"), (1, 8, 8))
    with pytest.raises(RecipeError, match="did you mean 'aol'"):
        build_plain(config)


def test_constants_of_a_changed_network_are_computed_again(tmp_path):
    train(preset("digits").replace(model_options=("channels=4", "width=2", "convs=1"), epochs=1), tmp_path / "run")
    run = load_run(tmp_path / "run")
    before = run.constants
    assert run.constants is before
    with torch.no_grad():
        for parameter in run.plain.parameters():
            parameter.data.mul_(2)  # torch does not count changes of `data`
    assert run.lipschitz is None or run.lipschitz > 4 * before.total
