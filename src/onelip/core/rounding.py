"""Directed rounding of exact fractions to binary64.

    up(x)          the smallest float not below x             below(x)              the largest float below x
    up_root(x)     the smallest float whose square >= x       root_below(x)         the largest float whose square < x
                                                              root_at_most(x)       the largest float whose square <= x

All comparisons are between integers or fractions, so they are exact. The checker (`onelip.checker`) has its own
version of each function and requires the same results.

Note [Arithmetic]
    The certified program computes in IEEE binary64, rounds to nearest, and sums each inner product in any order,
    with or without fused multiply-adds. One operation then gives (a op b)(1 + d) + h with |d| <= UNIT and
    |h| <= 2^-1022 (1 + |a| + |b|): h is underflow, also where subnormal operands and results are flushed to zero.
    n roundings in a row have relative error at most gamma(n) = n UNIT / (1 - n UNIT). An inner product of n terms and a
    bias is off by at most gamma(n + 2) times the sum of absolute terms (n + 1 roundings touch each term; one is spare).
    All numbers stay below LIMIT = 2^500, so |h| <= 2^-521, and ETA = 2^-500 per operation covers it with a factor of
    2^20 to spare. The spare factor covers values that comparisons and sorting may flush between two operations.
"""

import math
from decimal import ROUND_CEILING, Context, Decimal
from fractions import Fraction
from typing import Any

from onelip.core.errors import OutOfRange

UNIT = Fraction(1, 2**53)  # unit roundoff of binary64
ETA = Fraction(1, 2**500)
LIMIT = Fraction(2**500)

_DIGITS = 53  # significant bits of a float64
_LOWEST = -1074  # the smallest positive subnormal is 2^-1074


def up(x: Fraction) -> float:
    """Return the smallest float not below x.

    Raises:
        OutOfRange: if there is none.

    Examples:
        >>> up(Fraction(1, 3)) > Fraction(1, 3) > math.nextafter(up(Fraction(1, 3)), 0)
        True
    """
    value = _nearest(x)
    while Fraction(value) < x:
        value = math.nextafter(value, math.inf)
        if value == math.inf:
            raise _too_large(x)
    return value


