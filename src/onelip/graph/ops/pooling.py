"""Pooling and interpolation: linear maps that act on each axis by a matrix of its own, and maxima over windows.

For X -> A X B^T (and likewise with one or three axes) the norm is ||A|| ||B||. The matrices are read from the forward
pass of the operation itself, at the true sizes, borders included; its derivative is not used. (torch's derivative of
antialiased interpolation is not the adjoint of its forward pass.)

Note [Probes]
    An input that is a comb along one axis (1 at every P-th place, from place r on) and 1 along the others gives

        A comb_r  (x)  B 1  (x)  C 1.

    Where no output reads two teeth of one comb, this shows the entries of A, times the numbers b = (B 1)_o and
    c = (C 1)_o of a reference output o, where the answer s = a b c to an input of ones is the largest. So three such
    matrices A' = A b c, B' = B a c, C' = C a b give  A (x) B (x) C = A' (x) B' (x) C' / s^2.

    Which tooth an output has read is a guess, and so is the assumption that the operation is such a product at all.
    Both are then verified: on random images of two samples and two channels, the operation and the product of the
    matrices must agree up to a relative error of 2^-40, entry by entry. If they do not, P is doubled, up to the
    length of the axis, where nothing is guessed about the teeth; if they do not agree then, no bound is given. This
    also verifies that samples are kept apart and are treated alike.
"""

import math
import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import NamedTuple

import torch
from torch import Tensor, nn

from onelip.bounds.fast import bound_weight
from onelip.core.geometry import geometry_of
from onelip.core.rounding import multiply_up, up_root
from onelip.graph import kinds
from onelip.graph.lowering import Lowering, lowers
from onelip.graph.ops.movement import windows_of
from onelip.graph.step import Refusal, Step, StepBound, aten, per_axis, register_rule

_COMB = 64  # distance of teeth to begin with
_DENSE = 2**22  # entries up to which a matrix is written out
_AGREE = 2.0**-40
_SLACK = Fraction(1, 2**44)  # of one coefficient, whose rounding error is a few times 2^-53 times the length of an axis

_AVERAGES = frozenset(f"aten.avg_pool{d}d.default" for d in (1, 2, 3))  # whose rule is below
_NAMES = """
    adaptive_avg_pool1d.default adaptive_avg_pool2d.default adaptive_avg_pool3d.default
    _adaptive_avg_pool2d.default _adaptive_avg_pool3d.default
    upsample_linear1d.vec upsample_bilinear2d.vec upsample_trilinear3d.vec upsample_bicubic2d.vec
    upsample_linear1d.default upsample_bilinear2d.default upsample_trilinear3d.default upsample_bicubic2d.default
    _upsample_bilinear2d_aa.vec _upsample_bicubic2d_aa.vec _upsample_lanczos2d_aa.vec
    _upsample_bilinear2d_aa.default _upsample_bicubic2d_aa.default _upsample_lanczos2d_aa.default
"""
# Not every version of torch has all of them.
_PRESENT = frozenset(f"aten.{name}" for name in _NAMES.split() if hasattr(torch.ops.aten, name.split(".")[0]))
SEPARABLE = _AVERAGES | _PRESENT


class Sparse(NamedTuple):
    """A matrix with few entries in each row: those of row o are values[o], in columns[o]."""

    columns: Tensor  # (m, most)
    values: Tensor  # (m, most)
    width: int


@register_rule(*_PRESENT)
def separable(step: Step) -> StepBound:
    """The product of the norms along the axes. See the head of the file."""
    matrices, scale = read_matrices(step)
    factor = multiply_up(*(_norm(matrix, step) for matrix in matrices), abs(scale))
    return step.times(factor, "along each axis a matrix, whose norm is proved")


def read_matrices(step: Step) -> tuple[list[Sparse], float]:
    """Matrices, one for each image axis, and a number: the operation is their product times the number."""
    axes = image_axes(step.call.op)
    lead, sizes = step.source.shape[:-axes], step.source.shape[-axes:]
    if not lead:
        raise Refusal("works along the batch axis, so samples depend on each other")
    name, keywords = step.call.op, step.call.keywords

    def apply(x: Tensor) -> Tensor:
        return aten(name)(x, *step.call.arguments[1:], **keywords)

    few = tuple(min(n, 2) for n in lead)  # channels are alike by definition of these operations
    comb = _COMB
    while True:
        matrices, scale = _read(apply, (1,) * len(few), sizes, comb)
        if _agree(apply, matrices, scale, few, sizes):
            return matrices, scale
        if comb >= max(sizes):
            raise Refusal("is not a product of maps along its axes")
        comb *= 2


