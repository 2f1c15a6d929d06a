"""Every rule against the Jacobian: no slope of an operation is above the factor that its rule gives."""

# A missing number fails a test here, which is as good.
# pyright: reportOptionalOperand=false, reportOperatorIssue=false

import math
import re
from fractions import Fraction

import pytest
import torch
import torch.nn.functional as F
from _one_operation import X, fill, verdict
from torch import Tensor

from onelip.core.rounding import add_up, hypotenuse_up, inverse_up
from onelip.graph import known_operations, register_rule
from onelip.graph.step import Call, Graph, Ref, aten
from onelip.graph.walk import walk

TIGHT = 1 + 1e-9


def steepest(op, *arguments, shape, points=6, **keywords):
    """The largest singular value of the Jacobian of one sample at some points, at several scales."""
    generator = torch.Generator().manual_seed(0)

    def function(x):
        x = torch.stack([x, torch.zeros_like(x)])
        result = aten(op)(*fill(arguments, x), **keywords)
        if not isinstance(result, Tensor):
            pieces = [piece for piece in result if piece.is_floating_point()]
            result = pieces[0] if op not in PIECES else torch.cat([piece.reshape(2, -1) for piece in pieces], 1)
        return result[0]

    largest = 0.0
    for scale in [0.0, 0.01, 0.3, 1.0, 3.0, 10.0][:points]:
        x = scale * torch.randn(shape, dtype=torch.float64, generator=generator)
        jacobian = torch.autograd.functional.jacobian(function, x).reshape(-1, x.numel())
        largest = max(largest, float(torch.linalg.matrix_norm(jacobian, 2)))
    return largest


PIECES = ("aten.split.Tensor", "aten.unbind.int", "aten.chunk.default")
D = torch.float64
W = torch.linspace(-1, 1, 2 * 3 * 9, dtype=D).reshape(2, 3, 3, 3)
M = torch.tensor([[1.0, 2.0], [0.5, -1.0], [0.0, 3.0]], dtype=D)

