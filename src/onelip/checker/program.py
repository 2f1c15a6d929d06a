"""Every kind of node and its program; three numbers for each node and the radius; estimates of work and memory.

Programs run on arrays (*sample, batch): the batch axis is last, so that axes are numbered as in the file. `prove` runs
each program once on zeros, to compare the shape of its value with the `shape` in the file.
"""

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np

from .norms import U, gamma, least, matrix, number, odd_parts, prove_sigma, squares, to_integers, witness
from .reading import TrackedDict, context, ints, require, title

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


# ---- A radius from the nodes of a program: three numbers per node, in exact fractions, each rounded up once
#
# For every input of norm at most 2 sqrt(n), with z the value of a node in real arithmetic and z^ the computed one,
#
#     z is lipschitz-Lipschitz in the input,    ||z|| <= norm,    ||z^ - z|| <= error.
#
# Images lie in [0, 1]^n and radii are below sqrt(n), so no perturbed image has a norm above 2 sqrt(n).


Table = list[list[Fraction]]


class Proved(NamedTuple):
    """The three numbers of a node, and its program."""

    lipschitz: Fraction
    norm: Fraction
    error: Fraction
    shape: list[int]
    run: Callable[..., np.ndarray]


def check_graph(nodes: list[TrackedDict]) -> None:
    """Raise Rejected unless node 0 is the input, each other node has earlier inputs, and all but the last are used."""
    require(type(nodes) is list and nodes, "nodes: expected a list")
    shape: list[int] = []
    for i, node in enumerate(nodes):
        with context(title(i, node)):
            op, shape, inputs = node["op"], ints(node["shape"], 1), ints(node["inputs"], 0)
            small = 0 < len(shape) <= 8 and math.prod(shape) <= 2**26
            require(small, f"shape: expected 1 to 8 axes and at most 2^26 entries, got {shape!r:.80}")
            require((op == "input") == (i == 0), "expected op input at node 0 and nowhere else")
            count = {"input": 0, "add": 2, "join": max(1, len(inputs))}.get(op, 1)
            right = len(inputs) == count and all(j < i for j in inputs)
            require(right, f"inputs: expected {count} earlier nodes, got {inputs!r:.80}")
    unused = {*range(len(nodes) - 1)}.difference(*(node["inputs"] for node in nodes))
    require(not unused, f"unused nodes: {sorted(unused)!r:.80}")
    require(2 <= math.prod(shape) <= 2**12, f"expected 2 to 4096 logits, got {math.prod(shape)}")


def prove(node: TrackedDict, before: list[Proved], tensors: TrackedDict) -> Proved:
    """Return the three numbers of a node; those in the file must be equal to them."""
    op, shape, inputs = node["op"], node["shape"], [before[j] for j in node["inputs"]]
    n = math.prod(shape)
    if op == "input":  # rounded once
        operation, powers = Operation(lambda: np.zeros((*shape, 1))), (1, 2, 1)
        bounds = 1, 4 * n, U * least(node, "norm", 4 * n, 2) + ETA * n
    else:
        L, norm, error = (sum((of[k] for of in inputs), Fraction(0)) for k in range(3))
        operation, powers = operation_of(node, [of.shape for of in inputs], norm + error, tensors), (1, 1, 1)
        _, factor, shift, rounding = operation
        bounds = factor * L, factor * norm + shift, factor * error + rounding
    if op == "join":  # squared norms add up
        bounds, powers = [sum(of[k] ** 2 for of in inputs) for k in range(3)], (2, 2, 2)
    L, norm, error = map(least, [node] * 3, ("lipschitz", "norm", "error"), bounds, powers)
    require(max(L, norm, error) < LIMIT, "numbers beyond 2^500")
    value = operation.run(*(np.zeros((*of.shape, 1)) for of in inputs))
    require([*value.shape] == [*shape, 1], f"shape: expected {[*value.shape[:-1]]}, got {shape}")
    require(np.isfinite(value).all(), "take: a window without pixels has no maximum")
    return Proved(L, norm, error, shape, operation.run)


def prove_nodes(nodes: list[TrackedDict], tensors: TrackedDict, log: Callable[[str, str], None]) -> list[Proved]:
    proved: list[Proved] = []
    for i, node in enumerate(nodes):
        with context(title(i, node)):
            proved.append(prove(node, proved, tensors))
        log("node", f"node {i} ({node['op']}): {node['shape']}")
    return proved


