"""Exact numbers, and ||W|| <= sigma for a linear layer or convolution W, in integer arithmetic.

A layer with zero padding is a restriction of a convolution over all of Z^D, so its norm is not larger. With circular
padding, entries of the Gram operator are added to each other, and their absolute sums are not larger. Taps of different
phase (program.py) never read the same pixel, so a strided convolution is one of stride 1 whose channels are pairs
(channel, phase).

    schur     M = (W^T W)^(2^(steps - 1)) is symmetric, so ||M|| <= max_i sum_j |M_ij| q_j / q_i for any q > 0
    cholesky  W^T W <= S if the rows of |(S - r) I - W^T W - R^T R| sum to at most r, for any matrix R
    frequencies (below)
"""

import itertools
import math
import re
from fractions import Fraction
from typing import Any

import numpy as np

from .reading import TrackedDict, ints, require

U = Fraction(1, 2**53)  # relative rounding error of float64


def number(text: str) -> Fraction:
    """Parse a finite float, written exactly as by float.hex()."""
    require(float.fromhex(text).hex() == text, f"expected a float.hex(), got {text:.40}")
    return Fraction(float.fromhex(text))


def fraction(text: str) -> Fraction:
    """Parse p/q or p in ASCII digits."""
    require(re.fullmatch(r"(0|[1-9][0-9]{0,399})(/[1-9][0-9]{0,399})?", text), f"expected a fraction, got {text!r:.80}")
    return Fraction(text)


def claimed(node: TrackedDict, key: str) -> Fraction:
    """Return the number under this key, a float64 >= 0 written as a fraction in lowest terms."""
    v = fraction(node[key])
    require(v == float(v) and node[key] == str(v), f"{key}: expected a float64 in lowest terms, got {node[key]:.80}")
    return v


def least(node: TrackedDict, key: str, bound: Fraction | int, power: int = 1) -> Fraction:
    """Return the number under this key, which must be the smallest float64 v >= 0 with v^power >= bound."""
    v = claimed(node, key)
    right = v**power >= bound and (v == 0 or Fraction(math.nextafter(v, 0.0)) ** power < bound)
    require(right, f"{key}: not the smallest float64 that is proved, {node[key]:.80}")
    return v


def gamma(n: int) -> Fraction:
    """Relative error of n successive roundings, in any order of summation; n is far below 2^53 here."""
    return n * U / (1 - n * U)