SLOPES = [
    "relu", "tanh", "sigmoid", "gelu", "silu", "mish", "hardswish", "selu", "hardsigmoid", "erf", "abs", "neg", "sin",
    "cos", "atan", "asinh", "log_sigmoid", "hardtanh", "relu6", "softshrink", "celu", "elu",
]  # fmt: skip
# operation, arguments, shape of a sample; the last column: whether the factor is reached.
CASES = [
    *((f"aten.{name}.default", (X,), (5,), False) for name in SLOPES),
    ("aten.leaky_relu.default", (X, 3.0), (5,), True),
    ("aten.leaky_relu.default", (X, -3.0), (5,), True),
    ("aten.prelu.default", (X, torch.tensor([-2.5], dtype=D)), (5,), True),
    ("aten.elu.default", (X, 2.0, 1.5, 0.5), (5,), False),
    ("aten.elu.default", (X, -3.0, 1.5, 2.0), (5,), False),
    ("aten.clamp.default", (X, -0.5, 0.5), (5,), True),
    ("aten.clamp.Tensor", (X, torch.zeros(5, dtype=D)), (5,), True),
    ("aten.softmax.int", (X, 1), (2,), True),
    ("aten.softmax.int", (X, -1), (3, 4), False),
    ("aten.log_softmax.int", (X, 1), (4,), False),
    ("aten.logsumexp.default", (X, [1]), (4,), False),
    ("aten.linalg_vector_norm.default", (X, 2, [1, 2]), (2, 3), False),
    ("aten.linalg_norm.default", (X, None, [1, 2]), (2, 3), False),
    ("aten.linalg_norm.default", (X, 1, [1]), (4,), False),
    ("aten.std.correction", (X, [1]), (4,), False),
    ("aten.std.correction", (X, [1, 2]), (2, 3), False),
    ("aten.amax.default", (X, [1]), (4,), True),
    ("aten.max.dim", (X, 1), (4,), True),
    ("aten.sort.default", (X, 1), (4,), True),
    ("aten.topk.default", (X, 2), (4,), True),
    ("aten.add.Tensor", (X, 3.0), (4,), True),
    ("aten.add.Tensor", (X, torch.ones(3, 4, dtype=D)), (1, 4), True),
    ("aten.sub.Tensor", (torch.ones(4, dtype=D), X), (4,), True),
    ("aten.rsub.Scalar", (X, 1, 2), (4,), True),
    ("aten.add.Tensor", (X, X), (4,), True),
    ("aten.mul.Tensor", (X, torch.tensor([1.0, -2.5], dtype=D)), (2,), True),
    ("aten.mul.Tensor", (torch.full((3, 4), 2.0, dtype=D), X), (1, 4), True),
    ("aten.div.Tensor", (X, torch.tensor([3.0, -7.0], dtype=D)), (2,), True),
    ("aten.lerp.Scalar", (X, X, 0.3), (2,), False),
    ("aten.lerp.Scalar", (X, torch.ones(2, dtype=D), 1.7), (2,), True),
    ("aten.maximum.default", (X, torch.zeros(3, dtype=D)), (3,), False),
    ("aten.view.default", (X, [2, 6]), (2, 3), True),
    ("aten.permute.default", (X, [0, 2, 1]), (2, 3), True),
    ("aten.expand.default", (X, [2, 5, 3]), (1, 3), True),
    ("aten.repeat.default", (X, [1, 2, 3]), (2, 3), True),
    ("aten.slice.Tensor", (X, 1, 0, 4, 2), (5,), True),
    ("aten.index.Tensor", (X, [None, torch.tensor([0, 1, 1, 1])]), (3,), True),
    ("aten.split.Tensor", (X, 2, 1), (5,), True),
    ("aten.unbind.int", (X, 1), (3,), True),
    ("aten.cat.default", ([X, X], 1), (3,), True),
    ("aten.cat.default", ([X, torch.ones(2, 3, dtype=D)], 1), (3,), True),
    ("aten.stack.default", ([X, X, X], 2), (3,), True),
    ("aten.slice_scatter.default", (X, torch.zeros(2, 1, dtype=D), 1, 0, 1), (3,), True),
    ("aten.where.self", (torch.tensor([True, False, True]), X, torch.ones(3, dtype=D)), (3,), True),
    ("aten.masked_fill.Scalar", (X, torch.tensor([True, False, True]), 3.0), (3,), True),
    ("aten.flip.default", (X, [1]), (3,), True),
    ("aten.roll.default", (X, [1], [1]), (3,), True),
    ("aten.pixel_shuffle.default", (X, 2), (4, 2, 2), True),
    ("aten.pixel_unshuffle.default", (X, 2), (1, 4, 4), True),
    ("aten.im2col.default", (X, [2, 2], [1, 1], [0, 0], [1, 1]), (1, 3, 3), True),
    ("aten.pad.default", (X, [1, 2], "constant", 7.0), (1, 4), True),
    ("aten.pad.default", (X, [2, 1], "reflect"), (1, 4), True),
    ("aten.pad.default", (X, [1, 1, 1, 1], "reflect"), (1, 3, 3), True),
    ("aten.pad.default", (X, [1, 2], "replicate"), (1, 4), True),
    ("aten.pad.default", (X, [3, 2], "circular"), (1, 4), True),
    ("aten.upsample_nearest2d.vec", (X, None, [2.0, 3.0]), (1, 3, 3), True),
    ("aten.upsample_nearest1d.vec", (X, [5], None), (1, 3), True),
    ("aten.upsample_bilinear2d.vec", (X, [5, 7], False, None), (1, 3, 3), False),
    ("aten.upsample_bilinear2d.vec", (X, [5, 7], True, None), (1, 3, 3), False),
    ("aten.upsample_linear1d.vec", (X, [4], False, None), (1, 9), False),
    ("aten.upsample_bicubic2d.vec", (X, [5, 7], False, None), (1, 3, 4), False),
    ("aten.upsample_bicubic2d.vec", (X, None, True, [2.0, 3.0]), (2, 4, 3), False),
    ("aten.upsample_bicubic2d.vec", (X, [2, 9], False, None), (1, 5, 1), False),
    ("aten._upsample_bicubic2d_aa.vec", (X, [3, 2], False, None), (1, 7, 6), False),
    ("aten.avg_pool2d.default", (X, [2, 2]), (1, 4, 4), True),
    ("aten.avg_pool2d.default", (X, [3, 3], [1, 1], [1, 1]), (1, 4, 4), False),
    ("aten.avg_pool2d.default", (X, [3, 3], [2, 2], [1, 1], True, False), (1, 4, 4), False),
    ("aten.avg_pool1d.default", (X, [3], [2], [1], True, False), (1, 6), False),
    ("aten.adaptive_avg_pool2d.default", (X, [3, 2]), (1, 5, 5), False),
    ("aten.mean.dim", (X, [1, 2]), (2, 3), True),
    ("aten.sum.dim_IntList", (X, [2]), (2, 3), True),
    ("aten.col2im.default", (X, [3, 3], [2, 2], [1, 1], [0, 0], [1, 1]), (4, 4), False),
    ("aten.max_pool2d.default", (X, [2, 2]), (1, 4, 4), True),
    ("aten.max_pool2d.default", (X, [3, 3], [2, 2], [1, 1]), (1, 5, 5), False),
    ("aten.max_pool1d.default", (X, [2], [1], [0], [2]), (1, 6), False),
    ("aten.max_pool2d_with_indices.default", (X, [3, 3], [1, 1]), (1, 4, 4), False),
    ("aten.adaptive_max_pool2d.default", (X, [2, 2]), (1, 5, 5), False),
    ("aten.layer_norm.default", (X, [4], torch.tensor([1.0, 2, 3, 4], dtype=D), None, 1e-2), (4,), False),
    ("aten.group_norm.default", (X, 2, None, None, 1e-2), (4, 3), False),
    ("aten.rms_norm.default", (X, [4], None, 1e-2), (4,), False),
    ("aten.instance_norm.default", (X, None, None, None, None, True, 0.1, 1e-2, False), (2, 5), False),
    ("aten.linear.default", (X, M, torch.ones(3, dtype=D)), (2,), False),
    ("aten.matmul.default", (X, M.T), (2,), False),
    ("aten.matmul.default", (M, X), (2, 3), False),
    ("aten.matmul.default", (X, M[0]), (4, 2), False),
    ("aten.addmm.default", (torch.ones(3, dtype=D), X, M.T), (2,), False),
    ("aten.einsum.default", ("bci,ij->bcj", [X, M.T]), (2, 2), False),
    ("aten.einsum.default", ("ji,bci->bjc", [M, X]), (2, 2), False),
    ("aten.conv2d.default", (X, W, None, [2, 1], [1, 2], [1, 1]), (3, 4, 4), False),
    ("aten.conv2d.padding", (X, W, None, [1, 1], "same"), (3, 4, 4), False),
    ("aten.conv1d.default", (X, W[:, :, 0], None, [1], [3], [2]), (3, 6), False),
    ("aten.conv_transpose2d.input", (X, W, None, [2, 2], [1, 1], [1, 1]), (2, 3, 3), False),
    ("aten.convolution.default", (X, W, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1), (3, 4, 4), False),
]  # fmt: skip


