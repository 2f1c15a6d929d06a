"""Change the number of channels without changing the Lipschitz constant."""

from torch import Tensor
from torch.nn import functional as F

from onelip.core.arguments import check_integer
from onelip.core.lipschitz_module import LipschitzModule
from onelip.graph.kinds import Join
from onelip.graph.lowering import Lowering, lowers
from onelip.nn._base import axis_length


class _Channels(LipschitzModule):
    """Base of the layers below: the number of channels of the output and their axis."""

    def __init__(self, out_channels: int, dim: int = 1) -> None:
        super().__init__()
        self.out_channels = check_integer("out_channels", out_channels)
        self.dim = dim

    def extra_repr(self) -> str:
        return f"{self.out_channels}, dim={self.dim}"


class FirstChannels(_Channels):
    r"""Keep the first `out_channels` channels and drop the others.

    This is an orthogonal projection, $\|x_{1..n}\|_2 \le \|x\|_2$, hence 1-Lipschitz, and exact in floating point. The
    networks of AOL (Prach, Lampert, ECCV 2022) use it to obtain the logits from the last layer.

    Args:
        out_channels: number of channels to keep.
        dim: axis of the channels.

    Shape:
        - Input: $(N, C, *)$, or any shape whose axis `dim` has length `out_channels` or more.
        - Output: the shape of the input, with `out_channels` on axis `dim`.

    Examples:
        >>> import torch
        >>> FirstChannels(2)(torch.tensor([[1.0, 2.0, 3.0]]))
        tensor([[1., 2.]])
    """

    proved_constant = 1.0

    def forward(self, x: Tensor) -> Tensor:
        length = axis_length(x, self.dim, "FirstChannels")
        n = self.out_channels
        if length < n:
            raise ValueError(
                f"FirstChannels expected at least {n} channels on axis {self.dim}, got {length} "
                f"(input of shape {tuple(x.shape)}); keep fewer, or add zero channels with PadChannels({n}, {self.dim})"
            )
        return x.narrow(self.dim, 0, n)


class PadChannels(_Channels):
    r"""Append zero channels until there are `out_channels`.

    This is an isometry, $\|(x, 0)\|_2 = \|x\|_2$, hence 1-Lipschitz, and exact in floating point.

    Args:
        out_channels: number of channels of the output.
        dim: axis of the channels.

    Shape:
        - Input: $(N, C, *)$, or any shape whose axis `dim` has length `out_channels` or less.
        - Output: the shape of the input, with `out_channels` on axis `dim`.

    Examples:
        >>> import torch
        >>> PadChannels(4)(torch.tensor([[1.0, 2.0]]))
        tensor([[1., 2., 0., 0.]])
    """

    proved_constant = 1.0

    def forward(self, x: Tensor) -> Tensor:
        length = axis_length(x, self.dim, "PadChannels")
        n = self.out_channels
        if length > n:
            raise ValueError(
                f"PadChannels expected at most {n} channels on axis {self.dim}, got {length} "
                f"(input of shape {tuple(x.shape)}); use a larger number, or drop channels with "
                f"FirstChannels({n}, {self.dim})"
            )
        # F.pad counts axes from the last one, two numbers each.
        later_axes = x.dim() - 1 - self.dim % x.dim()
        return F.pad(x, (0, 0) * later_axes + (0, n - length))


@lowers(FirstChannels, PadChannels)
def _lower(low: Lowering) -> int:
    return low.emit(Join, low.source) if low.sample_axis == 0 else low.refuse()
