"""A traced network as data: its calls in order. `onelip.graph.trace` makes it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves


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
        keeps_batch: whether the first axis of the result is the batch, and no other size depends on its length.
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
    keeps_batch: bool = True


@dataclass(frozen=True)
class Graph:
    """All calls in order; call 0 is the input."""

    calls: tuple[Call, ...]
    output: int
    input_shape: tuple[int, ...]  # with the batch axis, see Note [Batch] in trace.py

    @property
    def batch(self) -> int:
        """Length of the batch axis during the trace."""
        return self.input_shape[0]


def argument_of(target: Any, arguments: Sequence[Any], keywords: Mapping[str, Any], name: str) -> Any:
    """An argument of an ATen operation by its name, with torch's default where it was left out."""
    for place, argument in enumerate(target._schema.arguments):
        if argument.name == name:
            return arguments[place] if place < len(arguments) else keywords.get(name, argument.default_value)
    raise KeyError(f"{target} has no argument {name!r}")


def references(arguments: Any) -> list[Ref]:
    """All uses of calls in arguments, each as often as it occurs."""
    return [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Ref)]


def first_different_call(one: Graph, other: Graph) -> Call | None:
    """The first call that differs between two traces of one model; None if none does."""
    for a, b in zip(one.calls, other.calls, strict=False):
        if (a.op, a.module, a.inputs, a.shape, a.dtype) != (b.op, b.module, b.inputs, b.shape, b.dtype):
            return a
        if not _equal((a.arguments, a.keywords), (b.arguments, b.keywords)):
            return a
    is_same = len(one.calls) == len(other.calls) and one.output == other.output
    return None if is_same else one.calls[-1]


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        is_alike = a.dtype == b.dtype and a.shape == b.shape
        return is_alike and torch.allclose(a, b, rtol=0.0, atol=0.0, equal_nan=True)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_equal(a[name], b[name]) for name in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(_equal(x, y) for x, y in zip(a, b, strict=True))
    return type(a) is type(b) and a == b