def squared_slopes(pairs: bool, nodes: list[TrackedDict], proved: list[Proved], tensors: TrackedDict) -> Table:
    """Return, for logits y and j (entries of the last node), the square of a Lipschitz constant of f_y - f_j."""
    at, K = len(proved) - 1, math.prod(proved[-1].shape)
    require(
        type(pairs) is bool and (K <= 2**7 or not pairs), "pairs: expected true or false, true for up to 128 logits"
    )
    if not pairs:  # |z_y - z_j| <= sqrt(2) ||z||
        return [[2 * proved[-1].lipschitz ** 2] * K] * K
    while nodes[at]["op"] == "join" and len(nodes[at]["inputs"]) == 1:  # keeps the first entries
        (at,) = nodes[at]["inputs"]
        require(math.prod(proved[at].shape) >= K, "pairs: expected logits that are rows of one layer")
    require(nodes[at]["op"] == "affine", "pairs: expected a linear layer or convolution at the end")
    last, before = nodes[at], proved[nodes[at]["inputs"][0]]
    layer = Layer(last, before.shape, tensors)
    # On a circle several taps may read one pixel, and the norm of a row may exceed that of its taps.
    single = math.prod(last["shape"][1:]) == len(layer.weight) == 1 and not any(last["circular"])
    require(single, "pairs: expected a last layer of one pixel and one group, not circular")
    table, e = to_integers(layer.weight[0].swapaxes(0, 1) if layer.transposed else layer.weight[0])
    rows, unit = table[:K].reshape(K, -1), Fraction(4) ** e * before.lipschitz**2
    dot = matrix(rows) * matrix(rows.T)
    return [[int(dot[y, y] + dot[j, j] - 2 * dot[y, j]) * unit for j in range(K)] for y in range(K)]


def is_radius(r: Fraction, logits: list[Fraction], y: int, squares: list[Fraction], error: Fraction, n: int) -> bool:
    """Whether class y is proved up to the distance r.

    The logits of the file are within 2 error of a run, which is within error of the real values. So is the run at
    distance r, where a margin in real arithmetic is smaller by at most slope r.
    """
    margins = [(logits[y] - logit - 8 * error, squares[j]) for j, logit in enumerate(logits) if j != y]
    return r >= 0 and r**2 < n and all(margin > 0 and margin**2 > r**2 * square for margin, square in margins)


# ---- Work and memory of a certificate, estimated from shapes and bit lengths before anything is computed
#
# Work is counted in seconds of one core. docs/certificates.md compares the estimates with measurements.


def seconds_of_product(rows: int, inner: int, columns: int, bits: float) -> float:
    """Seconds of a product of integer matrices: directly, or modulo primes of 59 bits, as FLINT does."""
    primes, n = 2 + 2 * bits / 59, rows * inner * columns
    modular = n * primes * 4e-10 + (rows * inner + inner * columns + rows * columns) * primes * (6e-8 + 2e-9 * primes)
    return 2e-7 + min(n * (1 + bits / 64) ** 1.3 * 5e-9, modular)


def bytes_of_matrices(entries: float, bits: float) -> float:
    """Bytes of FLINT matrices."""
    return entries * (8 if bits < 62 else 48 + bits / 8)


def bit_length(array: np.ndarray) -> float:
    """Bit length of the largest entry, with all entries as integer multiples of one power of two."""
    top, low, flat = -math.inf, math.inf, array.reshape(-1)
    for first in range(0, len(flat), 2**20):  # in little memory: the limit is not checked yet
        part = flat[first : first + 2**20]
        m, t = odd_parts(part[part != 0])
        if m.size:
            top, low = max(top, float((np.frexp(m.astype(float))[1] + t).max())), min(low, float(t.min()))
    return top - low if low < math.inf else 1.0


