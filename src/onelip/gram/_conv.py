"""Absolute sums of a convolution kernel's correlation with itself, and their derivative, with half of the offsets.

A_delta[a, c] = sum over rows and taps t of P[:, a, t + delta] P[:, c, t] is the Gram operator of the convolution, one
(columns x columns) block for each offset delta. A_{-delta} = A_delta^T, so half of the offsets suffice.

The kernel is laid out as Q (g, *leading taps, rows, last taps, columns). For one offset v of the leading taps let X be
the part of Q shifted by v and Y its unshifted counterpart. All offsets of the last axis are then stored side by side in
one array A (columns, offsets of the last axis, columns): the products of tap p of X with all taps of Y are one matrix
product whose result is a contiguous window of A. The derivative reads the same windows, so nothing is copied.
"""

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from onelip.gram._dense import add_product, sign_matrix, weighted


def lay_out(P: Tensor) -> Tensor:
    """Permute (g, rows, columns, *leading, last) to (g, *leading, rows, last, columns), contiguous."""
    axes = P.dim()
    return P.permute(0, *range(3, axes - 1), 1, axes - 1, 2).contiguous()


def lay_back(Q: Tensor) -> Tensor:
    """The inverse of `lay_out`, as a view."""
    axes = Q.dim()
    return Q.permute(0, axes - 3, axes - 1, *range(1, axes - 3), axes - 2)


def weighted_sums(Q: Tensor, w: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return s_c = sum_{delta, a} |A_delta[a, c]| w_a and the signs of A."""
    batch, *leading, _, k, C = Q.shape
    pairs = list(_half_of_offsets(tuple(leading)))
    signs = torch.zeros(batch, len(pairs), C, (2 * k - 1) * C, dtype=torch.int8, device=Q.device)
    sums = Q.new_zeros(batch, C)
    for i, pair in enumerate(pairs):
        A = _correlations(Q, pair)
        signs[:, i, :, : A.shape[2]] = A.sign()
        A.abs_()
        # Sums, not matrix-vector products: see _dense.
        sums += weighted(A, w, 1).sum(1).unflatten(1, (-1, C)).sum(1)
        sums += weighted(_transposed_offsets(A, k, C, pair).sum(2), w, 2).sum(2)
    return sums, signs


def absolute_matrix(Q: Tensor) -> Tensor:
    """Return the symmetric matrix T_ac = sum_delta |A_delta[a, c]|, shape (g, columns, columns)."""
    batch, *leading, _, k, C = Q.shape
    T = Q.new_zeros(batch, C, C)
    for pair in _half_of_offsets(tuple(leading)):
        A = _correlations(Q, pair).abs_()
        T += A.unflatten(2, (-1, C)).sum(2)
        T += _transposed_offsets(A, k, C, pair).sum(2).mT
    return T


def add_signed_product(target: Tensor, Q: Tensor, signs: Tensor, u: Tensor, w: Tensor | None) -> None:
    """Add sum_{delta, a} Q_{t+delta, a} E_delta[a, c] to target_t,c; E_delta = sign(A_delta) (u_a w_c + w_a u_c)."""
    _, *leading, _, k, C = Q.shape
    u_all, w_all = u.repeat(1, 2 * k - 1), None if w is None else w.repeat(1, 2 * k - 1)
    for i, pair in enumerate(_half_of_offsets(tuple(leading))):
        E = sign_matrix(signs[:, i], u, w, u_all, w_all)  # (g, C, (2k - 1) * C)
        if pair.is_centre:
            by_offset = E.unflatten(2, (2 * k - 1, C))
            for j in range(1, k):
                by_offset[:, :, k - 1 + j] = by_offset[:, :, k - 1 - j].mT
        shifted, base = _part(Q, pair.shifted), _part(Q, pair.base)
        for p in range(k):
            window = _taps(E, C, k - 1 - p, 2 * k - 1 - p)  # (g, C, k * C)
            _add_into(target, pair.base, slice(0, k * C), _taps(shifted, C, p, p + 1), window)
            if not pair.is_centre:
                _add_into(target, pair.shifted, slice(p * C, (p + 1) * C), base, window.mT)


class _Pair(NamedTuple):
    """Index ranges, along the leading tap axes, of a kernel shifted by an offset and of its unshifted counterpart."""

    shifted: tuple[slice, ...]
    base: tuple[slice, ...]
    is_centre: bool


def _half_of_offsets(taps: tuple[int, ...]) -> Iterator[_Pair]:
    """Offsets v of the leading axes with v >= 0 in lexicographic order: one of each pair {v, -v}, zero first."""
    for v in itertools.product(*(range(-k + 1, k) for k in taps)):
        if v >= (0,) * len(taps):
            shifted = tuple(slice(max(i, 0), k + min(i, 0)) for i, k in zip(v, taps, strict=True))
            base = tuple(slice(max(-i, 0), k + min(-i, 0)) for i, k in zip(v, taps, strict=True))
            yield _Pair(shifted, base, not any(v))


def _correlations(Q: Tensor, pair: _Pair) -> Tensor:
    """A (g, C, windows * C) for one offset of the leading taps and all (at the centre: half of the) last offsets."""
    k, C = Q.shape[-2:]
    X, Y = _part(Q, pair.shifted), _part(Q, pair.base)
    # At the centre only offsets j >= 0 of the last axis are needed: windows 0 to k - 1, the last of which is j = 0.
    A = Q.new_zeros(Q.shape[0], C, (k if pair.is_centre else 2 * k - 1) * C)
    for p in range(k):
        met = p + 1 if pair.is_centre else k
        window = _taps(A, C, k - 1 - p, k - 1 - p + met)
        add_product(window, _taps(X, C, p, p + 1).mT, _taps(Y, C, 0, met))
    return A


def _transposed_offsets(A: Tensor, k: int, C: int, pair: _Pair) -> Tensor:
    """The windows (g, C, n, C) of A whose transposes are those of -delta; all but delta = 0."""
    return (A[:, :, : (k - 1) * C] if pair.is_centre else A).unflatten(2, (-1, C))


def _part(Q: Tensor, index: tuple[slice, ...]) -> Tensor:
    """The selected leading taps as one batch of matrices (g, taps * rows, last taps * columns)."""
    chosen = Q[(slice(None), *index)]
    return chosen.reshape(Q.shape[0], -1, Q.shape[-2] * Q.shape[-1])


def _taps(matrix: Tensor, columns: int, start: int, stop: int) -> Tensor:
    """Taps start to stop of the last axis out of (g, n, last taps * columns)."""
    return matrix[:, :, start * columns : stop * columns]


def _add_into(target: Tensor, index: tuple[slice, ...], columns: slice, a: Tensor, b: Tensor) -> None:
    """Add a @ b to the selected leading taps and columns of target (g, *leading, rows, last, columns)."""
    chosen = target[(slice(None), *index)].flatten(-2)[..., columns]
    if chosen.dim() <= 4:
        # At most one leading axis: the selected rows are adjacent, so this is a view.
        add_product(chosen.view(chosen.shape[0], -1, chosen.shape[-1]), a, b)
    else:
        chosen += (a @ b).view(chosen.shape)
