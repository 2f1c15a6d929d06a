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
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from onelip.core.rounding import multiply_up
from onelip.graph.ops.movement import COPIES, MOVES, SPLITS, inserted, trace_entries
from onelip.graph.parts import rows
from onelip.graph.parts.rows import Decisions, NoRows, Rows
from onelip.graph.step import Call, Graph, Ref, Step, StepBound, check_alike

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

    def add(self, call: Call, bound: StepBound) -> int:
        """The number of the value of a call, given the result of its rule."""
        try:
            key = self._key(call)
            if key not in self._made:
                self._made[key] = self._make(call, bound)
            number = self._made[key]
            if bound.root is not None:
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

    def _make(self, call: Call, bound: StepBound) -> int:
        shape, operands = call.shape[1:], tuple(self.of_call[i] for i in call.inputs)
        if bound.root is not None or bound.by_roots:
            return self._root(call, bound)
        if self._roots.intersection(operands):  # Note [Roots]
            return self._new(shape)
        if bound.is_refused:
            # Perhaps it has rows: a product with a mask jumps, and a sum of two may not.
            is_known = call.op in OPERATIONS
            return self._new(shape, operands, None, call, is_refused=True) if is_known else self._new(shape)
        factor = bound.factor if len(operands) == 1 else None
        if call.op == "getitem":
            return self._result(call, factor)
        if call.op in _OF_PAIRS and len(operands) == 2:
            if all(self.graph.calls[i].shape == call.shape for i in call.inputs):
                return self._of_pair(call, operands)
        elif call.shape and (found := self._order(call, call, 0)) is not None:
            return found
        return self._new(shape, operands, factor, call)

    def _root(self, call: Call, bound: StepBound) -> int:
        """The root of a call that is made of squares, or a call that reads such roots."""
        inputs = call.inputs if bound.ancestor is None else (bound.ancestor,)
        if len(inputs) > 1 and call.op not in SUMS:
            return self._new(call.shape[1:])
        operands = tuple(self.of_call[i] for i in inputs)
        return self._new(call.shape[1:], operands, bound.root_factor, None if bound.root is not None else call)

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


# ---- Calls as rows: the piecewise affine form of one call from the rows of its operands
#
# Slices, copies and permutations pick rows; sums, and products with constants, combine them; relu, abs, comparisons and
# signs split them into pieces; other activations have slopes between two numbers. All other calls have no rows.


_TYPES = (torch.float32, torch.float64, torch.bool)
_SIGNS = {  # of a negative number, of zero, of a positive one
    "sign": (-1.0, 0.0, 1.0), "sgn": (-1.0, 0.0, 1.0),
    "gt": (0.0, 0.0, 1.0), "ge": (0.0, 1.0, 1.0), "lt": (1.0, 0.0, 0.0), "le": (1.0, 1.0, 0.0),
}  # fmt: skip
_SLOPES = {"relu": (0.0, 1.0), "abs": (-1.0, 1.0)}  # below zero and above
# Increasing functions have slopes from 0 to their constant, others from minus to plus it.
_INCREASING = {
    "tanh", "sigmoid", "atan", "asinh", "erf", "selu", "celu", "log_sigmoid", "hardtanh", "relu6", "hardsigmoid",
    "clamp", "clamp_min", "clamp_max", "softshrink",
}  # fmt: skip
_SMOOTH = _INCREASING | {"gelu", "silu", "mish", "hardswish", "elu", "sin", "cos", "prelu"}
_NOT = {"logical_not", "bitwise_not"}
_NAMES = {"add", "sub", "rsub", "mul", "div", "neg", "leaky_relu", *_SMOOTH, *_SIGNS, *_SLOPES, *_NOT}
OPERATIONS = {f"aten.{name}.{overload}" for name in _NAMES for overload in ("default", "Tensor", "Scalar")}
# Operations that choose by a mask, and the places of the mask, of what is chosen by it, and of the rest.
_CHOICES = {
    **dict.fromkeys(("aten.where.self", "aten.where.ScalarOther", "aten.where.ScalarSelf"), (0, 1, 2)),
    **dict.fromkeys(("aten.masked_fill.Scalar", "aten.masked_fill.Tensor"), (1, 2, 0)),
}
OPERATIONS |= set(_CHOICES)

Read = Callable[[int], Rows]  # the rows of a call, by its index; raises NoRows