def cost_of_sigma(node: TrackedDict, layer: Layer, bits: float) -> tuple[float, float]:
    """Seconds and bytes of `norms.prove_sigma` for weights with this number of bits."""
    (kind, side, steps), (groups, first, second, *kernel) = witness(node), layer.weight.shape
    size = layer.weight.size
    far, lengths = second * math.prod(layer.phases), [-(-k // p) for k, p in zip(kernel, layer.phases, strict=True)]
    n, inner = (far, first) if (side == "inputs") != layer.transposed else (first, far)
    taps, work, held = math.prod(lengths), 0.0, 0.0
    if kind == "frequencies":  # complex matrices in float64: two products and a Cholesky factor at each point
        each = (
            3e-4
            + 4e-8 * sum(length**2 for length in lengths)
            + groups * (5e-6 + n**2 * (inner + 1.4 * n) * 4e-10 + taps * n * inner * 4e-9)
        )
        return steps * each + size * 1e-6, 16 * groups * (2 * taps * n * inner + 8 * n**2) + size * 200
    if kind == "cholesky":
        work = seconds_of_product(n, inner, n, bits) + seconds_of_product(n, n, n, 53) + n**3 * 2e-10 + n**2 * 1e-6
        held = bytes_of_matrices(3 * n**2, 2 * bits + 64)
    for _ in range(steps):  # products of all pairs of taps, half of which are computed
        held = bytes_of_matrices(2 * taps * n * inner, bits)
        work += taps**2 * (2e-6 + (seconds_of_product(n, inner, n, bits) + n**2 * (5e-8 + bits * 2e-10)) / 2)
        bits, lengths = 2 * bits + math.log2(inner * taps), [2 * length - 1 for length in lengths]
        taps, inner = math.prod(lengths), n
    held += bytes_of_matrices(taps * n**2, bits) if kind == "schur" else 0
    work += taps * n**2 * (1.3e-6 + bits * 3e-10)  # absolute row sums
    return groups * work + size * 1e-6, held + size * (200 + bits / 4) + n**2 * 200


def cost_of(node: TrackedDict, shapes: list[list[int]], tensors: TrackedDict, bits: dict[str, float]) -> list[float]:
    """Seconds and bytes of the proof of a node, seconds for each batch and for each image, bytes for each image."""
    op, held = node["op"], math.prod(node["shape"]) + sum(map(math.prod, shapes))
    if op in ("affine", "potential", "exponential"):
        layer, times = Layer(node, shapes[0], tensors), {"affine": 1, "potential": 2}.get(op) or terms_of(node)
        (groups, first, second, *kernel), near, far = layer.weight.shape, math.prod(layer.near), math.prod(layer.far)
        taps, channels, size = math.prod(kernel), groups * (first + second), layer.weight.size
        proof, memory = cost_of_sigma(node, layer, bits[node["weight"]])
        batch = times * taps * (3e-5 + 3e-9 * (far + 3 * near))
        image = times * near * (size * 1e-10 + taps * channels * 5e-9)
        copies = min(2 * times - 1, 5)
        proof += 0.005 * times if op == "exponential" else 0
        return [1e-3 + proof, memory, batch, image, 8 * (2 * held + copies * (channels + 4) * near + far)]
    listed = sum(map(len, node["take"])) if op in ("max", "sum") else 0
    held += 3 * shapes[0][0] * listed if listed else 0
    proof = 1e-3 + 5e-5 * len(shapes) + 5e-7 * (listed + (shapes[0][0] if op == "normalize" else 0))
    return [proof, listed * 100, 2e-5 + 1e-6 * len(shapes), held * (2e-8 if op == "sort" else 5e-9), 8 * held]


def estimate(nodes: list[TrackedDict], tensors: TrackedDict, results: int, images: int) -> tuple[Any, ...]:
    """Seconds of one core, bytes, number of images to run together, and the nodes with the most work and memory."""
    shapes, costs, live, peak = [node["shape"] for node in nodes], [], 0, []
    bits = {name: bit_length(tensor) for name, tensor in tensors.items()}  # once: nodes may share tensors
    last = {j: i for i, node in enumerate(nodes) for j in node["inputs"]}  # where each value is used last
    for i, node in enumerate(nodes):
        with context(title(i, node)):
            costs.append(cost_of(node, [shapes[j] for j in node["inputs"]], tensors, bits))
        live += 8 * math.prod(shapes[i])
        peak.append(live + costs[i][-1])
        live -= sum(8 * math.prod(shapes[j]) for j in {*node["inputs"]} if last[j] == i)
    size = int(min(100, max(1, 2**28 // max(peak))))
    work = [proof + (2 + images // size) * batch + (1 + images) * image for proof, _, batch, image, _ in costs]
    memory = [max(cost[1] + cost[-1], size * run) for cost, run in zip(costs, peak, strict=True)]
    slowest, largest = (title(i := each.index(max(each)), nodes[i]) for each in (work, memory))
    logits, rows = math.prod(shapes[-1]), max((tensor.size for tensor in tensors.values()), default=0)
    return sum(work) + logits * (results * 6e-5 + rows * 2e-8), 5e7 + max(memory), size, slowest, largest
