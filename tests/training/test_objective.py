"""Losses and methods in training: what is computed when, for any number of processes, stopped and resumed."""

import json
import math
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F
from _process_pairs import assert_close, finish_pair
from _runs import SMALL, SMALL_FLAGS, Interrupted, Interrupter, call as command, same_bytes
from torch import nn

import onelip
from onelip.core.parametrization import find_parametrization, original_of
from onelip.losses import EMMALoss, LMTLoss, list_losses, orthogonality_penalty
from onelip.methods.projections import Projection
from onelip.methods.registry import METHODS
from onelip.models import register_model, registry as models_registry
from onelip.models.chain import LayerFactory
from onelip.training import Recipe, RecipeError, load_run, preset, train
from onelip.training.build import build_model
from onelip.training.evaluation import BY_PAIRS
from onelip.training.objective import Objective, resolve_loss, resolve_method, with_method

SHAPE = (1, 8, 8)
MECHANISMS = ["clipping", "lcc", "parseval", "ocnn", "gradient-penalty", "lmt", "gloro", "spectral-norm", "soc-cr"]


def batch(size=6):
    generator = torch.Generator().manual_seed(0)
    return torch.rand(size, *SHAPE, generator=generator), torch.arange(size) % 10


def made(method, **changes):
    recipe = with_method(SMALL, method).replace(**changes)
    torch.manual_seed(0)
    model = build_model(recipe, 10, SHAPE)
    return recipe, model, Objective(recipe, model)


def compute(objective, images, labels, batch_size=None, progress=1.0):
    size = len(labels) if batch_size is None else batch_size
    no_precision = torch.autocast("cpu", enabled=False)
    return objective(objective.model, images, labels, batch_size=size, progress=progress, precision=no_precision)


# Parts of a batch.


@pytest.mark.parametrize("method", MECHANISMS)
def test_parts_of_a_batch_add_up_to_the_whole(method):
    """Two processes with four and two images, and one with none, against one with all six."""
    images, labels = batch()
    whole = compute(made(method)[2], images, labels)
    parts = [compute(made(method)[2], images[a:b], labels[a:b], batch_size=6) for a, b in ((0, 4), (4, 6), (6, 6))]
    assert float(sum(parts).detach()) == pytest.approx(float(whole.detach()), rel=1e-5)
    parts[2].backward()  # a process without images takes part all the same


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_parts_of_a_batch_add_up_for_losses_of_ones_own(monkeypatch, reduction):
    module = ModuleType("my_losses")
    module.loss = lambda scores, labels: F.cross_entropy(scores, labels, reduction=reduction)
    monkeypatch.setitem(sys.modules, "my_losses", module)
    _, model, objective = made("aol", loss="my_losses:loss")
    images, labels = batch()
    parts = [compute(objective, images[a:b], labels[a:b], batch_size=6) for a, b in ((0, 4), (4, 6), (6, 6))]
    torch.testing.assert_close(sum(parts), F.cross_entropy(model(images), labels))
    parts[2].backward()
    assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


# Which loss, with which options.


def test_the_loss_of_a_parametrization_is_the_recipes():
    recipe, model, objective = made("aol")
    images, labels = batch()
    expected = onelip.OffsetCrossEntropy(recipe.offset, recipe.temperature)(model(images), labels)
    assert torch.allclose(compute(objective, images, labels), expected)


def test_a_penalty_is_added_and_its_options_reach_it():
    images, labels = batch()
    plain = compute(made("ocnn", loss_options=("weight=0",))[2], images, labels)
    _, model, objective = made("ocnn", loss_options=("weight=2.0",))
    assert torch.allclose(compute(objective, images, labels), plain + orthogonality_penalty(model, weight=2.0))


def test_progress_reaches_the_ramp():
    _, model, objective = made("lmt", loss_options=("radius=5.0",))
    model.eval()  # the estimates of the norms stay the same
    images, _ = batch()
    labels = model(images).argmax(1)  # only right decisions have a margin that can be used up
    start, end = (float(compute(objective, images, labels, progress=p).detach()) for p in (0.0, 1.0))
    scores = model(images)
    assert start == pytest.approx(float(F.cross_entropy(scores, labels).detach()), rel=1e-6)
    expected = LMTLoss(radius=5.0)(scores, labels, model=model, images=images)
    assert end == pytest.approx(float(expected.detach()), rel=1e-6)
    assert end > start


@pytest.mark.parametrize("loss", list_losses())
def test_every_loss_goes_with_every_kind_of_method(loss):
    images, labels = batch()
    for method in ("aol", "cayley", "lcc", "emma", "sll"):
        if (method, loss) == ("sll", "ocnn"):
            continue  # its residual layers have no kernel whose rows could be orthogonal
        _, model, objective = made(method, loss=loss)
        objective.check(SHAPE)
        compute(objective, images, labels).backward()
        assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


