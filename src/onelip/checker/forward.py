"""The program itself, in float64: nodes that are proved already, run on arrays (*sample, batch).

The batch comes last, so that axes count as in the file.
"""

import itertools
import math
from types import SimpleNamespace
from typing import Any

import numpy as np

from .layers import Map, map_of, windows_of


def window(tap: Any, stride: Any, dilation: Any, sizes: Any) -> tuple[slice, ...]:
    """What a tap reads for all outputs o: the pixels s o + d t."""
    each = zip(tap, stride, dilation, sizes, strict=True)
    return (slice(None), *(slice(d * t, d * t + s * (n - 1) + 1, s) for t, s, d, n in each))


def run_map(layer: Map, x: np.ndarray) -> np.ndarray:
    weight, batch, sizes, out = layer.weight, x.shape[-1], x.shape[1:-1], layer.shape[1:]
    taps = itertools.product(*map(range, weight.shape[3:]))
    if layer.transposed:
        each = zip(layer.padding, out, sizes, layer.stride, layer.dilation, weight.shape[3:], strict=True)
        padded = [max(p + o, s * (n - 1) + d * (k - 1) + 1) for (p, _), o, n, s, d, k in each]
        y = np.zeros((layer.shape[0], *padded, batch))
        columns = x.reshape(len(weight), -1, math.prod(sizes) * batch)
        for t in taps:
            part = weight[..., *t].swapaxes(1, 2) @ columns
            y[window(t, layer.stride, layer.dilation, sizes)] += part.reshape(-1, *sizes, batch)
        y = y[:, *(slice(p, p + o) for (p, _), o in zip(layer.padding, out, strict=True))]
    else:
        x = np.pad(x, [(0, 0), *layer.padding, (0, 0)], mode="wrap" if layer.circular else "constant")
        columns = math.prod(out) * batch
        y = np.zeros((*weight.shape[:2], columns))
        for t in taps:
            y += weight[..., *t] @ x[window(t, layer.stride, layer.dilation, out)].reshape(len(weight), -1, columns)
    return y.reshape(*layer.shape, batch) + layer.bias.reshape(-1, *(1,) * len(sizes), 1)


def run(node: SimpleNamespace, xs: list[np.ndarray]) -> np.ndarray:
    op, x = node.op, xs[0]
    shape, channels = (*node.shape, x.shape[-1]), (-1, *(1,) * (x.ndim - 1))
    if op in ("linear", "conv"):
        return run_map(map_of(node, x.shape[:-1]), x)
    if op in ("maxmin", "groupsort"):
        size = 2 if op == "maxmin" else node.group_size
        groups = x.reshape(*x.shape[: node.axis], size, -1, *x.shape[node.axis + 1 :])
        return np.flip(np.sort(groups, node.axis), node.axis).reshape(shape)
    if op in ("concatenate", "avg_pool", "max_pool"):
        k, s, p, d = zip(*windows_of(node), strict=True) if node.kernel else ((),) * 4
        x = np.pad(x, [(0, 0), *zip(p, p, strict=True), (0, 0)], constant_values=-np.inf)  # only max_pool has padding
        out = node.shape[1:]
        windows = np.stack([x[window(t, s, d, out)] for t in itertools.product(*map(range, k))], axis=1)
        if op == "concatenate":
            return windows.reshape(shape)
        return windows.max(axis=1) if op == "max_pool" else windows.sum(axis=1) * float(node.scale)
    if op == "normalize":
        return (x - node.mean.reshape(channels)) / node.std.reshape(channels)
    rules = {
        "first_channels": lambda: x[: node.count],
        "pad_channels": lambda: np.pad(x, [(0, node.count - len(x)), *[(0, 0)] * (x.ndim - 1)]),
        "add": lambda: x + xs[1],
        "scale": lambda: x * float(node.factor),
        "concat": lambda: np.concatenate(xs),
        "flatten": lambda: x.reshape(shape),
        "reshape": lambda: x.reshape(shape),
        "relu": lambda: np.maximum(x, 0.0),
        "abs": lambda: np.abs(x),
        "identity": lambda: x,
    }
    return rules[op]()


def logits_of(nodes: list[SimpleNamespace], images: np.ndarray) -> np.ndarray:
    """(count, *sample) in [0, 1] -> (count, classes)."""
    values = [np.moveaxis(images, 0, -1)]
    for node in nodes[1:]:
        values.append(run(node, [values[j] for j in node.inputs]))
    return values[-1].T
