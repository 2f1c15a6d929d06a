"""Absolute value as an activation."""

import torch
from torch import Tensor

from onelip.core.lipschitz_module import LipschitzModule
from onelip.graph.kinds import Abs as AbsNode
from onelip.graph.lowering import Lowering, lowers
from onelip.nn._base import axis_length


class Abs(LipschitzModule):
    r"""Absolute value of all channels, or of the first channels only (the $\beta$-Abs of LipNeXt).

    $$y_c = |x_c| \ \text{ for } c < \mathrm{round}(\beta n), \qquad y_c = x_c \ \text{ otherwise}$$

    The layer is 1-Lipschitz because $||a| - |b|| \le |a - b|$. It is exact in floating point. The Jacobian is a
    diagonal matrix of signs, hence orthogonal, except that torch's derivative is 0 at exactly 0. `MaxMin` is `Abs` on
    half of the channels between two fixed rotations.

    Args:
        fraction: $\beta$, the fraction of the channels whose absolute value is taken, from 0 to 1.
        dim: axis of the channels.

    Shape:
        - Input: $(N, C, *)$, or any shape that has the axis `dim`.
        - Output: same shape as the input.

    Raises:
        ValueError: if `fraction` is not in [0, 1].

    Examples:
        >>> Abs()(torch.tensor([[-1.0, 2.0, -3.0, -4.0]]))
        tensor([[1., 2., 3., 4.]])
        >>> Abs(fraction=0.5)(torch.tensor([[-1.0, 2.0, -3.0, -4.0]]))
        tensor([[ 1.,  2., -3., -4.]])
    """

    proved_constant = 1.0

    def __init__(self, fraction: float = 1.0, dim: int = 1) -> None:
        super().__init__()
        if not 0.0 <= fraction <= 1.0:
            raise ValueError(f"expected fraction in [0, 1], got {fraction!r}; 1 takes |x| of every channel")
        self.fraction = float(fraction)
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        if self.fraction == 1.0:
            return x.abs()
        n = axis_length(x, self.dim, "Abs")
        count = round(self.fraction * n)
        return torch.cat([x.narrow(self.dim, 0, count).abs(), x.narrow(self.dim, count, n - count)], self.dim)

    def extra_repr(self) -> str:
        return f"fraction={self.fraction:g}, dim={self.dim}"


@lowers(Abs)
def _lower(low: Lowering) -> int:
    return low.emit(AbsNode, low.source) if low.module.fraction == 1.0 else low.refuse()
