"""Steps that join parts of one tensor again, bounded by which entries they read.

Example: `a, b = x.chunk(2, 1); y = torch.cat([a.abs(), b], 1)`. The rule of `cat` alone bounds y by sqrt(2), since it
does not know that a and b are different parts of x. With weights for each entry of x, a has (1, 0), its absolute value
too, b has (0, 1), and y has their sum (1, 1): its constant is 1.

Let A be the last call through which all operands of a step depend on the input (its dominator). Each operand, and then
the step itself, gets weights w_i >= 0, one for each entry of A, with

    ||f - f'||^2 <= sum_i w_i (A_i - A'_i)^2,

so the step is sqrt(max w)-Lipschitz in A. The weights follow the program:

    A itself            1
    slices, sums        rows (_rows.py, _row_rules.py): which entries of A are read, and with which factors
    L-Lipschitz maps    L^2 times the weights of the operand
    side by side        the sum of the weights: where the parts are disjoint, each entry of A is in one of them
    f + g               (1 + t) w_f + (1 + 1/t) w_g for any t > 0, as |a + b|^2 <= (1 + t) |a|^2 + (1 + 1/t) |b|^2

Where parts overlap, both weights count: nothing is assumed of them. Several operands that reach A through one call D
are first bounded together in terms of D.

`Joint` follows the calls and knows their dominators. A `_Region` belongs to one A and computes weights over its
entries. An `_Entity` is a call, or a tensor between calls that Note [Orders] adds.

Note [Orders]
    The maximum and the minimum of two tensors are two slices of one tensor: of the two, side by side, sorted pair by
    pair. Sorting is 1-Lipschitz (rearrangement). So this sorted tensor is put in between, as a call that the program
    does not have: then max(a, b) and min(a, b) are disjoint parts of it. Likewise amax, amin, median, topk and sort of
    one tensor over the same axes.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from onelip.core.rounding import multiply_up, up, up_root
from onelip.graph import _rows
from onelip.graph._row_rules import OPERATIONS, may_have_rows, rows_of_call
from onelip.graph._rows import Decisions, NoRows, Rows
from onelip.graph.calls import Call, Graph, Ref
from onelip.graph.ops.movement import MOVES, SPLITS, trace_entries
from onelip.graph.step import Refusal, Step, StepBound, find_rule

_SUMS = ("aten.add.Tensor", "aten.sub.Tensor", "aten.rsub.Tensor")
_PAIRS = {  # which half of the sorted pair
    **dict.fromkeys(("aten.maximum.default", "aten.max.other", "aten.fmax.default"), 1),
    **dict.fromkeys(("aten.minimum.default", "aten.min.other", "aten.fmin.default"), 0),
}
_OF_PAIRS = ("aten.hypot.default", "aten.logaddexp.default", "aten.logaddexp2.default")
_ORDERS = ("aten.amax.default", "aten.amin.default")
_ORDERS_OF_SEVERAL = (
    "aten.max.dim", "aten.min.dim", "aten.aminmax.default", "aten.median.dim", "aten.kthvalue.default",
    "aten.topk.default", "aten.sort.default", "aten.sort.stable",
)  # fmt: skip
_MEETS = 2.0**-40  # how far pieces may be apart, of their coefficients: see Note [Jumps] of _rows.py


class Weight(NamedTuple):
    """A bound of a step in terms of a call before it: sqrt of the largest weight, and a remark."""

    constant: float
    ancestor: int  # a call of the graph
    remark: str | None


@dataclass(frozen=True)
class _Entity:
    """A call of the graph, or one that is put in between (Note [Orders]).

    Attributes:
        shape: of a sample.
        operands: entities.
        parent: the last entity through which it depends on the input; its own number for the input.
        depth: number of parents above.
        factor: its constant in its one operand; None if there are several, or if none is known.
        call: the call of the graph.
        positions: if it consists of entries of its one operand, a function that gives which.
    """

    shape: tuple[int, ...]
    operands: tuple[int, ...]
    parent: int
    depth: int
    factor: float | None
    call: Call | None = None
    positions: Callable[[], Tensor] | None = None


class Joint:
    """Follows a graph call by call; `enter` every call, in order."""

    def __init__(self, graph: Graph, effort: Any) -> None:
        self.graph, self.effort = graph, effort
        self.entities: list[_Entity] = []
        self.of_call: dict[int, int] = {}
        self._same: dict[Any, int] = {}
        self._refused: set[int] = set()  # calls
        self._roots: set[int] = set()  # entities that stand for roots
        self._pairs: dict[tuple[int, ...], int] = {}  # by the two
        self._sorted: dict[tuple[int, ...], int] = {}  # by the tensor, and the axes
        self._regions: dict[int, _Region] = {}
        self._links: dict[int, tuple[Tensor, str | None] | None] = {}

    def enter(self, call: Call, verdict: StepBound) -> Weight | None:
        """Add a call and the result of its rule; return a bound if it joins parts of one tensor.

        A call that is made of squares stands for its root, as `StepBound.root` does.
        """
        try:
            entity = self._entity(call, verdict)
        except Exception:  # of what cannot be followed nothing is known
            entity = self._new(call.shape[1:], (), None)
        self.of_call[call.index] = entity
        try:
            return self._bound(call, entity)
        except Exception:  # and proves nothing
            return None

    def _entity(self, call: Call, verdict: StepBound) -> int:
        key = self._key(call)
        if key not in self._same:
            self._same[key] = self._made(call, verdict)
        if verdict.root is not None:
            self._roots.add(self._same[key])
        return self._same[key]

    def _made(self, call: Call, verdict: StepBound) -> int:
        unknown = (call.shape[1:], (), None)
        if verdict.root is not None or verdict.by_roots:
            inputs = call.inputs if verdict.ancestor is None else (verdict.ancestor,)
            if len(inputs) > 1 and call.op not in _SUMS:
                return self._new(*unknown)
            operands = tuple(self.of_call[i] for i in inputs)
            return self._new(call.shape[1:], operands, verdict.root_factor, None if verdict.root is not None else call)
        reads = [self.graph.calls[i] for i in call.inputs]
        if any(self.of_call[read.index] in self._roots for read in reads):
            return self._new(*unknown)  # it reads squares, and their entities stand for the roots
        if verdict.is_refused:
            # Perhaps it has rows: a product with a mask jumps, and a sum of two may not.
            self._refused.add(call.index)
            return self._new(*unknown) if call.op not in OPERATIONS else self._plain(call, None)
        is_lost = call.op == "getitem" and reads[0].index in self._refused
        return self._new(*unknown) if is_lost else self._add(call, verdict.factor)

    def _bound(self, call: Call, number: int) -> Weight | None:
        found = self.entities[number]
        if found.operands and found.operands[0] in self._pairs.values():  # of a pair, which is none of the calls
            number, found = found.operands[0], self.entities[found.operands[0]]
        if len(found.operands) < 2:
            return None
        link = self._link(number)
        if link is None or not self.region(found.parent).has_parts(found.operands):
            return None
        constant, above = _root(link[0]), found.parent
        while (ancestor := self.entities[above].call) is None:
            scale = self.scale(above, self.entities[above].parent)
            if scale is None:
                return None
            constant, above = multiply_up(constant, scale), self.entities[above].parent
        return Weight(constant, ancestor.index, link[1])

    def _add(self, call: Call, factor: float | None) -> int:
        producer = self.graph.calls[call.inputs[0]] if call.op == "getitem" else call
        step = self.step(producer)
        if call.op == "getitem" and producer.op in SPLITS:
            index = call.arguments[1]
            source = self.of_call[producer.inputs[0]]
            return self._new(call.shape[1:], (source,), 1.0, call, lambda: trace_entries(step).pieces[index] - 1)
        if call.op == "getitem" and len(producer.inputs) == 1:
            found = self._order(call, producer) if producer.op in _ORDERS_OF_SEVERAL else None
            # One of several results; what the producer's own rule says is in the call's constant.
            return found if found is not None else self._new(
                call.shape[1:], (self.of_call[producer.inputs[0]],), self._factor_of(producer, factor), call
            )  # fmt: skip
        if (call.op in _PAIRS or call.op in _OF_PAIRS) and len(call.inputs) == 2 and self._are_alike(call):
            return self._of_pair(call)
        if call.op in _ORDERS and len(call.inputs) == 1 and (found := self._order(call, call)) is not None:
            return found
        return self._plain(call, factor)

    def _plain(self, call: Call, factor: float | None) -> int:
        operands = tuple(self.of_call[i] for i in call.inputs)
        return self._new(call.shape[1:], operands, factor if len(operands) == 1 else None, call)

    def _key(self, call: Call) -> Any:
        """The same for calls that compute the same: programs slice one tensor again and again."""

        def plain(argument: Any) -> Any:
            if isinstance(argument, Ref):
                return "call", self.of_call[argument.index]
            return ("tensor", id(argument)) if isinstance(argument, Tensor) else argument

        if not call.inputs:
            return call.index
        return repr((call.op, id(call.module), tree_map(plain, (call.arguments, call.keywords))))

    def _factor_of(self, producer: Call, factor: float | None) -> float | None:
        own = self.entities[self.of_call[producer.index]].factor
        return None if own is None or factor is None else multiply_up(own, factor)

    def _new(
        self,
        shape: tuple[int, ...],
        operands: tuple[int, ...],
        factor: float | None,
        call: Call | None = None,
        positions: Callable[[], Tensor] | None = None,
    ) -> int:
        number = len(self.entities)
        parent = self.common(operands) if operands else 0
        depth = self.entities[parent].depth + 1 if number else 0
        self.entities.append(_Entity(shape, operands, parent, depth, factor, call, positions))
        return number

    def _are_alike(self, call: Call) -> bool:
        """Whether both operands have the shape of the result."""
        return all(self.graph.calls[i].shape == call.shape for i in call.inputs)

    def _of_pair(self, call: Call) -> int:
        """The larger or the smaller of two, Note [Orders], or something else that is 1-Lipschitz in the pair."""
        pair = tuple(sorted(self.of_call[i] for i in call.inputs))
        shape = call.shape[1:]
        if pair not in self._pairs:
            self._pairs[pair] = self._new((2, *shape), pair, None)
        if call.op in _OF_PAIRS:
            return self._new(shape, (self._pairs[pair],), 1.0, call)
        positions = torch.arange(2 * math.prod(shape)).reshape(2, *shape)
        which = _PAIRS[call.op]
        return self._new(shape, (self._pairs[pair],), 1.0, call, lambda: positions[which])

    def _order(self, call: Call, producer: Call) -> int | None:
        """Some entries of groups, by their rank, Note [Orders]."""
        source = self.of_call[producer.inputs[0]]
        shape = self.entities[source].shape
        step = self.step(producer)
        dim = step.argument("dim")
        index = call.arguments[1] if call.op == "getitem" else 0
        axes = sorted({d % (len(shape) + 1) - 1 for d in (dim if isinstance(dim, list | tuple) else [dim])}
                      if dim is not None and dim != [] else {-1})  # fmt: skip
        if axes[0] < 0 or (index and "aminmax" not in producer.op):  # the batch; or indices, which jump
            return None
        count = math.prod(shape[axis] for axis in axes)
        ranks = _ranks(step, count, index)
        if count == 0 or ranks is None:
            return None
        kept = [n for axis, n in enumerate(shape) if axis not in axes]
        key = (source, *axes)
        if key not in self._sorted:
            self._sorted[key] = self._new((*kept, count), (source,), 1.0)
        between = self._sorted[key]

        def positions() -> Tensor:
            found = torch.arange(math.prod(shape)).reshape(*kept, count)[..., ranks]
            return (found.movedim(-1, axes[0]) if len(axes) == 1 else found).reshape(call.shape[1:])

        return self._new(call.shape[1:], (between,), 1.0, call, positions)

    def step(self, call: Call, constants: Any = ()) -> Step:
        return Step(call, self.graph, constants, self.effort)

    def region(self, ancestor: int) -> "_Region":
        if ancestor not in self._regions:
            self._regions[ancestor] = _Region(self, ancestor)
        return self._regions[ancestor]

    def common(self, entities: Sequence[int]) -> int:
        """The last entity through which all of them depend on the input, possibly one of them."""
        found = entities[0]
        for other in entities[1:]:
            while found != other:
                a, b = self.entities[found], self.entities[other]
                if a.depth >= b.depth:
                    found = a.parent
                if b.depth >= a.depth:
                    other = b.parent
        return found

    def scale(self, entity: int, ancestor: int) -> float | None:
        """A constant of an entity in terms of one that it depends on the input through."""
        constant = 1.0
        while entity != ancestor:
            link = self._link(entity)
            if link is None:
                return None
            constant = multiply_up(constant, _root(link[0]))
            entity = self.entities[entity].parent
        return constant

    def _link(self, number: int) -> tuple[Tensor, str | None] | None:
        """Weights of an entity in terms of its parent, and a remark; None if nothing is known."""
        if number not in self._links:
            entity = self.entities[number]
            if entity.factor is not None:
                self._links[number] = torch.tensor(_square_up(entity.factor), dtype=torch.float64), None
            else:
                self._links[number] = self.region(entity.parent).join(number) if entity.operands else None
        return self._links[number]


def _ranks(step: Step, count: int, index: int) -> list[int] | None:
    """Which entries of each sorted group a step gives, from the smallest on."""
    name = step.call.op.split(".")[1]
    if name == "sort":
        return list(range(count))[:: -1 if step.argument("descending") else 1]
    if name == "topk":
        k = step.argument("k")
        ranks = list(range(count))[::-1][:k] if step.argument("largest") else list(range(count))[:k]
        return ranks if step.argument("sorted") else None
    if name == "median":
        return [(count - 1) // 2]
    if name == "kthvalue":
        return [step.argument("k") - 1]
    return [count - 1] if name in ("amax", "max") or (name == "aminmax" and index == 1) else [0]


class _Region:
    """What is known of entities in terms of one of them, the ancestor, through which all depend on the input."""

    def __init__(self, joint: Joint, ancestor: int) -> None:
        self.joint, self.ancestor = joint, ancestor
        self.size = math.prod(joint.entities[ancestor].shape)
        self.decisions = Decisions()
        self._kinds: dict[int, str] = {0: "whole", ancestor: "rows"}
        self._rows: dict[int, Rows | None] = {}

    def kind(self, number: int) -> str:
        """ "rows": perhaps piecewise affine; "narrow": reads fewer entries than the ancestor has; or "whole"."""
        missing, found = [number], self._kinds
        while missing:
            if missing[-1] in found:
                missing.pop()
                continue
            entity = self.joint.entities[missing[-1]]
            has_rows = entity.positions is not None or (
                entity.call is not None and may_have_rows(entity.call, self.joint.graph.batch)
            )
            on = (*entity.operands, entity.parent) if has_rows else (entity.parent,)
            if unknown := [other for other in on if other not in found]:
                missing += unknown
                continue
            last = missing.pop()
            if has_rows and all(found[other] == "rows" for other in on):
                found[last] = "rows"
            elif found[entity.parent] == "rows":
                found[last] = "narrow" if math.prod(self.joint.entities[entity.parent].shape) < self.size else "whole"
            else:
                found[last] = found[entity.parent]
        return found[number]

    def has_parts(self, operands: Sequence[int]) -> bool:
        """Whether weights can be tighter than constants: if at least two operands read only parts."""
        return sum(self.kind(operand) != "whole" for operand in operands) >= 2

    def join(self, number: int) -> tuple[Tensor, str | None] | None:
        """Weights of an entity with several operands, and a remark; None if nothing is known."""
        entity = self.joint.entities[number]
        if entity.call is None:
            found = self._family([(operand, 1) for operand in entity.operands])
            return None if found is None else (found, None)
        if self.has_parts(entity.operands):
            try:
                return self._parts(number, entity.call)
            except (NoRows, Refusal):
                pass
        rule = find_rule(entity.call.op)
        if rule is None or entity.call.index in self.joint._refused:
            return None
        constants = {i: self.joint.scale(self.joint.of_call[i], self.ancestor) for i in entity.call.inputs}
        if any(constant is None for constant in constants.values()):
            return None
        try:
            constant = rule(self.joint.step(entity.call, constants)).constant
        except Refusal:
            return None
        return None if constant is None else (torch.tensor(_square_up(constant), dtype=torch.float64), None)

    def _parts(self, number: int, call: Call) -> tuple[Tensor, str | None]:
        if self.kind(number) == "rows" and (rows := self.rows(number)) is not None:
            exact = self.decisions.is_continuous(rows, 0.0)
            if exact or self.decisions.is_continuous(rows, _MEETS):
                return _rows.weights(rows, self.size), None if exact else _REMARK
        found = self._sum(call) if call.op in _SUMS else self._side_by_side(call) if call.op in MOVES else None
        if found is None:
            raise NoRows
        return found, None

    def _sum(self, call: Call) -> Tensor | None:
        step = self.joint.step(call)
        alpha = abs(float(step.argument("alpha")))
        terms = []
        for name, factor in (("self", 1.0), ("other", alpha)):
            operand = step.argument(name)
            if call.op == "aten.rsub.Tensor":
                factor = 1.0 if name == "other" else alpha
            shape = self.joint.graph.calls[operand.index].shape
            if len(shape) != len(call.shape):
                return None
            copies = math.prod(call.shape) // max(1, math.prod(shape))
            weights = self._whole(self.joint.of_call[operand.index])
            if weights is None:
                return None
            terms.append(_times(_square_up(factor), _times(float(copies), weights)))
        first, second = terms
        if not float(first.max()) > 0 or not float(second.max()) > 0:
            return _plus(first, second)
        ratio = math.sqrt(float(second.max()) / float(first.max()))
        sums = [_plus(_times(up(1 + Fraction(t)), first), _times(up(1 + 1 / Fraction(t)), second))
                for t in (ratio ** (p / 4) for p in range(2, 9))]  # fmt: skip
        return min(sums, key=lambda weights: float(weights.max()))

    def _side_by_side(self, call: Call) -> Tensor | None:
        moved = trace_entries(self.joint.step(call))
        numbers = torch.cat([piece.flatten() for piece in moved.pieces])
        parts: list[Rows] = []
        columns = torch.full((1 + sum(moved.lengths),), -1)  # from the numbers of `Moved` to places in the parts
        others: list[tuple[int, int]] = []
        start, place = 1, 0
        for owner, length in zip(moved.owners, moved.lengths, strict=True):
            entity = self.joint.of_call[owner.index]
            rows = self.rows(entity) if self.kind(entity) == "rows" else None
            if rows is None:
                counts = torch.bincount(numbers, minlength=len(columns))[start : start + length]
                others.append((entity, int(counts.max()) if length else 0))
            else:
                parts.append(rows)
                columns[start : start + length] = torch.arange(place, place + length)
                place += length
            start += length
        found = self._family(others)
        if found is None or not parts:
            return found
        picked = columns[numbers]
        rows = _rows.pick(_rows.concatenate(parts), picked[picked >= 0])
        if not self.decisions.is_continuous(rows, 0.0):
            return None
        return _plus(found, _rows.weights(rows, self.size))

    def _family(self, members: list[tuple[int, int]]) -> Tensor | None:
        """Weights of entities side by side, each repeated by its count."""
        total = torch.zeros((), dtype=torch.float64)
        counts: Counter[int] = Counter()
        for entity, times in members:
            counts[entity] += times
        members = list(counts.items())
        once = [entity for entity, times in members if times == 1 and self.kind(entity) == "rows"]
        together = {entity: self.rows(entity) for entity in once}
        parts = [rows for rows in together.values() if rows is not None]
        if len(parts) == len(together) > 1:
            rows = _rows.concatenate(parts)
            if not self.decisions.is_continuous(rows, 0.0):
                return None
            total = _rows.weights(rows, self.size)
            members = [member for member in members if member[0] not in together]
        groups: dict[int, list[tuple[int, int]]] = {}
        for member in members:
            groups.setdefault(self._child(member[0]), []).append(member)
        for group in groups.values():
            below = self.joint.common([entity for entity, _ in group])
            if len(group) == 1 or below == self.ancestor:
                for entity, times in group:
                    found = self._whole(entity)
                    if found is None:
                        return None
                    total = _plus(total, _times(float(times), found))
                continue
            inner = self.joint.region(below)._family(group)
            found = None if inner is None else self._through(below, inner)
            if found is None:
                return None
            total = _plus(total, found)
        return total

    def _child(self, entity: int) -> int:
        """The entity below the ancestor through which another one depends on it."""
        while entity != self.ancestor and self.joint.entities[entity].parent != self.ancestor:
            entity = self.joint.entities[entity].parent
        return entity

    def _whole(self, number: int) -> Tensor | None:
        """Weights of an entity: its rows, or those of the last one before it that has some, times constants."""
        chain, rows = [], None
        while number != self.ancestor:
            rows = self.rows(number) if self.kind(number) == "rows" else None
            if rows is not None and self.decisions.is_continuous(rows, 0.0):
                break
            chain.append(number)
            number = self.joint.entities[number].parent
        if number == self.ancestor or rows is None:
            weights = torch.ones((), dtype=torch.float64)
        else:
            weights = _rows.weights(rows, self.size)
        for entity in reversed(chain):
            link = self.joint._link(entity)
            if link is None:
                return None
            is_next = self.joint.entities[entity].parent == number
            through = self._through(number, link[0]) if is_next and link[0].dim() else None
            weights = _times(float(link[0].max()), weights) if through is None else through
        return weights

    def _through(self, number: int, weights: Tensor) -> Tensor | None:
        """Weights over the entries of an entity, as weights over those of the ancestor."""
        if number == self.ancestor:
            return weights
        rows = self.rows(number) if weights.dim() and self.kind(number) == "rows" else None
        if rows is not None and len(rows.index) == 1 and len(rows.slope) == 1:
            squares = _up(rows.slope[0, 0] ** 2, rows.slope[0, 0].abs() == 1)
            terms = _up(squares * weights, (squares == 1) | (squares == 0))
            total = torch.zeros(self.size, dtype=torch.float64).index_add_(0, rows.index[0], terms)
            most = int(torch.bincount(rows.index[0]).max()) if len(rows.index[0]) else 0
            return total if most <= 1 else total * (1 + most * 2.0**-50)
        whole = self._whole(number)
        return None if whole is None else _times(float(weights.max()), whole)

    def rows(self, number: int) -> Rows | None:
        """An entity of kind "rows" as rows over the ancestor, or None."""
        missing = [number]
        while missing:
            last = missing[-1]
            entity = self.joint.entities[last]
            if last == self.ancestor:
                self._rows[last] = _rows.identity(entity.shape)
            unknown = [] if last in self._rows else [other for other in entity.operands if other not in self._rows]
            if unknown:
                missing += unknown
                continue
            missing.pop()
            if last not in self._rows:
                try:
                    self._rows[last] = self._made(entity)
                except (NoRows, Refusal):
                    self._rows[last] = None
        return self._rows[number]

    def _made(self, entity: _Entity) -> Rows:
        if entity.positions is not None:
            return _rows.pick(self._read(entity.operands[0]), entity.positions())
        assert entity.call is not None
        for operand in entity.operands:
            self._read(operand)

        def read(call: int) -> Rows:
            return self._read(self.joint.of_call[call])

        return rows_of_call(self.joint.step(entity.call), entity.factor, read, self.decisions)

    def _read(self, number: int) -> Rows:
        """The rows of an entity, which are made already."""
        rows = self._rows.get(number)
        if rows is None:
            raise NoRows
        return rows


_REMARK = (
    "its pieces meet only up to the rounding of its constants: bounded as in real arithmetic, where sines and cosines "
    "are exact"
)


def _square_up(number: float) -> float:
    return up(Fraction(number) ** 2) if number < math.inf else math.inf


def _root(weights: Tensor) -> float:
    largest = float(weights.max()) if weights.numel() else 0.0
    return up_root(Fraction(largest)) if largest < math.inf else math.inf


def _up(numbers: Tensor, is_exact: Tensor) -> Tensor:
    return torch.where(is_exact, numbers, torch.nextafter(numbers, torch.tensor(math.inf, dtype=torch.float64)))


def _times(factor: float, weights: Tensor) -> Tensor:
    """Rounded up."""
    return weights if factor == 1 else _up(factor * weights, (weights == 0) | (weights == 1))


def _plus(a: Tensor, b: Tensor) -> Tensor:
    """Rounded up."""
    return _up(a + b, (a == 0) | (b == 0))