@pytest.mark.parametrize(
    ("op", "arguments", "shape", "is_reached"), CASES, ids=lambda v: v if isinstance(v, str) else ""
)
def test_no_slope_is_above_the_factor(op, arguments, shape, is_reached):
    found = verdict(op, *arguments, shape=shape)
    assert found.constant is not None, found.why
    slope = steepest(op, *arguments, shape=shape)
    assert slope <= found.constant * TIGHT, (slope, found)
    if is_reached:
        assert found.constant <= slope * (1 + 1e-9) + 1e-12, (slope, found)


def test_every_rule_is_of_an_operation_that_torch_has():
    assert len(known_operations()) > 150
    assert all(aten(name) for name in known_operations())


REFUSED = [
    ("aten.mul.Tensor", (X, X), (3,), "grows without bound"),
    ("aten.div.Tensor", (X, X), (3,), "next to zero"),
    ("aten.div.Tensor", (X, 0.0), (3,), "divides by zero"),
    ("aten.mul.Tensor", (X, torch.tensor(math.nan)), (3,), "not finite"),
    ("aten.exp.default", (X,), (3,), "without bound"),
    ("aten.softplus.default", (X,), (3,), "jumps"),
    ("aten.sign.default", (X,), (3,), "jumps"),
    ("aten.celu.default", (X, -1.0), (3,), "without bound"),
    ("aten.elu.default", (X, 1.0, 1.0, -1.0), (3,), "without bound"),
    ("aten.softmax.int", (X, 0), (3,), "batch"),
    ("aten.sum.dim_IntList", (X, [0]), (3,), "batch"),
    ("aten.mean.dim", (X, [0], True), (3,), "batch"),
    ("aten.flip.default", (X, [0]), (3,), "one sample to another"),
    ("aten.view.default", (X, [6]), (3,), "batch"),
    ("aten.view.default", (X, [3, 2]), (3,), "batch"),
    ("aten.permute.default", (X, [1, 0]), (2,), "one sample to another"),
    ("aten.roll.default", (X, [1], []), (3,), "one sample to another"),
    ("aten.add.Tensor", (X, torch.ones(2, 2, 3, dtype=D)), (3,), "batch"),
    ("aten.sort.default", (X, 0), (3,), "batch"),
    ("aten.topk.default", (X, 4, 1, True, False), (8,), "change places"),
    ("aten.layer_norm.default", (X, [2, 3]), (3,), "batch"),
    ("aten.layer_norm.default", (X, [3], None, None, 0.0), (3,), "unbounded"),
    ("aten._to_copy.default", (X,), (3,), "rounds to bfloat16"),
    ("aten.argmax.default", (X, 1), (3,), "jumps"),
    ("aten.sinc.default", (X,), (3,), r"register_rule\('aten.sinc.default'\)"),
    ("aten.matmul.default", (torch.ones(3, 2, dtype=D), X), (2,), "batch"),
    ("aten.conv2d.default", (X, torch.ones(2, 2, 1, 1, dtype=D)), (3, 3), "batch axis"),
    ("aten.linear.default", (torch.ones(2, 3, dtype=D), X), (3,), "depend"),
    ("aten.linear.default", (X, torch.full((3, 3), math.inf, dtype=D)), (3,), "finite"),
    ("aten.einsum.default", ("bi,i->bi", [X, torch.ones(3, dtype=D)]), (3,), "letters"),
    ("aten.einsum.default", ("bi,ib->b", [X, torch.ones(3, 2, dtype=D)]), (3,), "letters|batch"),
    ("aten.einsum.default", ("bi,ij->bj", [X, torch.ones(1, 4, dtype=D)]), (3,), "stretches"),  # norm 2, slope 2 sqrt 3
    ("aten.einsum.default", ("bi,ij->bj", [X, torch.ones(3, 1, dtype=D)]), (1,), "stretches"),
]


