"""The entries of one tensor as piecewise affine functions of the entries of another one, A, and the resulting weights.

Example: y = relu(x) - relu(-x) for A = x. Its terms are piecewise affine, and both are decided by the sign of x:

    sign of x                  -     0     +
    slope of relu(x)           0     0     1
    slope of relu(-x)         -1     0     0
    slope of y                 1     0     1

So y is 1-Lipschitz in x. The sum of the constants of both terms would be 2.

Note [Rows]
    Entry k of a sample of a value is

        sum_t slope[s, t, k] * A[index[t, k]]  +  shift[s, k],

    s being the state of some decisions. A decision is the sign (-, 0, +) of a function of A of the same kind: relu(x)
    is x times [x > 0], and max(a, b) is b + (a - b) [a - b > 0]. Functions that are decided by the same sign, or by the
    opposite one, share a decision, as in the example.

    A smooth function with slopes between l and h, such as tanh, has a slope in between at each point. The bounds below
    are convex in each such slope, so l and h are the worst: they count as the two sides of a decision about which
    nothing is known. The values of such a function are not known either: then the shift is NaN, and no sign can be
    taken.

Note [Weights]
    On the straight line from one input to another, the state changes finitely often, and between two changes the value
    moves by J_s times the step, with the matrix J_s of the state. If the value is continuous, then for every vector w
    with w_i >= sum_j |(J_s^T J_s)_ij| for all states s,

        ||value - value'||^2 <= sum_i w_i (A_i - A'_i)^2,

    since x^T G x <= sum |G_ij| (x_i^2 + x_j^2) / 2. States that no input has are counted all the same, and those with a
    zero need not be: where s stays 0, a multiple of s does not move. For column i only the rows that read A_i matter,
    so only the states of their decisions: if these are one place of each decision, then it is enough to let every place
    of a decision have the same state.

Note [Jumps]
    A product f [s > 0] is continuous only if f is 0 where s is 0. So wherever such products are used, the difference
    between the two sides of each decision must be a multiple m s of s. If coefficients have been rounded, it must be
    one up to rounding only: sides that meet in real arithmetic (the reflections of a Householder activation, made of
    sines and cosines) miss each other by 1e-16 of their slopes in float64, in each entry of A. The tolerance for shifts
    is relative to the shift of m s, and not larger than that for slopes: a large constant, which may be subtracted
    later, must hide no jump.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

STATES = 3  # of a decision: negative, zero, positive
_MOST_DECISIONS = 3
_MOST_NUMBERS = 2**25  # in one set of rows
_MOST_TERMS = 32  # of a row of J^T J
_ROUNDING = 2.0**-44  # of a coefficient, and of sums of few products of two
_CANCELS = 0.25  # a smaller part of a sum may have lost more digits than the rounding above allows
_TINY = 2.0**-400  # squares of smaller coefficients may leave the range of float64


class NoRows(Exception):
    """A value is no piecewise affine function of A, or has too many pieces."""


@dataclass(frozen=True)
class Rows:
    """Note [Rows]. All entries of a sample, flat.

    Attributes:
        shape: of a sample.
        index: (terms, n), entries of A.
        slope: (states, terms, n).
        shift: (states, n).
        decisions: their numbers; the states are all combinations of theirs, the last one running fastest.
        places: (decisions, n), the place of each decision that an entry depends on, or -1.
        may_jump: whether it may be discontinuous, Note [Jumps].
        is_exact: whether no coefficient has been rounded: otherwise equal ones may stand for different numbers.
    """

    shape: tuple[int, ...]
    index: Tensor
    slope: Tensor
    shift: Tensor
    decisions: tuple[int, ...]
    places: Tensor
    may_jump: bool = False
    is_exact: bool = True


def identity(shape: tuple[int, ...]) -> Rows:
    """A itself."""
    n = math.prod(shape)
    ones = torch.ones(1, 1, n, dtype=torch.float64)
    return Rows(shape, torch.arange(n)[None], ones, torch.zeros_like(ones[0]), (), _no_places(n))


def constant(values: Tensor) -> Rows:
    """Constants, which do not depend on A."""
    n, flat = values.numel(), values.double().reshape(1, -1)
    index = torch.zeros(0, n, dtype=torch.long)
    return Rows(tuple(values.shape), index, flat.new_zeros(1, 0, n), flat, (), _no_places(n))


def _no_places(n: int) -> Tensor:
    return torch.zeros(0, n, dtype=torch.long)


def _constants(shape: tuple[int, ...], decision: int, values: tuple[float, ...], may_jump: bool) -> Rows:
    """One constant for each state of a decision, the same for all entries; entry k is decided by place k."""
    n = math.prod(shape)
    shift = torch.tensor(values, dtype=torch.float64)[:, None].expand(STATES, n)
    slope, index = shift.new_zeros(STATES, 0, n), torch.zeros(0, n, dtype=torch.long)
    return Rows(shape, index, slope, shift, (decision,), torch.arange(n)[None], may_jump)


def pick(rows: Rows, positions: Tensor) -> Rows:
    """The entries at given positions, in the shape of these."""
    flat = positions.flatten()
    if rows.slope.shape[0] * max(1, rows.slope.shape[1]) * len(flat) > _MOST_NUMBERS:
        raise NoRows
    return replace(
        rows,
        shape=tuple(positions.shape),
        index=rows.index[:, flat],
        slope=rows.slope[:, :, flat],
        shift=rows.shift[:, flat],
        places=rows.places[:, flat],
    )


def expand(rows: Rows, shape: tuple[int, ...]) -> Rows:
    """Broadcast to a shape."""
    if rows.shape == shape:
        return rows
    return pick(rows, torch.arange(math.prod(rows.shape)).reshape(rows.shape).expand(shape))


def scale(rows: Rows, factor: float) -> Rows:
    """Return the rows times a number."""
    return rows if factor == 1 else multiply(rows, constant(torch.full(rows.shape, factor, dtype=torch.float64)))


def _are_signs(*numbers: Tensor) -> bool:
    """Whether products with these are exact."""
    return all(bool(((x == 0) | (x.abs() == 1)).all()) for x in numbers)


def _are_integers(*numbers: Tensor) -> bool:
    """Whether sums of few products of these are exact."""
    return all(bool(((x == x.round()) & (x.abs() < 2.0**20)).all()) for x in numbers)


def concatenate(parts: Sequence[Rows]) -> Rows:
    """All entries of all parts, in order, flat."""
    parts = _with_all_decisions(parts)
    terms = max(len(part.index) for part in parts)

    def longer(x: Tensor) -> Tensor:
        missing = terms - x.shape[-2]
        return torch.cat([x, x.new_zeros(*x.shape[:-2], missing, x.shape[-1])], -2) if missing else x

    return Rows(
        (sum(part.index.shape[1] for part in parts),),
        torch.cat([longer(part.index) for part in parts], 1),
        torch.cat([longer(part.slope) for part in parts], 2),
        torch.cat([part.shift for part in parts], 1),
        parts[0].decisions,
        torch.cat([part.places for part in parts], 1),
        any(part.may_jump for part in parts),
        all(part.is_exact for part in parts),
    )


def add(a: Rows, b: Rows) -> Rows:
    """Entry by entry, of one shape."""
    a, b = _with_all_decisions([a, b])
    if not (a.is_exact and b.is_exact) and _cancels(a, b):
        raise NoRows
    # Sums of small integers are exact; so are those where nothing is added to anything.
    is_apart = not bool((a.index[:, None] == b.index).any()) and not bool(((a.shift != 0) & (b.shift != 0)).any())
    is_exact = a.is_exact and b.is_exact and (is_apart or _are_integers(a.slope, a.shift, b.slope, b.shift))
    return merge(
        replace(
            a,
            index=torch.cat([a.index, b.index]),
            slope=torch.cat([a.slope, b.slope], 1),
            shift=a.shift + b.shift,
            places=_same_places(a, b),
            may_jump=a.may_jump or b.may_jump,
            is_exact=is_exact,
        )
    )


def _cancels(a: Rows, b: Rows) -> bool:
    """Whether slopes nearly cancel in a sum: if they have been rounded, little of the difference is known.

    Example: x / 3 * 3 - x has the slope 0 in float64, but not in real arithmetic, since 1 / 3 is rounded.
    """
    for i, p in zip(a.index, a.slope.unbind(1), strict=True):
        for j, q in zip(b.index, b.slope.unbind(1), strict=True):
            is_small = (p + q).abs() < _CANCELS * (p.abs() + q.abs())
            if bool((is_small & (i == j)).any()):
                return True
    return False


def multiply(a: Rows, b: Rows) -> Rows:
    """Return the products entry by entry; in each state, one of the factors must be constant."""
    if len(b.index):
        a, b = b, a
    if len(b.index):
        raise NoRows
    a, b = _with_all_decisions([a, b])
    slope, shift = _product(a.slope, b.shift[:, None]), _product(a.shift, b.shift)
    return replace(
        a,
        slope=slope,
        shift=shift,
        places=_same_places(a, b),
        may_jump=a.may_jump or b.may_jump,
        is_exact=a.is_exact and b.is_exact and (_are_signs(b.shift) or _are_signs(a.slope, a.shift)),
    )


def _product(a: Tensor, b: Tensor) -> Tensor:
    """The product; refused if a coefficient, or its square, could underflow: it would count as 0."""
    product = a * b
    if bool(((product.abs() < _TINY) & (a != 0) & (b != 0)).any()):
        raise NoRows
    return product


def _same_places(a: Rows, b: Rows) -> Tensor:
    if bool(((a.places != b.places) & (a.places >= 0) & (b.places >= 0)).any()):
        raise NoRows  # two places of one decision
    return torch.maximum(a.places, b.places)


def _with_all_decisions(parts: Sequence[Rows]) -> list[Rows]:
    """The parts as functions of the states of all their decisions."""
    everything = tuple(sorted({number for part in parts for number in part.decisions}))
    if all(part.decisions == everything for part in parts):
        return list(parts)
    if len(everything) > _MOST_DECISIONS:
        raise NoRows
    states = list(itertools.product(range(STATES), repeat=len(everything)))
    found = []
    for part in parts:
        own = [everything.index(number) for number in part.decisions]
        which = [sum(state[i] * STATES**p for p, i in enumerate(reversed(own))) for state in states]
        places = torch.full((len(everything), part.index.shape[1]), -1, dtype=torch.long)
        places[own] = part.places
        found.append(
            replace(part, slope=part.slope[which], shift=part.shift[which], decisions=everything, places=places)
        )
    return found


def merge(rows: Rows) -> Rows:
    """Equal rows that read every entry of A at most once, without terms that are 0 everywhere."""
    terms, n = rows.index.shape
    if terms > _MOST_TERMS or rows.slope.numel() > _MOST_NUMBERS:
        raise NoRows
    if terms == 0 or n == 0:
        return rows
    index, order = rows.index.sort(0)
    slope = rows.slope.gather(1, order.expand_as(rows.slope))
    for t in range(terms - 1, 0, -1):
        same = index[t] == index[t - 1]
        slope[:, t - 1] += slope[:, t] * same
        slope[:, t] *= ~same
    used = (slope != 0).any(0)
    order = (~used).byte().argsort(dim=0, stable=True)[: int(used.sum(0).max())]
    return replace(rows, index=index.gather(0, order), slope=slope.gather(1, order.expand(len(slope), -1, -1)))


class Decisions:
    """The decisions that rows over one tensor A depend on: the rows whose sign is taken, by number."""

    def __init__(self) -> None:
        self._given: list[Rows | None] = []  # None for a smooth function, of which only the slopes are known
        self._made: list[Rows | None] = []  # the same, merged

    def sign(self, rows: Rows, values: tuple[float, float, float]) -> Rows:
        """Constants for a negative, a zero and a positive entry."""
        if not self.is_continuous(rows, 0.0) or bool(rows.shift.isnan().any()):
            raise NoRows
        number, is_opposite = self._number(rows)
        return _constants(rows.shape, number, values[::-1] if is_opposite else values, may_jump=True)

    def apply(self, rows: Rows, slopes: tuple[float, float]) -> Rows:
        """A continuous function with one slope below zero and one above."""
        return replace(multiply(rows, self.sign(rows, (slopes[0], 0.0, slopes[1]))), may_jump=False)

    def smooth(self, rows: Rows, least: float, most: float) -> Rows:
        """A function of single entries with slopes from `least` to `most`."""
        if rows.may_jump:
            raise NoRows
        result = multiply(rows, _constants(rows.shape, self._new(None, None), (least, least, most), may_jump=False))
        return replace(result, shift=torch.full_like(result.shift, torch.nan))

    def _new(self, given: Rows | None, made: Rows | None) -> int:
        self._given.append(given)
        self._made.append(made)
        return len(self._made) - 1

    def _number(self, given: Rows) -> tuple[int, bool]:
        """The decision by the sign of these rows, and whether it has the opposite sign."""
        rows = merge(given)
        if len(rows.index) == 1 and len(rows.slope) == 1 and not bool(rows.shift.any()):
            rows = replace(rows, slope=rows.slope.sign(), is_exact=True)  # the sign of c x is that of c times that of x
        for number, other in enumerate(self._made):
            if self._given[number] is given:
                return number, False
            if other is None or not (rows.is_exact and other.is_exact):
                continue
            if rows.decisions != other.decisions or not torch.equal(rows.index, other.index):
                continue
            if not torch.equal(rows.places, other.places):  # equal tables that are decided by different entries
                continue
            for factor in (1, -1):
                if torch.equal(rows.slope, factor * other.slope) and torch.equal(rows.shift, factor * other.shift):
                    return number, factor == -1
        return self._new(given, rows), False

    def is_continuous(self, rows: Rows, tolerance: float) -> bool:
        """Note [Jumps]; where coefficients have been rounded, up to a tolerance relative to the slopes."""
        if not rows.may_jump:
            return True
        tolerance = 0.0 if rows.is_exact else tolerance
        rows = merge(rows)
        return all(self._meets(rows, number, tolerance) for number in rows.decisions)

    def _meets(self, rows: Rows, number: int, tolerance: float) -> bool:
        """Whether the sides of a decision differ by a multiple of the rows s whose sign it is, in every state."""
        places, made = rows.places[rows.decisions.index(number)], self._made[number]
        if made is None:
            return True
        decided = (places >= 0).nonzero().flatten()
        if not len(decided):
            return True
        try:
            f, s = _with_all_decisions([pick(rows, decided), pick(made, places[decided])])
            _same_places(f, s)
        except NoRows:
            return False
        width = STATES ** (len(f.decisions) - 1 - f.decisions.index(number))
        states = torch.arange(len(f.slope))
        below = states[(states // width) % STATES < STATES - 1]  # each state and the next one of this decision
        slope, shift = f.slope[below + width] - f.slope[below], f.shift[below + width] - f.shift[below]
        against, offset = s.slope[below], s.shift[below]
        size = f.slope.abs().amax(0)  # (terms, n)
        multiple, is_near = _nearest_multiple(f.index, slope, s.index, against, tolerance * size)
        expected = multiple * offset
        largest = size.amax(0) if len(size) else torch.zeros(len(decided), dtype=torch.float64)
        allowed = tolerance * torch.minimum(largest, expected.abs())
        return is_near and bool(((shift - expected).abs() <= allowed).all())


def _nearest_multiple(
    index: Tensor, slope: Tensor, s_index: Tensor, s_slope: Tensor, allowed: Tensor
) -> tuple[Tensor, bool]:
    """m (states, n) for which the slopes are nearly m times those of s, and whether they are.

    Each term has its own tolerance (terms, n): next to a large slope, a jump in another entry must not count as
    rounding.
    """
    if not len(index):
        return torch.zeros(slope.shape[0], slope.shape[2], dtype=torch.float64), True
    if not len(s_index):
        return torch.zeros_like(slope[:, 0]), not bool(slope.any())
    # The multiple is that of the largest coefficient of s.
    lead = s_slope.abs().amax(0).argmax(0)[None]  # (1, n)
    at, c = s_index.gather(0, lead), s_slope.gather(1, lead.expand(len(s_slope), 1, -1))[:, 0]
    own = (slope * (index == at)).sum(1)
    multiple = torch.where(c != 0, own / c, 0.0)  # (states, n)
    is_near = True
    for t in range(len(index)):
        matching = (s_slope * (s_index == index[t])).sum(1)
        is_near &= bool(((slope[:, t] - multiple * matching).abs() <= allowed[t]).all())
    for t in range(len(s_index)):
        is_alone = ~((index == s_index[t]) & (slope != 0).any(0)).any(0)
        is_near &= not bool(((multiple * s_slope[:, t]) * is_alone).any())
    return multiple, is_near


def weights_of_rows(rows: Rows, size: int) -> Tensor:
    """Note [Weights]: one number for each of `size` entries of A. The rows must be continuous."""
    rows = merge(rows)
    terms, n = rows.index.shape
    largest = rows.slope.abs().amax(0) if terms else rows.slope.new_zeros(0, n)
    term, row = largest.nonzero(as_tuple=True)
    column = rows.index[term, row]
    most = int(torch.bincount(column).max()) if len(column) else 0  # rows that read one entry of A
    is_exact = rows.is_exact and _are_integers(rows.slope)
    # Without cancellation, and with the worst state of every row by itself.
    plain = torch.zeros(size, dtype=torch.float64)
    plain.index_add_(0, column, largest[term, row] * largest.sum(0)[row])
    plain *= 1.0 if is_exact else 1 + _ROUNDING + most * 2.0**-50
    is_tight = most == 0 or (most == 1 and not rows.decisions)
    if is_tight or most * terms > _MOST_TERMS or not _is_uniform(rows, column, row, size):
        return plain
    columns, sums = _row_sums(rows, term, row, most)
    exact = sums if is_exact else sums + _ROUNDING * plain[columns]
    result = plain.clone()
    result[columns] = torch.minimum(exact, plain[columns])
    return result


def _row_sums(rows: Rows, term: Tensor, row: Tensor, most: int) -> tuple[Tensor, Tensor]:
    """The entries i of A that are read, and the largest sum_j |(J_s^T J_s)_ij| of each over all states s.

    Args:
        rows: merged.
        term, row: the coefficients that are not 0; each is in a column of J, and at most `most` are in one column.
    """
    column = rows.index[term, row]
    order = column.argsort(stable=True)
    columns, inverse, counts = column[order].unique_consecutive(return_inverse=True, return_counts=True)
    rank = torch.arange(len(order)) - (counts.cumsum(0) - counts)[inverse]
    # For each column the terms and rows that read it, filled up to `most`.
    terms_of, rows_of = (torch.zeros(len(columns), most, dtype=torch.long) for _ in range(2))
    is_there = torch.zeros(len(columns), most, dtype=torch.bool)
    terms_of[inverse, rank], rows_of[inverse, rank], is_there[inverse, rank] = term[order], row[order], True
    others, by = rows.index[:, rows_of].movedim(0, -1).flatten(1).sort(1)  # (columns, most * terms)
    found = torch.zeros(len(columns), dtype=torch.float64)
    for state in itertools.product((0, STATES - 1), repeat=len(rows.decisions)):
        slope = rows.slope[sum(digit * STATES**p for p, digit in enumerate(reversed(state)))]
        products = (slope[terms_of, rows_of] * is_there)[..., None] * slope[:, rows_of].movedim(0, -1)
        found = torch.maximum(found, _sums_of_segments(others, products.flatten(1).gather(1, by)))
    return columns, found


def _sums_of_segments(keys: Tensor, values: Tensor) -> Tensor:
    """Values of equal keys, which are sorted, are added; then their magnitudes."""
    total, running = torch.zeros_like(values[:, 0]), values[:, 0]
    for i in range(1, keys.shape[1]):
        goes_on = keys[:, i] == keys[:, i - 1]
        total = total + torch.where(goes_on, 0.0, running.abs())
        running = torch.where(goes_on, running, 0.0) + values[:, i]
    return total + running.abs()


def _is_uniform(rows: Rows, column: Tensor, row: Tensor, size: int) -> bool:
    """Whether the rows that read one entry of A depend on one place of each decision."""
    for places in rows.places:
        place = places[row]
        decided = place >= 0
        least = torch.full((size,), 2**62).scatter_reduce_(0, column[decided], place[decided], "amin")
        most = torch.full((size,), -1).scatter_reduce_(0, column[decided], place[decided], "amax")
        if bool(((most >= 0) & (least != most)).any()):
            return False
    return True
