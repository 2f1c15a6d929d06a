"""Bounds of calls that join parts of one tensor, by weights over its entries; see the head of the package.

`Joint` follows the calls of a graph. A `Region` belongs to one value A, the ancestor, and computes weights over its
entries for values that depend on the input through A. Weights are a tensor of one number for each entry of A, or of a
single number for all of them.

To join the values a.abs() and b of the example at the head of the package, the region of x reads both as rows over x.
For `torch.cat([f(a), b], 1)` with any L-Lipschitz f, the weights of f(a) are L^2 times those of a. Several operands
that depend on A through one value D are first joined over D, in the region of D.
"""

import contextlib
import math
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import torch
from torch import Tensor

from onelip.core.rounding import multiply_up, up, up_root
from onelip.graph.ops.movement import MOVES, trace_entries
from onelip.graph.parts.rows import Decisions, NoRows, Rows, concatenate, identity, pick, weights_of_rows
from onelip.graph.parts.values import SUMS, Value, Values, may_have_rows, rows_of_call
from onelip.graph.step import Call, Graph, Refusal, StepBound, find_rule

_MEETS = 2.0**-40  # how far pieces may be apart, relative to their coefficients: see Note [Jumps] of rows.py
_REMARK = (
    "its pieces meet only up to the rounding of its constants: bounded as in real arithmetic, where sines and cosines "
    "are exact"
)


class Unknown(Exception):
    """Nothing is known of a value in terms of one that it depends on."""


class JointBound(NamedTuple):
    """The constant of a call in terms of an earlier one, its dominator, and a remark."""

    constant: float
    ancestor: int  # a call of the graph
    remark: str | None


class Joint:
    """Follows a graph call by call; `enter` every call, in order."""

    def __init__(self, graph: Graph, effort: Any) -> None:
        self.values = Values(graph, effort)
        self.rounded: set[int] = set()  # values whose pieces meet only up to rounding
        self._regions: dict[int, Region] = {}
        self._links: dict[int, Tensor | None] = {}

    def enter(self, call: Call, bound: StepBound) -> JointBound | None:
        """Add a call and the result of its rule; return a bound if it joins parts of one tensor."""
        number = self.values.add(call, bound)
        try:
            return self._bound(number)
        except Exception:  # proves nothing
            return None

    def _bound(self, number: int) -> JointBound | None:
        value = self.values[number]
        if value.operands and value.operands[0] in self.values.pairs:
            number, value = value.operands[0], self.values[value.operands[0]]
        above = value.dominator
        if len(value.operands) < 2 or not self.region(above).has_parts(value.operands):
            return None
        constant = _root(self.link(number))
        while (ancestor := self.values[above].call) is None:
            constant = multiply_up(constant, _root(self.link(above)))
            above = self.values[above].dominator
        return JointBound(constant, ancestor.index, _REMARK if number in self.rounded else None)

    def region(self, ancestor: int) -> "Region":
        """The region of a value."""
        if ancestor not in self._regions:
            self._regions[ancestor] = Region(self, ancestor)
        return self._regions[ancestor]

    def link(self, number: int) -> Tensor:
        """Weights of a value over the entries of its dominator."""
        if number not in self._links:
            value, self._links[number] = self.values[number], None
            with contextlib.suppress(Unknown, Refusal):
                if value.factor is not None:
                    self._links[number] = _one_weight(value.factor)
                elif value.operands:
                    self._links[number] = self.region(value.dominator).join(number)
        if (found := self._links[number]) is None:
            raise Unknown
        return found

    def constant(self, number: int, ancestor: int) -> float:
        """The constant of a value in terms of one that it depends on the input through."""
        constant = 1.0
        while number != ancestor:
            constant = multiply_up(constant, _root(self.link(number)))
            number = self.values[number].dominator
        return constant


