"""Maxima over windows: | max u - max v |^2 <= ||u - v||^2 in each window; an entry counts once per window it lies in.

So the constant is the root of the most windows that one entry lies in, counted along each axis and multiplied.
"""

import math
from collections.abc import Sequence
from fractions import Fraction

from torch import nn

from onelip.core.rounding import up_root
from onelip.graph import kinds
from onelip.graph.lowering import Lowering, lowers
from onelip.graph.ops.separable import image_axes, separable
from onelip.graph.step import Refusal, Step, StepBound, per_axis, register_rule


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
    take = kinds.windows_of(sizes, low.shape[1:], kernel, stride, padding, dilation)
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
    take = kinds.windows_of(low.source_shape[1:], low.shape[1:], kernel, stride)
    return low.emit(kinds.Sum, low.source, take=take, factor=factor / math.prod(kernel))
