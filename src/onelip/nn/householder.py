"""Householder activations: every pair of channels is folded along learned lines of its plane.

Singla, Singla, Feizi, "Improved deterministic l2 robustness on CIFAR-10 and CIFAR-100", ICLR 2022.

Order 1, one angle t: the half plane  x sin(t/2) <= y cos(t/2)  stays, the other is reflected on the border line
(angle t/2).  t = pi/2 gives (min, max).  Order 2, angles t0, t1, t2, on the polar angle phi counted from t0/2:

    sector                                  polar angle after    map of the plane
    0              <= phi < t1/2            phi                  identity
    t1/2           <= phi < (t1 + t2)/2     t1 - phi             reflection, angle t0 + t1
    (t1 + t2)/2    <= phi < pi + t2/2       phi - t2             rotation by -t2
    pi + t2/2      <= phi < 2 pi            2 pi - phi           reflection, angle t0

The four sectors have the lengths t1/2, t2/2, pi - t1/2, pi - t2/2, and neighbours agree on every border, also at
2 pi = 0.  So for t1, t2 in [0, 2 pi] and every t0 the map is continuous, and t2 = 0 is order 1.

Inequality: ||f(p) - f(q)||_2 <= ||p - q||_2: f is continuous and orthogonal on finitely many pieces, so it does not
lengthen the image of the straight line from p to q.  Assumes t1, t2 in [0, 2 pi]: the forward pass folds the free
parameters there by a triangle wave, which unlike clamping has slope ±1 everywhere, so no angle ever gets stuck.
"""

import math

import torch
from torch import Tensor, nn

from onelip.core.arguments import check_integer
from onelip.core.lipschitz_module import LipschitzModule
from onelip.nn._base import along_axis, halves


def _fold(angle: Tensor) -> Tensor:
    """Triangle wave: the identity on [0, 2 pi], continued evenly and with period 4 pi."""
    # The clamp catches only rounding in the remainder.
    return (torch.remainder(angle + 2 * math.pi, 4 * math.pi) - 2 * math.pi).abs().clamp(max=2 * math.pi)


def _order1(x: Tensor, y: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
    stays = x * torch.sin(t / 2) <= y * torch.cos(t / 2)
    c, s = torch.cos(t), torch.sin(t)
    return torch.where(stays, x, c * x + s * y), torch.where(stays, y, s * x - c * y)


def _order2(x: Tensor, y: Tensor, t0: Tensor, t1: Tensor, t2: Tensor) -> tuple[Tensor, Tensor]:
    # Only chooses the piece: atan2 has no derivative at the origin, and none is wanted.
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
    """Fold the pairs (x[i], x[i + n/2]) of axis `dim`; 1-Lipschitz with an orthogonal derivative.

    `angles` (n/2,) for order 1, all pi/2 at first; (3, n/2) for order 2, uniform on [0, pi] at first.  They want no
    weight decay.

    Examples:
        >>> Householder(2)(torch.tensor([[5.0, 3.0]])).detach()
        tensor([[3.0000, 5.0000]])
    """

    proved_constant = 1.0

    def __init__(self, channels: int, order: int = 1, dim: int = 1) -> None:
        super().__init__()
        if check_integer("channels", channels, 2) % 2:
            raise ValueError(f"expected an even number of channels, got {channels}; the fold needs pairs")
        if order not in (1, 2):
            raise ValueError(f"expected order 1 or 2, got {order!r}; higher orders are not defined here")
        self.channels, self.order, self.dim = channels, order, dim
        self.angles = nn.Parameter(torch.empty(channels // 2) if order == 1 else torch.empty(3, channels // 2))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.order == 1:
            nn.init.constant_(self.angles, math.pi / 2)
        else:
            nn.init.uniform_(self.angles, 0.0, math.pi)

    def forward(self, x: Tensor) -> Tensor:
        a, b = halves(x, self.dim, "Householder")
        if x.shape[self.dim] != self.channels:
            raise ValueError(
                f"Householder expected {self.channels} channels on axis {self.dim}, got {x.shape[self.dim]} "
                f"(input of shape {tuple(x.shape)}); build it with that number or give another `dim`"
            )
        # In the wider type: cosine and sine in bfloat16 have squares that add up to 1.004.
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
