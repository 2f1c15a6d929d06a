"""Evaluation: the constants that it certifies with are proved, and the certified accuracy follows from them."""

import copy
import math
from types import SimpleNamespace

import pytest
import torch
from _runs import SMALL
from torch import nn

import onelip
from onelip.core.errors import UnsoundBound
from onelip.core.lipschitz_module import Bound
from onelip.graph.modules import bound_chain, bound_stored
from onelip.losses.chain import pair_distances
from onelip.models.chain import LayerFactory
from onelip.testing import exact_norm
from onelip.training import Constants, evaluate, find_constants, load_run, train
from onelip.training.build import build_model
from onelip.training.evaluation import BY_CONSTRUCTION, BY_PAIRS, BY_WEIGHTS
from onelip.training.objective import with_method

SHAPE = (1, 8, 8)


def made(method, **changes):
    recipe = with_method(SMALL, method).replace(**changes)
    torch.manual_seed(0)
    return recipe, build_model(recipe, 10, SHAPE)


def test_free_weights_are_bounded_and_estimates_never_used():
    recipe, model = made("gloro")
    with torch.no_grad():
        for module in model.modules():
            if hasattr(module, "v"):
                module.v.zero_()  # any estimate from these would be 0
    plain = onelip.bake(model)
    found = find_constants(model, plain, recipe, SHAPE)
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


@pytest.mark.parametrize(
    ("method", "loss", "mode"),
    [
        ("gloro", "default", BY_PAIRS),
        ("ocnn", "default", BY_WEIGHTS),
        ("aol", "emma", BY_PAIRS),
        ("aol", "default", BY_CONSTRUCTION),
        ("aol", "certificate-regularisation", BY_CONSTRUCTION),
    ],
)
def test_constants_hold_for_random_perturbations(method, loss, mode):
    recipe, model = made(method, loss=loss)
    plain = onelip.bake(model).double().eval()
    found = find_constants(model, plain, recipe, SHAPE)
    assert found.mode == mode
    x = torch.rand(200, *SHAPE, dtype=torch.float64)
    y = x + 1e-3 * torch.randn_like(x)
    change = (plain(x) - plain(y)).detach()
    distance = (x - y).flatten(1).norm(dim=1)
    assert (change.norm(dim=1) <= found.total * distance).all()
    between = (change[:, :, None] - change[:, None]).abs()  # (N, classes, classes)
    assert (between <= found.slopes * distance[:, None, None] + 1e-15).all()
    if found.pairs is not None:
        assert (found.pairs <= math.sqrt(2) * found.total * (1 + 1e-9)).all()


def test_evaluate_by_pairs():
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 2, bias=False))
    nn.init.constant_(model[1].weight, 0.0)
    with torch.no_grad():
        model[1].weight[0, 0] = 2.0
    images = torch.tensor([255, 51], dtype=torch.uint8)[:, None, None, None].expand(2, 1, 2, 2)
    labels = torch.zeros(2, dtype=torch.int64)
    pairs = torch.full((2, 2), 2.0, dtype=torch.float64)
    found = evaluate(model, images, labels, Constants(2.0, pairs, BY_PAIRS))
    assert found.total.cra == {"36/255": 1.0, "72/255": 0.5, "108/255": 0.5, "1": 0.0}
    assert found.to_json(("a", "b"))["mode"] == BY_PAIRS
    whole = evaluate(model, images, labels, Constants(2.0), radii=(36 / 255, 0.5))
    assert whole.total.cra == {"36/255": 1.0, "1/2": 0.5}
    assert evaluate(model, images, labels, Constants(None)).total.cra["1"] is None


def test_ties_and_nan_are_not_right():
    class Given(nn.Module):
        def __init__(self):
            super().__init__()
            self.scores = nn.Parameter(torch.tensor([[1.0, 1.0], [math.nan, 0.0], [2.0, 1.0]]))

        def forward(self, x):
            return self.scores

    images, labels = torch.zeros(3, 1, 2, 2, dtype=torch.uint8), torch.zeros(3, dtype=torch.int64)
    found = evaluate(Given(), images, labels, Constants(1.0), radii=(0.0, 0.5)).total
    assert found.accuracy == found.cra["0"] == found.cra["1/2"] == 1 / 3
    assert found.mean_margin is None