def image_axes(op: str) -> int:
    """The number of image axes in the name of an operation.

    Examples:
        >>> image_axes("aten.avg_pool2d.default")
        2
    """
    found = re.search(r"([123])d", op)
    assert found is not None
    return int(found.group(1))


def _read(
    apply: Callable[[Tensor], Tensor], ones: Sequence[int], sizes: Sequence[int], comb: int
) -> tuple[list[Sparse], float]:
    """Note [Probes]: the matrices A', B', C', and 1 / s^(axes - 1)."""
    axes = len(sizes)
    answer = apply(torch.ones(*ones, *sizes, dtype=torch.float64))
    shape = answer.shape[-axes:]
    place = int(answer.abs().argmax())
    s = float(answer.flatten()[place])
    if not 0 < abs(s) < math.inf:
        raise Refusal("gives nothing but zeros, or infinities, for an input of ones")
    reference = [int(i) for i in torch.unravel_index(torch.tensor(place), shape)]
    matrices = []
    for axis, n in enumerate(sizes):
        period = min(comb, n)
        teeth = torch.arange(n) % period == torch.arange(period)[:, None]  # (period, n)
        view = [period, *ones[1:], *(n if a == axis else 1 for a in range(axes))]
        probes = teeth.double().view(view).expand(period, *ones[1:], *sizes)
        seen = apply(probes.contiguous()).reshape(period, *shape)
        for other in reversed(range(axes)):
            if other != axis:
                seen = seen.select(other + 1, reference[other])
        matrices.append(_nearest(seen, n))
    return matrices, 1 / s ** (axes - 1)


