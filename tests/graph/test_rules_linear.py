"""Linear operations against their norms, from forward passes of unit vectors alone: never above, and reached."""

import math
import random

import pytest
import torch
import torch.nn.functional as F
from _one_operation import X, norm_from_forward, verdict
from torch import nn

import onelip
from onelip.graph.ops.arithmetic import cumsum_norm_up
from onelip.graph.step import aten

# Sizes and scales that contradict each other make torch read beyond the border, where memory is not the same each time:
# then the operation is no product of maps, and is refused. Whether it happens depends on the machine.
REFUSALS = ("for an input of ones", "is not a product of maps along its axes")


def interpolation(draw):
    axes = draw.choice([1, 2, 2, 2, 2, 3])
    names = {
        1: ["upsample_linear1d"],
        2: [
            "upsample_bilinear2d",
            "upsample_bicubic2d",
            "_upsample_bilinear2d_aa",
            "_upsample_bicubic2d_aa",
            "_upsample_lanczos2d_aa",
        ],
        3: ["upsample_trilinear3d"],
    }
    name, most = draw.choice(names[axes]), 8 if axes < 3 else 4
    sizes, out = ([draw.randint(1, most) for _ in range(axes)] for _ in range(2))
    align_corners = draw.random() < 0.4
    scales = [draw.choice([0.3, 0.5, 0.7, 1.0, 1.3, 1.5, 2.0, 2.7, 3.0]) for _ in range(axes)]
    kind = draw.choice(["size", "size", "scale", "both"])  # both: scale_factor without recompute_scale_factor
    if kind == "both":
        return f"aten.{name}.default", (X, out, align_corners, *scales), (1, *sizes)
    given = (X, out, align_corners, None) if kind == "size" else (X, None, align_corners, scales)
    return f"aten.{name}.vec", given, (1, *sizes)


