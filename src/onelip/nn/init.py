"""Initial weights for which AOL's bound is tight, as the paper chooses them.

Layers that preserve the size start as the identity, all others with random orthogonal columns. More columns than rows
cannot be orthogonal: there each column is a member of an orthonormal basis, and those that share a member share its
length ("repeated orthogonal"), which keeps every row sum of |P^T P| at 1. All weight sits on one tap, so that the
correlations at other offsets vanish.
"""

from typing import TypeVar

import torch
from torch import Tensor, nn

from onelip.core.geometry import Geometry, geometry_of

Layer = TypeVar("Layer", bound=nn.Module)


def orthogonal_columns(rows: int, columns: int, *, generator: torch.Generator | None = None) -> Tensor:
    """A random (rows, columns) matrix, float64, with orthonormal columns, or repeated orthogonal if there are too many.

    Examples:
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


def tight_(module: Layer, side: str = "inputs", *, generator: torch.Generator | None = None) -> Layer:
    """Fill a linear layer's weight as the paper does, its bias with zeros, in place; return the layer.

    Args:
        module: Linear, ConvNd or ConvTransposeNd, plain or parametrized.
        side: the side that AOL rescales.
        generator: source of randomness, on the CPU.
    """
    weight = module.weight
    assert isinstance(weight, Tensor)
    if weight.is_meta:
        return module
    wanted = tight_weight(geometry_of(module), tuple(weight.shape), side, generator=generator)
    with torch.no_grad():
        if isinstance(weight, nn.Parameter):
            weight.copy_(wanted)
        else:  # parametrized: goes through the right inverse
            module.weight = wanted.to(weight.device, weight.dtype)
        if isinstance(module.bias, Tensor):
            module.bias.zero_()
    return module