def _nearest(seen: Tensor, n: int) -> Sparse:
    """From the answers (period, m) to combs: an output is taken to read the tooth that is nearest to it."""
    period, m = seen.shape
    most = int((seen != 0).sum(0).max())
    r = (seen != 0).byte().argsort(dim=0, descending=True, stable=True)[:most].T  # (m, most)
    centre = (torch.arange(m) + 0.5) * (n / m) - 0.5
    nearest = ((centre[:, None] - r) / period).round().long()
    nearest = torch.minimum(nearest, (n - 1 - r) // period).clamp(min=0)
    return Sparse(r + period * nearest, seen.T.gather(1, r), n)


def _along(matrices: Sequence[Sparse], x: Tensor) -> Tensor:
    """The product of the matrices, on the last axes of x."""
    for axis, matrix in zip(range(-len(matrices), 0), matrices, strict=True):
        read = x.movedim(axis, -1)[..., matrix.columns]  # (..., m, most)
        x = (read * matrix.values).sum(-1).movedim(-1, axis)
    return x


def _agree(
    apply: Callable[[Tensor], Tensor], matrices: list[Sparse], scale: float, lead: Sequence[int], sizes: Sequence[int]
) -> bool:
    x = torch.randn(*lead, *sizes, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = apply(x)
    wanted = _along(matrices, x) * scale
    if found.shape != wanted.shape:
        return False
    magnitude = _along([matrix._replace(values=matrix.values.abs()) for matrix in matrices], x.abs()) * abs(scale)
    return bool(((found - wanted).abs() <= _AGREE * magnitude).all())


def _norm(matrix: Sparse, step: Step) -> float:
    """Not below the norm of a matrix, whose coefficients may be off by the slack."""
    largest = float(matrix.values.abs().max())
    if not largest < math.inf:
        raise Refusal("has coefficients that are not finite")
    m, n = len(matrix.columns), matrix.width
    slack = _SLACK * Fraction(largest) * (math.isqrt(matrix.values.numel() + 2 * m) + 1)
    if m * n <= _DENSE:
        dense = torch.zeros(m, n, dtype=torch.float64).scatter_add_(1, matrix.columns, matrix.values)
        proved = bound_weight(dense, geometry_of(nn.Linear(n, m, device="meta")), effort=step.effort).value
    else:  # Schur test: ||A||^2 <= (largest sum of a row) (largest sum of a column), of magnitudes
        rows = matrix.values.abs().sum(1)
        columns = torch.zeros(n, dtype=torch.float64)
        columns.scatter_add_(0, matrix.columns.flatten(), matrix.values.abs().flatten())
        proved = math.sqrt(float(rows.max())) * math.sqrt(float(columns.max())) * (1 + 2.0**-30)
    return math.nextafter(float(Fraction(proved) + slack), math.inf)


# ---- Maxima over windows
#
# | max u - max v |^2 <= ||u - v||^2 in each window, and an entry counts once per window it lies in.
# So the constant is the root of the most windows that one entry lies in, counted along each axis and multiplied.


@register_rule("aten.max_pool1d.default", "aten.max_pool1d_with_indices.default", nn.MaxPool1d)
@register_rule("aten.max_pool2d.default", "aten.max_pool2d_with_indices.default", nn.MaxPool2d)
@register_rule("aten.max_pool3d.default", "aten.max_pool3d_with_indices.default", nn.MaxPool3d)
def max_pool(step: Step) -> StepBound:
    """Window w of an axis reads s w - p + d t for t < k. On an axis of any length an entry lies in as many windows as
    there are t in one class modulo s / gcd(s, d)."""
    axes = image_axes(step.call.op)
    kernel = per_axis(step.argument("kernel_size"), axes)
    stride = per_axis(step.argument("stride"), axes, kernel)
    padding, dilation = (per_axis(step.argument(name), axes) for name in ("padding", "dilation"))
    if step.operand_shape is None:
        return _answer(step, most_windows(kernel, stride, dilation))
    counts = step.call.shape[-axes:] or (None,) * axes  # of windows; not known where there are several results
    windows = []
    sizes = step.operand_shape[-axes:]
    for n, count, k, s, p, d in zip(sizes, counts, kernel, stride, padding, dilation, strict=True):
        starts = range(-p, n + p, s)  # at least those that torch has, whichever way it rounds their number
        read = [[start + d * t for t in range(k)] for start in starts]
        windows.append(_most(read[:count], n))
    return _answer(step, windows)


@register_rule(
    "aten.adaptive_max_pool1d.default", "aten.adaptive_max_pool2d.default", "aten.adaptive_max_pool3d.default"
)
def adaptive_max_pool(step: Step) -> StepBound:
    """Window i of m on an axis of length n reads floor(i n / m) up to ceil((i + 1) n / m)."""
    axes = image_axes(step.call.op)
    if len(step.source.shape) != axes + 2:
        raise Refusal("expected a batch axis and a channel axis before the image")
    sizes = per_axis(step.argument("output_size"), axes)
    windows = [
        _most([list(range(i * n // m, -(-(i + 1) * n // m))) for i in range(m)], n)
        for n, m in zip(step.source.shape[-axes:], sizes, strict=True)
    ]
    return _answer(step, windows)


def most_windows(kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]) -> list[int]:
    """The most windows that one entry can lie in, for each axis of any length.

    Examples:
        >>> most_windows([3], [2], [1])
        [2]
    """
    return [-(-k // (s // math.gcd(s, d))) for k, s, d in zip(kernel, stride, dilation, strict=True)]


@register_rule(nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d,
               nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d)  # fmt: skip
def adaptive_pool_in_layer(step: Step) -> StepBound:
    """One window over an input of any size: a maximum, or a mean, is 1-Lipschitz."""
    sizes = step.argument("output_size")
    if any(size != 1 for size in (sizes if isinstance(sizes, tuple) else (sizes,))):
        raise Refusal("its windows depend on the size of its input")
    return step.times(1.0, "one window over all")


@register_rule("aten.avg_pool1d.default", nn.AvgPool1d)
@register_rule("aten.avg_pool2d.default", nn.AvgPool2d)
@register_rule("aten.avg_pool3d.default", nn.AvgPool3d)
def avg_pool(step: Step) -> StepBound:
    """A matrix for each axis of known length; Schur test for any: rows add up to 1, columns to at most the number of
    windows that an entry lies in, divided by the size of a window."""
    if step.operand_shape is not None:
        return separable(step)
    axes = image_axes(step.call.op)
    kernel, stride, padding = (per_axis(step.argument(name), axes) for name in ("kernel_size", "stride", "padding"))
    # torch's 1d pooling has no divisor_override.
    divisor = axes > 1 and step.argument("divisor_override")
    if step.argument("ceil_mode") or divisor or (any(padding) and not step.argument("count_include_pad")):
        raise Refusal("windows at the border are divided by less; use count_include_pad, no ceil_mode")
    windows = math.prod(most_windows(kernel, stride, [1] * axes))
    return step.times(up_root(Fraction(windows, math.prod(kernel))), "Schur test")


def _most(windows: list[list[int]], length: int) -> int:
    """The most windows that one of `length` entries lies in."""
    counts = [0] * length
    for window in windows:
        for i in window:
            if 0 <= i < length:
                counts[i] += 1
    return max(counts, default=0)


def _answer(step: Step, windows: list[int]) -> StepBound:
    most = math.prod(windows)
    why = "windows apart" if most <= 1 else f"an entry lies in up to {most} windows"
    return step.times(up_root(Fraction(max(most, 1))), why)


def _pooled_axes(low: Lowering) -> int:
    """The number in the name of the operation; torch also takes samples without channels, which have no lowering."""
    axes = image_axes(low.call.op)
    return axes if len(low.source_shape) == 1 + axes else low.refuse()


def _windows(low: Lowering) -> tuple[Sequence[int], Sequence[int], Sequence[int]]:
    axes = _pooled_axes(low)
    kernel = per_axis(low.argument("kernel_size"), axes)
    return kernel, per_axis(low.argument("stride") or kernel, axes), per_axis(low.argument("padding"), axes)


@lowers(*(f"aten.max_pool{d}d.default" for d in (1, 2, 3)))
def lower_max_pool(low: Lowering) -> int:
    sizes, (kernel, stride, padding) = low.source_shape[1:], _windows(low)
    dilation = per_axis(low.argument("dilation"), len(sizes))
    each = list(zip(sizes, kernel, stride, padding, dilation, low.shape[1:], strict=True))
    floor_mode = all((n + 2 * p - d * (k - 1) - 1) // s + 1 == out for n, k, s, p, d, out in each)
    # Every window must hold a pixel: one of padding alone is -infinity.
    filled = all(any(0 <= s * o + d * t - p < n for t in range(k)) for n, k, s, p, d, out in each for o in range(out))
    if not (floor_mode and filled):
        return low.refuse()
    take = windows_of(sizes, low.shape[1:], kernel, stride, padding, dilation)
    return low.emit(kinds.Max, low.source, take=take)


@lowers(*(f"aten.avg_pool{d}d.default" for d in (1, 2, 3)))
def lower_avg_pool(low: Lowering) -> int:
    sizes, (kernel, stride, padding) = low.source_shape[1:], _windows(low)
    whole = tuple((n - k) // s + 1 for n, k, s in zip(sizes, kernel, stride, strict=True))
    divisor = "1d" not in low.call.op and low.argument("divisor_override")
    return low.refuse() if any(padding) or divisor or whole != low.shape[1:] else average(low, kernel, stride, 1.0)


@lowers(*(f"aten.adaptive_avg_pool{d}d.default" for d in (1, 2, 3)))
def lower_global_average(low: Lowering) -> int:
    _pooled_axes(low)
    return _average_all(low)


def _average_all(low: Lowering) -> int:
    sizes = low.source_shape[1:]
    return low.refuse() if any(n != 1 for n in low.shape[1:]) else average(low, sizes, sizes, 1.0)


@lowers("aten.mean.dim")
def lower_mean(low: Lowering) -> int:
    axes = 1 + len(low.source_shape)
    spatial = sorted(axis % axes for axis in low.argument("dim") or ())
    return _average_all(low) if spatial == list(range(2, axes)) and low.argument("keepdim") else low.refuse()


def average(low: Lowering, kernel: Sequence[int], stride: Sequence[int], factor: float) -> int:
    """Means of windows, times a factor."""
    # The number nearest to factor / size; the error of that is one of the roundings of the rule.
    take = windows_of(low.source_shape[1:], low.shape[1:], kernel, stride)
    return low.emit(kinds.Sum, low.source, take=take, factor=factor / math.prod(kernel))