def may_have_rows(call: Call, batch: int) -> bool:
    """Whether `rows_of_call` knows the operation of a call."""
    is_known = call.op in OPERATIONS or call.op in MOVES or call.op in COPIES
    return is_known and call.dtype in _TYPES and call.keeps_batch and call.shape[:1] == (batch,)


def rows_of_call(step: Step, factor: float | None, read: Read, decisions: Decisions) -> Rows:
    """The rows of a call.

    Args:
        step: the call.
        factor: its Lipschitz constant in its one operand, if it is known.
        read: gives the rows of its operands.
        decisions: the signs on which the pieces depend, common to all calls of a region.

    Raises:
        NoRows: if it has none.
    """
    call = step.call
    if call.op in COPIES:
        if not (call.dtype.is_floating_point or step.graph.calls[call.inputs[0]].dtype == call.dtype):
            raise NoRows
        return _operand(step, call.arguments[0], read)
    if call.op in _CHOICES and isinstance(call.arguments[_CHOICES[call.op][0]], Ref):
        return _chosen(step, read)
    if call.op in MOVES:
        return _moved(step, read)
    name = call.op.split(".")[1]
    if name in _SMOOTH:
        if factor is None:
            raise NoRows
        least = 0.0 if name in _INCREASING else -factor
        return decisions.smooth(_operand(step, call.arguments[0], read), least, factor)
    return _entry_by_entry(step, name, read, decisions)


def _operand(step: Step, argument: Any, read: Read) -> Rows:
    """An argument of a step entry by entry, broadcast."""
    shape = step.call.shape
    if isinstance(argument, Ref):
        found = read(argument.index)
        if len(found.shape) != len(shape) - 1:
            raise NoRows
        return rows.expand(found, shape[1:])
    check_alike(step, argument)
    return rows.constant(torch.as_tensor(argument, dtype=torch.float64).expand(shape)[0])


def _moved(step: Step, read: Read) -> Rows:
    moved = trace_entries(step)
    (piece,) = moved.pieces
    fixed = rows.constant(inserted(step) if bool((piece == 0).any()) else torch.zeros(1))
    everything = rows.concatenate([*(read(owner.index) for owner in moved.owners), fixed])
    places = torch.arange(piece.numel()).reshape(piece.shape)
    return rows.pick(everything, torch.where(piece == 0, sum(moved.lengths) + places, piece - 1))


def _chosen(step: Step, read: Read) -> Rows:
    mask, one, other = (_operand(step, step.call.arguments[place], read) for place in _CHOICES[step.call.op])
    return rows.add(rows.multiply(one, mask), rows.multiply(other, _not(mask)))


def _entry_by_entry(step: Step, name: str, read: Read, decisions: Decisions) -> Rows:
    arguments = step.call.arguments
    if not (step.call.dtype.is_floating_point or name in _SIGNS or name in _NOT):
        raise NoRows  # sums of booleans are no sums

    def operand(place: int) -> Rows:
        return _operand(step, arguments[place], read)

    first = operand(0)
    if name in ("add", "sub", "rsub"):
        second, alpha = operand(1), float(step.argument("alpha"))
        if name == "rsub":
            first, second = second, first
        return rows.add(first, rows.scale(second, alpha if name == "add" else -alpha))
    if name == "mul":
        return rows.multiply(first, operand(1))
    if name == "div":
        if isinstance(arguments[1], Ref):
            raise NoRows
        divisor = operand(1)
        return rows.multiply(first, replace(divisor, shift=1 / divisor.shift, is_exact=False))
    if name == "neg":
        return rows.scale(first, -1.0)
    if name in _NOT:
        if step.graph.calls[arguments[0].index].dtype != torch.bool:  # `logical_not` of a number v is [v == 0]
            raise NoRows
        return _not(first)
    if name in _SIGNS:
        if len(arguments) == 2:
            first = rows.add(first, rows.scale(operand(1), -1.0))
        return decisions.sign(first, _SIGNS[name])
    return decisions.apply(first, _SLOPES.get(name) or (float(step.argument("negative_slope")), 1.0))


def _not(mask: Rows) -> Rows:
    """1 - mask, for a mask that is constant in each state."""
    if len(mask.index):
        raise NoRows
    return replace(mask, shift=1 - mask.shift)
