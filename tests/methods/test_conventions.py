"""The calling convention of all methods: arguments, names, returned modules, documentation."""

import inspect
import math
import re

import pytest
import torch
from torch import nn

import onelip
from onelip import methods
from onelip.core.docstrings import arguments_in
from onelip.core.parametrization import find_parametrization
from onelip.methods.registry import METHODS
from onelip.training.recipe import parse_options

APPLIED = {method.name: method for method in METHODS.values() if method.mechanism != "penalty"}
FUNCTIONS = {method.apply.__name__: method for method in APPLIED.values()}


class TwoWeights(nn.Linear):
    """A layer with a second weight."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.other = nn.Parameter(torch.randn(4, 4) / 3)

    def forward(self, x):
        return super().forward(x) + nn.functional.linear(x, self.other)


@pytest.mark.parametrize("method", FUNCTIONS.values(), ids=FUNCTIONS)
def test_first_arguments_are_module_and_name(method):
    first, *others = inspect.signature(method.apply).parameters.values()
    assert first.name == "module"
    names = [(p.name, p.default) for p in others if p.kind is p.POSITIONAL_OR_KEYWORD]
    assert names == ([] if method.replaces else [("name", "weight")])


@pytest.mark.parametrize("method", FUNCTIONS.values(), ids=FUNCTIONS)
def test_functions_are_public_and_document_every_argument(method):
    assert getattr(methods, method.apply.__name__) is method.apply
    assert list(arguments_in(method.apply)) == list(inspect.signature(method.apply).parameters)
    for section in ("Returns:", "Raises:", "Examples:"):
        assert section in inspect.getdoc(method.apply)


@pytest.mark.parametrize("method", [m for m in FUNCTIONS.values() if not m.replaces], ids=lambda m: m.name)
def test_another_weight_can_be_named(method):
    layer = TwoWeights()
    weight = layer.weight
    assert method.apply(layer, "other") is layer
    assert layer.weight is weight
    assert find_parametrization(layer, "other") is not None
    if method.guarantee is not None:
        constant = find_parametrization(layer, "other").constant_in(torch.float32)
        assert torch.linalg.matrix_norm(layer.eval().other, 2) <= constant * (1 + 1e-6)


@pytest.mark.parametrize("method", [m for m in FUNCTIONS.values() if not m.replaces], ids=lambda m: m.name)
def test_a_weight_of_another_shape_cannot_be_assigned(method):
    layer = method.apply(nn.Linear(4, 3))
    before = layer.weight.detach().clone()
    with pytest.raises(ValueError, match=r"expected a weight of shape \(3, 4\), got \(4, 3\)"):
        layer.weight = torch.zeros(4, 3)
    assert layer.weight.shape == before.shape


@pytest.mark.parametrize("name", ["clipping", "lcc", "parseval"])
def test_projections_of_other_weights_are_found(name):
    layer = TwoWeights()
    METHODS[name].apply(layer, "other")
    with torch.no_grad():
        before = layer.parametrizations.other.original.mul_(1.5).clone()
    assert onelip.project(layer) == 1
    assert not torch.equal(layer.parametrizations.other.original, before)


@pytest.mark.parametrize("method", METHODS.values(), ids=METHODS)
def test_every_method_has_a_citation(method):
    assert method.citation.endswith(".")
    assert re.search(r"\b20\d\d\b", method.citation)


@pytest.mark.parametrize("method", FUNCTIONS.values(), ids=FUNCTIONS)
def test_layers_show_their_options(method):
    for options in method.options:
        shown = repr(method.apply(nn.Linear(8, 8), **options))
        for name, value in options.items():
            if name not in ("side", "depth"):  # "auto" is resolved; Linear is no residual layer
                assert f"{name}={float(value) if name in ('lipschitz', 'norm', 'p') else value}" in shown


def test_infinity_is_a_value_of_method_options():
    assert parse_options(("p=inf",)) == {"p": math.inf}
    onelip.constrain(nn.Linear(2, 2), "lcc", **parse_options(("p=inf",)))
