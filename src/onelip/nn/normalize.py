"""Standardisation of images as a layer of the network, so that radii are in units of the image."""

import math
from collections.abc import Sequence
from fractions import Fraction

import torch
from torch import Tensor

from onelip.core.errors import UnknownLipschitzConstant
from onelip.core.lipschitz_module import LipschitzModule
from onelip.graph import kinds
from onelip.graph.lowering import Lowering, lowers
from onelip.nn._base import along_axis, check_channels


class Normalize(LipschitzModule):
    r"""Standardise each channel with fixed numbers: $y_c = (x_c - \mathrm{mean}_c) / \mathrm{std}_c$.

    The Lipschitz constant is $1 / \min_c \mathrm{std}_c$, attained by images that differ only in the channel with the
    smallest std. For the usual numbers of CIFAR-10 it is about 4.1: a network that is 1-Lipschitz on standardised
    images is not 1-Lipschitz on images. With this layer inside the network, the constant is part of each bound.

    Args:
        mean: one mean per channel (axis 1).
        std: one standard deviation per channel, each above 0.
        device: device of the buffers; that of `mean` and `std` by default.
        dtype: type of the buffers; that of `mean` and `std` by default.

    Shape:
        - Input: $(N, C, *)$, with $C$ the number of means.
        - Output: same shape as the input.

    Attributes:
        mean: buffer `(C,)`.
        std: buffer `(C,)`.

    Raises:
        ValueError: if the numbers of means and stds differ, or for values that are not finite, or stds that are not
            above 0.

    Examples:
        >>> layer = Normalize((0.5, 0.5, 0.5), (0.25, 0.5, 0.5))
        >>> layer(torch.ones(1, 3, 1, 1)).flatten(), layer.lipschitz_constant
        (tensor([2., 1., 1.]), 4.0)
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self,
        mean: Sequence[float] | Tensor,
        std: Sequence[float] | Tensor,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        means, stds = (_buffer(value, device, dtype) for value in (mean, std))
        if len(means) != len(stds) or not len(means):
            raise ValueError(f"expected one mean and one std per channel, got {len(means)} means and {len(stds)} stds")
        is_known = not (means.is_meta or stds.is_meta)
        if is_known and not bool((stds > 0).all() and torch.isfinite(stds).all() and torch.isfinite(means).all()):
            raise ValueError(f"expected finite means and stds above 0, got {means.tolist()} and {stds.tolist()}")
        self.register_buffer("mean", means)
        self.register_buffer("std", stds)

    @property
    def lipschitz_constant(self) -> float:
        r"""$1 / \min_c \mathrm{std}_c$ of the stored buffer, rounded up."""
        smallest = float(self.std.min())
        if not (smallest > 0 and bool(torch.isfinite(self.std).all())):  # loaded from a state dict, or NaN
            raise UnknownLipschitzConstant(f"expected stds above 0, got {self.std.tolist()}")
        inverse = 1 / smallest
        return inverse if Fraction(inverse) * Fraction(smallest) >= 1 else math.nextafter(inverse, math.inf)

    def forward(self, x: Tensor) -> Tensor:
        check_channels(x, 1, len(self.mean), "Normalize", "len(mean)")
        return (x - along_axis(self.mean.to(x.dtype), x, 1)) / along_axis(self.std.to(x.dtype), x, 1)

    def extra_repr(self) -> str:
        return f"mean={self.mean.tolist()}, std={self.std.tolist()}"


def _buffer(values: Sequence[float] | Tensor, device: torch.device | str | None, dtype: torch.dtype | None) -> Tensor:
    tensor = torch.as_tensor(values).detach().clone().flatten()
    if dtype is None and not tensor.is_floating_point():
        dtype = torch.get_default_dtype()
    return tensor.to(device=device, dtype=dtype)


@lowers(Normalize)
def _lower(low: Lowering) -> int:
    mean, std = (low.tensor(getattr(low.module, role), role) for role in ("mean", "std"))
    return low.emit(kinds.Normalize, low.source, mean=mean, std=std)
