"""Numbers rounded exactly, and layers as explicit matrices, by other ways than checker and library.

Matrices are made index by index. The Schur sums are read off the Gram matrix of the layer on a domain so large that its
middle does not feel the border.
"""

import itertools
import json
import math
from fractions import Fraction

import numpy as np


def up(x):
    y = float(x)
    return Fraction(y) if Fraction(y) >= x else Fraction(math.nextafter(y, math.inf))


def up_root(x):
    y = Fraction(math.sqrt(x))
    for _ in range(3):
        y = Fraction(math.nextafter(float(y), 0.0))
    while y * y < x:
        y = Fraction(math.nextafter(float(y), math.inf))
    return y


def up_power_root(x, power):
    """The smallest float whose power is at least x, from a guess of numpy's."""
    y = Fraction(float(x) ** (1 / power))
    while y**power < x:
        y = Fraction(math.nextafter(float(y), math.inf))
    while y and Fraction(math.nextafter(float(y), 0.0)) ** power >= x:
        y = Fraction(math.nextafter(float(y), 0.0))
    return y


def root_below(x):
    """The largest float whose square is below x > 0."""
    y = up_root(x)
    while y * y >= x:
        y = Fraction(math.nextafter(float(y), 0.0))
    return y


def text(x):
    return float(x).hex()


def exact_sum(array, power=1):
    return sum((abs(Fraction(float(v))) ** power for v in np.ravel(array)), Fraction(0))


def jacobian(
    weight, shape, *, stride, padding, dilation, groups=1, mode="zeros", transposed=False, output_padding=None
):
    """The layer as a matrix, and the shape of its output."""
    taps, sizes = weight.shape[2:], shape[1:]
    axes = range(len(taps))
    if transposed:
        extra = output_padding or [0] * len(taps)
        out = [(sizes[a] - 1) * stride[a] - sum(padding[a]) + dilation[a] * (taps[a] - 1) + extra[a] + 1 for a in axes]
        outputs, inputs = weight.shape[1] * groups, weight.shape[0]
    else:
        out = [(sizes[a] + sum(padding[a]) - dilation[a] * (taps[a] - 1) - 1) // stride[a] + 1 for a in axes]
        outputs, inputs = weight.shape[0], weight.shape[1] * groups
    matrix = np.zeros((outputs, *out, inputs, *sizes), weight.dtype)
    # Of the pair (near, far) the near side is the strided one: far = s near + d t - p.
    near_sizes, far_sizes = (sizes, out) if transposed else (out, sizes)
    for near in itertools.product(*map(range, near_sizes)):
        for t in itertools.product(*map(range, taps)):
            far = [stride[a] * near[a] + dilation[a] * t[a] - padding[a][0] for a in axes]
            if mode == "circular":
                far = [f % n for f, n in zip(far, far_sizes, strict=True)]
            if any(not 0 <= f < n for f, n in zip(far, far_sizes, strict=True)):
                continue
            for first in range(weight.shape[0]):
                group = first // (weight.shape[0] // groups)
                for second in range(weight.shape[1]):
                    other = group * weight.shape[1] + second
                    value = weight[(first, second, *t)]
                    if transposed:
                        matrix[(other, *far, first, *near)] += value
                    else:
                        matrix[(first, *near, other, *far)] += value
    return matrix.reshape(math.prod((outputs, *out)), -1), (outputs, *out)


def schur_sum(whole, q, side, steps, *, stride, dilation, groups, transposed):
    """max over columns of sum |M| q_j / q_i for integer weights, from the middle of a large layer; remembered."""
    key = (whole.shape, whole.tobytes(), json.dumps([q, side, steps, stride, dilation, groups, transposed]))
    if key not in _SUMS:
        _SUMS[key] = _schur_sum(whole, q, side, steps, stride, dilation, groups, transposed)
    return _SUMS[key]


_SUMS = {}


def _schur_sum(whole, q, side, steps, stride, dilation, groups, transposed):
    taps = whole.shape[2:]
    reach = [d * (k - 1) + 1 for d, k in zip(dilation, taps, strict=True)]
    phases = [min(s // math.gcd(s, d), k) for s, d, k in zip(stride, dilation, taps, strict=True)]
    # Near is the strided lattice; Gram powers couple what is apart by less than 2^(steps-1) reaches.
    near = [2 * (2 ** (steps - 1) * -(-r // s) + 1) + 1 for r, s in zip(reach, stride, strict=True)]
    far = [s * (n - 1) + r for s, n, r in zip(stride, near, reach, strict=True)]
    shape = (whole.shape[1] * groups, *far)
    settings = {"stride": stride, "dilation": dilation, "padding": [(0, 0)] * len(taps), "groups": groups}
    J, out = jacobian(whole, shape, **settings)  # as a convolution: rows (first, near), columns (second, far)
    columns_far = (side == "inputs") != transposed
    J = J.astype(np.float64)  # exact for these integers, and fast
    M = J.T @ J if columns_far else J @ J.T
    for _ in range(steps - 1):
        M = M @ M
    assert np.abs(M).sum(1).max() < 2**53
    M = M.astype(np.int64)
    channels, sizes = (shape[0], far) if columns_far else (out[0], near)
    index = np.full((channels, *sizes), -1)
    for c in range(channels):
        for place in itertools.product(*map(range, sizes)):
            if not columns_far:
                index[(c, *place)] = c
                continue
            classes = []
            for i, s, d, p in zip(place, stride, dilation, phases, strict=True):
                # The phase of a pixel is that of the taps t with s o + d t = i; a pixel may be read by none.
                classes.append(next((t for t in range(p) if (i - d * t) % s == 0), None))
            if None not in classes:
                flat = int(np.ravel_multi_index(classes, phases)) if phases else 0
                index[(c, *place)] = c * math.prod(phases) + flat
    flat_q = [v for group in q for v in group]
    weights = np.array([flat_q[i] if i >= 0 else 0 for i in index.ravel()], object)
    sums = np.abs(M).astype(object) @ weights
    middle = [range(n // 2, min(n, n // 2 + s)) for n, s in zip(sizes, stride, strict=True)]
    best = Fraction(0)
    for c in range(channels):
        for place in itertools.product(*middle):
            i = int(np.ravel_multi_index((c, *place), (channels, *sizes)))
            if weights[i]:
                best = max(best, Fraction(int(sums[i]), int(weights[i])))
    return best
