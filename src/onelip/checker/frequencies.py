"""||W|| <= sigma for a convolution W, by its matrices at the frequencies that a tree describes.

A convolution over Z^D with the kernel K has the norm sup ||V(a)|| over all angles a, V(a) = sum_t K_t exp(i t.a). For a
vector x, ||V(a) x||^2 is a trigonometric polynomial of degree m = taps - 1 in each angle, with values from 0 to
M = sup ||V||^2. Where it is M, the other angles fixed, it is at least M (1 + cos m d) / 2 >= M (1 - (m d / 2)^2) within
|d| <= pi / m of that angle (M. Riesz). So M <= S if arcs cover the circle of the first angle, each with a point c that
is at most 2 w away from all of the arc, m w < 1, and sup ||V(c, .)||^2 <= S (1 - (m w)^2) over the other angles: the
same question with one angle less. V(-a) is the conjugate of V(a), so half of the first circle is enough.

Angles are 2 atan(t) + q pi / 2, q = 0 .. 3, 0 <= t <= 1, with exp(i a) = i^q (1 + i t)^2 / (1 + t^2). An arc from lo to
hi has its c in the middle, w = (c - lo) / (1 + lo c): the angle from lo to c is 2 atan(w), that from c to hi is less.
In the tree "1" is an arc that is used, followed by the tree of the next angle, and "0" one that is halved, at most 40
times, so that the integers of its points stay small.
"""

import math
from fractions import Fraction
from typing import Any

import numpy as np

ZERO, ONE = Fraction(0), Fraction(1)


def is_below(v: Any, T: int) -> bool:
    """Whether v* v <= T for matrices of integers: if the rows of |(T - r) I - v* v - R* R| sum to at most r, for any R.

    Columns of v and R have squared norms below 2^52, so all sums of products are integers below 2^53: they are exact.
    """
    r, adjoint = T // 2**12, lambda m: m.conj().swapaxes(-1, -2)
    A = np.eye(v.shape[-1]) * (T - r) - adjoint(v) @ v
    try:
        R = np.rint(adjoint(np.linalg.cholesky(A)))  # any R would do
    except np.linalg.LinAlgError:
        return False
    E = A - adjoint(R) @ R
    small = all((m.real**2 + m.imag**2).sum(axis=-2).max() < 2.0**52 for m in (v, R))
    return small and (np.abs(E.real) + np.abs(E.imag)).sum(axis=-1).max() <= r


def powers(t: Fraction, quarter: int, count: int) -> np.ndarray:
    """exp(i k a) for k = 0, 1, ...: exact quotients of integers, rounded once."""
    p, q = t.numerator, t.denominator
    x, y, r = q * q - p * p, 2 * p * q, q * q + p * p
    x, y = [(x, y), (-y, x), (-x, -y), (y, -x)][quarter]
    a, b, scale, found = 1, 0, 1, []
    for _ in range(count):
        found.append(complex(a / scale, b / scale))  # Python rounds quotients of integers correctly
        a, b, scale = a * x - b * y, a * y + b * x, scale * r
    return np.array(found)


def is_covered(kernel: np.ndarray, sigma: Fraction, tree: str) -> bool:
    """Whether the tree proves that the convolution with the kernel (*taps, groups, rows, columns) has norm <= sigma."""
    *taps, _, rows, columns = kernel.shape
    # V is computed with errors below n R 2^-53 max |K| in both parts of each entry, n taps, R roundings in a row, that
    # is below u / 8, and V / u is rounded to integers v: ||V - u v|| <= u sqrt(2 rows columns). So ||V||^2 <= f S if
    # ||u v||^2 <= f S - loss.
    u, digits = Fraction(2) ** (math.frexp(float(sigma))[1] - 26), iter(tree)
    loss = 2 * sigma * u * (math.isqrt(2 * rows * columns) + 1)
    precise = math.prod(taps) * 8 * sum(k + 1 for k in taps) < 2**24 and Fraction(float(np.abs(kernel).max())) <= sigma
    moderate = 2.0**-400 < sigma < 2.0**400

    def below(V: np.ndarray, S: Fraction, quarters: int) -> bool:
        if V.ndim == 3:
            T = math.floor((S - loss) / u**2)
            return T > 0 and is_below(np.rint(V / float(u)), T)
        if len(V) == 1:  # no angle
            return below(V[0], S, quarters)
        return all(arc(V, S, q, ZERO, ONE) for q in range(quarters))

    def arc(V: np.ndarray, S: Fraction, q: int, lo: Fraction, hi: Fraction) -> bool:
        c, digit = (lo + hi) / 2, next(digits, "")
        if digit == "0":
            return c.denominator < 2**40 and arc(V, S, q, lo, c) and arc(V, S, q, c, hi)
        f = 1 - ((len(V) - 1) * (c - lo) / (1 + lo * c)) ** 2
        return digit == "1" and f > 0 and below(np.tensordot(powers(c, q, len(V)), V, 1), f * S, 4)

    return bool(precise and moderate and below(kernel, sigma**2, 2) and next(digits, None) is None)
