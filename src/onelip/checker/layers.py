"""Linear layers and convolutions: settings, shape of the output, phases of the taps, and the program."""

import itertools
import math
from typing import Any, NamedTuple

import numpy as np

from .reading import MAX_SETTING, SHAPE, Part, are_integers, is_shape, need

Shape = tuple[int, ...]


class Map(NamedTuple):
    """A linear layer (no spatial axes) or a convolution, perhaps transposed (and circular: an adjoint of stride 1)."""

    weight: np.ndarray  # (groups, first, second, *taps)
    bias: np.ndarray
    transposed: bool
    circular: bool
    stride: Shape
    dilation: Shape
    padding: list[list[int]]
    phases: Shape
    inner: int  # products in an output
    shape: Shape  # of the output


def tensor_of(node: Part, key: str, tensors: dict[str, np.ndarray]) -> np.ndarray:
    return tensors[node.take(key, lambda v: type(v) is str and v in tensors, "a tensor of the weight file")]


def map_of(node: Part, shape: Shape, tensors: dict[str, np.ndarray]) -> Map:
    """The layer of a node whose input has this shape."""
    where, axes, weight = node.where, len(shape) - 1, tensor_of(node, "weight", tensors)
    is_linear = node.given["op"] == "linear"
    stride, dilation, more, padding, groups, circular, transposed = (), (), (), [], 1, False, False
    if not is_linear:
        stride, dilation = node.integers("stride", axes, 1), node.integers("dilation", axes, 1)
        more, padding = node.integers("output_padding", axes, 0), node.items("padding", axes)
        pairs = all(are_integers(pair, 2, 0, MAX_SETTING) for pair in padding)
        need(pairs, f"{where}, padding: expected two integers from 0 to {MAX_SETTING} for each axis")
        groups, transposed = node.integer("groups", 1), node.choice("transposed", True, False)
        circular = node.choice("mode", "zeros", "circular") == "circular"
        need(not (circular and transposed), f"{where}: a transposed convolution cannot be circular")
    right = weight.size and weight.ndim == axes + 2 and (axes == 0 if is_linear else 1 <= axes <= 3)
    need(right, f"{where}: a weight of shape {weight.shape} cannot read shape {shape}")
    first, second, *kernel = weight.shape
    need(first % groups == 0, f"{where}: {groups} groups do not divide {first} channels")
    inputs, outputs = (first, second * groups) if transposed else (second * groups, first)
    need(inputs == shape[0], f"{where}: expected {inputs} channels, got shape {shape}")
    bias = np.zeros(outputs) if node.is_null("bias") else tensor_of(node, "bias", tensors)
    need(bias.shape == (outputs,), f"{where}: expected a bias of {outputs} numbers")
    need(max(np.abs(weight).max(), np.abs(bias).max()) < 2.0**500, f"{where}: weights beyond 2^500")
    out, phases = [outputs], []
    for k, n, s, d, (left, right), m in zip(kernel, shape[1:], stride, dilation, padding, more, strict=True):
        wraps = circular and left + right > 0
        narrow = left + right <= d * (k - 1) and max(left, right) <= n  # else outputs repeat, or torch refuses
        need(narrow or not wraps, f"{where}: circular padding is too wide")
        need(m < max(s, d) if transposed else m == 0, f"{where}: output_padding {m} does not fit")
        reach = d * (k - 1) + 1
        out.append((n - 1) * s - left - right + reach + m if transposed else (n + left + right - reach) // s + 1)
        # Output o reads pixel s o + d t - left by tap t, so taps t, t' meet only if t = t' modulo s / gcd(s, d), which
        # is the phase; around a circle only if s divides it, else the layer is a part of the one with stride 1.
        phases.append(1 if wraps and n % s else min(s // math.gcd(s, d), k))
    need(is_shape(out), f"{where}: expected to make {SHAPE}, got {out}")
    inner = (first // groups if transposed else second) * math.prod(kernel)
    weight = weight.reshape(groups, -1, second, *kernel)
    return Map(weight, bias, transposed, circular, stride, dilation, padding, (*phases,), inner, (*out,))


def window(tap: Any, stride: Any, dilation: Any, sizes: Any) -> tuple[slice, ...]:
    """What a tap reads for all outputs o: the pixels s o + d t."""
    each = zip(tap, stride, dilation, sizes, strict=True)
    return (slice(None), *(slice(d * t, d * t + s * (n - 1) + 1, s) for t, s, d, n in each))


def run_map(layer: Map, x: np.ndarray) -> np.ndarray:
    """Near pixels o and far pixels s o + d t: near += W_t far, or far += W_t^T near if it is transposed."""
    weight, batch, out, padding = layer.weight, x.shape[-1], layer.shape[1:], layer.padding
    if layer.transposed and layer.circular:  # far pixel i reads near ones from i - right to i + left, modulo the size
        x = np.pad(x, [(0, 0), *((right, left) for left, right in padding), (0, 0)], mode="wrap")
        padding = [[left + right, 0] for left, right in padding]
    sizes, kernel = x.shape[1:-1] if layer.transposed else out, weight.shape[3:]
    if layer.transposed:
        each = zip(padding, out, sizes, layer.stride, layer.dilation, kernel, strict=True)
        padded = [max(left + o, s * (n - 1) + d * (k - 1) + 1) for (left, _), o, n, s, d, k in each]
        near, far = x.reshape(len(weight), -1, math.prod(sizes) * batch), np.zeros((layer.shape[0], *padded, batch))
    else:
        near = np.zeros((*weight.shape[:2], math.prod(sizes) * batch))
        far = np.pad(x, [(0, 0), *padding, (0, 0)], mode="wrap" if layer.circular else "constant")
    for t in itertools.product(*map(range, kernel)):
        read = far[window(t, layer.stride, layer.dilation, sizes)]
        if layer.transposed:
            read += (weight[..., *t].swapaxes(1, 2) @ near).reshape(read.shape)
        else:
            near += weight[..., *t] @ read.reshape(len(weight), -1, math.prod(sizes) * batch)
    cut = (slice(left, left + o) for (left, _), o in zip(padding, out, strict=True))
    y = far[:, *cut] if layer.transposed else near
    return y.reshape(*layer.shape, batch) + layer.bias.reshape(-1, *(1,) * len(out), 1)
