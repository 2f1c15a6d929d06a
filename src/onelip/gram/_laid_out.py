"""Products of a kernel with itself, in the layout in which they are fastest, with half of the products.

A_delta[a, c] = sum over rows and taps t of P[:, a, t + delta] P[:, c, t] is the Gram operator of a convolution, one
(columns x columns) block for each offset delta. A_{-delta} = A_delta^T, so half of the offsets suffice. The derivative
needs only the sign of each entry, one byte.

Matrices (g, rows, columns) have one offset, and their Gram matrix is symmetric: only its blocks on and above the
diagonal are computed; each block is used for its rows and, transposed, for its columns.

A kernel with taps is laid out as Q (g, *leading taps, rows, last taps, columns). For one offset v of the leading taps
let X be the part of Q shifted by v and Y its unshifted counterpart. All offsets of the last axis are then stored side
by side in one array A (columns, offsets of the last axis, columns): the products of tap p of X with all taps of Y are
one matrix product whose result is a contiguous window of A. The derivative reads the same windows, so nothing is
copied.
"""

import itertools
from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

# Narrower blocks save more of the symmetric half, but matrix products get slower; see benchmarks/rescaling.py.
_NARROWEST_BLOCK = 256
_MOST_BLOCKS = 4


def lay_out(P: Tensor) -> Tensor:
    """Lay out a kernel (g, rows, columns, *taps); tap axes of length one are dropped: a 1x1 convolution is a matrix."""
    P = P.reshape(*P.shape[:3], *(k for k in P.shape[3:] if k > 1))
    axes = P.dim()
    return P if axes == 3 else P.permute(0, *range(3, axes - 1), 1, axes - 1, 2).contiguous()


def lay_back(Q: Tensor, shape: torch.Size) -> Tensor:
    """Return a laid-out kernel in the shape that it had: the inverse of `lay_out`."""
    axes = Q.dim()
    return (Q if axes == 3 else Q.permute(0, axes - 3, axes - 1, *range(1, axes - 3), axes - 2)).reshape(shape)


