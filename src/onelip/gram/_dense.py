"""Absolute row sums of P^T P for a batch of matrices, and their derivative, with half of the products.

P^T P is symmetric, so only its blocks on and above the diagonal are computed; each block is used for its rows and,
transposed, for its columns. The derivative needs only the sign of each entry, one byte.
"""

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor


def add_product(target: Tensor, a: Tensor, b: Tensor) -> None:
    """Compute target += a @ b for batches of matrices; target may be any strided view."""
    if target.shape[0] == 1:
        # One matrix: addmm passes the view's leading dimension to BLAS, baddbmm may copy.
        target[0].addmm_(a[0], b[0])
    else:
        target.baddbmm_(a, b)


def sign_matrix(signs: Tensor, u_a: Tensor, w_a: Tensor | None, u_c: Tensor, w_c: Tensor | None) -> Tensor:
    """Return sign_ac (u_a w_c + w_a u_c), shape (g, a, c). Weights None are ones."""
    if w_a is None or w_c is None:
        E = u_a[:, :, None] + u_c[:, None]
    else:
        E = (u_a[:, :, None] * w_c[:, None]).addcmul_(w_a[:, :, None], u_c[:, None])
    return E.mul_(signs.to(E.dtype))  # cast the int8 signs first: mixed-type products are slow


def weighted(A: Tensor, w: Tensor | None, dim: int) -> Tensor:
    """Multiply each row (dim 1) or column (dim 2) of A (g, a, c) by its weight. Weights None are ones."""
    if w is None:
        return A
    return A * (w[:, :, None] if dim == 1 else w[:, None])


def some(w: Tensor | None, columns: slice) -> Tensor | None:
    """Return the weights of the given columns."""
    return None if w is None else w[:, columns]


# Narrower blocks save more of the symmetric half, but matrix products get slower; see benchmarks/rescaling.py.
_NARROWEST_BLOCK = 256
_MOST_BLOCKS = 4


def lay_out(P: Tensor) -> Tensor:
    """Return the matrices (g, rows, columns) unchanged."""
    return P


def lay_back(Q: Tensor) -> Tensor:
    """The inverse of `lay_out`."""
    return Q


def weighted_sums(Q: Tensor, w: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return |Q^T Q| w and the signs of Q^T Q (blocks on and above the diagonal), for Q (g, rows, columns)."""
    batch, _, columns = Q.shape
    sums = Q.new_zeros(batch, columns)
    signs = torch.zeros(batch, columns, columns, dtype=torch.int8, device=Q.device)
    for start, stop in _blocks(columns):
        G = Q[:, :, start:stop].mT @ Q[:, :, start:]  # (g, block, columns from the block on)
        signs[:, start:stop, start:] = G.sign()
        G.abs_()
        # sum() adds pairwise. A matrix-vector product may add sequentially, and thousands of equal terms then round in
        # the same direction: the norm of W was 1 + 1.5e-5.
        sums[:, start:stop] += weighted(G, some(w, slice(start, columns)), 2).sum(2)
        sums[:, stop:] += weighted(G[:, :, stop - start :], some(w, slice(start, stop)), 1).sum(1)
    return sums, signs


def absolute_matrix(Q: Tensor) -> Tensor:
    """Return |Q^T Q|, shape (g, columns, columns)."""
    return (Q.mT @ Q).abs_()


def add_signed_product(target: Tensor, Q: Tensor, signs: Tensor, u: Tensor, w: Tensor | None) -> None:
    """Compute target += Q E with E_ac = sign_ac (u_a w_c + w_a u_c), with one block row of E in memory at a time."""
    columns = Q.shape[-1]
    for start, stop in _blocks(columns):
        block, rest = slice(start, stop), slice(start, columns)
        E = sign_matrix(signs[:, block, rest], u[:, block], some(w, block), u[:, rest], some(w, rest))
        add_product(target[:, :, rest], Q[:, :, block], E)
        if stop < columns:
            add_product(target[:, :, block], Q[:, :, stop:], E[:, :, stop - start :].mT)


def _blocks(columns: int) -> Iterator[tuple[int, int]]:
    count = max(1, min(_MOST_BLOCKS, columns // _NARROWEST_BLOCK))
    edges = [columns * i // count for i in range(count + 1)]
    yield from itertools.pairwise(edges)
