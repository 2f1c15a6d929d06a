"""Every mechanism in the training loop: what is done when, whatever number of processes, stopped and gone on with."""

import math

import pytest
import torch
from _runs import SMALL, SMALL_FLAGS, same_bytes
from test_distributed import assert_close, finish_pair
from torch import nn

import onelip
from onelip.methods._method import Method, Step
from onelip.methods._parametrization import original_of
from onelip.methods._registry import METHODS
from onelip.models._layers import LayerFactory
from onelip.testing import exact_norm
from onelip.training import Display, Recipe, RecipeError, load_run, preset, train
from onelip.training.build import build_model
from onelip.training.constants import BY_PAIRS, BY_WEIGHTS, bound_chain, constants_of
from onelip.training.evaluation import certified_by_pairs, evaluate
from onelip.training.objective import Objective
from onelip.training.presets import with_method

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


def call(objective, images, labels, batch_size=None, progress=1.0):
    size = len(labels) if batch_size is None else batch_size
    no_precision = torch.autocast("cpu", enabled=False)
    return objective(objective.model, images, labels, batch_size=size, progress=progress, precision=no_precision)


@pytest.mark.parametrize("method", MECHANISMS)
def test_parts_of_a_batch_add_up_to_the_whole(method):
    """Two processes with four and two images, and one with none, against one with all six."""
    images, labels = batch()
    whole = call(made(method)[2], images, labels)
    parts = [call(made(method)[2], images[a:b], labels[a:b], batch_size=6) for a, b in ((0, 4), (4, 6), (6, 6))]
    assert float(sum(parts).detach()) == pytest.approx(float(whole.detach()), rel=1e-5)
    parts[2].backward()  # a process without images takes part all the same


def test_the_loss_of_a_parametrization_is_the_recipes():
    recipe, model, objective = made("aol")
    images, labels = batch()
    expected = onelip.OffsetCrossEntropy(recipe.offset, recipe.temperature)(model(images), labels)
    assert torch.allclose(call(objective, images, labels), expected)


def test_a_penalty_is_added_and_its_options_reach_it():
    images, labels = batch()
    plain = call(made("ocnn", method_options=("weight=0",))[2], images, labels)
    _, model, objective = made("ocnn", method_options=("weight=2.0",))
    expected = plain + 2.0 * sum(
        onelip.methods.ocnn.orthogonality_residual(m) for m in model.modules() if isinstance(m, nn.Linear | nn.Conv2d)
    )
    assert torch.allclose(call(objective, images, labels), expected)


def test_progress_reaches_the_ramp():
    images, labels = batch()
    _, _, objective = made("lmt", method_options=("radius=5.0",))
    start, end = (call(objective, images, labels, progress=p) for p in (0.0, 1.0))
    assert float(end.detach()) >= float(start.detach())


@pytest.mark.parametrize("option", ["radius=-1", "ramp=7", "unknown=3"])
def test_wrong_options_are_named(option):
    with pytest.raises(RecipeError, match=r"expected (method_options|options) (that|of lmt among)"):
        made("lmt", method_options=(option,))


def test_projection_comes_after_each_step(tmp_path):
    train(with_method(SMALL, "clipping").replace(epochs=1, lr=50.0), tmp_path / "run")
    model = load_run(tmp_path / "run").model
    for layer in model.modules():
        if isinstance(layer, nn.Linear | nn.Conv2d):
            assert torch.equal(layer.train().weight, layer.eval().weight)


class Killed(Exception):
    """Comes between two steps."""


class Killer(Display):
    """A display that ends the run after some steps, as a kill would."""

    def __init__(self, steps):
        super().__init__(None)
        self.left = steps

    def step(self, *args):
        self.left -= 1
        if self.left == 0:
            raise Killed