def odd_parts(array: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """int64 m, odd or 0, and exponents t with array = m 2^t, exactly."""
    mantissa, t = np.frexp(array)
    m = np.ldexp(mantissa, 53).astype(np.int64)
    zeros = np.maximum(np.frexp((m & -m).astype(float))[1], 1) - 1  # trailing zero bits of m
    return m >> zeros, t - 53 + zeros


def to_integers(array: np.ndarray) -> tuple[np.ndarray, int]:
    """Python integers M and e with array = 2^e M, exactly.

    Examples:
        >>> to_integers(np.array([0.75, -3.0]))
        (array([3, -12], dtype=object), -2)
    """
    m, t = odd_parts(array)
    e = int(t[m != 0].min()) if m.any() else 0
    return m.astype(object) << np.where(m != 0, t - e, 0).astype(object), e


def squares(array: np.ndarray) -> Fraction:
    whole, e = to_integers(array)
    return int((whole**2).sum()) * Fraction(4) ** e


def matrix(array: np.ndarray) -> Any:
    from flint import fmpz_mat

    return fmpz_mat(array.tolist())


def row_sums(m: Any, q: list[int]) -> list[int]:
    """sum_j |m_ij| q_j for each i."""
    sums = type(m)(m.nrows(), m.ncols(), [abs(x) for x in m.entries()]) * matrix(np.array(q, object)[:, None])
    return [int(x) for x in sums.entries()]


# Norms. A kernel is a dictionary from offsets to matrices.


def kernels(weight: np.ndarray, layer: Any, side: str) -> dict[tuple[int, ...], np.ndarray]:
    """Matrices (groups, rows, columns) of the stride-1 convolution by tap; columns are channels, phases of `side`."""
    p, taps = layer.phases, {}
    for t in np.ndindex(*weight.shape[3:]):
        tap = tuple(i // n for i, n in zip(t, p, strict=True))
        phase = tuple(i % n for i, n in zip(t, p, strict=True))
        if tap not in taps:
            taps[tap] = np.zeros((*weight.shape[:3], *p), weight.dtype)
        taps[tap][..., *phase] = weight[..., *t]
    taps = {tap: part.reshape(*part.shape[:2], -1) for tap, part in taps.items()}
    far_are_columns = (side == "inputs") != layer.transposed
    # The adjoint has taps K'[t] = K[-t]^T. Without the minus sign its Gram operator is mirrored, with the same sums.
    return taps if far_are_columns else {tap: part.swapaxes(1, 2) for tap, part in taps.items()}


def mirrored(kernel: dict[Any, Any]) -> dict[Any, Any]:
    return {tuple(-i for i in d): m.transpose() for d, m in kernel.items()}


def product(one: dict[Any, Any], other: dict[Any, Any]) -> dict[Any, Any]:
    """The composition, if it is symmetric: M[-d] = M[d]^T, and only d >= 0 has to be computed."""
    found: dict[Any, Any] = {}
    for (a, A), (b, B) in itertools.product(one.items(), other.items()):
        d = tuple(i + j for i, j in zip(a, b, strict=True))
        if d >= (0,) * len(d):
            found[d] = found[d] + A * B if d in found else A * B
    return mirrored(found) | found


def schur(kernel: dict[Any, Any], q: list[int], steps: int) -> Fraction:
    M = product(mirrored(kernel), kernel)
    for _ in range(steps - 1):
        M = product(M, M)
    each = zip(*(row_sums(m, q) for m in M.values()), strict=True)  # for each row, over all offsets
    return max(Fraction(sum(sums), n) for sums, n in zip(each, q, strict=True))


def is_bounded(square: Fraction, whole: np.ndarray, e: int) -> bool:
    """Whether W^T W <= square for W = 2^e whole, by cholesky with r = 2^-32 square."""
    r, n, length = square / 2**32, whole.shape[1], int(np.abs(whole).max()).bit_length()
    w, f = (whole / 2**length).astype(float), e + length  # W = 2^f w
    if square > Fraction(4) ** (f + 32):  # W^T W is far smaller, and the residual would have many bits
        return False
    try:  # R is a guess; the residual decides
        R = np.linalg.cholesky(float((square - r) / Fraction(4) ** f) * np.eye(n) - w.T @ w).T
    except (np.linalg.LinAlgError, OverflowError):
        return False
    bits = 52 - int(np.frexp(np.abs(R).max())[1])
    R, f = matrix(np.rint(np.ldexp(R, bits)).astype(np.int64)), f - bits
    unit = min(e, f)
    both = matrix(whole.T) * matrix(whole) * 4 ** (e - unit) + R.transpose() * R * 4 ** (f - unit)
    # In units of 4^unit. Rounding down makes the test only stricter.
    wanted, allowed = (math.floor(x / Fraction(4) ** unit) for x in (square - r, r))
    return max(row_sums(both - matrix(np.eye(n, dtype=int)) * wanted, [1] * n)) <= allowed


def witness(node: TrackedDict) -> tuple[str, str, int]:
    """Kind, side and steps of the bound of a layer; for frequencies, steps is the number of used arcs."""
    bound, steps = node["bound"], 0
    if bound["kind"] == "schur":
        (steps,) = ints([bound["steps"]], 1)
        require(steps <= 4, "steps: expected 1 to 4")
    elif bound["kind"] == "frequencies":
        require(re.fullmatch("[01]*", bound["tree"]), "tree: expected a text of 0 and 1")
        steps = bound["tree"].count("1")
    kinds, sides = ("cholesky", "schur", "frequencies"), ("inputs", "outputs")
    require(bound["kind"] in kinds and bound["side"] in sides, f"bound: expected one of {kinds}, and of {sides}")
    return bound["kind"], bound["side"], steps


def prove_sigma(node: TrackedDict, layer: Any, whole: np.ndarray, e: int) -> Fraction:
    """Return sigma of the node, W = 2^e whole, after proving it from its witness."""
    kind, side, steps = witness(node)
    taps = kernels(layer.weight if kind == "frequencies" else whole, layer, side)
    if kind == "cholesky":
        require(len(taps) == 1, "cholesky: expected a kernel of one tap")
        sigma, (parts,) = claimed(node, "sigma"), taps.values()
        require(all(not m.any() or is_bounded(sigma**2, m, e) for m in parts), "sigma: not proved")
        return sigma
    if kind == "frequencies":
        sigma, lengths = claimed(node, "sigma"), [max(axis) + 1 for axis in zip(*taps, strict=True)]
        kernel = np.stack([taps[t] for t in np.ndindex(*lengths)]).reshape(*lengths, *next(iter(taps.values())).shape)
        require(is_covered(kernel, sigma, node["bound"]["tree"]), "sigma: not proved by these frequencies")
        return sigma
    groups, _, columns = next(iter(taps.values())).shape
    texts, digits = node["bound"]["scale"], re.compile("[0-9]{1,39}( [0-9]{1,39})*")
    scale = [[int(q) for q in text.split()] for text in texts if digits.fullmatch(text)]
    right = [len(q) for q in scale] == [columns] * groups == [columns] * len(texts) and min(map(min, scale)) > 0
    require(right, f"scale: expected {columns} integers above 0 for each of {groups} groups")
    each = (schur({t: matrix(part[g]) for t, part in taps.items()}, q, steps) for g, q in enumerate(scale))
    return least(node, "sigma", max(each) * Fraction(4) ** (e * 2 ** (steps - 1)), 2**steps)


# ---- ||W|| <= sigma by the matrices of a convolution at the frequencies that a tree describes
#
# A convolution over Z^D with the kernel K has the norm sup ||V(a)|| over all angles a, V(a) = sum_t K_t exp(i t.a). For
# a vector x, ||V(a) x||^2 is a trigonometric polynomial of degree m = taps - 1 in each angle, with values from 0 to M =
# sup ||V||^2. Where it is M, the other angles fixed, it is at least M (1 + cos m d) / 2 >= M (1 - (m d / 2)^2) within
# |d| <= pi / m of that angle (M. Riesz). So M <= S if arcs cover the circle of the first angle, each with a point c
# that is at most 2 w away from all of the arc, m w < 1, and sup ||V(c, .)||^2 <= S (1 - (m w)^2) over the other angles:
# the same question with one angle less. V(-a) is the conjugate of V(a), so half of the first circle is enough.
#
# Angles are 2 atan(t) + q pi / 2, q = 0 .. 3, 0 <= t <= 1, with exp(i a) = i^q (1 + i t)^2 / (1 + t^2). An arc from lo
# to hi has its c in the middle, w = (c - lo) / (1 + lo c): the angle from lo to c is 2 atan(w), that from c to hi is
# less. In the tree "1" is an arc that is used, followed by the tree of the next angle, and "0" one that is halved, at
# most 40 times, so that the integers of its points stay small.


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
