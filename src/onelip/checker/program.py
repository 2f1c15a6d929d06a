"""Every kind of node: its settings in the file, its program, and its effect on the three numbers of proof.py.

Programs run on arrays (*sample, batch): the batch axis is last, so that axes are numbered as in the file. proof.py runs
each program once on zeros, to compare the shape of its value with the `shape` in the file.
"""

import math
from collections.abc import Callable
from fractions import Fraction
from typing import NamedTuple

import numpy as np

from .norms import U, gamma, least, number, prove_sigma, squares, to_integers
from .reading import TrackedDict, ints, require

ETA = Fraction(1, 2**500)  # far above the error of an underflow in one operation
LIMIT = 2**500  # numbers below it do not overflow


class Layer:
    """W x + b. The outputs of a convolution are its near pixels and the inputs its far ones; transposed, the reverse.
    Tap t connects near pixel o with far pixel s o + d t - offset: modulo the size on circular axes, else possibly
    beyond the border, where values are 0. near += W_t far, or, transposed, far += W_t^T near. A linear layer has no
    axes, and one pixel on both sides.
    """

    def __init__(self, node: TrackedDict, shape: list[int], tensors: TrackedDict):
        weight, out, self.transposed = tensors[node["weight"]], node["shape"][1:], node["transposed"]
        require(weight.ndim > 1 and weight.size, "weight: expected at least two axes")
        (groups,), (first, second, *kernel) = ints([node["groups"]], 1), weight.shape
        require(first % groups == 0, f"groups: expected a divisor of {first}, got {groups}")
        # Channels: near (groups, first), far (groups, second).
        self.weight = weight.reshape(groups, first // groups, second, *kernel)
        inputs, outputs = (first, groups * second) if self.transposed else (groups * second, first)
        # Groups of a series may have more channels than those of its input and output.
        series, channels = node["op"] == "exponential", (shape[0], node["shape"][0])
        fits = all(c % groups == 0 and c <= first for c in channels) if series else channels[0] == inputs
        require(fits, f"weight: expected an input of {inputs} channels, got {shape[0]}")
        outputs = node["shape"][0] if series else outputs
        self.bias = np.zeros(outputs) if node["bias"] is None else tensors[node["bias"]]
        require(self.bias.shape == (outputs,), f"bias: expected {outputs} numbers")
        self.near, self.far = (shape[1:], out) if self.transposed else (out, shape[1:])
        steps = ints(node["stride"], 1), ints(node["dilation"], 1), ints(node["offset"], 0)
        booleans = type(node["circular"]) is list and {type(v) for v in (self.transposed, *node["circular"])} == {bool}
        require(booleans, "transposed, circular: expected true or false")
        settings = (self.near, self.far, kernel, *steps, node["circular"])
        fits = {len(values) for values in settings} == {len(kernel)}
        require(fits, f"axes: expected {len(kernel)} in shapes, stride, dilation, offset and circular")
        self.axes, self.phases = list(zip(*settings, strict=True)), []
        for o, n, k, s, d, _, wraps in self.axes:
            once = s * (o - 1) < n and not self.transposed  # no output occurs twice
            require(once or not wraps, "circular: expected one turn at most, and a layer that is not transposed")
            # With g = gcd(s, d) and t = (s / g) a + phase, tap t reads s (o + (d / g) a) + d phase - offset: taps of
            # different phases never read the same pixel. Those of one phase are a convolution of stride 1 and dilation
            # d / g, which only renames offsets. On a circle that needs s to divide its size; else the layer is a
            # restriction of the layer of stride 1, with one phase.
            self.phases.append(1 if wraps and n % s else min(s // math.gcd(s, d), k))

    def products(self, to_far: bool) -> int:
        """Number of products in one output, on the far or the near side."""
        return self.weight.shape[1 if to_far else 2] * math.prod(self.weight.shape[3:])

    def run(self, x: np.ndarray, to_far: bool) -> np.ndarray:
        """W x without the bias, from far to near pixels; or the adjoint, from near to far."""
        weight, batch = self.weight.swapaxes(1, 2) if to_far else self.weight, x.shape[-1]
        (groups, outputs, inputs, *kernel), near, far = weight.shape, math.prod(self.near), math.prod(self.far)
        # One more pixel, the last, stands for all beyond the border: zeros if it is read, unused if it is written.
        x = np.pad(x.reshape(groups, inputs, near if to_far else far, batch), [(0, 0), (0, 0), (0, 1), (0, 0)])
        y = np.zeros((groups, outputs, (far if to_far else near) + 1, batch))
        for tap in np.ndindex(*kernel):
            met = np.arange(far).reshape(self.far)  # becomes the far pixel of each near one
            for axis, (t, (o, n, _, s, d, offset, wraps)) in enumerate(zip(tap, self.axes, strict=True)):
                i = s * np.arange(o) + d * t - offset
                met = met.take(i % n, axis)
                met[(slice(None),) * axis + ((i != i % n) & (not wraps),)] = -1
            reads, writes = (slice(near), met.ravel()) if to_far else (met.ravel(), slice(near))
            part = weight[..., *tap] @ x[:, :, reads].reshape(groups, inputs, -1)
            y[:, :, writes] += part.reshape(groups, outputs, near, batch)
        return y[:, :, :-1].reshape(-1, *(self.far if to_far else self.near), batch)


class Operation(NamedTuple):
    """Run a node; from L, norm, error of its input to factor L, factor norm + shift, factor error + rounding."""

    run: Callable[..., np.ndarray]
    factor: Fraction | int = 1
    shift: Fraction | int = 0
    rounding: Fraction | int = 0


def rounding_of(products: int, sums: Fraction, entries: int) -> Fraction:
    """Rounding error of W x + b, if the sums of absolute terms in each output form a vector of norm at most `sums`."""
    require(sums < LIMIT, "may overflow")
    n = products + 2
    return gamma(n) * sums + n * ETA * entries


def layer_operation(node: TrackedDict, shape: list[int], size: Fraction, tensors: TrackedDict) -> Operation:
    """W x + b with ||W|| <= sigma, || |W| || <= A, and B the norm of the bias at all positions."""
    layer, positions = Layer(node, shape, tensors), math.prod(node["shape"][1:])
    channels = shape[0] if node["op"] == "potential" else layer.bias.size
    require(node["shape"][0] == channels, f"shape: expected {channels} channels, got {node['shape']}")
    whole, e = to_integers(layer.weight)
    sums = np.abs(whole).reshape(*whole.shape[:3], -1).sum(axis=3)  # (groups, first, second)
    schur = int(sums.sum(axis=2).max()) * int(sums.sum(axis=1).max()) * Fraction(4) ** e
    sigma, A = prove_sigma(node, layer, whole, e), least(node, "absolute", schur, 2)
    B = least(node, "bias_norm", squares(layer.bias) * positions, 2)
    if node["op"] == "exponential":
        return series_operation(node, layer, size, (sigma, A, B))
    bias = layer.bias.reshape(-1, *(1,) * len(node["shape"]))
    run = lambda x: layer.run(x, layer.transposed) + bias  # noqa: E731
    one = rounding_of(layer.products(layer.transposed), A * size + B, layer.bias.size * positions)
    if node["op"] == "affine":
        return Operation(run, sigma, B, one)
    # f(x) = x - 2 V^T relu(V x + b): f(x) - f(y) = (I - 2 V^T D V) (x - y) with D diagonal, entries in [0, 1], and
    # 0 <= V^T D V <= sigma^2. f(0) = -2 V^T relu(b). The computed V x + b has the error `one`, and so has its relu. The
    # input of V^T has a norm of at most `inside`, and its sums the error `two`. Doubling is exact. The difference, of
    # norm at most `reach`, is rounded once.
    require(not layer.transposed, "transposed: expected false")
    inside = sigma * size + B + one
    two = rounding_of(layer.products(True), A * inside, math.prod(shape))
    reach = size + 2 * (sigma * inside + two)
    require(reach < LIMIT, "may overflow")
    rounding = 2 * (sigma * one + two) + U * reach + 2 * ETA * math.prod(shape)
    both = lambda x: x - 2.0 * layer.run(np.maximum(run(x), 0.0), True)  # noqa: E731
    return Operation(both, max(1, 2 * sigma**2 - 1), 2 * sigma * B, rounding)


def terms_of(node: TrackedDict) -> int:
    """Highest power in a series."""
    (terms,) = ints([node["terms"]], 1)
    require(terms <= 30, "terms: expected 1 to 30")
    return terms


def gain(terms: int, sigma: Fraction) -> Fraction:
    """A bound of |p(ia)|^2 for |a| <= sigma, p(z) = sum of z^j / j! up to j = terms.

    It is 1 + c_m x^m + c_(m+1) x^(m+1) + ... in x = a^2. On each interval of length 1 / 256 terms of positive c are
    largest at the end; x^m is too, and the powers of x beside it in terms of negative c are smallest at the start.
    """
    whole, c = math.factorial(terms), [0] * (terms + 1)  # c times whole^2
    for j, k in np.ndindex(terms + 1, terms + 1):
        if (j - k) % 2 == 0:  # i^j conj(i^k) is 1 or -1, else imaginary
            c[(j + k) // 2] += (1 - (j - k) % 4) * (whole // math.factorial(j)) * (whole // math.factorial(k))
    m = next(j for j in range(1, terms + 1) if c[j])
    most, c = 0, [v * 256 ** (terms - j) for j, v in enumerate(c)]
    for i in range(math.ceil(256 * sigma**2)):
        q = sum(v * (i + 1 if v > 0 else i) ** j for j, v in enumerate(c[m:]))
        most = max(most, (i + 1) ** m * q)
    return 1 + Fraction(most, whole**2 * 256**terms)


def series_operation(node: TrackedDict, layer: Layer, size: Fraction, norms: tuple[Fraction, ...]) -> Operation:
    """factor p(S) x + b, p(S) = sum of S^j / j! up to j = terms, for a skew convolution S with ||S|| <= sigma.

    S is normal with eigenvalues i a, |a| <= sigma. The program is v <- x + (1/j) S v for j = terms, ..., 1, from v = x.
    In real arithmetic v has a norm of at most `length`; its computed value has the error `off`. 1/j, the product and
    the sum are rounded once each, and so are the product with the factor and the sum with b. In each group x is padded
    with zero channels, and the first channels of the result are kept.
    """
    (sigma, A, B), terms, factor, kernel = norms, terms_of(node), number(node["factor"]), layer.weight
    groups, channels, pixels, kept = *kernel.shape[:2], layer.near, node["shape"][0]
    require(sigma <= 8 and abs(factor) < LIMIT, "expected sigma <= 8, and a factor below 2^500")
    centred = all(o == n and s == 1 and 2 * at == d * (k - 1) for o, n, k, s, d, at, _ in layer.axes)
    require(centred and not layer.transposed, "expected a centred kernel, stride 1, and outputs of the size of inputs")
    opposite = np.flip(kernel.swapaxes(1, 2), tuple(range(3, kernel.ndim))) if channels == kernel.shape[2] else np.nan
    require((kernel == -opposite).all(), "weight: expected a skew kernel")
    length, off, entries = size, Fraction(0), groups * channels * math.prod(pixels)
    for j in range(terms, 0, -1):
        rounding = rounding_of(layer.products(False), A * (length + off), entries)
        reach = size + (sigma * (length + off) + rounding) / j
        require(reach < LIMIT, "may overflow")
        off = (sigma * off + rounding) / j + gamma(3) * reach + 2 * ETA * entries
        length = size + sigma * length / j
    G = least(node, "gain", gain(terms, sigma), 2)
    reach = abs(factor) * (G * size + off) + B
    require(reach < LIMIT, "may overflow")

    def run(x: np.ndarray) -> np.ndarray:
        v = x = x.reshape(groups, -1, *pixels, x.shape[-1])
        v = x = np.pad(x, [(0, 0), (0, channels - x.shape[1]), *[(0, 0)] * (x.ndim - 2)])
        for j in range(terms, 0, -1):
            v = x + (1 / j) * layer.run(v.reshape(-1, *pixels, x.shape[-1]), False).reshape(x.shape)
        v = v[:, : kept // groups].reshape(kept, *pixels, -1)
        return v * float(factor) + layer.bias.reshape(-1, *(1,) * len(node["shape"]))

    rounding = abs(factor) * off + gamma(2) * reach + 2 * ETA * math.prod(node["shape"])
    return Operation(run, abs(factor) * G, B, rounding)


def windows_operation(node: TrackedDict, shape: list[int], size: Fraction, scale: Fraction) -> Operation:
    """take[k][i] is the k-th pixel of window i, -1 for none. In each channel the largest value of a window, or the sum
    times a factor; windows of one pixel only move pixels.
    """
    rows, K, is_sum = [ints(row, -1) for row in node["take"]], len(node["take"]), node["op"] == "sum"
    require(rows and {len(row) for row in rows} == {len(rows[0])}, "take: expected lists of equal length")
    take = np.array(rows)
    require(take.max() < math.prod(shape[1:]), f"take: expected pixels below {math.prod(shape[1:])}, got {take.max()}")
    entries = shape[0] * len(rows[0])
    require(entries == math.prod(node["shape"]), f"shape: expected {entries} entries, got {node['shape']}")
    m = int(np.unique(take[take >= 0], return_counts=True)[1].max(initial=0))  # most windows that hold one pixel

    def run(x: np.ndarray) -> np.ndarray:
        seen = x.reshape(shape[0], -1, x.shape[-1])[:, take]
        seen = np.where(take[..., None] < 0, 0.0 if is_sum else -np.inf, seen)
        return (seen.sum(axis=1) * float(scale) if is_sum else seen.max(axis=1)).reshape(*node["shape"], x.shape[-1])

    if not is_sum:
        return Operation(run, least(node, "constant", m, 2))
    constant = least(node, "constant", scale**2 * K * m, 2)  # by Schur: row sums are scale K, column sums scale m
    return Operation(run, constant, 0, gamma(K + 4) * constant * size + (K + 2) * ETA * math.prod(node["shape"]))


def operation_of(node: TrackedDict, shapes: list[list[int]], size: Fraction, tensors: TrackedDict) -> Operation:
    """For inputs of these shapes, with norms that sum to at most `size`."""
    op, shape, entries = node["op"], shapes[0], math.prod(shapes[0])
    c = number(node["factor"]) if op in ("sum", "scale") else Fraction(1)
    require(abs(c) < LIMIT, "factor beyond 2^500")
    if op in ("affine", "potential", "exponential"):
        return layer_operation(node, shape, size, tensors)
    if op in ("max", "sum"):
        return windows_operation(node, shape, size, c)
    if op == "join":  # all entries, one input after the other, cut or padded with zeros to the new shape

        def run(*xs: np.ndarray) -> np.ndarray:
            flat, n = np.concatenate([x.reshape(-1, x.shape[-1]) for x in xs]), math.prod(node["shape"])
            return np.pad(flat[:n], [(0, max(0, n - len(flat))), (0, 0)]).reshape(*node["shape"], -1)

        return Operation(run)
    if op == "sort":  # groups of equal size along the axis
        axis, group = ints([node["axis"], node["group_size"]], 0)
        require(axis < len(shape), f"axis: expected 0 to {len(shape) - 1}, got {axis}")  # the next is that of the batch
        require(group and shape[axis] % group == 0, f"group_size: expected a divisor of {shape[axis]}, got {group}")
        split = (*shape[:axis], group, shape[axis] // group, *shape[axis + 1 :])
        return Operation(lambda x: np.flip(np.sort(x.reshape(*split, x.shape[-1]), axis), axis).reshape(x.shape))
    if op == "normalize":
        mean, std = (tensors[node[key]] for key in ("mean", "std"))
        require(mean.shape == std.shape == (shape[0],), f"mean, std: expected {shape[0]} numbers each")
        mean, std = (values.reshape(-1, *(1,) * len(shape)) for values in (mean, std))
        require((std >= 2.0**-500).all(), "std: expected at least 2^-500")
        factor, M = 1 / Fraction(float(std.min())), least(node, "mean_norm", squares(mean) * math.prod(shape[1:]), 2)
        rounding = factor * gamma(4) * (size + M) + 4 * ETA * entries
        return Operation(lambda x: (x - mean) / std, factor, factor * M, rounding)
    if op == "scale":
        return Operation(lambda x: x * float(c), abs(c), 0, U * abs(c) * size + ETA * entries)
    if op == "add":
        require(shapes[0] == shapes[1], "expected equal shapes")
        return Operation(np.add, 1, 0, U * size + ETA * entries)
    require(op in ("relu", "abs"), f"unknown op {op!r:.40}; written by a newer version?")
    return Operation(np.abs if op == "abs" else lambda x: np.maximum(x, 0.0))
