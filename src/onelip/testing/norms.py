"""Norms by brute force: dense Jacobians and their singular values in float64."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from onelip.core.bake import bake
from onelip.core.geometry import LINEAR_LAYERS


@torch.no_grad()
def exact_jacobian(layer: nn.Module, input_shape: Sequence[int]) -> Tensor:
    """Return the matrix (outputs, inputs) of an affine layer with its stored weights, in float64.

    Each column is the output for one unit vector. Products with 0 and 1 are exact, so the entries of the matrix are the
    stored weights to the last bit.

    Args:
        layer: a linear or affine layer, plain or parametrized, of any floating-point type.
        input_shape: shape of one sample, without the batch axis.

    Returns:
        The Jacobian, float64.

    Examples:
        >>> exact_jacobian(nn.AvgPool1d(2), (1, 4))
        tensor([[0.5000, 0.5000, 0.0000, 0.0000],
                [0.0000, 0.0000, 0.5000, 0.5000]], dtype=torch.float64)
    """
    layer = bake(layer).double().eval()  # a copy
    for module in layer.modules():
        if isinstance(bias := getattr(module, "bias", None), Tensor):  # offsets do not matter, and adding rounds
            if isinstance(module, LINEAR_LAYERS):
                module.register_parameter("bias", None)
            else:
                bias.detach().zero_()
    return columns_of(layer, input_shape)


@torch.no_grad()
def columns_of(layer: nn.Module, input_shape: Sequence[int]) -> Tensor:
    """Return the matrix (outputs, inputs) of a plain float64 layer in eval mode without offsets."""
    size = int(torch.Size(input_shape).numel())
    device = next((p.device for p in layer.parameters()), torch.device("cpu"))
    units = torch.eye(size, dtype=torch.float64, device=device).reshape(size, *input_shape)
    return layer(units).reshape(size, -1).T


def jacobians_at(layer: nn.Module, points: Tensor) -> Tensor:
    """Return the Jacobians (points, outputs, inputs) of a layer, linear or not, at several points.

    It takes one backward pass: in a batch of copies of a point, sample i yields the gradient of output i. The layer
    must not mix samples.

    Args:
        layer: the layer.
        points: inputs (points, *input_shape).

    Returns:
        One Jacobian per point, in the dtype of the points.

    Examples:
        >>> jacobians_at(nn.ReLU(), torch.tensor([[1.0, -1.0]]))
        tensor([[[1., 0.],
                 [0., 0.]]])
    """
    with torch.no_grad():
        outputs = layer(points[:1]).numel()
    with torch.enable_grad():
        x = points.detach().repeat_interleave(outputs, 0).requires_grad_()
        y = layer(x).reshape(len(points), outputs, outputs)
        (rows,) = torch.autograd.grad(y.diagonal(dim1=1, dim2=2).sum(), x)
    return rows.reshape(len(points), outputs, -1)


def exact_norm(layer: nn.Module, input_shape: Sequence[int]) -> float:
    """Return the largest singular value of `exact_jacobian`.

    Args:
        layer: a linear or affine layer, plain or parametrized, of any floating-point type.
        input_shape: shape of one sample, without the batch axis.

    Returns:
        The spectral norm, computed in float64.

    Examples:
        >>> exact_norm(nn.Identity(), (3,))
        1.0
    """
    return float(torch.linalg.matrix_norm(exact_jacobian(layer, input_shape), 2))


def rounding_allowance(jacobian: Tensor, dtype: torch.dtype) -> float:
    r"""Return how much rounding a weight to `dtype`, and computing it, can change the norm of its layer.

    Rounding changes each entry $W$ by at most $u |W|$, so it changes the norm by at most $u \lVert |J| \rVert$. The
    rescaling itself has an error of a few units in the last place; ten are allowed. For float64 the result is about
    1e-15.

    Args:
        jacobian: matrix of the layer.
        dtype: dtype of the stored weight.

    Returns:
        The allowed difference of the norm.
    """
    unit = torch.finfo(dtype).eps / 2
    entrywise = float(torch.linalg.matrix_norm(jacobian.abs(), 2)) if jacobian.numel() else 0.0
    working = max(torch.finfo(torch.float64).eps, min(unit, torch.finfo(torch.float32).eps))
    return unit * entrywise + 10 * working * max(1.0, entrywise)
