"""N-activation: a piecewise linear activation with two learned kinks per channel."""

from typing import Literal

import torch
from torch import Tensor, nn

from onelip.core.arguments import check_integer
from onelip.core.lipschitz_module import LipschitzModule
from onelip.nn._base import along_axis, check_channels

Init = Literal["identity", "absolute", "alternating"]

# "absolute" is |x| for x >= -10; activations of a 1-Lipschitz network on images are rarely below that.
_KINKS: dict[str, tuple[float, float]] = {"identity": (0.0, 0.0), "absolute": (-10.0, 0.0)}


class NActivation(LipschitzModule):
    r"""Piecewise linear activation with slopes $+1, -1, +1$ and two learned kinks $a \le b$ per channel.

    $$f(x) = x - 2\,\mathrm{clamp}(x, a, b) = \begin{cases} x - 2a & x < a \\ -x & a \le x < b \\
    x - 2b & x \ge b\end{cases}$$

    The layer is 1-Lipschitz because $f$ is continuous with slopes $\pm 1$. The forward pass sorts the two parameters of
    each channel, so $a \le b$ holds for every value that training can reach.

    From Prach, Lampert, "1-Lipschitz neural networks are more expressive with N-activations", 2023.

    Args:
        channels: number of channels.
        dim: axis of the channels.
        init: initial kinks: "identity" ($a = b = 0$), "absolute" ($a = -10$, $b = 0$, which is $|x|$ for $x \ge -10$),
            "alternating" (the first half of the channels "absolute", the second half "identity", which is `MaxMin` up
            to rotations), or a pair $(a, b)$ of numbers.
        device: device of the parameters.
        dtype: type of the parameters.

    Shape:
        - Input: $(N, C, *)$, or any shape whose axis `dim` has length `channels`.
        - Output: same shape as the input.

    Attributes:
        theta: parameter `(2, channels)`, the pairs in any order. Do not apply weight decay to it; it often needs a
            learning rate of its own.

    Raises:
        ValueError: for an unknown `init`.

    Examples:
        >>> NActivation(1, init=(-1.0, 1.0))(torch.tensor([[-3.0], [0.5], [3.0]])).detach().T
        tensor([[-1.0000, -0.5000,  1.0000]])
    """

    proved_constant = 1.0

    def __init__(
        self,
        channels: int,
        dim: int = 1,
        *,
        init: Init | tuple[float, float] = "identity",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if isinstance(init, str) and init not in (*_KINKS, "alternating"):
            raise ValueError(
                f"expected init to be 'identity', 'absolute', 'alternating' or a pair of numbers, got {init!r}"
            )
        self.channels = check_integer("channels", channels)
        self.dim = dim
        self.init: Init | tuple[float, float] = init
        self.theta = nn.Parameter(torch.empty(2, channels, device=device, dtype=dtype))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Set the kinks to the values of `init`."""
        half = self.channels // 2
        start = "absolute" if self.init == "alternating" else self.init
        pair = _KINKS[start] if isinstance(start, str) else start
        self.theta.copy_(self.theta.new_tensor(pair).unsqueeze(1).expand_as(self.theta))
        if self.init == "alternating":
            self.theta[:, half:] = 0.0

    def forward(self, x: Tensor) -> Tensor:
        check_channels(x, self.dim, self.channels, "NActivation")
        a, b = along_axis(self.theta.sort(dim=0).values.to(x.dtype), x, self.dim).unbind(0)
        return x - 2 * torch.clamp(x, a, b)

    def extra_repr(self) -> str:
        return f"channels={self.channels}, dim={self.dim}"
