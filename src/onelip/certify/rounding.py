"""Numbers of a proof: exact fractions, rounded to binary64 only in the safe direction.

    up(x)       the smallest float not below x          below(x)    the largest float below x
    up_root(x)  the smallest float whose square is not below x

All comparisons are between fractions, so nothing here is subject to rounding itself. The checker (`onelip.checker`)
has its own version of each and demands the same numbers.

Note [Arithmetic]
    The program that is certified computes in IEEE binary64, rounds to nearest, and sums each inner product in any
    order, with or without fused multiply-adds. One operation then gives (a op b)(1 + d) + h with |d| <= U and
    |h| <= 2^-1022 (1 + |a| + |b|): h is underflow, also where subnormal operands and results are flushed to zero.
    An inner product of n terms and a bias has relative error at most gamma(n) = (n + 2) U / (1 - (n + 2) U) of the sum
    of absolute terms (n + 1 roundings touch each term; one is spare). All numbers stay below LIMIT = 2^500, so
    |h| <= 2^-521, and ETA = 2^-500 per operation covers it with 2^20 to spare; that rest covers what comparisons and
    sorting may flush between two operations.
"""

import math
from fractions import Fraction

UNIT = Fraction(1, 2**53)  # unit roundoff of binary64
ETA = Fraction(1, 2**500)
LIMIT = Fraction(2**500)


class ProofError(ValueError):
    """A network, or its numbers, for which no statement about the running program can be proved."""


def up(x: Fraction) -> float:
    """The smallest float not below x >= 0.

    Example:
        >>> up(Fraction(1, 3)) > Fraction(1, 3) > math.nextafter(up(Fraction(1, 3)), 0)
        True
    """
    value = _nearest(x)
    while Fraction(value) < x:
        value = math.nextafter(value, math.inf)
        if value == math.inf:
            raise ProofError(f"expected numbers below {float(LIMIT):.0e}, got one beyond the range of float64")
    return value


def below(x: Fraction) -> float:
    """The largest float strictly below x.

    Example:
        >>> below(Fraction(1)) == 1 - 2**-53
        True
    """
    value = _nearest(x)
    while Fraction(value) >= x:
        value = math.nextafter(value, -math.inf)
    return value


def up_root(square: Fraction) -> float:
    """The smallest float whose square is not below `square` >= 0.

    Example:
        >>> up_root(Fraction(4)), up_root(Fraction(2)) ** 2 >= 2
        (2.0, True)
    """
    return _root_up(square.numerator, square.denominator)


def root_below(square: Fraction) -> float:
    """The largest float whose square is strictly below `square` > 0.

    Example:
        >>> root_below(Fraction(4)) < 2.0
        True
    """
    value = _root_up(square.numerator, square.denominator)
    while Fraction(value) ** 2 >= square:
        value = math.nextafter(value, 0.0)
    return value


def gamma(terms: int) -> Fraction:
    """Relative error of an inner product of so many terms, of its bias and one more operation; Note [Arithmetic].

    Example:
        >>> gamma(2) == Fraction(4, 2**53 - 4)
        True
    """
    share = (terms + 2) * UNIT
    if not share < Fraction(1, 2):
        raise ProofError(f"expected sums of fewer than 2^52 terms, got {terms}")
    return share / (1 - share)


def _nearest(x: Fraction) -> float:
    try:
        return float(x)
    except OverflowError:
        raise ProofError(f"expected numbers below {float(LIMIT):.0e}, got one beyond the range of float64") from None


def _root_up(numerator: int, denominator: int) -> float:
    if numerator == 0:
        return 0.0
    # An integer root of 64 or more bits: scaled by 4^shift so that it does not matter how small or large the square is.
    shift = max(0, 64 - (numerator.bit_length() - denominator.bit_length()) // 2)
    root = math.isqrt((numerator << 2 * shift) // denominator)
    value = _nearest(Fraction(root, 1 << shift))
    # `value` is next to the root: a step or two in either direction make it the smallest that will do.
    while Fraction(value) ** 2 * denominator < numerator:
        value = math.nextafter(value, math.inf)
    while value > 0 and Fraction(math.nextafter(value, 0.0)) ** 2 * denominator >= numerator:
        value = math.nextafter(value, 0.0)
    return value