def average(draw):
    axes = draw.choice([1, 2, 2, 3])
    sizes = [draw.randint(1, 8 if axes < 3 else 4) for _ in range(axes)]
    if draw.random() < 0.3:
        return f"aten.adaptive_avg_pool{axes}d.default", (X, [draw.randint(1, 9) for _ in range(axes)]), (1, *sizes)
    kernel, stride = ([draw.randint(1, 4) for _ in range(axes)] for _ in range(2))
    padding = [draw.randint(0, k // 2) for k in kernel]
    given = (X, kernel, stride, padding, draw.random() < 0.5, draw.random() < 0.5)
    if axes > 1 and draw.random() < 0.3:
        given = (*given, draw.randint(1, 9))
    return f"aten.avg_pool{axes}d.default", given, (1, *sizes)


def folding(draw):
    size = [draw.randint(2, 7) for _ in range(2)]
    kernel, stride = ([draw.randint(1, 3) for _ in range(2)] for _ in range(2))
    dilation, padding = [draw.randint(1, 2) for _ in range(2)], [draw.randint(0, 2) for _ in range(2)]
    if draw.random() < 0.5:
        return "aten.im2col.default", (X, kernel, dilation, padding, stride), (1, *size)
    counts = [
        (n + 2 * p - d * (k - 1) - 1) // s + 1
        for n, k, d, p, s in zip(size, kernel, dilation, padding, stride, strict=True)
    ]
    shape = (math.prod(kernel), math.prod(max(0, count) for count in counts))
    return "aten.col2im.default", (X, size, kernel, dilation, padding, stride), shape


def padding(draw):
    axes = draw.choice([1, 2, 3])
    sizes = [draw.randint(1, 5) for _ in range(axes)]
    mode = draw.choice(["constant", "reflect", "replicate", "circular"])
    return "aten.pad.default", (X, [draw.randint(0, 4) for _ in range(2 * axes)], mode), (1, *sizes)


def nearest(draw):
    axes = draw.choice([1, 2, 3])
    sizes = [draw.randint(1, 6 if axes < 3 else 4) for _ in range(axes)]
    name = f"aten.{draw.choice(['upsample_nearest', '_upsample_nearest_exact'])}{axes}d.vec"
    if draw.random() < 0.5:
        return name, (X, [draw.randint(1, 9) for _ in range(axes)], None), (1, *sizes)
    return name, (X, None, [draw.choice([0.4, 0.5, 0.7, 1.5, 2.0, 2.3]) for _ in range(axes)]), (1, *sizes)


def along_axes(draw):
    name = draw.choice(["mean.dim", "sum.dim_IntList", "cumsum.default"])
    dim = draw.choice([1, 2]) if "cumsum" in name else draw.choice([[1], [2], [1, 2], [-1]])
    return f"aten.{name}", (X, dim), (draw.randint(1, 6), draw.randint(1, 6))


@pytest.mark.parametrize("family", [interpolation, average, folding, padding, nearest, along_axes])
def test_never_below_the_norm_and_next_to_it(family):
    """Sizes and settings of all kinds; what torch itself does not run is left out."""
    draw = random.Random(0)
    bounded = 0
    for _ in range(150):
        op, arguments, shape = family(draw)
        try:
            norm = norm_from_forward(op, *arguments, shape=shape)
        except RuntimeError:
            continue
        found = verdict(op, *arguments, shape=shape)
        if found.constant is None:
            assert any(why in found.why for why in REFUSALS), (op, arguments, shape, found.why)
            continue
        bounded += 1
        assert norm <= found.constant * (1 + 1e-12), (op, arguments, shape, norm, found)
        assert found.constant <= norm * (1 + 1e-9) + 1e-12, (op, arguments, shape, norm, found)
    assert bounded >= 60


def test_antialiased_interpolation_is_not_bounded_by_torchs_derivative():
    """torch's derivative of it is not the adjoint: for this size it would give 1.0, and the norm is sqrt(2)."""
    found = verdict("aten._upsample_bilinear2d_aa.vec", X, [4, 1], False, None, shape=(1, 2, 2))
    assert found.constant == pytest.approx(math.sqrt(2), rel=1e-9)

    class Resized(nn.Module):
        def forward(self, x):
            return F.interpolate(x, size=(4, 1), mode="bilinear", antialias=True)

    audit = onelip.audit(Resized(), torch.rand(1, 1, 2, 2))
    assert audit.lower <= audit.upper == found.constant


@pytest.mark.parametrize(
    ("op", "arguments", "shape"),
    [
        ("aten.upsample_bilinear2d.vec", (X, [448, 448], False, None), (3, 224, 224)),
        ("aten._upsample_bilinear2d_aa.vec", (X, [64, 100], False, None), (3, 224, 224)),
        ("aten.upsample_bicubic2d.vec", (X, [300, 300], True, None), (1, 224, 224)),
        ("aten.avg_pool2d.default", (X, [3, 3], [2, 2], [1, 1]), (2, 112, 112)),
        ("aten.adaptive_avg_pool2d.default", (X, [7, 7]), (2, 224, 200)),
    ],
)
def test_large_images(op, arguments, shape):
    """The norm of a product of matrices is reached by a product of vectors, which the power method finds."""
    found = verdict(op, *arguments, shape=shape)
    x = torch.ones(1, 1, *shape[1:], dtype=torch.float64)
    ratio = 0.0
    for _ in range(3):
        x = (x / x.norm()).requires_grad_()
        y = aten(op)(x, *arguments[1:])
        ratio = max(ratio, float(y.detach().norm()))
        (x,) = torch.autograd.grad(y, x, y.detach())  # only a direction: any vector gives a lower bound
    assert ratio <= found.constant <= 1.05 * ratio


def test_long_signals_are_not_written_out():
    found = verdict("aten.avg_pool1d.default", X, [4], [2], [1], shape=(1, 40_000))
    small = verdict("aten.avg_pool1d.default", X, [4], [2], [1], shape=(1, 400))
    assert small.constant <= found.constant <= small.constant * (1 + 1e-3)


def test_cumulative_sums():
    for count in [1, 2, 3, 10, 100]:
        exact = 1 / (2 * math.sin(math.pi / (2 * (2 * count + 1))))
        assert exact * (1 - 1e-15) <= cumsum_norm_up(count) <= exact * (1 + 1e-14)


ALIKE = torch.ones(2, 3, dtype=torch.float64)
OTHER = torch.tensor([[1.0, 1.0, 1.0], [1.0, 2.0, 1.0]], dtype=torch.float64)
MASK = torch.tensor([[True, False, True], [True, True, True]])


@pytest.mark.parametrize(
    ("op", "arguments", "shape"),
    [
        ("aten.tril.default", (X,), (3,)),
        ("aten.tril.default", (X, 1), (3,)),
        ("aten.triu.default", (X,), (3,)),
        ("aten.where.self", (MASK, X, OTHER[:1]), (3,)),
        ("aten.where.self", (MASK[:1], X, OTHER), (3,)),
        ("aten.masked_fill.Scalar", (X, MASK, 0.0), (3,)),
        ("aten.index.Tensor", (X, [torch.arange(2)[:, None], torch.tensor([[0, 1], [1, 2]])]), (3,)),
        ("aten.gather.default", (X, 1, torch.tensor([[0, 1], [1, 2]])), (3,)),
        ("aten.slice_scatter.default", (X, OTHER[:, :1] * 0 + torch.arange(2.0)[:, None], 1, 0, 1), (3,)),
        ("aten.cat.default", ([X, OTHER], 1), (3,)),
        ("aten.roll.default", (X, [1], [0]), (3,)),
        ("aten.add.Tensor", (X, OTHER), (3,)),
        ("aten.mul.Tensor", (X, OTHER), (3,)),
        ("aten.div.Tensor", (X, OTHER), (3,)),
        ("aten.clamp.Tensor", (X, None, OTHER), (3,)),
        ("aten.lerp.Tensor", (X, ALIKE, OTHER), (3,)),
        ("aten.maximum.default", (X, OTHER), (3,)),
        ("aten.matmul.default", (X, torch.stack([torch.eye(3), 2 * torch.eye(3)]).double()), (4, 3)),
        ("aten.matmul.default", (torch.stack([torch.eye(3), 2 * torch.eye(3)]).double(), X), (3, 4)),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_samples_must_be_treated_alike(op, arguments, shape):
    """An operation may keep samples apart and still depend on their place in the batch."""
    found = verdict(op, *arguments, shape=shape)
    assert found.is_refused
    assert "one sample" in found.why or "differ between samples" in found.why


def test_samples_that_are_treated_alike():
    given = {
        "aten.add.Tensor": (X, ALIKE),
        "aten.where.self": (MASK[:1], X, ALIKE),
        "aten.cat.default": ([X, ALIKE], 1),
        "aten.maximum.default": (X, ALIKE),
    }
    assert all(verdict(op, *arguments, shape=(3,)).constant == 1.0 for op, arguments in given.items())
    assert verdict("aten.tril.default", X, shape=(3, 3)).constant == 1.0


def test_lower_triangles_over_the_batch_are_refused():
    class Triangle(nn.Module):
        def forward(self, x):
            return x.tril()

    audit = onelip.audit(Triangle(), torch.rand(3, 4), lower=False)
    assert audit.upper is None
    assert "treats samples differently" in audit.unproved[0]


class AlongTheBatch(nn.Module):
    def __init__(self, run):
        super().__init__()
        self.run = run

    def forward(self, x):
        return self.run(x)


@pytest.mark.parametrize(
    "run",
    [
        lambda x: x.triu(-100),
        lambda x: x.tril(100),
        lambda x: x.roll(2**5 * 3**3 * 5 * 7, 0),
        lambda x: x.roll(2**5 * 3**3 * 5 * 7 * 4),
        lambda x: x.roll((0, 1), (0, 1)),
        lambda x: x.flip(0).flip(0),
    ],
)
def test_operations_along_the_batch_are_refused_whatever_they_do_to_few_samples(run):
    audit = onelip.audit(AlongTheBatch(run).eval(), torch.rand(3, 4), lower=False)
    assert audit.upper is None
    assert "along the batch axis" in audit.unproved[0]


@pytest.mark.parametrize(
    "run", [lambda x: x.triu(-1), lambda x: x.roll(1, 1), lambda x: x.flip(-1), lambda x: x.rot90(1, (1, 2))]
)
def test_operations_within_samples_are_bounded(run):
    assert onelip.audit(AlongTheBatch(run).eval(), torch.rand(3, 4, 4), lower=False).upper == 1.0
