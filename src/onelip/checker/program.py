"""Every kind of node: what the file tells of it, its program, and what it does to the three numbers of proof.py.

Programs run on arrays (*sample, batch): the batch comes last, so that axes count as in the file. proof.py runs each of
them once: what does not fit its input fails there, or does not make the `shape` that the file tells.
"""

import math
from collections.abc import Callable
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from .norms import U, gamma, least, number, prove_sigma, squares, to_integers
from .reading import Told, ints, need

ETA = Fraction(1, 2**500)  # far above what an underflow can do to one operation
LIMIT = 2**500  # below it nothing overflows
Tensors = dict[str, np.ndarray]


class Layer:
    """W x + b. Near pixels are outputs and far ones inputs; transposed the other way round. By tap t near pixel o meets
    far pixel s o + d t - offset: modulo the size of far on axes that are circular, else perhaps beyond the border,
    where there are zeros. near += W_t far, or, transposed, far += W_t^T near. Without axes both sides have one pixel.
    """

    def __init__(self, node: Told, pixels: list[int], tensors: Tensors):
        weight, out, self.transposed = tensors[node["weight"]], node["shape"][1:], node["transposed"]
        _, second, *kernel = weight.shape
        # Channels: near (groups, 1), far (groups, 2).
        self.weight = weight.reshape(*ints([node["groups"]], 1), -1, second, *kernel)
        outputs = len(self.weight) * self.weight.shape[2 if self.transposed else 1]
        self.bias = np.zeros(outputs) if node["bias"] is None else tensors[node["bias"]]
        need(self.bias.shape == (outputs,), f"bias: expected {outputs} numbers")
        need(max(np.abs(weight).max(), np.abs(self.bias).max()) < 2.0**500, "weights beyond 2^500")
        self.near, self.far = (pixels, out) if self.transposed else (out, pixels)
        steps = ints(node["stride"], 1), ints(node["dilation"], 1), ints(node["offset"], 0)
        booleans = type(node["circular"]) is list and {type(v) for v in (self.transposed, *node["circular"])} == {bool}
        need(booleans, "transposed, circular: expected true or false")
        self.axes, self.phases = list(zip(self.near, self.far, kernel, *steps, node["circular"], strict=True)), []
        for o, n, k, s, d, _, wraps in self.axes:
            once = s * (o - 1) < n and not self.transposed  # no output is there twice
            need(once or not wraps, "expected to go around a circle once, and not transposed")
            # With g = gcd(s, d) and t = (s / g) a + phase, tap t meets s (o + (d / g) a) + d phase - offset: taps of
            # different phases never meet a pixel, those of one are a convolution of stride 1 and dilation d / g, which
            # only renames offsets. Around a circle that needs s to divide its size; if it does not, the layer is a part
            # of that with stride 1, and there is one phase.
            self.phases.append(1 if wraps and n % s else min(s // math.gcd(s, d), k))

    def products(self, to_far: bool) -> int:
        """In one output, on the far or the near side."""
        return self.weight.shape[1 if to_far else 2] * math.prod(self.weight.shape[3:])

    def run(self, x: np.ndarray, to_far: bool) -> np.ndarray:
        """Without the bias: from far to near pixels, or the adjoint of that."""
        weight, batch = self.weight.swapaxes(1, 2) if to_far else self.weight, x.shape[-1]
        (groups, outputs, inputs, *kernel), near, far = weight.shape, math.prod(self.near), math.prod(self.far)
        # One pixel more, the last, is that beyond the border: zeros to be read, or not to be looked at.
        x = np.pad(x.reshape(groups, inputs, near if to_far else far, batch), [(0, 0), (0, 0), (0, 1), (0, 0)])
        y = np.zeros((groups, outputs, (far if to_far else near) + 1, batch))
        for tap in np.ndindex(*kernel):
            met = np.arange(far).reshape(self.far)  # to become the far pixel of each near one
            for axis, (t, (o, n, _, s, d, offset, wraps)) in enumerate(zip(tap, self.axes, strict=True)):
                i = s * np.arange(o) + d * t - offset
                met = met.take(i % n, axis)
                met[(slice(None),) * axis + ((i != i % n) & (not wraps),)] = -1
            reads, writes = (slice(near), met.ravel()) if to_far else (met.ravel(), slice(near))
            part = weight[..., *tap] @ x[:, :, reads].reshape(groups, inputs, -1)
            y[:, :, writes] += part.reshape(groups, outputs, near, batch)
        return y[:, :, :-1].reshape(-1, *(self.far if to_far else self.near), batch)


class Rule(NamedTuple):
    """factor L, factor norm + shift and factor error + rounding are the numbers, if L, norm, error are the input's.

    What moves or chooses values, never computes, and takes 0 to 0, has those of its input.
    """

    run: Callable[..., np.ndarray]
    factor: Fraction | int = 1
    shift: Fraction | int = 0
    rounding: Fraction | int = 0


def rounding_of(products: int, sums: Fraction, entries: int) -> Fraction:
    """Of W x + b, if the sums of absolute terms of all outputs are together at most so long."""
    need(sums < LIMIT, "might overflow")
    n = products + 2
    return gamma(n) * sums + n * ETA * entries


def rule_of_layer(node: Told, shape: list[int], size: Fraction, tensors: Tensors) -> Rule:
    """W x + b with ||W|| <= sigma, || |W| || <= A, and B the norm of the bias at all positions."""
    layer, positions = Layer(node, shape[1:], tensors), math.prod(node["shape"][1:])
    channels = shape[0] if node["op"] == "potential" else layer.bias.size
    need(node["shape"][0] == channels, f"shape: expected {channels} channels, got {node['shape']}")
    whole, e = to_integers(layer.weight)
    sums = np.abs(whole).reshape(*whole.shape[:3], -1).sum(axis=3)  # (groups, first, second)
    schur = int(sums.sum(axis=2).max()) * int(sums.sum(axis=1).max()) * Fraction(4) ** e
    sigma, A = prove_sigma(node, layer, whole, e), least(node, "absolute", schur, 2)
    B = least(node, "bias_norm", squares(layer.bias) * positions, 2)
    bias = layer.bias.reshape(-1, *(1,) * len(node["shape"]))
    run = lambda x: layer.run(x, layer.transposed) + bias  # noqa: E731
    one = rounding_of(layer.products(layer.transposed), A * size + B, layer.bias.size * positions)
    if node["op"] == "affine":
        return Rule(run, sigma, B, one)
    # f(x) = x - 2 V^T relu(V x + b): f(x) - f(y) = (I - 2 V^T D V) (x - y) with D diagonal, its entries in [0, 1], and
    # 0 <= V^T D V <= sigma^2. f(0) is -2 V^T relu(b). The program's V x + b is off by `one`, and so is relu of it; what
    # goes to V^T is not longer than `inside`, and its sums are off by `two`. Doubling is exact; the difference, at most
    # `reach` long, is rounded once.
    need(not layer.transposed, "expected V not to be transposed")
    inside = sigma * size + B + one
    two = rounding_of(layer.products(True), A * inside, math.prod(shape))
    reach = size + 2 * (sigma * inside + two)
    need(reach < LIMIT, "might overflow")
    rounding = 2 * (sigma * one + two) + U * reach + 2 * ETA * math.prod(shape)
    both = lambda x: x - 2.0 * layer.run(np.maximum(run(x), 0.0), True)  # noqa: E731
    return Rule(both, max(1, 2 * sigma**2 - 1), 2 * sigma * B, rounding)


def rule_of_windows(node: Told, shape: list[int], size: Fraction, scale: Fraction) -> Rule:
    """take[k][i] is the pixel that window i has as its k-th, -1 for none. In each channel the largest of a window, or
    the sum times a factor; windows of one pixel only move them.
    """
    take, K, is_sum = np.array([ints(row, -1) for row in node["take"]]), len(node["take"]), node["op"] == "sum"
    m = int(np.unique(take[take >= 0], return_counts=True)[1].max())  # windows hold one pixel at most so many times

    def run(x: np.ndarray) -> np.ndarray:
        seen = x.reshape(shape[0], -1, x.shape[-1])[:, take]
        seen = np.where(take[..., None] < 0, 0.0 if is_sum else -np.inf, seen)
        return (seen.sum(axis=1) * float(scale) if is_sum else seen.max(axis=1)).reshape(*node["shape"], x.shape[-1])

    if not is_sum:
        return Rule(run, least(node, "constant", m, 2))
    constant = least(node, "constant", scale**2 * K * m, 2)  # by Schur: row sums are scale K, column sums scale m
    return Rule(run, constant, 0, gamma(K + 4) * constant * size + (K + 2) * ETA * math.prod(node["shape"]))


def rule_of(node: Told, shapes: list[list[int]], size: Fraction, tensors: Tensors) -> Rule:
    """For inputs of these shapes, all of them together not longer than `size`."""
    op, shape, entries = node["op"], shapes[0], math.prod(shapes[0])
    c = number(node["factor"]) if op in ("sum", "scale") else Fraction(1)
    need(abs(c) < LIMIT, "factor beyond 2^500")
    if op in ("affine", "potential"):
        return rule_of_layer(node, shape, size, tensors)
    if op in ("max", "sum"):
        return rule_of_windows(node, shape, size, c)
    if op == "join":  # all entries, one input after the other, cut or filled up with zeros to those of the new shape

        def run(*xs: np.ndarray) -> np.ndarray:
            flat, n = np.concatenate([x.reshape(-1, x.shape[-1]) for x in xs]), math.prod(node["shape"])
            return np.pad(flat[:n], [(0, max(0, n - len(flat))), (0, 0)]).reshape(*node["shape"], -1)

        return Rule(run)
    if op == "sort":  # groups of equal size along the axis
        axis, group = ints([node["axis"], node["group_size"]], 0)
        need(axis < len(shape), "axis: expected one of a sample")  # the next is that of the batch
        split = (*shape[:axis], group, shape[axis] // group, *shape[axis + 1 :])
        return Rule(lambda x: np.flip(np.sort(x.reshape(*split, x.shape[-1]), axis), axis).reshape(x.shape))
    if op == "normalize":
        mean, std = (tensors[node[key]] for key in ("mean", "std"))
        need(mean.shape == std.shape == (shape[0],), f"mean, std: expected {shape[0]} numbers each")
        mean, std = (values.reshape(-1, *(1,) * len(shape)) for values in (mean, std))
        bounded = (np.abs(mean) < 2.0**500).all() and ((std >= 2.0**-500) & (std < 2.0**500)).all()
        need(bounded, "expected |mean| < 2^500 and a std from 2^-500 to 2^500")
        factor, M = 1 / Fraction(float(std.min())), least(node, "mean_norm", squares(mean) * math.prod(shape[1:]), 2)
        rounding = factor * gamma(4) * (size + M) + 4 * ETA * entries
        return Rule(lambda x: (x - mean) / std, factor, factor * M, rounding)
    if op == "scale":
        return Rule(lambda x: x * float(c), abs(c), 0, U * abs(c) * size + ETA * entries)
    if op == "add":
        need(shapes[0] == shapes[1], "expected equal shapes")
        return Rule(np.add, 1, 0, U * size + ETA * entries)
    need(op in ("relu", "abs"), "no rule for it; of a newer version?")
    return Rule(np.abs if op == "abs" else lambda x: np.maximum(x, 0.0))
