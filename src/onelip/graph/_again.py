"""Whether two traces of one model, in turn, of two and of four samples, show the same program.

If not, the forward works with the length of the batch, and what was proved of the first trace is not true of the model.
Only what follows the batch by itself may differ: the sizes in a view, the first size of a result, and constants that
are the same for every sample.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from onelip.graph.trace import Graph, Node

# Sizes follow the batch on any axis, since nothing is copied, and the rules see what becomes of the batch.
_VIEWS = ("aten.view.default", "aten.reshape.default", "aten._unsafe_view.default")
_SIZED = ("aten.expand.default", "aten.new_zeros.default", "aten.new_ones.default", "aten.new_full.default")


def first_difference(one: "Graph", other: "Graph") -> "Node | None":
    """The first node of a graph that is another one in the other, or None."""
    lengths = one.batch, other.batch
    for a, b in zip(one.nodes, other.nodes, strict=False):
        if (a.op, a.module, a.inputs, a.dtype) != (b.op, b.module, b.inputs, b.dtype):
            return a
        if not _alike(a.op, (a.arguments, a.keywords), (b.arguments, b.keywords), lengths):
            return a
    is_same = len(one.nodes) == len(other.nodes) and one.output == other.output
    return None if is_same else one.nodes[-1]


def _alike(op: str, a: Any, b: Any, lengths: tuple[int, int]) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return _same_for_every_sample(a, b, lengths)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_alike(op, a[name], b[name], lengths) for name in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and (
            _follow(op, a, b, lengths) or all(_alike(op, x, y, lengths) for x, y in zip(a, b, strict=True))
        )
    return type(a) is type(b) and a == b


def _follow(op: str, a: Sequence[Any], b: Sequence[Any], lengths: tuple[int, int]) -> bool:
    """Whether these are sizes that differ as the batches do."""
    if not a or not all(type(size) is int for size in (*a, *b)):
        return False
    follows = [x * lengths[1] == y * lengths[0] for x, y in zip(a, b, strict=True)]
    if op in _VIEWS:
        return all(f or x == y for f, x, y in zip(follows, a, b, strict=True))
    return op in _SIZED and follows[0] and list(a[1:]) == list(b[1:])


def _same_for_every_sample(a: Tensor, b: Tensor, lengths: tuple[int, int]) -> bool:
    if a.shape != b.shape:
        if (a.shape[:1], b.shape[:1]) != ((lengths[0],), (lengths[1],)) or a.shape[1:] != b.shape[1:]:
            return False
        a, b = torch.broadcast_tensors(torch.cat([a, b]), b[:1])
    return a.dtype == b.dtype and torch.allclose(a, b, rtol=0.0, atol=0.0, equal_nan=True)
