"""Affine map per channel, the form of batch normalisation in eval mode."""

import torch
from torch import Tensor, nn

from onelip.core.arguments import check_integer
from onelip.core.errors import UnknownLipschitzConstant
from onelip.core.lipschitz_module import LipschitzModule


class ChannelAffine(LipschitzModule):
    r"""Multiply each channel by a factor and add an offset: $y_c = w_c x_c + b_c$.

    `onelip.bake` uses it to replace a batch normalisation that it cannot fold into the preceding layer. Its Lipschitz
    constant is $\max_c |w_c|$.

    Args:
        channels: number of channels.
        axes: number of spatial axes: 1, 2 or 3. With 1, the input may also have none, as for `nn.BatchNorm1d`.
        device: device of the parameters.
        dtype: dtype of the parameters.

    Shape:
        - Input: (batch, channels, *sizes)
        - Output: same shape as the input

    Attributes:
        weight: the factors, shaped like the weight of a depthwise convolution: (channels, 1, *ones).
        bias: the offsets (channels).

    Examples:
        >>> layer = ChannelAffine(2, axes=1)
        >>> _ = layer.weight.data.copy_(torch.tensor([2.0, -3.0]).reshape(2, 1, 1))
        >>> layer(torch.ones(1, 2)).tolist(), layer.lipschitz_constant
        ([[2.0, -3.0]], 3.0)
    """

    def __init__(
        self, channels: int, axes: int = 2, device: torch.device | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.channels, self.axes = check_integer("channels", channels), check_integer("axes", axes, 1, 3)
        self.weight = nn.Parameter(torch.ones(channels, 1, *(1,) * axes, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.zeros(channels, device=device, dtype=dtype))

    @property
    def lipschitz_constant(self) -> float:
        """The largest absolute value of the factors."""
        largest = float(self.weight.detach().double().abs().max())
        if not largest < float("inf"):
            raise UnknownLipschitzConstant("expected finite factors, got NaN or infinity; use finite weights")
        return largest

    def forward(self, x: Tensor) -> Tensor:
        axes = x.dim() - 2
        if (axes != self.axes and (axes, self.axes) != (0, 1)) or x.shape[1] != self.channels:
            raise ValueError(
                f"expected an input (batch, {self.channels}, {self.axes} spatial axes), got shape {tuple(x.shape)}"
            )
        shape = (-1, *(1,) * axes)
        return x * self.weight.reshape(shape) + self.bias.reshape(shape)

    def extra_repr(self) -> str:
        return f"{self.channels}, axes={self.axes}"
