"""N-activation: two learned kinks per channel, slopes +1, -1, +1, the shape of the letter.

Prach, Lampert, "1-Lipschitz neural networks are more expressive with N-activations", 2023.  With a <= b,

    f(x) = x - 2a  (x < a),   -x  (a <= x < b),   x - 2b  (x >= b),   in one expression:   f(x) = x - 2 clamp(x, a, b).

Inequality: |f(x) - f(y)| <= |x - y|, because f is continuous with slopes +1 and -1.  Assumes a <= b, which sorting the
two numbers in every forward pass makes true for every value that training can reach.
"""

from typing import Literal

import torch
from torch import Tensor, nn

from onelip.core.arguments import check_integer
from onelip.core.lipschitz_module import LipschitzModule
from onelip.nn._base import along_axis, axis_length

Init = Literal["identity", "absolute", "alternating"]

# "absolute" is |x| for x >= -10; a network that starts 1-Lipschitz on images seldom leaves that range.
_KINKS: dict[str, tuple[float, float]] = {"identity": (0.0, 0.0), "absolute": (-10.0, 0.0)}


class NActivation(LipschitzModule):
    """x - 2 clamp(x, a, b) with a learned pair a <= b for each of `channels` channels along `dim`.

    `theta` (2, channels) holds the pairs in any order.  It wants no weight decay, and often its own learning rate.

    Args:
        init: "identity" (a = b = 0), "absolute" (a = -10, b = 0: |x| above -10), "alternating" (the first half of the
            channels absolute, the second identity: MaxMin up to rotations), or the pair (a, b) itself.

    Examples:
        >>> NActivation(1, init=(-1.0, 1.0))(torch.tensor([[-3.0], [0.5], [3.0]])).detach().T
        tensor([[-1.0000, -0.5000,  1.0000]])
    """

    proved_constant = 1.0

    def __init__(self, channels: int, dim: int = 1, *, init: Init | tuple[float, float] = "identity") -> None:
        super().__init__()
        if isinstance(init, str) and init not in (*_KINKS, "alternating"):
            raise ValueError(
                f"expected init to be identity, absolute, alternating or a pair of numbers, got {init!r}; pick one"
            )
        self.channels = check_integer("channels", channels)
        self.dim = dim
        self.init: Init | tuple[float, float] = init
        self.theta = nn.Parameter(torch.empty(2, channels))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        half = self.channels // 2
        start = "absolute" if self.init == "alternating" else self.init
        pair = _KINKS[start] if isinstance(start, str) else start
        self.theta.copy_(self.theta.new_tensor(pair).unsqueeze(1).expand_as(self.theta))
        if self.init == "alternating":
            self.theta[:, half:] = 0.0

    def forward(self, x: Tensor) -> Tensor:
        n = axis_length(x, self.dim, "NActivation")
        if n != self.channels:
            raise ValueError(
                f"NActivation expected {self.channels} channels on axis {self.dim}, got {n} "
                f"(input of shape {tuple(x.shape)}); build it with channels={n} or give another `dim`"
            )
        a, b = along_axis(self.theta.sort(dim=0).values.to(x.dtype), x, self.dim).unbind(0)
        return x - 2 * torch.clamp(x, a, b)

    def extra_repr(self) -> str:
        return f"channels={self.channels}, dim={self.dim}"
