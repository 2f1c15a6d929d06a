"""Exact numbers, and ||W|| <= sigma for a linear layer or convolution W, in whole numbers.

A layer with zero padding is a part of a convolution over all of Z^D, so its norm is not larger; around a circle entries
of the Gram operator fold onto each other, and their absolute sums are not larger. Taps of different phase (program.py)
never meet the same pixel: a strided convolution is one of stride 1 whose channels are pairs (channel, phase).

    schur     M = (W^T W)^(2^(steps - 1)) is symmetric, so ||M|| <= max_i sum_j |M_ij| q_j / q_i for any q > 0
    cholesky  W^T W <= S if the rows of |(S - r) I - W^T W - R^T R| sum to at most r, for any matrix R
"""

import itertools
import math
from fractions import Fraction
from typing import Any

import numpy as np

from .reading import Told, ints, need

U = Fraction(1, 2**53)  # what a binary64 is rounded by, relatively


def number(text: str) -> Fraction:
    """A float as float.hex() writes it, to the letter; NaN and infinity are no fractions."""
    need(float.fromhex(text).hex() == text, f"expected a float.hex(), got {text:.40}")
    return Fraction(float.fromhex(text))


def fraction(text: str) -> Fraction:
    """p/q or p, not below 0, in plain digits: int() reads others, that look like something else."""
    p, q = (int(part) for part in (text if "/" in text else f"{text}/1").split("/"))
    need(q > 0 <= p and text in (f"{p}", f"{p}/{q}"), f"expected a fraction, got {text!r:.80}")
    return Fraction(p, q)


def claimed(told: Told, key: str) -> Fraction:
    """The number told under this key, a binary64 v >= 0 as a fraction in lowest terms."""
    v = fraction(told[key])
    need(v == float(v) and told[key] == str(v), f"{key}: expected a float64 in lowest terms, got {told[key]:.80}")
    return v


def least(told: Told, key: str, bound: Fraction | int, power: int = 1) -> Fraction:
    """The number told under this key, which must be the smallest binary64 v >= 0 with v^power >= bound."""
    v = claimed(told, key)
    right = v**power >= bound and (v == 0 or Fraction(math.nextafter(v, 0.0)) ** power < bound)
    need(right, f"{key}: not the smallest float64 that is proved, {told[key]:.80}")
    return v


def gamma(n: int) -> Fraction:
    """n roundings in a row, or in a tree, are off by at most this factor; n is far below 2^53 here."""
    return n * U / (1 - n * U)


def to_integers(array: np.ndarray) -> tuple[np.ndarray, int]:
    """Python integers M and e with array = 2^e M, exactly.

    Example:
        >>> to_integers(np.array([0.75, -3.0]))
        (array([3, -12], dtype=object), -2)
    """
    ratios = [value.as_integer_ratio() for value in array.ravel().tolist()]
    unit = max(denominator for _, denominator in ratios)  # a power of two
    whole = np.array([numerator * (unit // denominator) for numerator, denominator in ratios], object)
    return whole.reshape(array.shape), 1 - unit.bit_length()


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


# ---- norms: kernels are dictionaries, matrices by offset


def kernels(weight: np.ndarray, layer: Any, side: str) -> dict[tuple[int, ...], np.ndarray]:
    """By tap: (groups, rows, columns) of the stride-1 convolution, its columns the channels and phases of the side."""
    p, taps = layer.phases, {}
    for t in np.ndindex(*weight.shape[3:]):
        tap = tuple(i // n for i, n in zip(t, p, strict=True))
        phase = tuple(i % n for i, n in zip(t, p, strict=True))
        taps.setdefault(tap, np.zeros((*weight.shape[:3], *p), weight.dtype))[..., *phase] = weight[..., *t]
    taps = {tap: part.reshape(*part.shape[:2], -1) for tap, part in taps.items()}
    far_are_columns = {"inputs": True, "outputs": False}[side] != layer.transposed
    # The adjoint has taps K'[t] = K[-t]^T. Without the -, as here, its Gram operator is mirrored; its sums stay.
    return taps if far_are_columns else {tap: part.swapaxes(1, 2) for tap, part in taps.items()}


def mirrored(kernel: dict[Any, Any]) -> dict[Any, Any]:
    return {tuple(-i for i in d): m.transpose() for d, m in kernel.items()}


def product(one: dict[Any, Any], other: dict[Any, Any]) -> dict[Any, Any]:
    """One after the other, if that is symmetric: M[-d] = M[d]^T, and only d >= 0 has to be computed."""
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
    each = zip(*(row_sums(m, q) for m in M.values()), strict=True)  # by row, over all offsets
    return max(Fraction(sum(sums), n) for sums, n in zip(each, q, strict=True))


def is_bounded(square: Fraction, whole: np.ndarray, e: int) -> bool:
    """Whether W^T W <= square for W = 2^e whole, by cholesky with r = 2^-32 square."""
    r, n, length = square / 2**32, whole.shape[1], int(np.abs(whole).max()).bit_length()
    w, f = (whole / 2**length).astype(float), e + length  # W = 2^f w
    try:  # R is a guess; the residual decides
        R = np.linalg.cholesky(float((square - r) / Fraction(4) ** f) * np.eye(n) - w.T @ w).T
    except (np.linalg.LinAlgError, OverflowError):
        return False
    bits = 52 - int(np.frexp(np.abs(R).max())[1])
    R, f = matrix(np.rint(np.ldexp(R, bits)).astype(np.int64)), f - bits
    unit = min(e, f)
    both = matrix(whole.T) * matrix(whole) * 4 ** (e - unit) + R.transpose() * R * 4 ** (f - unit)
    # In units of 4^unit; what is rounded down here makes the claim only stronger.
    wanted, allowed = (math.floor(x / Fraction(4) ** unit) for x in (square - r, r))
    return max(row_sums(both - matrix(np.eye(n, dtype=int)) * wanted, [1] * n)) <= allowed


def prove_sigma(node: Told, layer: Any, whole: np.ndarray, e: int) -> Fraction:
    """sigma of the node, W = 2^e whole, by its witness."""
    bound = node["bound"]
    taps = kernels(whole, layer, bound["side"])
    if bound["kind"] == "cholesky":
        sigma, (parts,) = claimed(node, "sigma"), taps.values()  # of one tap
        need(all(not m.any() or is_bounded(sigma**2, m, e) for m in parts), "sigma: not proved")
        return sigma
    (steps,), scale = ints([bound["steps"]], 1), [[int(q) for q in group.split()] for group in bound["scale"]]
    need(bound["kind"] == "schur" and steps <= 4, "bound: expected cholesky, or schur with 1 to 4 steps")
    groups, _, columns = next(iter(taps.values())).shape
    right = [len(q) for q in scale] == [columns] * groups and min(map(min, scale)) > 0
    need(right, f"scale: expected {columns} integers above 0 for each of {groups} groups")
    each = (schur({t: matrix(part[g]) for t, part in taps.items()}, q, steps) for g, q in enumerate(scale))
    return least(node, "sigma", max(each) * Fraction(4) ** (e * 2 ** (steps - 1)), 2**steps)
