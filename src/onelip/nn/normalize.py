"""Standardisation as a layer: (x - mean) / std per channel, inside the network, so that radii are in pixel units.

Inequality: ||f(x) - f(y)||_2 <= ||x - y||_2 / min std, reached by images that differ in the channel of the smallest std
only.  For CIFAR-10's usual numbers the constant is about 4.1: a network that is 1-Lipschitz on standardised images is
not 1-Lipschitz on images, and a radius that forgets this is about 4 times too large.
"""

import math
from collections.abc import Sequence
from fractions import Fraction

import torch
from torch import Tensor

from onelip.core.errors import UnknownLipschitzConstant
from onelip.core.lipschitz_module import LipschitzModule
from onelip.graph import kinds
from onelip.graph.lowering import Lowering, lowers
from onelip.nn._base import along_axis, axis_length


class Normalize(LipschitzModule):
    """(x - mean) / std with one mean and one std for each channel (axis 1); both are buffers.

    Examples:
        >>> layer = Normalize((0.5, 0.5, 0.5), (0.25, 0.5, 0.5))
        >>> layer(torch.ones(1, 3, 1, 1)).flatten(), layer.lipschitz_constant
        (tensor([2., 1., 1.]), 4.0)
    """

    mean: Tensor
    std: Tensor

    def __init__(self, mean: Sequence[float] | Tensor, std: Sequence[float] | Tensor) -> None:
        super().__init__()
        means, stds = (torch.as_tensor(value).detach().clone().flatten() for value in (mean, std))
        means, stds = (v if v.is_floating_point() else v.to(torch.get_default_dtype()) for v in (means, stds))
        if len(means) != len(stds) or not len(means):
            raise ValueError(
                f"expected as many means as stds, one per channel, got {len(means)} and {len(stds)}; give both"
            )
        if not bool((stds > 0).all() and torch.isfinite(stds).all() and torch.isfinite(means).all()):
            raise ValueError(f"expected finite means and stds above 0, got {means.tolist()} and {stds.tolist()}")
        self.register_buffer("mean", means)
        self.register_buffer("std", stds)

    @property
    def lipschitz_constant(self) -> float:
        smallest = float(self.std.min())
        if not (smallest > 0 and bool(torch.isfinite(self.std).all())):  # loaded from somewhere, or NaN
            raise UnknownLipschitzConstant(f"expected stds above 0, got {self.std.tolist()}")
        inverse = 1 / smallest
        return inverse if Fraction(inverse) * Fraction(smallest) >= 1 else math.nextafter(inverse, math.inf)

    def forward(self, x: Tensor) -> Tensor:
        channels = axis_length(x, 1, "Normalize")
        if channels != len(self.mean):
            raise ValueError(
                f"Normalize expected {len(self.mean)} channels on axis 1, got {channels} (input of shape "
                f"{tuple(x.shape)}); give one mean and one std per channel"
            )
        return (x - along_axis(self.mean.to(x.dtype), x, 1)) / along_axis(self.std.to(x.dtype), x, 1)

    def extra_repr(self) -> str:
        return f"mean={self.mean.tolist()}, std={self.std.tolist()}"


@lowers(Normalize)
def _lower(low: Lowering) -> int:
    mean, std = (low.tensor(getattr(low.module, role), role) for role in ("mean", "std"))
    return low.emit(kinds.Normalize, low.source, mean=mean, std=std)
