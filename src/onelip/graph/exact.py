"""Exact sums over weights: floats are integers times a power of two, and integers can be summed without rounding."""

import functools
import itertools
import math
from collections.abc import Sequence
from fractions import Fraction

from torch import Tensor

from onelip.core.floats import integers
from onelip.core.rounding import up_root

# Error of a float64 sum of n non-negative numbers, relative: below n 2^-53 (1 + ...), so this is safe up to 2^28 terms.
_SLACK = 2.0**-24
_MOST_TERMS = 2**28


def squared_norm(values: Tensor) -> Fraction:
    """The sum of squares, without rounding.

    Examples:
        >>> squared_norm(Tensor([0.5, 1.5]))
        Fraction(5, 2)
    """
    numbers, exponent = integers(values)
    return Fraction(sum(n * n for n in numbers), 1 << 2 * exponent)


def largest_sum(rows: Tensor) -> Fraction:
    """max_i sum_j |rows_ij|, without rounding; 0 for an empty matrix.

    Float64 sums tell which rows can be the largest; only those are summed exactly.

    Examples:
        >>> largest_sum(Tensor([[1.0, -2.0], [0.5, 0.5]]))
        Fraction(3, 1)
    """
    rows = rows.detach().double().abs()
    if rows.numel() == 0:
        return Fraction(0)
    if rows.shape[1] > _MOST_TERMS:
        raise ValueError(f"expected rows of at most 2^28 numbers, got {rows.shape[1]}; split the layer")
    # Halved exponents for huge rows: a sum must not overflow to infinity and hide which one is the largest.
    sums = rows.mul(2.0**-600 if float(rows.max()) > 2.0**900 else 1.0).sum(1)
    # Tiny rows: below 2^-900 the relative error is no longer small, so all such rows stay candidates.
    candidates = rows[sums >= sums.max() * (1 - _SLACK) - 2.0**-900]
    numbers, exponent = integers(candidates[candidates > 0])
    ends = itertools.accumulate((candidates > 0).sum(1).tolist(), initial=0)
    return Fraction(max(sum(numbers[a:b]) for a, b in itertools.pairwise(ends)), 1 << exponent)


def squared_distances(rows: Tensor) -> list[list[Fraction]]:
    """||rows_i - rows_j||^2 for all pairs, without rounding.

    Examples:
        >>> squared_distances(Tensor([[0.0, 1.0], [1.0, 0.0]]))[0]
        [Fraction(0, 1), Fraction(2, 1)]
    """
    count, width = rows.shape
    numbers, exponent = integers(rows)
    lines = [numbers[i * width : (i + 1) * width] for i in range(count)]
    table = [[Fraction(0)] * count for _ in range(count)]
    for i in range(count):
        for j in range(i):
            table[i][j] = table[j][i] = Fraction(_square_of_difference(lines[i], lines[j]), 1 << 2 * exponent)
    return table


def _square_of_difference(one: Sequence[int], other: Sequence[int]) -> int:
    return sum((a - b) ** 2 for a, b in zip(one, other, strict=True))


@functools.lru_cache(maxsize=1024)
def gain(terms: int, norm: float) -> float:
    """A float not below max |p(i a)| for |a| <= norm, where p(x) = sum_{j <= terms} x^j / j!.

    So the norm of p(S) is not larger for any skew S of this norm: S is normal with eigenvalues i a. |p(i a)|^2 is
    1 + x^m q(x) for x = a^2, with rational coefficients, m being the first power after 0: the sign of q near 0 decides
    whether the series expands there. In each of many intervals of x the positive terms of q are largest at the end and
    the negative ones at the beginning. All of it is integer arithmetic.

    Examples:
        >>> gain(4, 2.8), round(gain(5, 2.0), 3)
        (1.0, 1.005)
    """
    if not 0 <= norm < math.inf:
        return math.inf
    whole = math.factorial(terms)
    coefficients = [0] * (terms + 1)  # times whole^2
    for j in range(terms + 1):
        for k in range(j % 2, terms + 1, 2):  # i^j conj(i^k) is real only for even j - k
            sign = 1 if (j - k) % 4 == 0 else -1
            coefficients[(j + k) // 2] += sign * (whole // math.factorial(j)) * (whole // math.factorial(k))
    m = next(j for j, c in enumerate(coefficients) if j > 0 and c != 0)
    # In units of 1 / 256 for x, and of 256^-terms for the whole.
    tail = [(c * 256 ** (terms - j), j - m) for j, c in enumerate(coefficients) if j >= m]
    most = 0
    for i in range(math.ceil(256 * Fraction(norm) ** 2)):
        most = max(most, (i + 1) ** m * sum(c * (i + 1 if c > 0 else i) ** j for c, j in tail))
    return up_root(1 + Fraction(most, whole**2 * 256**terms))


def is_below(values: Tensor | None, limit: Fraction) -> bool:
    """Whether all numbers are finite and below the limit in magnitude; NaN is not."""
    return values is None or values.numel() == 0 or bool((values.detach().abs() < float(limit)).all())