def test_a_module_without_a_constant_leaves_none():
    assert bound_chain([nn.Linear(2, 2), nn.LayerNorm(2)], bound_stored).constant is None
    copies = nn.Conv2d(1, 1, 3, padding=1, padding_mode="reflect")
    assert bound_chain([copies], bound_stored).constant >= exact_norm(copies, (1, 6, 6))


def test_last_layer_normalisation_goes_with_any_method():
    recipe = SMALL.replace(method="aol", method_options=("normalise_last_layer=true",))
    model = build_model(recipe, 10, SHAPE)
    found = find_constants(model, onelip.bake(model), recipe, SHAPE)
    assert found.mode == BY_PAIRS
    assert float(found.pairs.max()) <= 2 * (1 + 1e-5)  # rows of length 1 after features of constant 1
    with pytest.raises(ValueError, match="True or False"):
        LayerFactory("aol", {"normalise_last_layer": "other"})


def test_constants_of_a_loaded_run_are_computed_when_they_are_used(tmp_path, monkeypatch):
    train(with_method(SMALL, "gloro").replace(epochs=1), tmp_path / "run")
    calls = []

    def counted(*args, **kwargs):
        calls.append(kwargs)
        return find_constants(*args, **kwargs)

    monkeypatch.setattr("onelip.training.build.find_constants", counted)
    run = load_run(tmp_path / "run")
    assert not calls
    assert run.lipschitz == run.constants.total
    assert calls == [{"effort": "high"}]


@pytest.mark.parametrize("method", ["aol", "cayley", "sll"])
def test_changed_plain_weights_are_bounded_by_themselves(method):
    """Also if the change is too small to be measured, or only one of rounding."""
    recipe, model = made(method)
    plain = onelip.bake(model)
    assert find_constants(model, plain, recipe, SHAPE).mode == BY_CONSTRUCTION
    assert find_constants(model, copy.deepcopy(plain).double(), recipe, SHAPE).mode == BY_CONSTRUCTION
    for factor in (1 + 2.0**-20, 1.1, 3.0):
        changed = copy.deepcopy(plain)
        with torch.no_grad():
            [p for p in changed.parameters() if p.dim() > 1][-1].mul_(factor)
        found = find_constants(model, changed, recipe, SHAPE)
        assert found.mode == BY_WEIGHTS
        audited = onelip.audit(changed, torch.full((1, *SHAPE), 0.5))
        assert audited.lower <= found.total <= factor * (1 + 1e-5)
    with torch.no_grad():
        next(model.parameters()).fill_(math.nan)
    assert find_constants(model, changed, recipe, SHAPE) == found


def test_wrong_constants_raise(monkeypatch):
    """Of the whole network, by construction or by stored weights, and of pairs of scores."""
    module = "onelip.training.evaluation."
    for method, name, wrong in (
        ("aol", "summary", lambda model: SimpleNamespace(constant=1e-3)),
        ("ocnn", "bound_chain", lambda *args: Bound(1e-3, "")),
        ("gloro", "pair_distances", lambda rows: 1e-3 * pair_distances(rows)),
        ("gloro", "bound_chain", lambda *args: Bound(1e-3, "")),
    ):
        recipe, model = made(method)
        plain = onelip.bake(model)
        before = {key: value.clone() for key, value in plain.state_dict().items()}
        find_constants(model, plain, recipe, SHAPE)
        assert all(torch.equal(before[key], value) for key, value in plain.state_dict().items())
        with monkeypatch.context() as patch:
            patch.setattr(module + name, wrong)
            with pytest.raises(UnsoundBound):
                find_constants(model, plain, recipe, SHAPE)