@pytest.mark.parametrize("method", ["lcc", "gloro", "spectral-norm", "gradient-penalty", "parseval rows=0.3", "emma"])
def test_a_run_that_was_killed_ends_with_the_same_bits(method, tmp_path):
    """In the first epoch; and in the second, so that the evaluation before it is done again."""
    name, *options = method.split()
    recipe = with_method(SMALL, name).replace(epochs=2, method_options=tuple(options))
    train(recipe, tmp_path / "whole")
    for steps, save_steps in ((4, 3), (8, 0)):
        out = tmp_path / f"killed-{steps}"
        with pytest.raises(Killed):
            train(recipe, out, display=Killer(steps), save_steps=save_steps)
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


def test_hyperparameters_of_a_method_change_only_what_is_its_own():
    recipe = with_method(preset("digits"), "lmt")
    assert (recipe.offset, recipe.temperature, recipe.method) == (0.0, 1.0, "lmt")
    assert (recipe.data, recipe.model, recipe.epochs) == ("digits", "patchwise-tiny", preset("digits").epochs)
    assert with_method(preset("paper"), "emma").gradient_clip == 3.0
    assert with_method(preset("paper"), None) == preset("paper")
    assert with_method(preset("paper"), "none").method == "none"
    with pytest.raises(RecipeError, match="did you mean 'gloro'"):
        with_method(preset("paper"), "glorro")


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS.keys())
def test_hyperparameters_are_fields_of_a_recipe_and_options_have_a_term(method):
    Recipe().replace(**method.hyperparameters)
    assert bool(method.term_options) <= bool(method.loss or method.penalty)


@pytest.mark.parametrize("method", ["ocnn", "gradient-penalty", "parseval", "lmt", "bjorck"])
def test_free_weights_begin_with_equal_singular_values(method):
    """The identity or orthogonal weights on one tap; torch's own would take half of the norm in each layer."""
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


def test_free_weights_are_bounded_and_estimates_never_used():
    recipe, model, _ = made("gloro")
    with torch.no_grad():
        for module in model.modules():
            if hasattr(module, "v"):
                module.v.zero_()  # any estimate from these would be 0
    plain = onelip.bake(model)
    found = constants_of(model, plain, recipe, SHAPE)
    assert found.mode == BY_PAIRS
    assert found.total >= exact_norm_of_chain(plain)
    assert found.pairs.shape == (10, 10)


def exact_norm_of_chain(plain):
    """Of the linear layers alone, each at an image size that is large enough."""
    product = 1.0
    for layer in plain.modules():
        if isinstance(layer, nn.Conv2d):
            product *= exact_norm(layer, (layer.in_channels, 4, 4))
        elif isinstance(layer, nn.Linear):
            product *= exact_norm(layer, (layer.in_features,))
    return product


@pytest.mark.parametrize("method", ["gloro", "ocnn"])
def test_pairs_and_constants_hold_for_random_perturbations(method):
    recipe, model, _ = made(method)
    plain = onelip.bake(model).double().eval()
    found = constants_of(model, plain, recipe, SHAPE)
    x = torch.rand(200, *SHAPE, dtype=torch.float64)
    y = x + 1e-3 * torch.randn_like(x)
    change = (plain(x) - plain(y)).detach()
    distance = (x - y).flatten(1).norm(dim=1)
    assert (change.norm(dim=1) <= found.total * distance).all()
    if found.pairs is not None:
        between = (change[:, :, None] - change[:, None]).abs()  # (N, classes, classes)
        assert (between <= found.pairs * distance[:, None, None] + 1e-15).all()
        assert (found.pairs <= math.sqrt(2) * found.total * (1 + 1e-9)).all()
    else:
        assert found.mode == BY_WEIGHTS


def test_pairs_certify_what_the_inequality_says():
    scores = torch.tensor([[3.0, 1.0, 2.5], [3.0, 1.0, 2.0], [0.0, 1.0, 0.0], [math.nan, 0.0, 0.0]])
    labels = torch.tensor([0, 0, 0, 1])
    pairs = torch.tensor([[0.0, 1.0, 0.5], [1.0, 0.0, 1.0], [0.5, 1.0, 0.0]])
    assert certified_by_pairs(scores, labels, 1.5, pairs).tolist() == [False, True, False, False]
    assert certified_by_pairs(scores, labels, 0.5, pairs).tolist() == [True, True, False, False]
    with pytest.raises(ValueError, match="radius"):
        certified_by_pairs(scores, labels, math.nan, pairs)
    pairs = torch.full((3, 3), math.nan)
    assert not certified_by_pairs(scores, labels, 1.0, pairs).any()


