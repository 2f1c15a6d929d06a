"""Maxima and averages over windows."""

import math
from collections.abc import Sequence
from fractions import Fraction

from onelip.core.rounding import root_at_most
from onelip.graph import kinds
from onelip.graph.lowering import Lowering, lowers
from onelip.nn.pooling import LipschitzAvgPool1d, LipschitzAvgPool2d, LipschitzAvgPool3d


def _sizes(value: int | Sequence[int], axes: int) -> list[int]:
    numbers = [value] if isinstance(value, int) else list(value)
    return numbers * axes if len(numbers) == 1 else numbers


def _windows(low: Lowering) -> tuple[list[int], list[int], list[int]]:
    axes = len(low.source_shape) - 1
    kernel = _sizes(low.argument("kernel_size"), axes)
    return kernel, _sizes(low.argument("stride") or kernel, axes), _sizes(low.argument("padding"), axes)


@lowers(*(f"aten.max_pool{d}d.default" for d in (1, 2, 3)))
def max_pool(low: Lowering) -> int:
    sizes, (kernel, stride, padding) = low.source_shape[1:], _windows(low)
    dilation = _sizes(low.argument("dilation"), len(sizes))
    each = list(zip(sizes, kernel, stride, padding, dilation, low.shape[1:], strict=True))
    floor_mode = all((n + 2 * p - d * (k - 1) - 1) // s + 1 == out for n, k, s, p, d, out in each)
    # Every window must hold a pixel: one of padding alone is -infinity.
    filled = all(any(0 <= s * o + d * t - p < n for t in range(k)) for n, k, s, p, d, out in each for o in range(out))
    if not (floor_mode and filled):
        return low.refuse()
    take = kinds.windows_of(sizes, low.shape[1:], kernel, stride, padding, dilation)
    return low.emit(kinds.Max, low.source, take=take)


@lowers(*(f"aten.avg_pool{d}d.default" for d in (1, 2, 3)))
def avg_pool(low: Lowering) -> int:
    sizes, (kernel, stride, padding) = low.source_shape[1:], _windows(low)
    whole = tuple((n - k) // s + 1 for n, k, s in zip(sizes, kernel, stride, strict=True))
    divisor = "1d" not in low.call.op and low.argument("divisor_override")
    return low.refuse() if any(padding) or divisor or whole != low.shape[1:] else average(low, kernel, stride, 1.0)


@lowers(*(f"aten.adaptive_avg_pool{d}d.default" for d in (1, 2, 3)))
def global_average(low: Lowering) -> int:
    sizes = low.source_shape[1:]
    return low.refuse() if any(n != 1 for n in low.shape[1:]) else average(low, sizes, sizes, 1.0)


@lowers("aten.mean.dim")
def mean(low: Lowering) -> int:
    axes = 1 + len(low.source_shape)
    spatial = sorted(axis % axes for axis in low.argument("dim") or ())
    return global_average(low) if spatial == list(range(2, axes)) and low.argument("keepdim") else low.refuse()


@lowers(LipschitzAvgPool1d, LipschitzAvgPool2d, LipschitzAvgPool3d)
def lipschitz_average(low: Lowering) -> int:
    module, sizes = low.module, low.source_shape[1:]
    kernel = module.kernel_size or sizes
    scale = module.scale if module.kernel_size else root_at_most(Fraction(math.prod(kernel)))
    if any(module.padding) or len(sizes) != module.axes:
        return low.refuse()
    return average(low, kernel, module.stride or kernel, scale)


def average(low: Lowering, kernel: Sequence[int], stride: Sequence[int], factor: float) -> int:
    """Means of windows, times a factor."""
    # The number nearest to factor / size; the error of that is one of the roundings of the rule.
    take = kinds.windows_of(low.source_shape[1:], low.shape[1:], kernel, stride)
    return low.emit(kinds.Sum, low.source, take=take, factor=factor / math.prod(kernel))
