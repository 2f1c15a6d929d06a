"""A convolution that keeps the size of images, for modules that apply the same one several times."""

from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class SameSizeConv:
    """A convolution of stride 1 with an odd kernel, padded such that outputs have the size of inputs.

    Attributes:
        channels: number of channels of the input.
        kernel_size: number of taps for each axis, odd.
        dilation: distance between the taps, for each axis.
        groups: number of groups of channels.
        circular: whether the padding is circular; zeros otherwise.

    Examples:
        >>> import torch
        >>> conv = SameSizeConv(2, (3,), (1,), 1, circular=True)
        >>> conv(torch.ones(1, 2, 5), torch.ones(4, 2, 3))[0, 0]
        tensor([6., 6., 6., 6., 6.])
    """

    channels: int
    kernel_size: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int
    circular: bool

    @property
    def padding(self) -> tuple[int, ...]:
        """The padding on both sides of each axis."""
        return tuple(d * (k // 2) for k, d in zip(self.kernel_size, self.dilation, strict=True))

    def is_for(self, taps: tuple[int, ...]) -> bool:
        """Whether this is such a convolution, for weights with these taps."""
        return type(self) is SameSizeConv and self.kernel_size == taps

    def check(self, x: Tensor, channels: int | None = None) -> None:
        """Raise a ValueError unless x is a batch of images with these channels; by default those of the input."""
        axes, channels = len(self.kernel_size), channels or self.channels
        if x.dim() != axes + 2 or x.shape[1] != channels:
            raise ValueError(
                f"expected an input (batch, {channels}, {axes} spatial axes), got shape {tuple(x.shape)}; "
                "check the layer before it"
            )

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Convolve x (batch, channels, *size) with a weight (outputs, channels / groups, *kernel_size)."""
        convolve: Any = (F.conv1d, F.conv2d, F.conv3d)[len(self.kernel_size) - 1]
        x, padding = (self._wrapped(x), 0) if self.circular else (x, self.padding)
        return convolve(x, weight, bias, padding=padding, dilation=self.dilation, groups=self.groups)

    def adjoint(self, y: Tensor, weight: Tensor) -> Tensor:
        """Apply the adjoint of the convolution with this weight to y (batch, outputs, *size)."""
        convolve: Any = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[len(self.kernel_size) - 1]
        padding = self.padding
        if self.circular:
            # Entry i of the transposed layer reads y[i + p - d t], which is i .. i + 2 p of the wrapped y.
            y, padding = self._wrapped(y), tuple(2 * p for p in padding)
        return convolve(y, weight, padding=padding, dilation=self.dilation, groups=self.groups)

    def as_layer(self, outputs: int) -> nn.Module:
        """Return the torch layer, without values."""
        kind: Any = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[len(self.kernel_size) - 1]
        settings = {"padding": self.padding, "dilation": self.dilation, "groups": self.groups, "device": "meta"}
        mode = "circular" if self.circular else "zeros"
        return kind(self.channels, outputs, self.kernel_size, padding_mode=mode, **settings)

    def _wrapped(self, x: Tensor) -> Tensor:
        return F.pad(x, [p for n in reversed(self.padding) for p in (n, n)], mode="circular")