def test_evaluate_by_pairs():
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 2, bias=False))
    nn.init.constant_(model[1].weight, 0.0)
    with torch.no_grad():
        model[1].weight[0, 0] = 2.0
    images = torch.tensor([255, 51], dtype=torch.uint8)[:, None, None, None].expand(2, 1, 2, 2)
    labels = torch.zeros(2, dtype=torch.int64)
    pairs = torch.full((2, 2), 2.0, dtype=torch.float64)
    found = evaluate(model, images, labels, lipschitz=2.0, pairs=pairs, mode=BY_PAIRS)
    assert found.total.cra == {"36/255": 1.0, "72/255": 0.5, "108/255": 0.5, "1": 0.0}
    assert found.to_json(("a", "b"))["mode"] == BY_PAIRS


def test_a_module_without_a_constant_leaves_none():
    assert bound_chain([nn.Linear(2, 2), nn.LayerNorm(2)]) is None
    copies = nn.Conv2d(1, 1, 3, padding=1, padding_mode="reflect")
    assert bound_chain([copies]) >= exact_norm(copies, (1, 6, 6))


def test_last_layer_normalisation_goes_with_any_method():
    recipe = SMALL.replace(method="aol", method_options=("last_layer=normalised",))
    model = build_model(recipe, 10, SHAPE)
    found = constants_of(model, onelip.bake(model), recipe, SHAPE)
    assert found.mode == BY_PAIRS
    assert float(found.pairs.max()) <= 2 * (1 + 1e-5)  # rows of length 1 behind features of constant 1
    with pytest.raises(ValueError, match="normalised"):
        LayerFactory("aol", {"last_layer": "other"})


def test_layers_that_a_method_refuses_are_made_from_those_it_serves():
    """Only square layers without strides, and only circular padding: as methods of the Fourier domain have it."""

    def picky(layer):
        square = layer.weight.shape[0] == layer.weight.shape[1]
        circular = isinstance(layer, nn.Linear) or layer.padding_mode == "circular"
        plain = isinstance(layer, nn.Linear) or layer.stride == (1, 1)
        if not (square and circular and plain):
            raise onelip.UnsupportedLayer("expected a square circular layer, got another; take a square one")
        return onelip.aol(layer)

    factory = LayerFactory("aol")
    factory.method = Method("picky", "", "parametrization", "proved", (nn.Linear, nn.Conv2d), picky)
    for inputs, outputs in ((3, 3), (2, 5), (5, 2)):
        x = torch.randn(2, inputs, 6, 6)
        assert factory.linear(inputs, outputs)(x[:, :, 0, 0]).shape == (2, outputs)
        layer = factory.conv2d(inputs, outputs, 3, padding=1)
        assert layer(x).shape == (2, outputs, 6, 6)
        assert onelip.summary(layer).constant == 1.0
        assert factory.downsample(inputs, outputs, 2)(x).shape == (2, outputs, 3, 3)


def test_refusals_reach_the_user():
    with pytest.raises(onelip.UnsupportedLayer, match="serves Linear"):
        LayerFactory("lln").conv2d(2, 2, 3)


def test_a_step_is_what_terms_see():
    seen = []

    class Spy:
        def __call__(self, step):
            seen.append(step)
            return step.scores.sum(1)

    _, model, objective = made("aol")
    objective.loss = Spy()
    images, labels = batch()
    call(objective, images, labels, progress=0.25)
    (step,) = seen
    assert isinstance(step, Step)
    assert step.model is model
    assert step.progress == 0.25
    assert original_of(model.fc1).requires_grad
