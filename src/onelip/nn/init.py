r"""Initial weights for which the bound of AOL is tight, as in the paper.

Layers that preserve the number of channels start as the identity, all others with random orthogonal columns. More
columns than rows cannot be orthogonal: then each column is a member of an orthonormal basis, and columns that share a
member share its length ("repeated orthogonal"), which keeps each row sum of $|P^\top P|$ at 1. All weight is on one
tap, so that the correlations at other offsets vanish.
"""

from typing import TypeVar

import torch
from torch import Tensor, nn

from onelip.core.geometry import Geometry, geometry_of

Layer = TypeVar("Layer", bound=nn.Module)


def orthogonal_columns(rows: int, columns: int, *, generator: torch.Generator | None = None) -> Tensor:
    r"""Return a random matrix with orthonormal columns; repeated orthogonal if there are more columns than rows.

    Args:
        rows: number of rows.
        columns: number of columns.
        generator: random number generator, on the CPU.

    Returns:
        A matrix $W$ `(rows, columns)` in float64 whose row sums of $|W^\top W|$ are 1.

    Examples:
        >>> W = orthogonal_columns(3, 8)
        >>> torch.allclose((W.T @ W).abs().sum(1), torch.ones(8, dtype=torch.float64))
        True
    """
    basis = _orthonormal(rows, min(rows, columns), generator)
    if columns <= rows:
        return basis
    # Each basis vector is used equally often, up to one, in random order; used n times it is divided by sqrt(n).
    member = torch.arange(columns)[torch.randperm(columns, generator=generator)] % rows
    count = torch.bincount(member, minlength=rows)
    return basis[:, member] / count[member].sqrt()


def _orthonormal(rows: int, columns: int, generator: torch.Generator | None) -> Tensor:
    """Uniformly distributed: QR of a Gaussian matrix, with the signs of the diagonal of R made positive."""
    gaussian = torch.randn(rows, columns, dtype=torch.float64, generator=generator)
    Q, R = torch.linalg.qr(gaussian)
    return Q * R.diagonal().sign()


def tight_weight(
    geometry: Geometry, shape: tuple[int, ...], side: str, *, generator: torch.Generator | None = None
) -> Tensor:
    """Return a weight whose AOL bound is tight: the identity where rows = columns, else orthogonal columns.

    Args:
        geometry: how the weight acts, from `onelip.core.geometry.geometry_of`.
        shape: shape of the weight.
        side: side that AOL rescales, "inputs" or "outputs".
        generator: random number generator, on the CPU.

    Returns:
        The weight, in float64.

    Examples:
        >>> layer = nn.Linear(2, 2)
        >>> tight_weight(geometry_of(layer), (2, 2), "inputs").tolist()
        [[1.0, 0.0], [0.0, 1.0]]
    """
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
    """Initialise a linear layer in place such that the bound of AOL is tight; the bias is set to zero.

    Args:
        module: Linear, Conv1d to Conv3d or ConvTranspose1d to ConvTranspose3d, plain or parametrized.
        side: side that AOL rescales, "inputs" or "outputs".
        generator: random number generator, on the CPU.

    Returns:
        The same module.

    Examples:
        >>> layer = tight_(nn.Conv2d(3, 3, 3, padding=1))
        >>> x = torch.randn(1, 3, 5, 5)
        >>> torch.equal(layer(x), x)
        True
    """
    weight = module.weight
    assert isinstance(weight, Tensor)
    if weight.is_meta:
        return module
    wanted = tight_weight(geometry_of(module), tuple(weight.shape), side, generator=generator)
    with torch.no_grad():
        if isinstance(weight, nn.Parameter):
            weight.copy_(wanted)
        else:  # parametrized: the right inverse of the parametrization is applied
            module.weight = wanted.to(weight.device, weight.dtype)
        if isinstance(module.bias, Tensor):
            module.bias.zero_()
    return module
