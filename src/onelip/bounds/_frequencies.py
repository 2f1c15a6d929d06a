r"""A bound of a convolution that is nearly its norm: its matrix at a few hundred frequencies, checked in integers.

A convolution over Z^D with the kernel K has the norm sup ||V(a)|| over all angles a, V(a) = sum_t K_t exp(i t.a).
Layers with borders are parts of such a convolution, and layers around a circle have some of its frequencies.

Note [Arcs]
    For a vector x, p(a) = ||V(a) x||^2 is a trigonometric polynomial of degree m = taps - 1 in each angle, from 0 to
    M = sup ||V||^2. Where p = M at an angle a* of one axis, the other angles fixed, a lemma of M. Riesz is

        p(a* + d) >= M (1 + cos m d) / 2 >= M (1 - (m d / 2)^2)        for |d| <= pi / m.

    Let arcs cover the circle of the first angle. Each has a point c, all of the arc is at most 2 w away from c, and
    m w < 1. If for each arc

        sup ||V(c, .)||^2 <= S (1 - (m w)^2)        over the other angles,                                       (1)

    then M <= S: M is reached at some a*, other angles b and x; the arc of a* has p(c, b) >= M (1 - (m w)^2). Each line
    of (1) is the same question with one angle less, and without angles it is about one matrix. As V(-a) is the
    conjugate of V(a), half of the first circle is enough.

Note [Points]
    Angles are 2 atan(t) + q pi / 2, q = 0 .. 3, 0 <= t <= 1: exp of them is i^q (1 + i t)^2 / (1 + t^2), rational for
    rational t. Arcs are the halves, quarters, ... of 0 <= t <= 1, and c is the middle of an arc in t. From lo to c the
    angle is 2 atan(w), w = (c - lo) / (1 + lo c), at most 2 w, and from c to hi it is less. A tree is a text: for each
    quarter of a circle "1" for an arc that is used, followed by the tree of the other angles at c, or "0" for an arc
    that is halved, followed by its halves. Axes with one tap have no angle.

Note [Integers]
    With sigma^2 = S and a power of two u, 2^25 u <= sigma < 2^26 u, both parts of all entries of the computed V(c) / u
    are rounded to integers: v. That changes each part by at most u / 2. V(c) itself was computed with errors of at most
    u / 2: for n taps and R roundings in a row, they are below n R 2^-53 max |K|, where max |K| <= sigma, and n R < 2^24
    is checked. So ||V(c) - u v|| <= u sqrt(2 rows columns) =: e, and

        v* v <= (S f - 2 sigma e) / u^2 =: T        implies        ||V(c)||^2 <= S f        (f <= 1).

    With any matrix R of integers (complex) and r = 2^-12 T, v* v <= T if the rows of |(T - r) I - v* v - R* R| sum to
    at most r. R is a rounded Cholesky factor. Columns of v and R have squared norms below 2^52, so that all sums of
    products are integers below 2^53, which float64 adds without rounding, in any order.
"""

import functools
import math
from collections.abc import Iterator
from fractions import Fraction
from typing import Any

import numpy as np
from torch import Tensor

from onelip.core.rounding import up_root

_RESIDUAL = 2**12
_FINEST, _COARSEST = 2.0**-8, 2.0**-4  # how far above the largest value that was found S may be
_STRICTER = 1 - 2.0**-11  # of S, for the search: twice the residual, so that no machine's rounding decides
_LEAST_FACTOR = 0.25  # arcs with less are not worth a try
_MOST = 8  # times the number of points that is planned with
_PER_DEGREE = 8  # points for each axis of a grid, and about as many in a cover, for each degree


def cost_of_frequencies(shape: tuple[int, ...]) -> float:
    """Multiplications and additions of `frequency_bound` for a kernel (g, *taps, rows, columns), about.

    Examples:
        >>> cost_of_frequencies((1, 3, 3, 64, 64)) < 2e9
        True
    """
    g, *taps, rows, columns = shape
    return float(_points(taps)) * 8 * g * columns**2 * (rows + columns)


def _points(taps: list[int]) -> int:
    return math.prod(_PER_DEGREE * (k - 1) for k in taps if k > 1)


