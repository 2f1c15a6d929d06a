"""Rounding up, decided in integers: no float is compared that was not compared exactly."""

import math
from fractions import Fraction

_DIGITS = 53  # bits of a float64
_LOWEST = -1074  # the least subnormal is 2^-1074


def up_root(x: Fraction) -> float:
    """The smallest float64 whose square is at least x.

    Raises:
        OverflowError: if there is none.

    Example:
        >>> up_root(Fraction(9, 4)), up_root(Fraction(2)) ** 2 >= 2, up_root(Fraction(1, 10**700))
        (1.5, True, 5e-324)
    """
    if not x >= 0:
        raise ValueError(f"expected a number that has a root, got {x}")
    if x == 0:
        return 0.0
    # 2^(b-1) < x < 2^(b+1), so the root has at least 53 digits before the point in units of 2^t, and at most 54.
    b = x.numerator.bit_length() - x.denominator.bit_length()
    t = max((b - 1) // 2 - (_DIGITS - 1), _LOWEST)
    j = _root_in_units(x, t)
    if j > 2**_DIGITS:
        t += 1
        j = _root_in_units(x, t)
    try:
        return math.ldexp(j, t)
    except OverflowError:
        raise OverflowError(
            f"expected a norm within the range of float64, got one of about 2^{b // 2}; scale the weights down"
        ) from None


def _root_in_units(x: Fraction, t: int) -> int:
    """The smallest integer j with j 2^t >= sqrt(x)."""
    y = x / Fraction(4) ** t
    above = -(-y.numerator // y.denominator)  # j^2 >= y exactly if j^2 >= ceil(y)
    return math.isqrt(above - 1) + 1


def repeated_root(x: Fraction, times: int) -> Fraction:
    """up_root applied again and again, as an exact number; x itself for 0 times.

    Example:
        >>> repeated_root(Fraction(16), 2)
        Fraction(2, 1)
    """
    for _ in range(times):
        x = Fraction(up_root(x))
    return x


def up_root_of_power(x: Fraction, times: int) -> float:
    """The smallest float64 whose power 2^times is at least x: repeated roots are rounded up each time, this one once.

    Example:
        >>> up_root_of_power(Fraction(16), 2)
        2.0
    """
    if not x > 0:
        return 0.0
    power = 2**times
    # In units of 2^t the root is near 1, however small or large x is, and repeated roots are near to it.
    t = (x.numerator.bit_length() - x.denominator.bit_length()) // power
    try:
        root = math.ldexp(float(repeated_root(x / Fraction(2) ** (t * power), times)), t)
    except OverflowError:
        raise OverflowError(f"expected a norm within the range of float64, got one of about 2^{t}") from None
    while Fraction(root) ** power < x:  # where it is subnormal, and was rounded down
        root = math.nextafter(root, math.inf)
    while Fraction(math.nextafter(root, 0.0)) ** power >= x:
        root = math.nextafter(root, 0.0)
    return root
