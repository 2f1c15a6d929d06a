"""The bounds of the rounding recursion against the true errors, in exact fractions, tolerance zero."""

import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from _certified_programs import Everything, check, states_of
from _layer_cases import layer_cases
from hypothesis import HealthCheck, assume, given, settings
from torch import nn

from onelip.core.errors import ProofError, UnsupportedLayer
from onelip.core.geometry import geometry_of
from onelip.core.rounding import up_root
from onelip.graph import kinds
from onelip.graph.kinds import Affine, Input, NodeBound, Scale, Stored, propagate
from onelip.graph.lowering import Program, lower


def layer_program(module, shape):
    """A program of one layer, without a trace."""
    geometry_of(module, shape[1:] or None)  # refuses what has no bound
    with torch.no_grad():
        out = tuple(module.double()(torch.zeros(1, *shape, dtype=torch.float64)).shape[1:])
    weight = Stored(module.weight.detach().double())
    bias = None if module.bias is None else Stored(module.bias.detach().double())
    layer = Affine((0,), out, "layer", layer=module, weight=weight, bias=bias, pixels=shape[1:])
    return Program((Input((), shape), layer))


@settings(max_examples=30, deadline=None, suppress_health_check=list(HealthCheck))
@given(layer_cases(with_wide=False))
def test_linear_layers_of_every_kind(case):
    assume(math.prod(case.input_shape) <= 60)
    module = case.build()
    try:
        program = layer_program(module, case.input_shape)
        pixels = np.random.default_rng(case.seed).integers(0, 256, (2, *case.input_shape))
        check(program, pixels)
    except UnsupportedLayer:
        assume(False)
    except ProofError:  # the program could overflow
        assert case.weights == "huge"
        return
    x = torch.rand(2, *case.input_shape, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(program.run(x)[-1], module(x), rtol=1e-9, atol=1e-300)


def test_all_operations_together():
    torch.manual_seed(0)
    model = Everything().double().eval()
    program = lower(model, (2, 6, 6))
    assert {node.kind for node in program.nodes} == {
        *("input", "normalize", "affine", "sort", "relu", "abs", "max", "sum", "join", "add", "scale"),
    }
    pixels = np.random.default_rng(0).integers(0, 256, (2, 2, 6, 6))
    states = check(program, pixels)
    assert states[-1].error < 1e-10  # and of use
    x = torch.rand(3, 2, 6, 6, dtype=torch.float64)
    with torch.no_grad():
        assert float((program.run(x)[-1] - model(x)).norm()) <= 2 * 3 * states[-1].error


def one_row(weights, inputs):
    """The node of one inner product, and its state for an input known exactly."""
    weight = torch.tensor([weights], dtype=torch.float64)
    module = nn.Linear(len(weights), 1, bias=False)
    node = Affine((0,), (1,), layer=module, weight=Stored(weight))
    norm = up_root(sum(Fraction(x) ** 2 for x in inputs))
    square = sum((Fraction(w) ** 2 for w in weights), Fraction(0))
    return propagate(replace(node, square=square), NodeBound(1.0, norm, 0.0))


def test_the_worst_order_of_summation_is_covered_and_reached():
    """1 + 2^-53 + 2^-53 + ... loses every term but the first: the error is that of the bound, but for some percent."""
    terms = 400
    weights, inputs = [1.0] + [2.0**-26] * terms, [1.0] + [2.0**-27] * terms
    computed = 0.0
    for w, x in zip(weights, inputs, strict=True):
        computed += w * x
    true = sum(Fraction(w) * Fraction(x) for w, x in zip(weights, inputs, strict=True))
    measured = abs(Fraction(computed) - true)
    error = Fraction(one_row(weights, inputs).error)
    assert measured <= error
    assert measured > error * Fraction(9, 10)


@pytest.mark.parametrize("seed", range(5))
def test_any_order_of_summation(seed):
    generator = np.random.default_rng(seed)
    weights = (generator.standard_normal(50) * 10.0 ** generator.integers(-8, 8, 50)).tolist()
    inputs = generator.standard_normal(50).tolist()
    true = sum(Fraction(w) * Fraction(x) for w, x in zip(weights, inputs, strict=True))
    error = Fraction(one_row(weights, inputs).error)
    for _ in range(20):
        total = 0.0
        for i in generator.permutation(50):
            total += weights[i] * inputs[i]
        assert abs(Fraction(total) - true) <= error


def test_underflow():
    """Fifty products of 1.4 times the least number each lose 0.4 of it: relative bounds know nothing of that."""
    weights, inputs = [2.0**-600] * 50, [1.4 * 2.0**-474] * 50
    computed = sum((w * x for w, x in zip(weights, inputs, strict=True)), 0.0)
    true = 50 * Fraction(weights[0]) * Fraction(inputs[0])
    assert true - Fraction(computed) > 10 * Fraction(5e-324)
    assert true - Fraction(computed) <= Fraction(one_row(weights, inputs).error)


def test_flushed_subnormals():
    """A processor may take subnormal numbers for zeros, when they are read and when they are made."""
    state = one_row([1.0, 2.0**-1060], [2.0**-1060, 1.0])
    assert state.error >= 2 * 2.0**-1060
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor does not flush")
    try:
        computed = (torch.ones(2, dtype=torch.float64) * 2.0**-511).mul(2.0**-540).tolist()
    finally:
        torch.set_flush_denormal(False)
    assert computed == [0.0, 0.0]  # it does happen in torch


def test_the_bias_counts_at_every_position():
    module = nn.Conv2d(1, 1, 1).double()
    module.weight.data.fill_(1.0)
    module.bias.data.fill_(1e6 + 1 / 3)
    program = layer_program(module, (1, 4, 4))
    state = check(program, np.arange(32).reshape(2, 1, 4, 4))[1]
    assert state.facts["bias_norm"] == up_root(16 * Fraction(1e6 + 1 / 3) ** 2)
    # Each of 16 entries can be off by half a unit in the last place of 1e6, 2^-34: a bound without the bias says 1e-15.
    assert state.error >= 4 * 2.0**-34


def test_numbers_that_could_overflow_are_refused():
    module = nn.Linear(2, 2).double()
    module.weight.data.fill_(1e150)
    with pytest.raises(ProofError, match="2\\^500"):
        states_of(layer_program(module, (2,)))
    module.weight.data.fill_(1.0)
    module.bias.data.fill_(math.nan)
    with pytest.raises(ProofError, match="finite weights and biases"):
        states_of(layer_program(module, (2,)))


def test_numbers_without_a_proof_are_refused():
    one, zero = NodeBound(1.0, 1.0, 0.0), Stored(torch.zeros(1, dtype=torch.float64))
    with pytest.raises(ProofError, match="bound of"):
        propagate(Affine((0,), (1,), layer=nn.Linear(1, 1), weight=zero), one)
    with pytest.raises(ProofError, match="deviations"):
        propagate(kinds.Normalize((0,), (1,), mean=zero, std=zero), one)
    with pytest.raises(ProofError, match="factor"):
        propagate(Scale((0,), (1,), factor=2.0**600), one)
