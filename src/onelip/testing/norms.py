"""The norm of a linear layer by brute force: its Jacobian, written out, and singular values in float64."""

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from onelip.export import bake


@torch.no_grad()
def exact_jacobian(layer: nn.Module, input_shape: Sequence[int]) -> Tensor:
    """The matrix (outputs, inputs) of an affine layer with the weights it has stored, in float64.

    Each column is the layer's response to one unit vector: products with 0 and 1 are exact, so the entries of the
    matrix are the stored weights to the last bit.

    Args:
        layer: a linear or affine layer, plain or parametrized, of any floating-point type.
        input_shape: shape of one sample, without the batch axis.

    Example:
        >>> exact_jacobian(nn.AvgPool1d(2), (1, 4))
        tensor([[0.5000, 0.5000, 0.0000, 0.0000],
                [0.0000, 0.0000, 0.5000, 0.5000]], dtype=torch.float64)
    """
    layer = bake(copy.deepcopy(layer)).double().eval()
    for module in layer.modules():
        if isinstance(getattr(module, "bias", None), Tensor):
            module.register_parameter("bias", None)  # shifts do not matter, and adding them would round
    size = int(torch.Size(input_shape).numel())
    device = next((p.device for p in layer.parameters()), torch.device("cpu"))
    units = torch.eye(size, dtype=torch.float64, device=device).reshape(size, *input_shape)
    return layer(units).reshape(size, -1).T


def exact_norm(layer: nn.Module, input_shape: Sequence[int]) -> float:
    """The largest singular value of `exact_jacobian`.

    Example:
        >>> exact_norm(nn.Identity(), (3,))
        1.0
    """
    return float(torch.linalg.matrix_norm(exact_jacobian(layer, input_shape), 2))


def rounding_allowance(jacobian: Tensor, dtype: torch.dtype) -> float:
    """How far rounding a weight to `dtype` can move the norm of its layer, and the arithmetic on the way to it with it.

    Each entry W moves by at most u |W|, so the norm by at most u || |J| ||. The rescaling itself is wrong by some units
    in the last place; ten of them are granted. For float64 this is some 1e-15.
    """
    unit = torch.finfo(dtype).eps / 2
    entrywise = float(torch.linalg.matrix_norm(jacobian.abs(), 2)) if jacobian.numel() else 0.0
    working = max(torch.finfo(torch.float64).eps, min(unit, torch.finfo(torch.float32).eps))
    return unit * entrywise + 10 * working * max(1.0, entrywise)
