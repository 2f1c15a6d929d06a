"""The initialisers of the paper, for layers that are not made by onelip's own classes (those use them already)."""

import torch
from torch import Tensor, nn

from onelip.geometry import geometry_of
from onelip.methods._tight import orthogonal_columns, tight_weight
from onelip.methods.aol import Layer

__all__ = ["orthogonal_columns", "tight_", "tight_weight"]


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
