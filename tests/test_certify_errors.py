"""The bounds of the rounding recursion against the true errors, in exact fractions, tolerance zero."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from _exact_network import exact, run_exactly, squared_norm
from hypothesis import HealthCheck, assume, given, settings
from torch import nn

from onelip.bounds import bound_weight
from onelip.certify.exact import as_float64
from onelip.certify.interpreter import run_program
from onelip.certify.lowering import lower
from onelip.certify.lowering.linear import linear_settings
from onelip.certify.program import Operation, Program
from onelip.certify.recursion import State, propagate
from onelip.certify.rounding import ProofError, up_root
from onelip.geometry import UnsupportedLayer, geometry_of
from onelip.nn import (
    Abs,
    ConcatenationPool2d,
    FirstChannels,
    GroupSort,
    LipschitzAvgPool2d,
    MaxMin,
    PadChannels,
)
from onelip.nn.normalize import Normalize
from onelip.testing.layers import layer_cases


def states_of(program):
    states = []
    for node in program.nodes:
        square = None
        if node.geometry is not None:
            square = Fraction(bound_weight(node.weight, node.geometry, effort="quick").value) ** 2
        states.append(propagate(node, [states[i] for i in node.inputs], square))
    return states


def check(program, pixels):
    """All three numbers of all nodes, at images k / 255 and between them."""
    states = states_of(program)
    images = [np.array([Fraction(int(k), 255) for k in p.ravel()], dtype=object).reshape(p.shape) for p in pixels]
    real = [run_exactly(program, image) for image in images]
    rounded = torch.tensor(np.array([p / 255 for p in pixels]), dtype=torch.float64)
    computed = run_program(program, rounded)
    for index, (node, state) in enumerate(zip(program.nodes, states, strict=True)):
        lipschitz, norm, error = state.fractions
        for i in range(len(images)):
            assert squared_norm(real[i][index]) <= norm**2, node
            assert squared_norm(exact(computed[index][i]) - real[i][index]) <= error**2, node
        apart = squared_norm(real[0][index] - real[1][index])
        assert apart <= lipschitz**2 * squared_norm(images[0] - images[1]), node
    return states


def layer_program(module, shape):
    """A program of one layer, without a trace."""
    x = torch.zeros(1, *shape, dtype=torch.float64)
    kept = {"weight": as_float64(module.weight)}
    if module.bias is not None:
        kept["bias"] = as_float64(module.bias)
    op = "linear" if isinstance(module, nn.Linear) else "conv"
    geometry = geometry_of(module, shape[1:] or None)
    with torch.no_grad():
        out = tuple(module.double()(x).shape[1:])
    layer = Operation(op, (0,), out, "layer", linear_settings(module), kept, {}, geometry)
    return Program((Operation("input", (), shape), layer))


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
        torch.testing.assert_close(run_program(program, x)[-1], module(x), rtol=1e-9, atol=1e-300)


class Everything(nn.Module):
    """One of each operation that can be certified, by layers and by calls."""

    def __init__(self):
        super().__init__()
        self.normalize = Normalize((0.4, 0.5), (0.25, 0.2))
        self.first = nn.Conv2d(2, 4, 3, padding=1, padding_mode="circular", dilation=1)
        self.maxmin = MaxMin()
        self.grouped = nn.Conv2d(4, 4, 3, padding=2, dilation=2, groups=2)
        self.pool = nn.MaxPool2d(3, 2, 1)
        self.up = nn.ConvTranspose2d(8, 4, 2, stride=2)
        self.strided = nn.Conv2d(4, 6, 2, stride=2, bias=False)
        self.sort = GroupSort(3)
        self.average = LipschitzAvgPool2d(2, 1)
        self.patches = ConcatenationPool2d(2)
        self.abs = Abs()
        self.wider = PadChannels(26)
        self.kernel = nn.Parameter(torch.randn(4, 26, 1, 1) / 8)
        self.last = nn.Linear(4, 5)
        self.choose = FirstChannels(3)

    def forward(self, x):
        x = self.maxmin(self.first(self.normalize(x)))  # (4, 6, 6)
        x = torch.relu(x + 0.5 * self.grouped(x))
        x = self.pool(torch.cat([x, -x], 1))  # (8, 3, 3)
        x = nn.functional.dropout(self.up(x), training=self.training)  # (4, 6, 6)
        x = self.sort(self.strided(x))  # (6, 3, 3)
        x = self.average(x)  # (6, 2, 2)
        x = self.wider(self.abs(self.patches(x)))  # (26, 1, 1)
        x = nn.functional.conv2d(x, self.kernel)[:, :4]
        return self.choose(self.last(x.mean((2, 3), keepdim=True).flatten(1)))


def test_all_operations_together():
    torch.manual_seed(0)
    model = Everything().double().eval()
    program = lower(model, (2, 6, 6))
    assert {node.op for node in program.nodes} >= {
        *("input", "normalize", "conv", "linear", "maxmin", "groupsort", "relu", "abs", "max_pool", "avg_pool"),
        *("concatenate", "pad_channels", "first_channels", "flatten", "add", "concat", "scale"),
    }
    pixels = np.random.default_rng(0).integers(0, 256, (2, 2, 6, 6))
    states = check(program, pixels)
    assert states[-1].error < 1e-10  # and of use
    x = torch.rand(3, 2, 6, 6, dtype=torch.float64)
    with torch.no_grad():
        assert float((run_program(program, x)[-1] - model(x)).norm()) <= 2 * 3 * states[-1].error


def one_row(weights, inputs):
    """The node of one inner product, and its state for an input known exactly."""
    weight = torch.tensor([weights], dtype=torch.float64)
    module = nn.Linear(len(weights), 1, bias=False)
    node = Operation("linear", (0,), (1,), "", {}, {"weight": weight}, {}, geometry_of(module))
    norm = up_root(sum(Fraction(x) ** 2 for x in inputs))
    square = sum((Fraction(w) ** 2 for w in weights), Fraction(0))
    return propagate(node, [State(1.0, norm, 0.0)], square)


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
    assert state.bias_norm == up_root(16 * Fraction(1e6 + 1 / 3) ** 2)
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


def test_unknown_operations_are_refused():
    with pytest.raises(ProofError, match="rounding rule"):
        propagate(Operation("tanh", (0,), (2,)), [State(1.0, 1.0, 0.0)])
    with pytest.raises(ProofError, match="bound of"):
        propagate(Operation("linear", (0,), (2,)), [State(1.0, 1.0, 0.0)])
    deviations = {"mean": torch.zeros(1), "std": torch.zeros(1)}
    with pytest.raises(ProofError, match="deviations"):
        propagate(Operation("normalize", (0,), (1,), tensors=deviations), [State(1.0, 1.0, 0.0)])
    with pytest.raises(ProofError, match="factor"):
        propagate(Operation("scale", (0,), (1,), settings={"factor": "0x1.0p+600"}), [State(1.0, 1.0, 0.0)])
