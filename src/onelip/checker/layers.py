"""What the settings of a node mean: whether it fits its input, the shape that it makes, the phases of its taps."""

import math
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np

from .reading import integer, need, shape_of


class Map(NamedTuple):
    """A linear layer (no spatial axes) or a convolution, perhaps transposed."""

    weight: np.ndarray  # (groups, first, second, *taps)
    bias: np.ndarray
    transposed: bool
    circular: bool
    stride: tuple[int, ...]
    dilation: tuple[int, ...]
    padding: tuple[tuple[int, ...], ...]
    phases: tuple[int, ...]
    inner: int  # products in an output
    shape: tuple[int, ...]  # of the output


PLAIN = {"stride": (), "dilation": (), "padding": (), "output_padding": (), "groups": 1}
PLAIN |= {"mode": "zeros", "transposed": False}


def map_of(node: SimpleNamespace, shape: tuple[int, ...]) -> Map:
    """The layer of a node whose input has this shape."""
    where, weight, axes = node.where, node.weight, len(node.shape) - 1
    right = weight.size and weight.ndim == axes + 2 and (axes == 0 if node.op == "linear" else 1 <= axes <= 3)
    need(right, f"{where}: a weight of shape {weight.shape} for an output of shape {node.shape}")
    need(len(shape) == axes + 1, f"{where}: expected an input of {axes + 1} axes, got shape {shape}")
    conv = SimpleNamespace(**PLAIN | vars(node))
    circular, transposed, groups = conv.mode == "circular", conv.transposed, conv.groups
    need(not (circular and transposed), f"{where}: a transposed convolution cannot be circular")
    first, second, *kernel = weight.shape
    need(first % groups == 0, f"{where}: {groups} groups do not divide {first} channels")
    inputs, outputs = (first, second * groups) if transposed else (second * groups, first)
    need(inputs == shape[0], f"{where}: expected {inputs} channels, got shape {shape}")
    bias = np.zeros(outputs) if node.bias is None else node.bias
    need(bias.shape == (outputs,), f"{where}: expected a bias of {outputs} numbers")
    need(max(np.abs(weight).max(), np.abs(bias).max()) < 2.0**500, f"{where}: weights beyond 2^500")
    out, phases = [outputs], []
    each = zip(kernel, shape[1:], conv.stride, conv.dilation, conv.padding, conv.output_padding, strict=True)
    for k, n, s, d, (left, right), more in each:
        wraps = circular and left + right > 0
        narrow = left + right <= d * (k - 1) and max(left, right) <= n  # else outputs repeat, or torch refuses
        need(narrow or not wraps, f"{where}: circular padding is too wide")
        need(more < max(s, d) if transposed else more == 0, f"{where}: output_padding {more} does not fit")
        reach = d * (k - 1) + 1
        out.append((n - 1) * s - left - right + reach + more if transposed else (n + left + right - reach) // s + 1)
        # Output o reads pixel s o + d t - left by tap t, so taps t, t' meet only if t = t' modulo s / gcd(s, d), which
        # is the phase; around a circle only if s divides it, else the layer is a part of the one with stride 1.
        phases.append(1 if wraps and n % s else min(s // math.gcd(s, d), k))
    inner = (first // groups if transposed else second) * math.prod(kernel)
    weight, shape = weight.reshape(groups, -1, second, *kernel), shape_of(out, f"{where}: output")
    return Map(weight, bias, transposed, circular, conv.stride, conv.dilation, conv.padding, (*phases,), inner, shape)


def windows_of(node: SimpleNamespace) -> list[tuple[int, int, int, int]]:
    """Kernel, stride, padding and dilation for each axis."""
    k, none = node.kernel, (0,) * len(node.kernel)
    rest = getattr(node, "stride", k), getattr(node, "padding", none), getattr(node, "dilation", (1,) * len(k))
    return list(zip(k, *rest, strict=True))


def shape_after(node: SimpleNamespace, shapes: list[tuple[int, ...]]) -> tuple[int, ...]:
    """The shape of what a node other than a linear map makes, if it can be applied."""
    op, where, (channels, *sizes) = node.op, node.where, shapes[0]
    if op in ("maxmin", "groupsort"):
        size = 2 if op == "maxmin" else node.group_size
        fits = len(node.shape) == len(shapes[0]) and shapes[0][node.axis] % size == 0
        need(fits, f"{where}: groups of {size} do not divide axis {node.axis} of {shapes[0]}")
    elif op in ("first_channels", "pad_channels"):
        low, high = (1, channels) if op == "first_channels" else (channels, node.shape[0])
        return (integer(node.count, where, low, high), *sizes)
    elif op in ("concatenate", "max_pool", "avg_pool"):
        need(len(node.kernel) == len(sizes), f"{where}: expected an input of {len(node.kernel) + 1} axes")
        out = []
        for n, (k, s, p, d) in zip(sizes, windows_of(node), strict=True):
            out.append((n + 2 * p - d * (k - 1) - 1) // s + 1)
            need(out[-1] >= 1, f"{where}: the kernel is larger than the input")
            filled = all(any(0 <= s * o + d * t - p < n for t in range(k)) for o in range(out[-1]))
            need(filled, f"{where}: a window holds no pixel, its maximum is -infinity")
            need(op != "concatenate" or n % k == 0, f"{where}: windows of {k} do not tile {n}")
        return (channels * math.prod(node.kernel) if op == "concatenate" else channels, *out)
    elif op == "normalize":
        need(node.mean.size == node.std.size == channels, f"{where}: expected a mean and a std for each channel")
    elif op == "add":
        need(shapes[0] == shapes[1], f"{where}: expected equal shapes")
    elif op == "concat":
        need(len({shape[1:] for shape in shapes}) == 1, f"{where}: expected equal shapes but for the channels")
        return (sum(shape[0] for shape in shapes), *sizes)
    elif op == "flatten" or (op == "reshape" and math.prod(node.shape) != math.prod(shapes[0])):
        return (math.prod(shapes[0]),)
    elif op == "reshape":
        return node.shape
    return shapes[0]