@pytest.mark.parametrize(("op", "arguments", "shape", "words"), REFUSED, ids=lambda v: v if isinstance(v, str) else "")
def test_refused(op, arguments, shape, words):
    keywords = {"dtype": torch.bfloat16} if op == "aten._to_copy.default" else {}
    found = verdict(op, *arguments, shape=shape, **keywords)
    assert found.constant is None
    assert found.is_refused
    assert re.search(words, found.why), found.why


def test_batch_norm_has_the_gain_of_its_stored_statistics():
    weight, var = torch.tensor([1.0, -3.0, 2.0], dtype=D), torch.tensor([4.0, 9.0, 0.25], dtype=D)
    stored = (weight, None, torch.zeros(3, dtype=D), var, 0.1, 0.0)
    found = verdict("aten._native_batch_norm_legit_no_training.default", X, *stored, shape=(3, 2))
    assert found.factor == 4.0
    poisoned = (weight, None, torch.zeros(3, dtype=D), -var, 0.1, 0.0)
    assert verdict("aten._native_batch_norm_legit_no_training.default", X, *poisoned, shape=(3, 2)).constant is None
    training = (weight, None, None, None, True, 0.1, 1e-5, False)
    assert verdict("aten.batch_norm.default", X, *training, shape=(3, 2)).is_refused


def test_own_deviation_is_said_to_be_of_no_use():
    found = verdict("aten.layer_norm.default", X, [4], shape=(4,))
    assert found.factor >= 1e-5**-0.5
    assert "of no use" in found.remark
    # Without an eps torch takes that of the type, so the float64 program of a float32 model has a smaller one.
    assert verdict("aten.rms_norm.default", X, [4], shape=(4,), dtype=torch.float32).factor >= 2.0**26


def test_a_write_into_a_view_keeps_nothing_of_what_was_there():
    assert verdict("aten.copy.default", torch.ones(2, 4, 3, dtype=D), X, shape=(1, 3)).factor == 2.0  # 4 copies
    assert verdict("aten.copy.default", X, torch.ones(2, 3, dtype=D), shape=(3,)).factor == 0.0


