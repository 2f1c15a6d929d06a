"""The Gram operator of a kernel, in float64, and the number of roundings that went into it.

A kernel K is laid out as (g, *taps, rows, columns), one matrix K_t for each tap. Its Gram operator is the kernel

    A_delta = sum_t K_{t + delta}^T K_t        (columns x columns), one matrix for each offset delta,

and A_{-delta} = A_delta^T, so half of the offsets are multiplied out and the others are their transposes: the result is
symmetric to the last bit. Then A^T A = A A up to a reflection of space, so the Gram operator of A is its square.
"""

import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor

Offset = tuple[int, ...]


class Gram(NamedTuple):
    """A computed Gram operator.

    Attributes:
        sums: T_ij = sum_delta |A_delta[i, j]|, shape (g, columns, columns).
        kernel: A, shape (g, *offsets, columns, columns), if it was asked for.
        inner: the number of products in an entry of A.
        offsets: the number of terms in an entry of T.
    """

    sums: Tensor
    kernel: Tensor | None
    inner: int
    offsets: int


def lay_out(kernel: Tensor) -> Tensor:
    """(g, rows, columns, *taps) of `Geometry.to_kernel` -> (g, *taps, rows, columns)."""
    return kernel.permute(0, *range(3, kernel.dim()), 1, 2).contiguous()


def half_of_offsets(taps: tuple[int, ...]) -> Iterator[Offset]:
    """Offsets that are zero or come after zero in lexicographic order: one of each pair {delta, -delta}.

    Examples:
        >>> list(half_of_offsets((2, 2)))
        [(0, 0), (0, 1), (1, -1), (1, 0), (1, 1)]
    """
    offsets = itertools.product(*(range(1 - k, k) for k in taps))
    return (delta for delta in offsets if delta >= (0,) * len(taps))


def gram(K: Tensor, keep: bool = False) -> Gram:
    """The Gram operator of K (g, *taps, rows, columns); `keep` says whether A itself is wanted or only its sums.

    Examples:
        >>> import torch
        >>> K = torch.tensor([[[[1.0]], [[2.0]]]])  # one channel, taps 1 and 2: A = 2, 5, 2
        >>> gram(K).sums
        tensor([[[9.]]])
    """
    g, *taps, R, C = K.shape
    sums = K.new_zeros(g, C, C)
    kernel = K.new_zeros(g, *(2 * k - 1 for k in taps), C, C) if keep else None
    for delta in half_of_offsets(tuple(taps)):
        shifted = tuple(slice(max(i, 0), k + min(i, 0)) for i, k in zip(delta, taps, strict=True))
        base = tuple(slice(max(-i, 0), k + min(-i, 0)) for i, k in zip(delta, taps, strict=True))
        A = _stacked(K, shifted).mT @ _stacked(K, base)  # (g, C, C)
        if not any(delta):
            A = A.triu() + A.triu(1).mT
            sums += A.abs()
        else:
            sums += A.abs()
            sums += A.abs().mT
        if kernel is not None:
            kernel[(slice(None), *(k - 1 + i for i, k in zip(delta, taps, strict=True)))] = A
            kernel[(slice(None), *(k - 1 - i for i, k in zip(delta, taps, strict=True)))] = A.mT
    return Gram(sums, kernel, math.prod(taps) * R, math.prod(2 * k - 1 for k in taps))


def cost_of_gram(shape: tuple[int, ...]) -> float:
    """Multiplications and additions of `gram` for a kernel of the shape (g, *taps, rows, columns)."""
    g, *taps, R, C = shape
    return float(g) * C * C * R * math.prod(taps) ** 2


def _stacked(K: Tensor, taps: tuple[slice, ...]) -> Tensor:
    """Some taps of K, one below the other: (g, taps * rows, columns)."""
    chosen = K[(slice(None), *taps)]
    return chosen.reshape(K.shape[0], -1, K.shape[-1])