def test_a_loss_that_is_named_replaces_that_of_the_method():
    assert resolve_loss(Recipe(method="soc-cr")) == ("certificate-regularisation", {"per_pair": True})
    assert resolve_loss(Recipe(method="soc-cr", loss="certificate-regularisation")) == (
        "certificate-regularisation",
        {},
    )
    assert resolve_loss(Recipe(method="gloro", loss_options=("weight=2",))) == ("gloro", {"weight": 2})
    assert isinstance(made("gloro", loss="emma", loss_options=("epsilon=0.5",))[2].loss, EMMALoss)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"method": "lmt", "loss_options": ("radius=-1",)}, "loss lmt: expected radius"),
        ({"method": "lmt", "loss_options": ("ramp=7",)}, "loss lmt: expected ramp"),
        ({"method": "lmt", "loss_options": ("unknown=3",)}, "no option 'unknown'"),
        ({"method": "lmt", "method_options": ("radius=1",)}, "lmt has no option 'radius'"),
        ({"loss": "ema"}, "did you mean 'emma'"),
        ({"loss": "no_such_module:loss"}, "cannot be imported"),
        ({"loss_options": ("offset=1",)}, "the recipe's field offset sets it"),
        ({"loss": "torch.nn:CrossEntropyLoss", "loss_options": ("reduction=sum",)}, "field reduction"),
        ({"loss": "emma", "method": "none"}, "does not fit this network: .*onelip.constrain"),
        ({"loss": "torch.nn.functional:nll_loss", "loss_options": ("reduction=oops",)}, "does not fit this network"),
        ({"loss": "torch:argmax"}, "does not fit this network"),
    ],
)
def test_losses_that_cannot_be_used_leave_nothing_behind(tmp_path, changes, message):
    with pytest.raises(RecipeError, match=message):
        train(SMALL.replace(**changes), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_trial_of_a_loss_changes_nothing():
    _, model, objective = made("gloro")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    random = torch.get_rng_state()
    objective.check(SHAPE)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), random)


