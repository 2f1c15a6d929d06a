"""Householder activations: fold each pair of channels along learned lines of its plane."""

import math

import torch
from torch import Tensor, nn

from onelip.core.arguments import check_integer
from onelip.core.lipschitz_module import LipschitzModule
from onelip.nn._base import along_axis, check_channels, halves


def _fold(angle: Tensor) -> Tensor:
    """Triangle wave: the identity on [0, 2 pi], even, with period 4 pi."""
    # The clamp only removes rounding errors of the remainder.
    return (torch.remainder(angle + 2 * math.pi, 4 * math.pi) - 2 * math.pi).abs().clamp(max=2 * math.pi)


def _order1(x: Tensor, y: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
    stays = x * torch.sin(t / 2) <= y * torch.cos(t / 2)
    c, s = torch.cos(t), torch.sin(t)
    return torch.where(stays, x, c * x + s * y), torch.where(stays, y, s * x - c * y)


def _order2(x: Tensor, y: Tensor, t0: Tensor, t1: Tensor, t2: Tensor) -> tuple[Tensor, Tensor]:
    # phi only selects the piece, so its derivative (undefined at the origin) is not needed.
    phi = torch.remainder(torch.atan2(y.detach(), x.detach()) - t0.detach() / 2, 2 * math.pi)
    first, second, third = phi < t1 / 2, phi < (t1 + t2) / 2, phi < math.pi + t2 / 2

    def choose(identity: Tensor, reflect: Tensor, rotate: Tensor, back: Tensor) -> Tensor:
        return torch.where(first, identity, torch.where(second, reflect, torch.where(third, rotate, back)))

    one, zero = torch.ones_like(t0), torch.zeros_like(t0)
    c = choose(one, torch.cos(t0 + t1), torch.cos(t2), torch.cos(t0))
    s = choose(zero, torch.sin(t0 + t1), torch.sin(t2), torch.sin(t0))
    sign = choose(-one, one, -one, one)  # +1 on reflections, -1 on rotations
    return c * x + s * y, sign * (s * x - c * y)


class Householder(LipschitzModule):
    r"""Fold each pair of channels $(x_i, x_{i + n/2})$ along learned lines of its plane.

    **Order 1**, one angle $t$ per pair: points with $x \sin(t/2) \le y \cos(t/2)$ are unchanged, all others are
    reflected at the line of angle $t/2$. For $t = \pi/2$ this is (min, max).

    **Order 2**, three angles per pair, by the polar angle $\varphi$ relative to $t_0/2$:

    | sector | polar angle of the output | map |
    |---|---|---|
    | $0 \le \varphi < t_1/2$ | $\varphi$ | identity |
    | $t_1/2 \le \varphi < (t_1 + t_2)/2$ | $t_1 - \varphi$ | reflection, angle $t_0 + t_1$ |
    | $(t_1 + t_2)/2 \le \varphi < \pi + t_2/2$ | $\varphi - t_2$ | rotation by $-t_2$ |
    | $\pi + t_2/2 \le \varphi < 2\pi$ | $2\pi - \varphi$ | reflection, angle $t_0$ |

    The sectors have the lengths $t_1/2$, $t_2/2$, $\pi - t_1/2$ and $\pi - t_2/2$, and neighbouring maps agree on the
    borders. So the map is continuous for $t_1, t_2 \in [0, 2\pi]$ and every $t_0$; with $t_2 = 0$ it is order 1.

    The layer is 1-Lipschitz: it is continuous and orthogonal on finitely many pieces, so it does not lengthen the image
    of the segment from $p$ to $q$. The forward pass folds the parameters $t_1, t_2$ into $[0, 2\pi]$ by a triangle
    wave. Its slope is $\pm 1$ everywhere, so that, unlike with clamping, no angle stops training.

    From Singla, Singla, Feizi, "Improved deterministic l2 robustness on CIFAR-10 and CIFAR-100", ICLR 2022.

    Args:
        channels: number of channels, even.
        order: 1 or 2.
        dim: axis of the channels.
        device: device of the parameters.
        dtype: type of the parameters.

    Shape:
        - Input: $(N, C, *)$, or any shape whose axis `dim` has length `channels`.
        - Output: same shape as the input.

    Attributes:
        angles: parameter, `(channels / 2,)` for order 1, initialised with $\pi/2$; `(3, channels / 2)` for order 2,
            initialised uniformly in $[0, \pi]$. Do not apply weight decay to it.

    Raises:
        ValueError: for an odd number of channels, and for other orders.

    Examples:
        >>> Householder(2)(torch.tensor([[5.0, 3.0]])).detach()
        tensor([[3.0000, 5.0000]])
    """

    proved_constant = 1.0

    def __init__(
        self,
        channels: int,
        order: int = 1,
        dim: int = 1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if check_integer("channels", channels, 2) % 2:
            raise ValueError(
                f"expected an even number of channels, got {channels}; the layer acts on pairs of channels"
            )
        if order not in (1, 2):
            raise ValueError(f"expected order 1 or 2, got {order!r}")
        self.channels, self.order, self.dim = channels, order, dim
        shape = (channels // 2,) if order == 1 else (3, channels // 2)
        self.angles = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        r"""Initialise the angles: $\pi/2$ for order 1, uniform in $[0, \pi]$ for order 2."""
        if self.order == 1:
            nn.init.constant_(self.angles, math.pi / 2)
        else:
            nn.init.uniform_(self.angles, 0.0, math.pi)

    def forward(self, x: Tensor) -> Tensor:
        check_channels(x, self.dim, self.channels, "Householder")
        a, b = halves(x, self.dim, "Householder")
        # In the wider type: in bfloat16 the squares of cosine and sine add up to 1.004.
        dtype = max(x.dtype, self.angles.dtype, key=lambda t: t.itemsize)
        a, b, angles = a.to(dtype), b.to(dtype), along_axis(self.angles.to(dtype), x, self.dim)
        if self.order == 1:
            pair = _order1(a, b, angles)
        else:
            t0, t1, t2 = angles.unbind(0)
            pair = _order2(a, b, t0, _fold(t1), _fold(t2))
        return torch.cat(pair, self.dim).to(x.dtype)

    def extra_repr(self) -> str:
        return f"channels={self.channels}, order={self.order}, dim={self.dim}"
