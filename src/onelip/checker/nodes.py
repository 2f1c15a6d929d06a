"""Every kind of node: the settings it takes, the shape it makes, what rounding does, and its program.

Programs run on arrays (*sample, batch): the batch comes last, so that axes count as in the file.
"""

import itertools
import math
from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import partial, reduce
from typing import NamedTuple

import numpy as np

from .layers import Map, Shape, map_of, run_map, tensor_of, window
from .norms import ONE, ZERO, U, gamma, square_of, squares, to_integers, up_root
from .reading import SHAPE, Part, Rejected, in_hex, is_hex, is_shape, need

ETA = Fraction(1, 2**500)  # far above what an underflow can do to one operation
LIMIT = 2**500  # below it nothing overflows


class Rule(NamedTuple):
    """factor L, factor norm + shift and factor error + rounding are the numbers, if L, norm, error are the input's.

    What moves or chooses values, never computes, and takes 0 to 0, has those of its input.
    """

    shape: Shape
    run: Callable[..., np.ndarray]
    factor: Fraction = ONE
    shift: Fraction = ZERO
    rounding: Fraction = ZERO
    layer: Map | None = None


def constant(node: Part, key: str) -> Fraction:
    value = Fraction(float.fromhex(node.take(key, is_hex, "a finite float.hex()")))
    need(abs(value) < LIMIT, f"{node.where}, {key}: beyond 2^500")
    return value


def rounding_of(node: Part, layer: Map, sums: Fraction) -> Fraction:
    """Of W x + b, if the sums of absolute terms of all outputs are together at most so long."""
    need(sums < LIMIT, f"{node.where}: might overflow")
    n = layer.inner + 2
    return gamma(n) * sums + n * ETA * math.prod(layer.shape)


def rule_of_map(op: str, node: Part, shape: Shape, size: Fraction, tensors: dict[str, np.ndarray]) -> Rule:
    """W x + b with ||W|| <= sigma, || |W| || <= A, and B the norm of the bias at all positions."""
    layer = map_of(node, shape, tensors)
    whole, e = to_integers(layer.weight)
    sums = np.abs(whole).reshape(*whole.shape[:3], -1).sum(axis=3)  # (groups, first, second)
    A = up_root(int(sums.sum(axis=2).max()) * int(sums.sum(axis=1).max()) * Fraction(4) ** e)  # by Schur
    B = up_root(squares(layer.bias) * math.prod(layer.shape[1:]))
    sigma = up_root(square_of(node.part("bound"), layer, whole, e))
    node.own |= {"sigma": in_hex(sigma), "absolute": in_hex(A), "bias_norm": in_hex(B)}
    rounding = rounding_of(node, layer, A * size + B)
    rule = Rule(layer.shape, partial(run_map, layer), sigma, B, rounding, layer)
    return rule_of_potential(node, rule, layer, A, shape, size) if op == "potential" else rule


def rule_of_potential(node: Part, inner: Rule, V: Map, A: Fraction, shape: Shape, size: Fraction) -> Rule:
    """f(x) = x - 2 V^T relu(V x + b), `inner` being V x + b for a convolution V that keeps the size.

    f(x) - f(y) = (I - 2 V^T D V) (x - y) with D diagonal, its entries in [0, 1], and 0 <= V^T D V <= sigma^2. f(0) is
    -2 V^T relu(b). The program's V x + b is off by `one`, and so is relu of it; what goes to V^T is not longer than
    `inside`, and its sums are off by `two`. Doubling is exact; the difference, at most `reach` long, is rounded once.
    """
    keeps = {*V.stride} == {1} and not V.transposed and V.shape[1:] == shape[1:]
    need(keeps, f"{node.where}: expected a convolution of stride 1, not transposed, that keeps the size")
    products = V.weight.shape[1] * math.prod(V.weight.shape[3:])
    back = V._replace(bias=np.zeros(shape[0]), transposed=True, inner=products, shape=shape)
    sigma, B, one = inner.factor, inner.shift, inner.rounding
    inside = sigma * size + B + one
    two = rounding_of(node, back, A * inside)
    reach = size + 2 * (sigma * inside + two)
    need(reach < LIMIT, f"{node.where}: might overflow")
    rounding = 2 * (sigma * one + two) + U * reach + 2 * ETA * math.prod(shape)
    run = lambda x: x - 2.0 * run_map(back, np.maximum(inner.run(x), 0.0))  # noqa: E731
    return Rule(shape, run, max(ONE, 2 * sigma**2 - 1), 2 * sigma * B, rounding)