def up_root(square: Fraction) -> float:
    """Return the smallest float whose square is at least `square`.

    Raises:
        OutOfRange: if there is none.
        ValueError: if `square` is negative.

    Examples:
        >>> up_root(Fraction(9, 4)), up_root(Fraction(2)) ** 2 >= 2, up_root(Fraction(1, 10**700))
        (1.5, True, 5e-324)
    """
    if not square >= 0:
        raise ValueError(f"expected a non-negative number, got {square}")
    if square == 0:
        return 0.0
    # 2^(b-1) < square < 2^(b+1), so in units of 2^t the root has at least 53 binary digits, and at most 54.
    b = square.numerator.bit_length() - square.denominator.bit_length()
    t = max((b - 1) // 2 - (_DIGITS - 1), _LOWEST)
    j = _root_in_units(square, t)
    if j > 2**_DIGITS:
        t += 1
        j = _root_in_units(square, t)
    try:
        return math.ldexp(j, t)
    except OverflowError:
        raise _too_large(square) from None


def root_at_most(square: Fraction) -> float:
    """Return the largest float whose square is at most `square`.

    Examples:
        >>> root_at_most(Fraction(4)), root_at_most(Fraction(2)) ** 2 <= 2
        (2.0, True)
    """
    value = up_root(square)
    return value if Fraction(value) ** 2 <= square else math.nextafter(value, 0.0)


def root_below(square: Fraction) -> float:
    """Return the largest float whose square is strictly below `square` > 0.

    Examples:
        >>> root_below(Fraction(4)) < 2.0
        True
    """
    return math.nextafter(up_root(square), 0.0)


def repeated_root(x: Fraction, times: int) -> Fraction:
    """Apply `up_root` several times and return the result as a fraction; x itself for 0 times.

    Examples:
        >>> repeated_root(Fraction(16), 2)
        Fraction(2, 1)
    """
    for _ in range(times):
        x = Fraction(up_root(x))
    return x


def up_root_of_power(x: Fraction, times: int) -> float:
    """Return the smallest float whose power 2^times is at least x.

    `repeated_root` rounds up at every root, this function only once.

    Examples:
        >>> up_root_of_power(Fraction(16), 2)
        2.0
    """
    if not x > 0:
        return 0.0
    power = 2**times
    # In units of 2^t the root is near 1 for every x, so repeated roots are a good starting value.
    t = (x.numerator.bit_length() - x.denominator.bit_length()) // power
    try:
        root = math.ldexp(float(repeated_root(x / Fraction(2) ** (t * power), times)), t)
    except OverflowError:
        raise _too_large(x) from None
    while Fraction(root) ** power < x:  # ldexp rounds a subnormal result, possibly down
        root = math.nextafter(root, math.inf)
    while Fraction(math.nextafter(root, 0.0)) ** power >= x:
        root = math.nextafter(root, 0.0)
    return root


def float_up(number: Any) -> float:
    """Return a number of any type as a float that is not below it.

    Products of numpy's and torch's scalars are rounded to their own type; those of floats are rounded here.

    Examples:
        >>> float_up(Fraction(1, 3)) > Fraction(1, 3), float_up(2)
        (True, 2.0)
    """
    return up(Fraction(number)) if isinstance(number, int | Fraction) else float(number)


def multiply_up(*factors: float) -> float:
    """Return a float not below the real product of non-negative `factors`; exact where every factor is 1."""
    product = 1.0
    for factor in factors:
        rounded = product * factor
        exact = product == 1.0 or factor == 1.0
        product = rounded if exact else math.nextafter(rounded, math.inf)
    return product


def add_up(*terms: float) -> float:
    """Return the smallest float not below the real sum of non-negative numbers; infinity if one is not finite.

    Examples:
        >>> add_up(1.0, 2.0), add_up(1.0, 2.0**-60) > 1
        (3.0, True)
    """
    if not all(term < math.inf for term in terms):
        return math.inf
    return up(sum((Fraction(term) for term in terms), Fraction(0)))


def hypotenuse_up(*legs: float) -> float:
    """Return the smallest float not below the root of the sum of squares; infinity if a number is not finite.

    Examples:
        >>> hypotenuse_up(3.0, 4.0)
        5.0
    """
    if not all(leg < math.inf for leg in legs):
        return math.inf
    return up_root(sum((Fraction(leg) ** 2 for leg in legs), Fraction(0)))


def inverse_up(number: float) -> float:
    """Return a float not below 1 / number, for a number above 0.

    Examples:
        >>> inverse_up(0.25), inverse_up(3.0) * 3 >= 1
        (4.0, True)
    """
    inverse = 1 / number
    return inverse if Fraction(inverse) * Fraction(number) >= 1 else math.nextafter(inverse, math.inf)


def rounded_up(value: float, digits: int = 6) -> str:
    """A number as text with some significant digits, rounded up, so that the printed number is a bound as well.

    Examples:
        >>> rounded_up(1.0), rounded_up(1.0000000001), rounded_up(1234567.0)
        ('1', '1.00001', '1.23457e+6')
    """
    if not math.isfinite(value):
        return str(value)
    rounded = Context(prec=digits, rounding=ROUND_CEILING).create_decimal(Decimal(value)).normalize()
    return f"{rounded:f}" if 1e-4 <= value < 10**digits or value == 0 else f"{rounded:e}"


def gamma(roundings: int) -> Fraction:
    """Return the relative error n UNIT / (1 - n UNIT) of n = `roundings` in a row; see Note [Arithmetic].

    Raises:
        OutOfRange: for 2^50 roundings or more.

    Examples:
        >>> gamma(1) == Fraction(1, 2**53 - 1)
        True
    """
    if not roundings < 2**50:
        raise OutOfRange(f"expected fewer than 2^50 roundings in a row, got {roundings}; split the layer")
    return Fraction(roundings, 2**53 - roundings)


def _root_in_units(x: Fraction, t: int) -> int:
    """The smallest integer j with j 2^t >= sqrt(x)."""
    y = x / Fraction(4) ** t
    above = -(-y.numerator // y.denominator)  # j^2 >= y exactly if j^2 >= ceil(y)
    return math.isqrt(above - 1) + 1


def _nearest(x: Fraction) -> float:
    try:
        return float(x)
    except OverflowError:
        raise _too_large(x) from None


def _too_large(x: Fraction) -> OutOfRange:
    b = x.numerator.bit_length() - x.denominator.bit_length()
    return OutOfRange(f"expected numbers within the range of float64, got one of about 2^{b}; scale the weights down")