def test_what_rests_on_a_gap_is_unproved_and_later_gaps_are_named_too():
    shape = (2, 3)
    ops = ["input", "aten.exp.default", "aten.relu.default", "aten.square.default"]
    nodes = [
        Call(i, "", op, None, (Ref(i - 1),) if i else (), {}, (i - 1,) if i else (), shape, D)
        for i, op in enumerate(ops)
    ]
    found = walk(Graph(tuple(nodes), 3, shape))
    assert [v.constant for v in found] == [1.0, None, None, None]
    assert [v.is_refused for v in found] == [False, True, False, True]
    assert found[2].factor == 1.0


def test_a_rule_of_ones_own(monkeypatch):
    monkeypatch.setattr("onelip.graph.step._RULES", {})
    register_rule("aten.sinc.default")(lambda step: step.times(1.4, "steepest slope"))
    assert verdict("aten.sinc.default", X, shape=(3,)).factor == 1.4
    with pytest.raises(ValueError, match="expected the name of an operation"):
        register_rule("aten.no_such_thing.default")
    register_rule("aten.exp.default")(lambda step: step.times(math.nan, "?"))
    assert verdict("aten.exp.default", X, shape=(3,)).constant is None
    register_rule("aten.exp.default")(lambda step: step.times(math.inf, "?"))
    assert verdict("aten.exp.default", X, shape=(3,)).constant is None


@pytest.mark.parametrize(
    ("name", "function", "curvature"),
    [
        ("sigmoid", torch.sigmoid, 0.1),
        ("gelu", F.gelu, 0.8),
        ("gelu", lambda x: F.gelu(x, approximate="tanh"), 0.81),
        ("silu", F.silu, 0.5),
        ("mish", F.mish, 0.7),
        ("erf", torch.erf, 1.0),
    ],
)
def test_steepest_slopes(name, function, curvature):
    """A grid, and what the slope can rise between its points; far out the slope is within 1e-6 of 0 or 1."""
    constant = verdict(f"aten.{name}.default", X, shape=(3,)).factor
    step = 1e-3
    x = torch.arange(-20, 20, step, dtype=D).requires_grad_()
    (slope,) = torch.autograd.grad(function(x).sum(), x, create_graph=True)
    (second,) = torch.autograd.grad(slope.sum(), x)
    assert float(second.abs().max()) <= curvature
    largest = float(slope.detach().abs().max())
    assert largest <= constant
    # At a maximum the slope is flat, so between grid points it rises by no more than curvature * step / 2 anyway.
    assert largest + curvature * step / 2 <= constant * (1 + 1e-3)
    assert largest >= constant * 0.998


@pytest.mark.parametrize(
    ("name", "function"),
    [("hardswish", F.hardswish), ("hardsigmoid", F.hardsigmoid), ("selu", F.selu)],
)
def test_steepest_slopes_at_kinks(name, function):
    constant = verdict(f"aten.{name}.default", X, shape=(3,)).factor
    x = torch.arange(-8, 8, 1e-4, dtype=D)
    ratios = (function(x[1:]) - function(x[:-1])).abs() / (x[1:] - x[:-1])
    assert constant * (1 - 1e-3) < float(ratios.max()) <= constant * (1 + 1e-9)


def test_rounding_is_upward():
    generator = torch.Generator().manual_seed(0)
    for a, b in torch.rand(200, 2, generator=generator, dtype=D).mul(10).tolist():
        assert Fraction(add_up(a, b)) >= Fraction(a) + Fraction(b)
        assert Fraction(hypotenuse_up(a, b)) ** 2 >= Fraction(a) ** 2 + Fraction(b) ** 2
        assert Fraction(inverse_up(a)) * Fraction(a) >= 1
    assert add_up(0.0, 1.0, 0.0) == 1.0
    assert hypotenuse_up(math.inf, 1.0) == math.inf
    # Constants meet rules rounded up, too: 1 - 0.7 in floats may be below the real number.
    found = verdict("aten.lerp.Scalar", X, torch.zeros(2, dtype=D), 0.7, shape=(2,))
    assert Fraction(found.constant) >= 1 - Fraction(0.7)
    assert verdict("aten.mul.Tensor", X, 2.1, shape=(2,)).factor == 2.1  # as a float32 it would be below
    assert verdict("aten.leaky_relu.default", X, 2.1, shape=(2,)).factor == 2.1
