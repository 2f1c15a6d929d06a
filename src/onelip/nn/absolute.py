"""Abs: the absolute value of all channels, or of the first of them (the beta-Abs of LipNeXt).

Inequality: ||a| - |b|| <= |a - b| in every coordinate; the other coordinates pass unchanged.  Assumes nothing.  Exact
in floating point.  The derivative is a diagonal of signs: orthogonal, except that torch takes 0 for it at exactly 0.
MaxMin is Abs on half of the channels between two fixed rotations: max, min = (s ± |d|) / sqrt 2.
"""

import torch
from torch import Tensor

from onelip.core.lipschitz_module import LipschitzModule
from onelip.graph.kinds import Abs as AbsNode
from onelip.graph.lowering import Lowering, lowers
from onelip.nn._base import axis_length


class Abs(LipschitzModule):
    """|x| on the first `round(fraction * n)` of the n channels along `dim`, x on the rest.

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
            raise ValueError(f"expected fraction to lie in [0, 1], got {fraction!r}; 1 takes |x| of every channel")
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