def frequency_bound(K: Tensor, known: Fraction, enough: Fraction = Fraction(0)) -> tuple[Fraction, str] | None:
    """(S, tree) with ||K||^2 <= S, proved.

    Args:
        K: a kernel (g, *taps, rows, columns), its largest entry between 1 and 2.
        known: a bound of ||K||^2.
        enough: a bound of ||K||^2 that is wanted; slightly larger ones are avoided.

    Returns:
        None if the search found nothing below `known`, or would take long.
    """
    kernel = np.moveaxis(K.numpy(), 0, -3)  # (*taps, g, rows, columns)
    values, angles = _grid(kernel, half=True)
    # First a look at a few points: where they are as large as the known bound there is nothing to gain.
    if not _top(values[:: len(values) // 8 + 1], 4)[0].max() < known:
        return None
    estimates = _top(values, 12)[0].max(1)
    largest = _uphill(kernel, estimates, angles)
    tolerance = _tolerance(estimates, largest, kernel.shape[:-3])
    start = largest * (1 + tolerance)
    start = float(enough) if largest * (1 + tolerance / 2) <= enough < start else start
    if tolerance > _COARSEST or not start < known:
        return None
    search = _Search(kernel, start, tolerance)
    tree = search.tree()
    square = Fraction(up_root(Fraction(search.square))) ** 2
    return (square, tree) if tree is not None and square < known and is_proved(K, square, tree) else None


def is_proved(K: Tensor, square: Fraction, tree: str) -> bool:
    """Whether a tree proves ||K||^2 <= square for a kernel (g, *taps, rows, columns); Note [Arcs].

    The square has to be that of a fraction.

    Examples:
        >>> import torch
        >>> K = torch.tensor([0.5, 1.0]).double().reshape(1, 2, 1, 1)
        >>> S, tree = frequency_bound(K, Fraction(9))
        >>> is_proved(K, S, tree), is_proved(K, S * Fraction(9, 10)**2, tree), is_proved(K, S, tree[1:])
        (True, False, False)
    """
    sigma = Fraction(math.isqrt(square.numerator), math.isqrt(square.denominator))
    if not (sigma > 0 and sigma**2 <= square):
        return False
    kernel, digits = np.moveaxis(K.numpy(), 0, -3), iter(tree)
    leaf = _Leaf(kernel, sigma)
    return leaf.fits and _walk(kernel, square, True, digits, leaf) and not any(digits)


class _Leaf:
    """The question of Note [Arcs] without angles, about one matrix for each group; Note [Integers]."""

    def __init__(self, kernel: np.ndarray, sigma: Fraction) -> None:
        *taps, _, rows, columns = kernel.shape
        exponent = math.frexp(float(sigma))[1] - 26
        self.sigma, self.unit = sigma, Fraction(2) ** exponent
        self.loss = 2 * sigma * self.unit * (math.isqrt(2 * rows * columns) + 1)
        # Terms, and roundings in a row: two for each product of complex numbers, and those of exp(i t.a).
        terms, roundings = math.prod(taps), 8 * sum(k + 1 for k in taps)
        self.fits = terms * roundings < 2**24 and Fraction(float(np.abs(kernel).max())) <= sigma

    def __call__(self, V: np.ndarray, square: Fraction) -> bool:
        """Whether ||V||^2 <= square for each of (g, rows, columns)."""
        T = math.floor((square - self.loss) / self.unit**2)
        return T > 0 and _is_below(np.rint(V / float(self.unit)), T)


def _is_below(v: Any, T: int) -> bool:
    """Whether v* v <= T for matrices (g, rows, columns) of integers (complex)."""
    r = T // _RESIDUAL
    A = (T - r) * np.eye(v.shape[-1]) - v.conj().swapaxes(-1, -2) @ v
    try:
        R = np.rint(np.linalg.cholesky(A)).conj().swapaxes(-1, -2)
    except np.linalg.LinAlgError:
        return False
    E = A - R.conj().swapaxes(-1, -2) @ R
    small = all((M.real**2 + M.imag**2).sum(-2).max() < 2.0**52 for M in (v, R))
    return small and bool((np.abs(E.real) + np.abs(E.imag)).sum(-1).max() <= r)


def _at(V: np.ndarray, quarter: int, t: Fraction) -> np.ndarray:
    """V at an angle of its first axis, Note [Points]."""
    return np.tensordot(_powers(len(V), quarter, t), V, 1)


@functools.lru_cache(maxsize=4096)
def _powers(count: int, quarter: int, t: Fraction) -> np.ndarray:
    """exp(i k a) for k = 0, 1, ..., both parts rounded once."""
    z = (1 - t**2) / (1 + t**2), 2 * t / (1 + t**2)
    for _ in range(quarter):
        z = -z[1], z[0]
    power, powers = (Fraction(1), Fraction(0)), []
    for _ in range(count):
        powers.append(complex(*map(float, power)))
        power = power[0] * z[0] - power[1] * z[1], power[0] * z[1] + power[1] * z[0]
    return np.array(powers)


@functools.lru_cache(maxsize=4096)
def _middle(lo: Fraction, hi: Fraction, degree: int) -> tuple[Fraction, Fraction]:
    """c, and 1 - (m w)^2 or 0."""
    c = (lo + hi) / 2
    w = (c - lo) / (1 + lo * c)
    return c, max(Fraction(0), 1 - (degree * w) ** 2)


def _walk(V: np.ndarray, S: Fraction, half: bool, tree: Iterator[str], leaf: _Leaf) -> bool:
    if V.ndim == 3:
        return leaf(V, S)
    if len(V) == 1:
        return _walk(V[0], S, half, tree, leaf)

    def arc(quarter: int, lo: Fraction, hi: Fraction) -> bool:
        c, factor = _middle(lo, hi, len(V) - 1)
        digit = next(tree, "")
        if digit == "1":
            return factor > 0 and _walk(_at(V, quarter, c), S * factor, False, tree, leaf)
        return digit == "0" and arc(quarter, lo, c) and arc(quarter, c, hi)

    return all(arc(quarter, Fraction(0), Fraction(1)) for quarter in range(2 if half else 4))


class _Search:
    """A tree and a claim S for it. It proves nothing: `is_proved` does.

    S grows where a point is found that is larger than the largest one so far. The part of the tree that was found
    before remains valid.
    """

    def __init__(self, kernel: np.ndarray, square: float, tolerance: float) -> None:
        self.kernel, self.square, self.tolerance = kernel, square, tolerance
        self.left = _MOST * _points(list(kernel.shape[:-3]))  # matrices that may be tried

    def tree(self) -> str | None:
        """None if it would take long."""
        return self._cover(self.kernel, 1.0, None, half=True, is_last=True)

    def _cover(
        self, V: np.ndarray, factor: float, values: np.ndarray | None, *, half: bool = False, is_last: bool
    ) -> str | None:
        """The trees of all quarters.

        Args:
            V: with the angles that are left.
            factor: the part of S that the arcs before leave.
            values: of ||V||^2, about, on the grid of its angles, if they were computed.
            half: whether half of the first circle is enough.
            is_last: whether arcs of the angles before are too short to be halved.
        """
        if V.ndim == 3:
            return "" if self._is_below(V, factor, is_last) else None
        if len(V) == 1:
            return self._cover(V[0], factor, values, half=half, is_last=is_last)
        found = ""
        for quarter in range(2 if half else 4):
            part = self._arc(V, factor, values, quarter, Fraction(0), Fraction(1), is_last)
            if part is None:
                return None
            found += part
        return found

    def _arc(
        self,
        V: np.ndarray,
        factor: float,
        values: np.ndarray | None,
        quarter: int,
        lo: Fraction,
        hi: Fraction,
        is_last: bool,
    ) -> str | None:
        c, own = _middle(lo, hi, len(V) - 1)
        both, is_short = factor * float(own), own > 1 - self.tolerance / 16
        if own >= _LEAST_FACTOR and (is_short or self._seems_below(values, quarter, c, self.square * both)):
            at, more = _at(V, quarter, c), None
            if at.ndim > 3 and not is_short:
                more = _top(_grid(at, half=False)[0], 8)[0].max(1)
            # A value that is only just below S would take long to prove.
            if more is None or more.max() * (1 + self.tolerance / 4) <= self.square * both:
                found = self._cover(at, both, more, is_last=is_last and is_short)
                if found is not None:
                    return "1" + found
        if is_short or self.left < 0:
            return None
        one = self._arc(V, factor, values, quarter, lo, c, is_last)
        other = None if one is None else self._arc(V, factor, values, quarter, c, hi, is_last)
        return None if one is None or other is None else f"0{one}{other}"

    def _seems_below(self, values: np.ndarray | None, quarter: int, t: Fraction, square: float) -> bool:
        """By the nearest point of the grid, if there is one angle."""
        if values is None or values.ndim > 1:
            return True
        share = quarter / 4 + math.atan(float(t)) / math.pi
        return bool(values[round(share * len(values)) % len(values)] * 0.98 <= square)

    def _is_below(self, V: np.ndarray, factor: float, is_last: bool) -> bool:
        self.left -= 1
        H = V.conj().swapaxes(-1, -2) @ V
        try:
            np.linalg.cholesky(self.square * factor * _STRICTER * np.eye(H.shape[-1]) - H)
        except np.linalg.LinAlgError:
            if not is_last:
                return False
            self.square = max(self.square, float(np.linalg.eigvalsh(H).max()) / factor * (1 + self.tolerance / 4))
        return True


# ---- estimates: nothing is proved by these


def _grid(V: np.ndarray, *, half: bool) -> tuple[np.ndarray, list[np.ndarray]]:
    """V at the points of a grid, (points, g, rows, columns), and their angles on each axis."""
    taps = V.shape[:-3]
    sizes = [1 if k == 1 else _PER_DEGREE * (k - 1) for k in taps]
    values = np.fft.ifftn(V, sizes, range(len(taps)), norm="forward") if taps else V
    angles = [2 * np.pi * np.arange(n) / n for n in sizes]
    first = next((axis for axis, n in enumerate(sizes) if n > 1), None)
    if half and first is not None:
        values = values.take(range(sizes[first] // 2 + 1), first)
        angles[first] = angles[first][: sizes[first] // 2 + 1]
    mesh = np.meshgrid(*angles, indexing="ij") if taps else []
    return values.reshape(-1, *V.shape[-3:]), [axis.ravel() for axis in mesh]


def _tolerance(estimates: np.ndarray, largest: float, taps: tuple[int, ...]) -> float:
    """The smallest one for which a cover does not need more points than are planned with.

    At a point with the value p, all D angles have arcs with 1 - (m w)^2 = 1 - (1 - p / S) / D, about, 4 w long.
    """
    degrees = [k - 1 for k in taps if k > 1]
    tolerance = _FINEST
    while tolerance <= _COARSEST:
        room = np.maximum(1 - estimates / (largest * (1 + tolerance)), tolerance / 2) / max(1, len(degrees))
        count = np.mean(np.prod([np.pi * m / 2 / np.sqrt(room) for m in degrees], axis=0)) / 2
        if count <= _points(list(taps)):
            break
        tolerance *= 2
    return tolerance


def _top(V: np.ndarray, steps: int) -> tuple[np.ndarray, np.ndarray]:
    """Values near ||V||^2 for (points, g, rows, columns), from below, and their vectors, by Krylov spaces."""
    adjoint = V.conj().swapaxes(-1, -2)
    x = np.random.default_rng(0).standard_normal((V.shape[-1], 1)) * np.ones((*V.shape[:-2], 1, 1))
    basis = [x]
    for _ in range(min(steps, V.shape[-1] - 1)):
        x = adjoint @ (V @ x)
        x = x / np.maximum(np.linalg.norm(x, axis=-2, keepdims=True), 1e-300)
        basis.append(x)
    Q = np.linalg.qr(np.concatenate(basis, -1))[0]
    B = V @ Q
    values, vectors = np.linalg.eigh(B.conj().swapaxes(-1, -2) @ B)
    return values[..., -1], (Q @ vectors[..., -1:])[..., 0]


def _uphill(kernel: np.ndarray, estimates: np.ndarray, angles: list[np.ndarray]) -> float:
    """About sup ||V||^2: from the best points of a grid uphill, by turns in the vector and in each angle."""
    taps, best = kernel.shape[:-3], float(estimates.max())
    circle = np.exp(2j * np.pi * np.arange(2048) / 2048)
    for point in np.argsort(-estimates)[:4]:
        at = [float(axis[point]) for axis in angles]
        for _ in range(3):
            V = _evaluate(kernel, at)
            each, vectors = _top(V[None], 24)
            group = int(each[0].argmax())
            best = max(best, float(each[0, group]))
            images = kernel[..., group, :, :] @ vectors[0, group]  # (*taps, rows)
            for axis, k in enumerate(taps):
                line = np.moveaxis(images, axis, 0)
                for other in reversed([i for i in range(len(taps)) if i != axis]):
                    place = 1 + other - (other > axis)
                    line = np.tensordot(line, np.exp(1j * at[other] * np.arange(taps[other])), (place, 0))
                p = (np.abs(circle[:, None] ** np.arange(k) @ line) ** 2).sum(1)
                at[axis] = 2 * np.pi * int(p.argmax()) / 2048
        each = _top(_evaluate(kernel, at)[None], 24)[0]
        best = max(best, float(each.max()))
    return best


def _evaluate(kernel: np.ndarray, at: list[float]) -> np.ndarray:
    for angle in at:
        kernel = np.tensordot(np.exp(1j * angle * np.arange(len(kernel))), kernel, 1)
    return kernel
