"""The nodes of a program as a certificate file has them: many kinds of operations in the few that the checker knows.

Each operation becomes one node that computes the same numbers in the same way, so that its three numbers stay:

    affine, potential   linear layers (without axes) and convolutions. Of the padding only the left part, `offset`, is
                        told: the right part and `output_padding` only decide how many pixels there are, see `shape`.
    join                all entries, one input after the other, cut or filled up with zeros to those of `shape`
    max, sum            windows of pixels, listed; windows of one pixel only move them
    sort                groups along an axis, in falling order; MaxMin has groups of 2
    relu, abs, add, scale, normalize

docs/certificates.md tells the format.
"""

import itertools
import math
from typing import Any

from onelip.certify.program import Operation

_JOINS = ("flatten", "reshape", "identity", "concat", "first_channels", "pad_channels")


def normal_form(node: Operation, before: tuple[int, ...]) -> dict[str, Any]:
    """Kind and settings of a node whose (first) input has the shape `before`.

    Example:
        >>> normal_form(Operation("maxmin", (0,), (4,), settings={"axis": 0}), (4,))
        {'op': 'sort', 'axis': 0, 'group_size': 2}
        >>> normal_form(Operation("flatten", (0,), (8,)), (2, 4))
        {'op': 'join'}
    """
    if node.op in ("linear", "conv", "potential"):
        return _layer(node)
    if node.op in _JOINS:
        return {"op": "join"}
    if node.op == "concatenate":  # each place of a window becomes a channel
        return {"op": "max", "take": [[i for place in _pixels(node, before[1:]) for i in place]]}
    if node.op == "max_pool":
        return {"op": "max", "take": _pixels(node, before[1:])}
    if node.op == "avg_pool":
        return {"op": "sum", "take": _pixels(node, before[1:]), "factor": node.settings["scale"]}
    if node.op in ("maxmin", "groupsort"):
        return {"op": "sort", "axis": node.settings["axis"], "group_size": node.settings.get("group_size", 2)}
    return {"op": node.op, **node.settings}


def _layer(node: Operation) -> dict[str, Any]:
    settings = node.settings
    padding = settings.get("padding", [])
    around = settings.get("mode") == "circular"
    return {
        "op": "potential" if node.op == "potential" else "affine",
        "weight": settings["weight"],
        "bias": settings["bias"],
        "stride": settings.get("stride", []),
        "dilation": settings.get("dilation", []),
        "offset": [left for left, _ in padding],
        "circular": [around and left + right > 0 for left, right in padding],
        "groups": settings.get("groups", 1),
        "transposed": settings.get("transposed", False),
    }


def _pixels(node: Operation, sizes: tuple[int, ...]) -> list[list[int]]:
    """By place in the window: the pixel of each window, row-major; -1 beyond the border."""
    kernel = node.settings["kernel"]
    stride = node.settings.get("stride", kernel)  # those of a concatenation tile the image
    padding, dilation = (
        node.settings.get("padding", [0] * len(kernel)),
        node.settings.get("dilation", [1] * len(kernel)),
    )
    found = []
    for tap in itertools.product(*map(range, kernel)):
        axes = [
            [i if 0 <= i < n else None for i in range(d * t - p, d * t - p + s * out, s)]
            for t, n, s, p, d, out in zip(tap, sizes, stride, padding, dilation, node.shape[1:], strict=True)
        ]
        found.append([_number(place, sizes) for place in itertools.product(*axes)])
    return found


def _number(place: tuple[int | None, ...], sizes: tuple[int, ...]) -> int:
    known = [i for i in place if i is not None]
    if len(known) < len(place):
        return -1
    return sum(i * math.prod(sizes[axis + 1 :]) for axis, i in enumerate(known))