def weighted_sums(Q: Tensor, w: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return s_c = sum_{delta, a} |A_delta[a, c]| w_a and the signs of A. Weights None are ones."""
    return _weighted_sums_of_matrices(Q, w) if Q.dim() == 3 else _weighted_sums_of_kernels(Q, w)


def absolute_matrix(Q: Tensor) -> Tensor:
    """Return the symmetric matrix T_ac = sum_delta |A_delta[a, c]|, shape (g, columns, columns)."""
    if Q.dim() == 3:
        return (Q.mT @ Q).abs_()
    batch, *leading, _, k, C = Q.shape
    T = Q.new_zeros(batch, C, C)
    for pair in _half_of_offsets(tuple(leading)):
        A = _correlations(Q, pair).abs_()
        T += A.unflatten(2, (-1, C)).sum(2)
        T += _transposed_offsets(A, k, C, pair).sum(2).mT
    return T


def add_signed_product(target: Tensor, Q: Tensor, signs: Tensor, u: Tensor, w: Tensor | None) -> None:
    """Add sum_{delta, a} Q_{t+delta, a} E_delta[a, c] to target_t,c; E_delta = sign(A_delta) (u_a w_c + w_a u_c)."""
    if Q.dim() == 3:
        _add_signed_product_of_matrices(target, Q, signs, u, w)
    else:
        _add_signed_product_of_kernels(target, Q, signs, u, w)


# ---- matrices


def _weighted_sums_of_matrices(Q: Tensor, w: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return |Q^T Q| w and the signs of Q^T Q, of blocks on and above the diagonal."""
    batch, _, columns = Q.shape
    sums = Q.new_zeros(batch, columns)
    signs = torch.zeros(batch, columns, columns, dtype=torch.int8, device=Q.device)
    for start, stop in _blocks(columns):
        G = Q[:, :, start:stop].mT @ Q[:, :, start:]  # (g, block, columns from the block on)
        signs[:, start:stop, start:] = G.sign()
        G.abs_()
        # sum() adds pairwise. A matrix-vector product may add sequentially, and thousands of equal terms then round in
        # the same direction: the norm of W was 1 + 1.5e-5.
        sums[:, start:stop] += _weighted(G, _some(w, slice(start, columns)), 2).sum(2)
        sums[:, stop:] += _weighted(G[:, :, stop - start :], _some(w, slice(start, stop)), 1).sum(1)
    return sums, signs


def _add_signed_product_of_matrices(target: Tensor, Q: Tensor, signs: Tensor, u: Tensor, w: Tensor | None) -> None:
    """Compute target += Q E with E_ac = sign_ac (u_a w_c + w_a u_c), with one block row of E in memory at a time."""
    columns = Q.shape[-1]
    for start, stop in _blocks(columns):
        block, rest = slice(start, stop), slice(start, columns)
        E = _sign_matrix(signs[:, block, rest], u[:, block], _some(w, block), u[:, rest], _some(w, rest))
        _add_product(target[:, :, rest], Q[:, :, block], E)
        if stop < columns:
            _add_product(target[:, :, block], Q[:, :, stop:], E[:, :, stop - start :].mT)


def _blocks(columns: int) -> Iterator[tuple[int, int]]:
    count = max(1, min(_MOST_BLOCKS, columns // _NARROWEST_BLOCK))
    edges = [columns * i // count for i in range(count + 1)]
    yield from itertools.pairwise(edges)


# ---- kernels with taps


def _weighted_sums_of_kernels(Q: Tensor, w: Tensor | None) -> tuple[Tensor, Tensor]:
    batch, *leading, _, k, C = Q.shape
    pairs = list(_half_of_offsets(tuple(leading)))
    signs = torch.zeros(batch, len(pairs), C, (2 * k - 1) * C, dtype=torch.int8, device=Q.device)
    sums = Q.new_zeros(batch, C)
    for i, pair in enumerate(pairs):
        A = _correlations(Q, pair)
        signs[:, i, :, : A.shape[2]] = A.sign()
        A.abs_()
        # Sums, not matrix-vector products: see `_weighted_sums_of_matrices`.
        sums += _weighted(A, w, 1).sum(1).unflatten(1, (-1, C)).sum(1)
        sums += _weighted(_transposed_offsets(A, k, C, pair).sum(2), w, 2).sum(2)
    return sums, signs


def _add_signed_product_of_kernels(target: Tensor, Q: Tensor, signs: Tensor, u: Tensor, w: Tensor | None) -> None:
    _, *leading, _, k, C = Q.shape
    u_all, w_all = u.repeat(1, 2 * k - 1), None if w is None else w.repeat(1, 2 * k - 1)
    for i, pair in enumerate(_half_of_offsets(tuple(leading))):
        E = _sign_matrix(signs[:, i], u, w, u_all, w_all)  # (g, C, (2k - 1) * C)
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
        _add_product(window, _taps(X, C, p, p + 1).mT, _taps(Y, C, 0, met))
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
        _add_product(chosen.view(chosen.shape[0], -1, chosen.shape[-1]), a, b)
    else:
        chosen += (a @ b).view(chosen.shape)


# ---- both


def _add_product(target: Tensor, a: Tensor, b: Tensor) -> None:
    """Compute target += a @ b for batches of matrices; target may be any strided view."""
    if target.shape[0] == 1:
        # One matrix: addmm passes the view's leading dimension to BLAS, baddbmm may copy.
        target[0].addmm_(a[0], b[0])
    else:
        target.baddbmm_(a, b)


def _sign_matrix(signs: Tensor, u_a: Tensor, w_a: Tensor | None, u_c: Tensor, w_c: Tensor | None) -> Tensor:
    """Return sign_ac (u_a w_c + w_a u_c), shape (g, a, c). Weights None are ones."""
    if w_a is None or w_c is None:
        E = u_a[:, :, None] + u_c[:, None]
    else:
        E = (u_a[:, :, None] * w_c[:, None]).addcmul_(w_a[:, :, None], u_c[:, None])
    return E.mul_(signs.to(E.dtype))  # cast the int8 signs first: mixed-type products are slow


def _weighted(A: Tensor, w: Tensor | None, dim: int) -> Tensor:
    """Multiply each row (dim 1) or column (dim 2) of A (g, a, c) by its weight. Weights None are ones."""
    if w is None:
        return A
    return A * (w[:, :, None] if dim == 1 else w[:, None])


def _some(w: Tensor | None, columns: slice) -> Tensor | None:
    """Return the weights of the given columns."""
    return None if w is None else w[:, columns]
