"""Initial weights for which AOL's bound is tight, as the paper chooses them.

Layers that preserve the size start as the identity, all others with random orthogonal columns. More columns than rows
cannot be orthogonal: there each column is a member of an orthonormal basis, and those that share a member share its
length ("repeated orthogonal"), which keeps every row sum of |P^T P| at 1. All weight sits on one tap, so that the
correlations at other offsets vanish.
"""

import torch
from torch import Tensor

from onelip.geometry import Geometry


def orthogonal_columns(rows: int, columns: int, *, generator: torch.Generator | None = None) -> Tensor:
    """A random (rows, columns) matrix, float64, with orthonormal columns, or repeated orthogonal if there are too many.

    Example:
        >>> W = orthogonal_columns(3, 8)
        >>> torch.allclose((W.T @ W).abs().sum(1), torch.ones(8, dtype=torch.float64))
        True
    """
    basis = _orthonormal(rows, min(rows, columns), generator)
    if columns <= rows:
        return basis
    # Every member once or more, as evenly as possible, in random order; a member used n times is divided by sqrt(n).
    member = torch.arange(columns)[torch.randperm(columns, generator=generator)] % rows
    count = torch.bincount(member, minlength=rows)
    return basis[:, member] / count[member].sqrt()


def _orthonormal(rows: int, columns: int, generator: torch.Generator | None) -> Tensor:
    """Uniformly distributed: QR of a Gaussian matrix with the signs of R's diagonal made positive."""
    gaussian = torch.randn(rows, columns, dtype=torch.float64, generator=generator)
    Q, R = torch.linalg.qr(gaussian)
    return Q * R.diagonal().sign()


def tight_weight(
    geometry: Geometry, shape: tuple[int, ...], side: str, *, generator: torch.Generator | None = None
) -> Tensor:
    """A float64 weight of the given shape whose AOL bound on the given side is tight: identity where rows = columns."""
    kernel = torch.zeros(geometry.kernel_shape(shape, side), dtype=torch.float64)  # (g, rows, columns, *taps)
    groups, rows, columns = kernel.shape[:3]
    if kernel.numel() == 0:
        return geometry.to_weight(kernel, side)
    for group in range(groups):
        if rows == columns:
            matrix = torch.eye(rows, dtype=torch.float64)
        else:
            matrix = orthogonal_columns(rows, columns, generator=generator)
        kernel[(group, slice(None), slice(None), *geometry.identity_tap)] = matrix
    return geometry.to_weight(kernel, side)
