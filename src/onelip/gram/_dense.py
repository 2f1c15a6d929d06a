"""Absolute row sums of P^T P for a batch of matrices, and their derivative, with half of the products.

P^T P is symmetric, so only its blocks on and above the diagonal are computed; each block is used for its rows and,
transposed, for its columns. The derivative needs only the sign of each entry, one byte.
"""

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from onelip.gram._products import add_product, sign_matrix, some, weighted

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
