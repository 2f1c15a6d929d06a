"""A program run in exact fractions: what the rounding bounds of `onelip.certify` are measured against.

Written from the meaning of the operations, with loops over pixels and taps: nothing is shared with the library but the
list of nodes. Samples are numpy arrays of Fraction.
"""

import math
from fractions import Fraction

import numpy as np


def exact(tensor):
    """A tensor or array of floats as fractions."""
    array = np.asarray(tensor, dtype=np.float64)
    return np.array([Fraction(v) for v in array.ravel().tolist()], dtype=object).reshape(array.shape)


def squared_norm(array):
    return sum((v * v for v in array.ravel().tolist()), Fraction(0))


def run_exactly(program, image):
    """The real values of all nodes for one sample of fractions."""
    values = [image]
    for node in program.nodes[1:]:
        operands = [values[i] for i in node.inputs]
        values.append(_step(node, *operands))
        assert values[-1].shape == node.shape, node
    return values


def _step(node, x, *others):
    record = node.record()
    match node.kind:
        case "affine" if not record["stride"]:
            return exact(node.weight.values) @ x + _bias(node)
        case "affine":
            return _conv(node, x, node.shape, record["transposed"], _bias(node))
        case "potential":
            hidden = _conv(node, x, (len(node.weight.values), *x.shape[1:]), False, _bias(node))
            return x - 2 * _conv(node, np.maximum(hidden, Fraction(0)), node.shape, True, 0)
        case "exponential":
            groups, channels, pixels = record["groups"], len(node.weight.values), x.shape[1:]
            wide = np.full((groups, channels // groups, *pixels), Fraction(0))
            wide[:, : len(x) // groups] = x.reshape(groups, -1, *pixels)
            term = total = wide.reshape(channels, *pixels)
            for j in range(1, record["terms"] + 1):
                term = _conv(node, term, term.shape, False, 0) / j
                total = total + term
            kept = total.reshape(wide.shape)[:, : node.shape[0] // groups].reshape(node.shape)
            bias = _bias(node)
            bias = bias if isinstance(bias, int) else bias.reshape(-1, *(1,) * len(pixels))
            return kept * Fraction(float.fromhex(record["factor"])) + bias
        case "relu":
            return np.maximum(x, Fraction(0))
        case "abs":
            return abs(x)
        case "sort":
            parts = np.stack(np.split(x, record["group_size"], record["axis"]))
            return np.concatenate(list(-np.sort(-parts, 0)), record["axis"])
        case "join":
            entries = [v for part in (x, *others) for v in part.ravel().tolist()]
            missing = math.prod(node.shape) - len(entries)
            filled = entries[: math.prod(node.shape)] + [Fraction(0)] * missing
            return np.array(filled, dtype=object).reshape(node.shape)
        case "max":
            return _windows(node, x, max)
        case "sum":
            factor = Fraction(float.fromhex(record["factor"]))
            return _windows(node, x, lambda window: factor * sum(window, Fraction(0)))
        case "normalize":
            along = (-1, *(1,) * (x.ndim - 1))
            return (x - exact(node.mean.values).reshape(along)) / exact(node.std.values).reshape(along)
        case "add":
            return x + others[0]
        case "scale":
            return x * Fraction(float.fromhex(record["factor"]))
    raise AssertionError(node.kind)


def _bias(node):
    return 0 if node.bias is None else exact(node.bias.values)


def _windows(node, x, reduce):
    """`take` lists the pixels of every window; tests of pooling compare what it computes with torch."""
    result = []
    for channel in x.reshape(len(x), -1):
        windows = zip(*node.record()["take"], strict=True)
        result += [reduce([channel[pixel] for pixel in window if pixel >= 0]) for window in windows]
    return np.array(result, dtype=object).reshape(node.shape)


def _conv(node, x, shape, transposed, bias):
    record, weight = node.record(), exact(node.weight.values)
    groups = record["groups"]
    result = np.full(shape, Fraction(0))
    sizes, taps = x.shape[1:], weight.shape[2:]
    wide, narrow = (sizes, shape[1:]) if not transposed else (shape[1:], sizes)
    # Both kinds join the pixel o of the narrow side with the pixel s o + d t - offset of the wide one.
    for o in np.ndindex(*narrow):
        for t in np.ndindex(*taps):
            each = zip(record["stride"], o, record["dilation"], t, record["offset"], strict=True)
            place = [s * i + d * j - p for s, i, d, j, p in each]
            place = [i % n if around else i for i, n, around in zip(place, wide, record["circular"], strict=True)]
            if not all(0 <= i < n for i, n in zip(place, wide, strict=True)):
                continue
            first, second = len(weight) // groups, len(weight[0])
            for g in range(groups):
                kernel = weight[(slice(g * first, (g + 1) * first), slice(None), *t)]  # (first, second)
                if transposed:
                    result[(slice(g * second, (g + 1) * second), *place)] += (
                        kernel.T @ x[(slice(g * first, (g + 1) * first), *o)]
                    )
                else:
                    result[(slice(g * first, (g + 1) * first), *o)] += (
                        kernel @ x[(slice(g * second, (g + 1) * second), *place)]
                    )
    return result if isinstance(bias, int) else result + bias.reshape(-1, *(1,) * len(sizes))


def entries(shape):
    return math.prod(shape)
