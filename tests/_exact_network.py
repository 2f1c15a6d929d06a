"""A program run in exact fractions: what the rounding bounds of `onelip.certify` are measured against.

Written from the meaning of the operations, with loops over pixels and taps: nothing is shared with the library but the
list of nodes. Samples are numpy arrays of Fraction.
"""

import dataclasses
import itertools
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
    settings = node.settings
    match node.op:
        case "linear":
            return exact(node.weight) @ x + _bias(node)
        case "conv":
            return _conv(node, x)
        case "potential":
            hidden = _conv(dataclasses.replace(node, shape=(len(node.weight), *x.shape[1:])), x)
            back = {"settings": {**settings, "transposed": True}, "tensors": {"weight": node.weight}}
            return x - 2 * _conv(dataclasses.replace(node, **back), np.maximum(hidden, Fraction(0)))
        case "relu":
            return np.maximum(x, Fraction(0))
        case "abs":
            return abs(x)
        case "maxmin":
            a, b = np.split(x, 2, settings["axis"])
            return np.concatenate([np.maximum(a, b), np.minimum(a, b)], settings["axis"])
        case "groupsort":
            parts = np.stack(np.split(x, settings["group_size"], settings["axis"]))
            return np.concatenate(list(-np.sort(-parts, 0)), settings["axis"])
        case "flatten" | "reshape":
            return x.reshape(node.shape)
        case "first_channels":
            return x[: settings["count"]]
        case "pad_channels":
            return np.concatenate([x, np.full((settings["count"] - len(x), *x.shape[1:]), Fraction(0))])
        case "concatenate":
            offsets = list(itertools.product(*map(range, settings["kernel"])))
            steps = settings["kernel"]
            parts = [
                x[(c, *(slice(o, None, k) for o, k in zip(at, steps, strict=True)))]
                for c in range(len(x))
                for at in offsets
            ]
            return np.stack(parts)
        case "max_pool":
            return _windows(node, x, settings["padding"], settings["dilation"], max)
        case "avg_pool":
            scale = Fraction(float.fromhex(settings["scale"]))
            ones = [1] * len(settings["kernel"])
            return _windows(node, x, [0] * len(ones), ones, lambda window: scale * sum(window, Fraction(0)))
        case "normalize":
            along = (-1, *(1,) * (x.ndim - 1))
            return (x - exact(node.tensors["mean"]).reshape(along)) / exact(node.tensors["std"]).reshape(along)
        case "add":
            return x + others[0]
        case "concat":
            return np.concatenate([x, *others])
        case "scale":
            return x * Fraction(float.fromhex(settings["factor"]))
    raise AssertionError(node.op)


def _bias(node):
    return 0 if node.bias is None else exact(node.bias)


def _windows(node, x, padding, dilation, reduce):
    result = np.empty(node.shape, dtype=object)
    for channel, *at in np.ndindex(*node.shape):
        window = []
        for t in itertools.product(*map(range, node.settings["kernel"])):
            place = [
                s * o + d * i - p
                for s, o, d, i, p in zip(node.settings["stride"], at, dilation, t, padding, strict=True)
            ]
            if all(0 <= i < n for i, n in zip(place, x.shape[1:], strict=True)):
                window.append(x[(channel, *place)])
        result[(channel, *at)] = reduce(window)
    return result


def _conv(node, x):
    settings, weight = node.settings, exact(node.weight)
    groups, transposed = settings["groups"], settings["transposed"]
    result = np.full(node.shape, Fraction(0))
    sizes, taps = x.shape[1:], weight.shape[2:]
    wide, narrow = (sizes, node.shape[1:]) if not transposed else (node.shape[1:], sizes)
    # Both kinds join the pixel o of the narrow side with the pixel s o + d t - p of the wide one.
    for o in np.ndindex(*narrow):
        for t in np.ndindex(*taps):
            each = zip(settings["stride"], o, settings["dilation"], t, settings["padding"], wide, strict=True)
            place = [s * i + d * j - p[0] for s, i, d, j, p, n in each]
            if settings["mode"] == "circular":
                place = [i % n if sum(p) else i for i, n, p in zip(place, wide, settings["padding"], strict=True)]
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
    bias = _bias(node)
    return result if isinstance(bias, int) else result + bias.reshape(-1, *(1,) * len(sizes))


def entries(shape):
    return math.prod(shape)