def test_losses_are_a_choice_of_the_command_line(tmp_path, capsys, monkeypatch):
    """AOL layers with EMMA, certified per pair; and with a function of one's own in the current directory."""
    out = tmp_path / "emma"
    flags = ["train", *SMALL_FLAGS, "--epochs", "1", "--method", "aol"]
    code, _, err = command(capsys, *flags, "--loss", "emma", "--loss-options", "epsilon=0.5", "--out", out)
    assert code == 0, err
    run = load_run(out)
    assert (run.config.recipe.loss, run.config.recipe.loss_options) == ("emma", ("epsilon=0.5",))
    assert run.constants.mode == BY_PAIRS
    (tmp_path / "lossy_module.py").write_text(
        "import torch.nn.functional as F\n"
        "def lossy(scores, labels, p=1): return F.multi_margin_loss(scores, labels, p=p)\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [path for path in sys.path if path])  # as for the installed script
    code, _, err = command(
        capsys, *flags, "--loss", "lossy_module:lossy", "--loss-options", "p=2", "--out", tmp_path / "own"
    )
    assert code == 0, err
    monkeypatch.delitem(sys.modules, "lossy_module")
    monkeypatch.chdir(tmp_path.parent)
    assert load_run(tmp_path / "own").lipschitz == 1.0  # where the module is missing, too


# A model's own method.


@pytest.fixture
def own_method(monkeypatch):
    """Register a model whose own method is a given one; the registry is restored."""
    monkeypatch.setattr(models_registry, "_MODELS", dict(models_registry._MODELS))

    def make(method):
        def own(*, num_classes=10, image_size=(8, 8), in_channels=1, method=method, method_options=None):
            layers, pixels = LayerFactory(method, method_options), image_size[0] * image_size[1]
            return nn.Sequential(
                nn.Flatten(), layers.linear(in_channels * pixels, 12), onelip.nn.MaxMin(), layers.linear(12, 10)
            )

        own.__name__ = f"own_{method.replace('-', '_')}"
        register_model(own)
        return Recipe(model=f"own-{method}", data="digits", epochs=1, batch_size=250, lr=0.05, augment=False)

    return make


@pytest.mark.parametrize("method", ["lcc", "lmt", "gloro", "soc-cr", "ocnn"])
def test_a_models_own_method_has_its_loss_projection_and_constants(own_method, tmp_path, method):
    """The same run as with the method named: nothing of "default" is lost."""
    recipe = own_method(method)
    assert resolve_method(recipe) is METHODS[method]
    assert resolve_loss(recipe) == resolve_loss(recipe.replace(method=method))
    found = train(recipe, tmp_path / "default")
    expected = train(recipe.replace(method=method), tmp_path / "named")
    assert found == expected
    assert found["test"]["lipschitz"] is not None
    assert same_bytes(tmp_path / "default", tmp_path / "named")
    run = load_run(tmp_path / "default")
    assert run.constants.mode == found["test"]["mode"]
    projected = [m for m in run.model.modules() if isinstance(find_parametrization(m), Projection)]
    assert bool(projected) == (METHODS[method].mechanism == "projection")
    for layer in projected:
        before = original_of(layer).detach().clone()
        onelip.project(layer)
        torch.testing.assert_close(original_of(layer).detach(), before, rtol=1e-3, atol=1e-4)


# Projection; stopped and resumed; several processes.


def test_projection_comes_after_each_step(tmp_path):
    train(with_method(SMALL, "clipping").replace(epochs=1, lr=50.0), tmp_path / "run")
    model = load_run(tmp_path / "run").model
    for layer in model.modules():
        if isinstance(layer, nn.Linear | nn.Conv2d):
            assert torch.equal(layer.train().weight, layer.eval().weight)


@pytest.mark.parametrize("method", ["lcc", "gloro", "spectral-norm", "gradient-penalty", "parseval rows=0.3", "emma"])
def test_an_interrupted_run_ends_with_the_same_bits(method, tmp_path):
    """In the first epoch; and in the second, so that the evaluation before it is repeated."""
    name, *options = method.split()
    recipe = with_method(SMALL, name).replace(epochs=2, method_options=tuple(options))
    train(recipe, tmp_path / "whole")
    for steps, save_steps in ((4, 3), (8, 0)):
        out = tmp_path / f"stopped-{steps}"
        with pytest.raises(Interrupted):
            train(recipe, out, display=Interrupter(steps), save_steps=save_steps)
        train(recipe, out, resume=True)
        assert same_bytes(out, tmp_path / "whole")


@pytest.mark.parametrize("method", ["lcc", "gloro", "gradient-penalty"])
def test_two_processes_find_the_weights_of_one(method, tmp_path):
    recipe = preset("digits").replace(
        augment=True, model_options=SMALL.model_options, batch_size=241, epochs=1, method=method, lr=0.01
    )
    flags = [*SMALL_FLAGS, "--batch-size", "241", "--epochs", "1", "--method", method, "--lr", "0.01"]
    # What the method would change in the preset is given on both sides.
    changed = {name: getattr(recipe, name) for name in METHODS[method].hyperparameters if name != "lr"}
    for name, value in changed.items():
        flag = f"--{name.replace('_', '-')}"
        flags += [flag if value else f"--no-{flag[2:]}"] if isinstance(value, bool) else [flag, repr(value)]
    finish_pair(tmp_path / "log", "train", *flags, "--out", tmp_path / "two")
    train(recipe, tmp_path / "one")
    assert_close(tmp_path / "two", tmp_path / "one")


# Hyperparameters.


def test_hyperparameters_of_a_method_change_only_what_is_its_own():
    recipe = with_method(preset("digits"), "lmt")
    assert (recipe.offset, recipe.temperature, recipe.method) == (0.0, 1.0, "lmt")
    assert (recipe.data, recipe.model, recipe.epochs) == ("digits", "patchwise-tiny", preset("digits").epochs)
    assert with_method(preset("paper"), "emma").gradient_clip == 3.0
    assert with_method(preset("paper"), "none").method == "none"
    with pytest.raises(RecipeError, match="did you mean 'gloro'"):
        with_method(preset("paper"), "glorro")


def test_rates_of_fast_networks_are_those_that_were_measured():
    rows = json.loads((Path(__file__).parents[2] / "results" / "methods_by_time.json").read_text())["rows"]
    measured = {row["method"]: row["lr"] for row in rows if row["name"] == row["method"] and row["cra_36"]}
    # Muon is better for these two.
    expected = {name: measured.get(name) for name in METHODS if name not in ("aol", "bjorck")}
    assert {name: METHODS[name].fast_lr for name in expected} == expected


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS.keys())
def test_hyperparameters_are_fields_of_a_recipe_and_losses_exist(method):
    Recipe().replace(**method.hyperparameters)
    assert method.loss is None or method.loss in list_losses()


@pytest.mark.parametrize("method", ["ocnn", "gradient-penalty", "parseval", "lmt", "bjorck"])
def test_free_weights_start_with_equal_singular_values(method):
    """The identity or orthogonal weights on one tap; torch's own would halve the norm in each layer."""
    model = onelip.bake(made(method)[1])
    layers = [layer for layer in model.modules() if isinstance(layer, nn.Conv2d | nn.Linear)]
    assert len(layers) > 3
    for layer in layers:
        matrix = layer.weight.detach().double()
        if matrix.dim() == 4:
            assert int((matrix != 0).any((0, 1)).sum()) == 1  # one tap
            matrix = matrix.sum((2, 3))
        values = torch.linalg.svdvals(matrix)
        torch.testing.assert_close(values, values[0].expand_as(values), rtol=0, atol=1e-6)


def test_a_step_clips_and_follows_the_learning_rate():
    """The one step that the trainer, the comparison and the benchmarks share."""
    from onelip.training import Learner

    recipe, model, _ = made("aol", gradient_clip=0.1, momentum=0.0, nesterov=False, weight_decay=0.0)
    before = [p.detach().clone() for p in model.parameters()]
    images, labels = batch()
    Learner(recipe, model).step(images, labels, batch_size=6, progress=0.0, lr=0.5)
    moved = math.sqrt(
        sum(float((p.detach() - b).square().sum()) for p, b in zip(model.parameters(), before, strict=True))
    )
    assert moved == pytest.approx(0.5 * 0.1, rel=1e-4)
