"""The values of a program, and through which of them the others depend on the input.

A value is the result of a call, or a tensor that Note [Orders] adds. Its dominator is the last value through which it
depends on the input. In

    a, b = x.chunk(2, 1)
    y = torch.cat([a.abs(), b], 1)

the dominator of a.abs() is a, and that of a, b and y is x. Calls that compute the same share a value: programs slice
one tensor again and again.

Note [Orders]
    The maximum and the minimum of two tensors are two slices of one tensor: of the two, side by side, sorted pair by
    pair. Sorting is 1-Lipschitz (rearrangement). So this sorted tensor is added, as a value that no call of the program
    gives: then max(a, b) and min(a, b) are disjoint parts of it. Likewise amax, amin, median, topk and sort of one
    tensor over the same axes.

Note [Roots]
    The value of a call that is made of squares is its root, as `StepBound.root` is the constant of the root. So a call
    that reads the squares themselves has no known value.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from onelip.core.rounding import multiply_up
from onelip.graph.calls import Call, Graph, Ref
from onelip.graph.ops.movement import SPLITS, trace_entries
from onelip.graph.parts.row_rules import OPERATIONS
from onelip.graph.step import Step, StepBound

SUMS = ("aten.add.Tensor", "aten.sub.Tensor", "aten.rsub.Tensor")
_OF_PAIRS = {  # 1-Lipschitz functions of a pair, and which half of the sorted pair they give, if any
    **dict.fromkeys(("aten.maximum.default", "aten.max.other", "aten.fmax.default"), 1),
    **dict.fromkeys(("aten.minimum.default", "aten.min.other", "aten.fmin.default"), 0),
    **dict.fromkeys(("aten.hypot.default", "aten.logaddexp.default", "aten.logaddexp2.default"), None),
}


def _sorted(step: Step, n: int) -> list[int]:
    return [*range(n)][:: -1 if step.argument("descending") else 1]


def _top(step: Step, n: int) -> list[int]:
    ranks = [*range(n)][:: -1 if step.argument("largest") else 1][: step.argument("k")]
    return ranks if step.argument("sorted") else []


# By operation and number of the result: which entries of each sorted group of n it gives, from the smallest on.
_RANKS: dict[tuple[str, int], Callable[[Step, int], list[int]]] = {
    ("aten.amin.default", 0): lambda step, n: [0],
    ("aten.amax.default", 0): lambda step, n: [n - 1],
    ("aten.min.dim", 0): lambda step, n: [0],
    ("aten.max.dim", 0): lambda step, n: [n - 1],
    ("aten.aminmax.default", 0): lambda step, n: [0],
    ("aten.aminmax.default", 1): lambda step, n: [n - 1],
    ("aten.median.dim", 0): lambda step, n: [(n - 1) // 2],
    ("aten.kthvalue.default", 0): lambda step, n: [step.argument("k") - 1],
    ("aten.topk.default", 0): _top,
    ("aten.sort.default", 0): _sorted,
    ("aten.sort.stable", 0): _sorted,
}


@dataclass(frozen=True)
class Value:
    """A value of a program.

    Attributes:
        shape: of a sample.
        operands: the numbers of the values that it is computed from; none for the input, and if nothing is known of it.
        dominator: the number of its dominator; 0 for the input itself.
        depth: number of dominators above it.
        factor: its constant in its one operand; None if there are several, or if none is known.
        call: the call that gives it; None for those of Note [Orders] and Note [Roots].
        positions: if it consists of entries of its one operand, a function that returns their positions.
        is_refused: whether its call has no bound by its rule.
    """

    shape: tuple[int, ...]
    operands: tuple[int, ...]
    dominator: int
    depth: int
    factor: float | None
    call: Call | None
    positions: Callable[[], Tensor] | None
    is_refused: bool


class Values:
    """The values of the calls that were added so far, by number; operands have smaller numbers."""

    def __init__(self, graph: Graph, effort: Any) -> None:
        self.graph, self.effort = graph, effort
        self.of_call: dict[int, int] = {}
        self.pairs: set[int] = set()  # two tensors side by side
        self._all: list[Value] = []
        self._roots: set[int] = set()
        self._made: dict[Any, int] = {}  # by how it is computed

    def __getitem__(self, number: int) -> Value:
        return self._all[number]

    def step(self, call: Call, constants: Any = ()) -> Step:
        """A call for its rule."""
        return Step(call, self.graph, constants, self.effort)

    def add(self, call: Call, verdict: StepBound) -> int:
        """The number of the value of a call, given the result of its rule."""
        try:
            key = self._key(call)
            if key not in self._made:
                self._made[key] = self._make(call, verdict)
            number = self._made[key]
            if verdict.root is not None:
                self._roots.add(number)
        except Exception:  # nothing is known of a call that cannot be followed
            number = self._new(call.shape[1:])
        self.of_call[call.index] = number
        return number

    def common(self, numbers: Sequence[int]) -> int:
        """The last value through which all of them depend on the input, possibly one of them."""
        found = numbers[0]
        for other in numbers[1:]:
            while found != other:
                a, b = self._all[found], self._all[other]
                if a.depth >= b.depth:
                    found = a.dominator
                if b.depth >= a.depth:
                    other = b.dominator
        return found

    def _key(self, call: Call) -> Any:
        """Equal for calls that compute the same."""

        def plain(argument: Any) -> Any:
            if isinstance(argument, Ref):
                return "call", self.of_call[argument.index]
            return ("tensor", id(argument)) if isinstance(argument, Tensor) else argument

        if not call.inputs:
            return call.index
        return repr((call.op, id(call.module), tree_map(plain, (call.arguments, call.keywords))))

    def _new(
        self,
        shape: tuple[int, ...],
        operands: tuple[int, ...] = (),
        factor: float | None = None,
        call: Call | None = None,
        positions: Callable[[], Tensor] | None = None,
        is_refused: bool = False,
    ) -> int:
        """A new value; without operands, nothing is known of it."""
        dominator = self.common(operands) if operands else 0
        depth = self._all[dominator].depth + 1 if self._all else 0
        self._all.append(Value(shape, operands, dominator, depth, factor, call, positions, is_refused))
        return len(self._all) - 1

    def _make(self, call: Call, verdict: StepBound) -> int:
        shape, operands = call.shape[1:], tuple(self.of_call[i] for i in call.inputs)
        if verdict.root is not None or verdict.by_roots:
            return self._root(call, verdict)
        if self._roots.intersection(operands):  # Note [Roots]
            return self._new(shape)
        if verdict.is_refused:
            # Perhaps it has rows: a product with a mask jumps, and a sum of two may not.
            is_known = call.op in OPERATIONS
            return self._new(shape, operands, None, call, is_refused=True) if is_known else self._new(shape)
        factor = verdict.factor if len(operands) == 1 else None
        if call.op == "getitem":
            return self._result(call, factor)
        if call.op in _OF_PAIRS and len(operands) == 2:
            if all(self.graph.calls[i].shape == call.shape for i in call.inputs):
                return self._of_pair(call, operands)
        elif call.shape and (found := self._order(call, call, 0)) is not None:
            return found
        return self._new(shape, operands, factor, call)

    def _root(self, call: Call, verdict: StepBound) -> int:
        """The root of a call that is made of squares, or a call that reads such roots."""
        inputs = call.inputs if verdict.ancestor is None else (verdict.ancestor,)
        if len(inputs) > 1 and call.op not in SUMS:
            return self._new(call.shape[1:])
        operands = tuple(self.of_call[i] for i in inputs)
        return self._new(call.shape[1:], operands, verdict.root_factor, None if verdict.root is not None else call)

    def _result(self, call: Call, factor: float | None) -> int:
        """Add one result of a call with several results, as a function of the operands of the call."""
        producer, index, shape = self.graph.calls[call.inputs[0]], call.arguments[1], call.shape[1:]
        whole = self._all[self.of_call[producer.index]]
        if not whole.operands:
            return self._new(shape)
        if producer.op in SPLITS:
            step = self.step(producer)
            return self._new(shape, whole.operands, 1.0, call, lambda: trace_entries(step).pieces[index] - 1)
        if len(whole.operands) > 1:
            return self._new(shape, (self.of_call[producer.index],), factor, call)
        if (found := self._order(call, producer, index)) is not None:
            return found
        own = None if whole.factor is None or factor is None else multiply_up(whole.factor, factor)
        return self._new(shape, whole.operands, own, call)

    def _of_pair(self, call: Call, operands: tuple[int, ...]) -> int:
        """The larger or the smaller of two, Note [Orders], or another 1-Lipschitz function of the pair."""
        shape, half = call.shape[1:], _OF_PAIRS[call.op]
        pair = self._between(("pair", *sorted(operands)), (2, *shape), tuple(sorted(operands)), None)
        self.pairs.add(pair)
        if half is None:
            return self._new(shape, (pair,), 1.0, call)
        return self._new(shape, (pair,), 1.0, call, lambda: _places((2, *shape))[half])

    def _order(self, call: Call, producer: Call, result: int) -> int | None:
        """Some entries of groups, by their rank, Note [Orders]."""
        if (producer.op, result) not in _RANKS:
            return None
        step, source = self.step(producer), self.of_call[producer.inputs[0]]
        shape, dim = self._all[source].shape, step.argument("dim")
        axes = sorted({d % (len(shape) + 1) - 1 for d in ([dim] if isinstance(dim, int) else dim or [0])})
        count = math.prod(shape[axis] for axis in axes)
        ranks = _RANKS[producer.op, result](step, count)
        if axes[0] < 0 or not count or not ranks:  # -1 is the batch
            return None
        kept = [n for axis, n in enumerate(shape) if axis not in axes]
        groups = self._between(("sorted", source, *axes), (*kept, count), (source,), 1.0)

        def positions() -> Tensor:
            found = _places((*kept, count))[..., ranks]
            return (found.movedim(-1, axes[0]) if len(axes) == 1 else found).reshape(call.shape[1:])

        return self._new(call.shape[1:], (groups,), 1.0, call, positions)

    def _between(self, key: Any, shape: tuple[int, ...], operands: tuple[int, ...], factor: float | None) -> int:
        """A value that no call gives, made once."""
        if key not in self._made:
            self._made[key] = self._new(shape, operands, factor)
        return self._made[key]


def _places(shape: tuple[int, ...]) -> Tensor:
    return torch.arange(math.prod(shape)).reshape(shape)