class Region:
    """Weights of values over the entries of one of them, the ancestor, through which they depend on the input."""

    def __init__(self, joint: Joint, ancestor: int) -> None:
        self.joint, self.values, self.ancestor = joint, joint.values, ancestor
        self.size = math.prod(self.values[ancestor].shape)
        self.decisions = Decisions()
        self._reach = {ancestor: "rows"}
        self._next = ancestor + 1
        self._rows: dict[int, Rows | None] = {}

    def has_parts(self, operands: Sequence[int]) -> bool:
        """Whether weights can be tighter than constants: if at least two operands read only parts."""
        return sum(self.reach(operand) != "whole" for operand in operands) >= 2

    def reach(self, number: int) -> str:
        """How a value reads the ancestor: "rows" (it may be piecewise affine), "narrow" (some entries) or "whole"."""
        for i in range(self._next, number + 1):
            value = self.values[i]
            on = {self._reach.get(other, "whole") for other in (value.dominator, *value.operands)}
            above = self._reach.get(value.dominator, "whole")
            if self._may_have_rows(value) and on == {"rows"}:
                self._reach[i] = "rows"
            elif above == "rows":
                is_narrow = math.prod(self.values[value.dominator].shape) < self.size
                self._reach[i] = "narrow" if is_narrow else "whole"
            else:
                self._reach[i] = above
        self._next = max(self._next, number + 1)
        return self._reach.get(number, "whole")

    def _may_have_rows(self, value: Value) -> bool:
        is_known = value.call is not None and may_have_rows(value.call, self.values.graph.batch)
        return is_known or value.positions is not None

    def rows(self, number: int) -> Rows | None:
        """A value as rows over the ancestor, or None."""
        if self.reach(number) != "rows":
            return None
        missing, todo = set[int](), [number]
        while todo:
            last = todo.pop()
            if last not in self._rows and last not in missing:
                missing.add(last)
                todo += self.values[last].operands if last != self.ancestor else ()
        for last in sorted(missing):
            self._rows[last] = None
            with contextlib.suppress(NoRows, Refusal):
                self._rows[last] = self._make_rows(last)
        return self._rows[number]

    def _make_rows(self, number: int) -> Rows:
        value = self.values[number]
        if number == self.ancestor:
            return identity(value.shape)

        def read(operand: int) -> Rows:
            if (rows := self._rows[operand]) is None:
                raise NoRows
            return rows

        operands = [read(operand) for operand in value.operands]
        if value.positions is not None:
            return pick(operands[0], value.positions())
        assert value.call is not None
        step, of_call = self.values.step(value.call), self.values.of_call
        return rows_of_call(step, value.factor, lambda call: read(of_call[call]), self.decisions)

    def join(self, number: int) -> Tensor:
        """Weights of a value with several operands, whose dominator is the ancestor."""
        value = self.values[number]
        if value.call is None:
            return self._side_by_side([(operand, 1) for operand in value.operands])
        if self.has_parts(value.operands):
            with contextlib.suppress(NoRows, Unknown, Refusal):
                return self._join_parts(number, value.call)
        rule = find_rule(value.call.op)
        if rule is None or value.is_refused:
            raise Unknown
        constants = {i: self.joint.constant(self.values.of_call[i], self.ancestor) for i in value.call.inputs}
        constant = rule(self.values.step(value.call, constants)).constant
        if constant is None:
            raise Unknown
        return _one_weight(constant)

    def _join_parts(self, number: int, call: Call) -> Tensor:
        if (rows := self.rows(number)) is not None:
            is_exact = self.decisions.is_continuous(rows, 0.0)
            if is_exact or self.decisions.is_continuous(rows, _MEETS):
                if not is_exact:
                    self.joint.rounded.add(number)
                return weights_of_rows(rows, self.size)
        if call.op in SUMS:
            return self._sum(call)
        if call.op in MOVES:
            return self._moved(call)
        raise Unknown

    def _sum(self, call: Call) -> Tensor:
        """f + g, with the best of several t: see the head of the package."""
        step = self.values.step(call)
        alpha = abs(float(step.argument("alpha")))
        factors = (alpha, 1.0) if call.op == "aten.rsub.Tensor" else (1.0, alpha)
        terms = []
        for name, factor in zip(("self", "other"), factors, strict=True):
            operand = step.argument(name).index
            shape = self.values.graph.calls[operand].shape
            if len(shape) != len(call.shape):
                raise Unknown
            copies = math.prod(call.shape) // max(1, math.prod(shape))
            weights = self.weights(self.values.of_call[operand])
            terms.append(_times(_square_up(factor), _times(float(copies), weights)))
        first, second = terms
        if not float(first.max()) > 0 or not float(second.max()) > 0:
            return _plus(first, second)
        ratio = math.sqrt(float(second.max()) / float(first.max()))
        sums = [
            _plus(_times(up(1 + Fraction(t)), first), _times(up(1 + 1 / Fraction(t)), second))
            for t in (ratio ** (p / 4) for p in range(2, 9))
        ]
        return min(sums, key=lambda weights: float(weights.max()))

    def _moved(self, call: Call) -> Tensor:
        """Entries of several operands: rows one by one, other operands by how often an entry of them is copied."""
        moved = trace_entries(self.values.step(call))
        numbers = torch.cat([piece.flatten() for piece in moved.pieces])
        counts = torch.bincount(numbers, minlength=1 + sum(moved.lengths))
        parts: list[Rows] = []
        others: list[tuple[int, int]] = []
        columns = torch.full_like(counts, -1)  # from the numbers of `Moved` to places in the parts
        start, place = 1, 0
        for owner, length in zip(moved.owners, moved.lengths, strict=True):
            operand, own = self.values.of_call[owner.index], slice(start, start + length)
            if (rows := self.rows(operand)) is None:
                others.append((operand, int(counts[own].max()) if length else 0))
            else:
                parts.append(rows)
                columns[own] = torch.arange(place, place + length)
                place += length
            start += length
        total = self._side_by_side(others)
        if not parts:
            return total
        picked = columns[numbers]
        return _plus(total, self._of_rows(pick(concatenate(parts), picked[picked >= 0])))

    def _of_rows(self, rows: Rows) -> Tensor:
        if not self.decisions.is_continuous(rows, 0.0):
            raise Unknown
        return weights_of_rows(rows, self.size)

    def _side_by_side(self, members: list[tuple[int, int]]) -> Tensor:
        """Weights of values side by side, each repeated by its count."""
        counts: Counter[int] = Counter()
        for number, times in members:
            counts[number] += times
        total = torch.zeros((), dtype=torch.float64)
        once = [number for number, times in counts.items() if times == 1 and self.reach(number) == "rows"]
        parts = [rows for number in once if (rows := self.rows(number)) is not None]
        if len(parts) == len(once) > 1:
            total = self._of_rows(concatenate(parts))
            for number in once:
                del counts[number]
        groups: dict[int, list[tuple[int, int]]] = {}
        for number, times in counts.items():
            groups.setdefault(self._child(number), []).append((number, times))
        for group in groups.values():
            below = self.values.common([number for number, _ in group])
            if len(group) == 1 or below == self.ancestor:
                for number, times in group:
                    total = _plus(total, _times(float(times), self.weights(number)))
            else:
                total = _plus(total, self._pull_back(below, self.joint.region(below)._side_by_side(group)))
        return total

    def _child(self, number: int) -> int:
        """The value whose dominator is the ancestor, through which another one depends on it."""
        while number != self.ancestor and self.values[number].dominator != self.ancestor:
            number = self.values[number].dominator
        return number

    def weights(self, number: int) -> Tensor:
        """Weights of a value, or those of the last value before it that has rows, times the constants after that."""
        chain, rows = [], None
        while number != self.ancestor:
            rows = self.rows(number)
            if rows is not None and self.decisions.is_continuous(rows, 0.0):
                break
            chain.append(number)
            number = self.values[number].dominator
        if number == self.ancestor or rows is None:
            weights = torch.ones((), dtype=torch.float64)
        else:
            weights = weights_of_rows(rows, self.size)
        for i, below in enumerate(reversed(chain)):
            link = self.joint.link(below)
            is_over_rows = i == 0 and link.dim() > 0
            weights = self._pull_back(number, link) if is_over_rows else _times(float(link.max()), weights)
        return weights

    def _pull_back(self, number: int, weights: Tensor) -> Tensor:
        """Weights over the entries of a value, as weights over those of the ancestor."""
        if number == self.ancestor:
            return weights
        rows = self.rows(number) if weights.dim() else None
        if rows is None or len(rows.index) != 1 or len(rows.slope) != 1:
            return _times(float(weights.max()), self.weights(number))
        # Each entry of the value is a multiple of one entry of the ancestor, plus a constant.
        index, slope = rows.index[0], rows.slope[0, 0]
        squares = _up(slope**2, slope.abs() == 1)
        terms = _up(squares * weights, (squares == 1) | (squares == 0))
        total = torch.zeros(self.size, dtype=torch.float64).index_add_(0, index, terms)
        most = int(torch.bincount(index).max()) if len(index) else 0
        return total if most <= 1 else total * (1 + most * 2.0**-50)


def _square_up(number: float) -> float:
    return up(Fraction(number) ** 2) if number < math.inf else math.inf


def _one_weight(constant: float) -> Tensor:
    """The weight of all entries, for a value with this constant."""
    return torch.tensor(_square_up(constant), dtype=torch.float64)


def _root(weights: Tensor) -> float:
    """The constant that weights prove."""
    largest = float(weights.max()) if weights.numel() else 0.0
    return up_root(Fraction(largest)) if largest < math.inf else math.inf


def _up(numbers: Tensor, is_exact: Tensor) -> Tensor:
    """The next larger floats, where numbers may have been rounded."""
    return torch.where(is_exact, numbers, torch.nextafter(numbers, torch.tensor(math.inf, dtype=torch.float64)))


def _times(factor: float, weights: Tensor) -> Tensor:
    """Rounded up."""
    return weights if factor == 1 else _up(factor * weights, (weights == 0) | (weights == 1))


def _plus(a: Tensor, b: Tensor) -> Tensor:
    """Rounded up."""
    return _up(a + b, (a == 0) | (b == 0))
