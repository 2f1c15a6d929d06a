"""A traced network as data: its calls in order. `onelip.graph.trace` makes it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

# Sizes follow the batch on any axis, since nothing is copied, and the rules see what becomes of the batch.
_VIEWS = ("aten.view.default", "aten.reshape.default", "aten._unsafe_view.default")
_SIZED = ("aten.expand.default", "aten.new_zeros.default", "aten.new_ones.default", "aten.new_full.default")


@dataclass(frozen=True)
class Ref:
    """In the arguments of a call: the result of another call."""

    index: int


@dataclass(frozen=True)
class Call:
    """One operation or layer that runs, with a result that depends on the input.

    Attributes:
        index: position in `Graph.calls`; operands come before.
        place: path of the module that runs it, such as "blocks.0.conv1"; "" for the model itself.
        op: "input", "module", "constant" (an output that does not depend on the input), "getitem" (an entry of an
            operation with several results), or the ATen name, such as "aten.add.Tensor".
        module: for op "module" the layer itself, baked and in eval mode.
        arguments: positional arguments of an ATen operation: a `Ref` for the result of a call, else a constant.
        keywords: keyword arguments, likewise.
        inputs: indices of the operands that depend on the input.
        shape: shape of the result, with the batch axis first; () for an operation with several results.
        dtype: dtype of the result.
    """

    index: int
    place: str
    op: str
    module: nn.Module | None
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    inputs: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Graph:
    """All calls in order; call 0 is the input."""

    calls: tuple[Call, ...]
    output: int
    input_shape: tuple[int, ...]  # with the batch axis, see Note [Batch]

    @property
    def batch(self) -> int:
        """Length of the batch axis during the trace."""
        return self.input_shape[0]


def first_difference(one: Graph, other: Graph) -> Call | None:
    """The first call that differs between two traces of one model, of two and of four samples; None if none does.

    If one differs, the forward depends on the length of the batch or on previous calls, and what is proved of the
    first trace is not true of the model. Only what follows the batch by itself may differ: the sizes in a view, the
    first size of a result, and constants that are the same for every sample.
    """
    lengths = one.batch, other.batch
    for a, b in zip(one.calls, other.calls, strict=False):
        if (a.op, a.module, a.inputs, a.dtype) != (b.op, b.module, b.inputs, b.dtype):
            return a
        if not _alike(a.op, (a.arguments, a.keywords), (b.arguments, b.keywords), lengths):
            return a
    is_same = len(one.calls) == len(other.calls) and one.output == other.output
    return None if is_same else one.calls[-1]


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