def rule_of_pool(op: str, node: Part, shape: Shape, size: Fraction) -> Rule:
    channels, *sizes = shape
    axes = len(sizes)
    kernel = node.integers("kernel", axes, 1)
    stride = kernel if op == "concatenate" else node.integers("stride", axes, 1)
    padding = node.integers("padding", axes, 0) if op == "max_pool" else (0,) * axes
    dilation = node.integers("dilation", axes, 1) if op == "max_pool" else (1,) * axes
    out, readers = [], 1  # readers: how many windows hold a pixel
    for n, k, s, p, d in zip(sizes, kernel, stride, padding, dilation, strict=True):
        out.append((n + 2 * p - d * (k - 1) - 1) // s + 1)
        need(out[-1] >= 1, f"{node.where}: the kernel is larger than the input")
        need(op != "concatenate" or n % k == 0, f"{node.where}: windows of {k} do not tile {n}")
        # Windows that begin left of pixel 0 need a tap between the first and the last pixel; none may begin behind it.
        taps = [(o, (p - s * o + d - 1) // d) for o in range(min(out[-1], -(-p // s)))]
        filled = s * (out[-1] - 1) - p < n and all(t < k and s * o + d * t - p < n for o, t in taps)
        need(filled, f"{node.where}: a window holds no pixel, its maximum is -infinity")
        readers *= -(-k // (s // math.gcd(s, d)))  # taps t with s o + d t = i + p: one in s / gcd(s, d) of them

    def views(x: np.ndarray) -> Iterator[np.ndarray]:
        """What each tap reads: (channels, *out, batch)."""
        x = np.pad(x, [(0, 0), *zip(padding, padding, strict=True), (0, 0)], constant_values=-np.inf)
        return (x[window(t, stride, dilation, out)] for t in itertools.product(*map(range, kernel)))

    K, shape = math.prod(kernel), (channels, *out)
    if op == "concatenate":
        return Rule((channels * K, *out), lambda x: np.stack([*views(x)], axis=1).reshape(channels * K, *out, -1))
    if op == "max_pool":
        return Rule(shape, lambda x: reduce(np.maximum, views(x)), up_root(readers))
    scale = constant(node, "scale")
    factor = up_root(scale**2 * K * readers)  # by Schur: row sums are scale K, column sums scale readers
    rounding = gamma(K + 4) * factor * size + (K + 2) * ETA * math.prod(shape)
    return Rule(shape, lambda x: reduce(np.add, views(x)) * float(scale), factor, ZERO, rounding)


def rule_of(op: str, node: Part, shapes: list[Shape], size: Fraction, tensors: dict[str, np.ndarray]) -> Rule:
    """For inputs of these shapes, all of them together not longer than `size`."""
    where, shape, (channels, *sizes), entries = node.where, shapes[0], shapes[0], math.prod(shapes[0])
    if op in ("linear", "conv", "potential"):
        return rule_of_map(op, node, shape, size, tensors)
    if op in ("concatenate", "max_pool", "avg_pool"):
        return rule_of_pool(op, node, shape, size)
    if op in ("maxmin", "groupsort"):
        axis, group = node.integer("axis", 0, len(sizes)), 2 if op == "maxmin" else node.integer("group_size", 1)
        need(shape[axis] % group == 0, f"{where}: groups of {group} do not divide axis {axis} of {shape}")
        split = (*shape[:axis], group, shape[axis] // group, *shape[axis + 1 :], -1)
        return Rule(shape, lambda x: np.flip(np.sort(x.reshape(split), axis), axis).reshape(x.shape))
    if op == "first_channels":
        count = node.integer("count", 1, channels)
        return Rule((count, *sizes), lambda x: x[:count])
    if op == "pad_channels":
        count = node.integer("count", channels)
        return Rule((count, *sizes), lambda x: np.pad(x, [(0, count - channels), *[(0, 0)] * len(shape)]))
    if op == "normalize":
        mean, std = (tensor_of(node, key, tensors) for key in ("mean", "std"))
        need(mean.size == std.size == channels, f"{where}: expected a mean and a std for each channel")
        mean, std = (values.reshape(-1, *(1,) * len(shape)) for values in (mean, std))
        bounded = (np.abs(mean) < 2.0**500).all() and ((std >= 2.0**-500) & (std < 2.0**500)).all()
        need(bounded, f"{where}: expected |mean| < 2^500 and a std from 2^-500 to 2^500")
        factor, M = 1 / Fraction(float(std.min())), up_root(squares(mean) * math.prod(sizes))
        rounding = factor * gamma(4) * (size + M) + 4 * ETA * entries
        return Rule(shape, lambda x: (x - mean) / std, factor, factor * M, rounding)
    if op == "scale":
        c = constant(node, "factor")
        return Rule(shape, lambda x: x * float(c), abs(c), ZERO, U * abs(c) * size + ETA * entries)
    if op == "add":
        need(shapes[0] == shapes[1], f"{where}: expected equal shapes")
        return Rule(shape, np.add, ONE, ZERO, U * size + ETA * entries)
    if op == "concat":
        need(len({other[1:] for other in shapes}) == 1, f"{where}: expected equal shapes but for the channels")
        return Rule((sum(other[0] for other in shapes), *sizes), lambda *xs: np.concatenate(xs))
    if op in ("flatten", "reshape"):
        new = [entries] if op == "flatten" else node.take("shape", is_shape, SHAPE)
        need(math.prod(new) == entries, f"{where}: expected a shape of {entries} entries")
        return Rule((*new,), lambda x: x.reshape(*new, -1))
    plain = {"relu": lambda x: np.maximum(x, 0.0), "abs": np.abs, "identity": lambda x: x}
    if op not in plain:
        raise Rejected(f"{where}: no rule for it; of a newer version?")
    return Rule(shape, plain[op])
