"""A residual connection that stays 1-Lipschitz: the convex combination of the input and a branch.

Inequality: ||(1-a) (x-y) + a (f(x) - f(y))||_2 <= ((1-a) + a L) ||x - y||_2 <= max(1, L) ||x - y||_2 for a in [0, 1]
and an L-Lipschitz f (triangle inequality).  Assumes that a is one number: with one per channel the sum of the squares
is only bounded by 2, not by 1.  a is the sigmoid of a free parameter, so no step of training can leave [0, 1].
"""

import math

import torch
from torch import Tensor, nn

from onelip.core.errors import UnknownLipschitzConstant
from onelip.core.lipschitz_module import LipschitzModule
from onelip.graph.modules import constant_of


class ConvexResidual(LipschitzModule):
    """(1 - a) x + a branch(x).

    The constant is known where that of the branch is; otherwise asking for it raises `UnknownLipschitzConstant`
    (a `ValueError`), while the layer itself works.

    Args:
        branch: a module whose output has the shape of its input.
        alpha: the weight a of the branch at first; strictly between 0 and 1 if it is learned.
        learnable: whether a is trained (through its logit) or a fixed buffer.

    Examples:
        >>> from onelip.nn.maxmin import MaxMin
        >>> layer = ConvexResidual(MaxMin(), alpha=0.25, learnable=False)
        >>> layer(torch.tensor([[0.0, 4.0]])), layer.lipschitz_constant
        (tensor([[1., 3.]]), 1.0)
    """

    def __init__(self, branch: nn.Module, alpha: float = 0.5, learnable: bool = True) -> None:
        super().__init__()
        inside = 0.0 < alpha < 1.0 if learnable else 0.0 <= alpha <= 1.0
        if not inside:
            raise ValueError(
                f"expected alpha in {'(0, 1)' if learnable else '[0, 1]'}, got {alpha!r}; "
                "the ends themselves need learnable=False, a sigmoid never reaches them"
            )
        self.branch = branch
        self.learnable = learnable
        if learnable:
            self.logit = nn.Parameter(torch.tensor(math.log(alpha) - math.log1p(-alpha)))
        else:
            self.register_buffer("fixed_alpha", torch.tensor(float(alpha)))

    @property
    def alpha(self) -> Tensor:
        """The weight of the branch, a number in [0, 1]."""
        return torch.sigmoid(self.logit) if self.learnable else self.get_buffer("fixed_alpha")

    @property
    def lipschitz_constant(self) -> float:
        branch = constant_of(self.branch)
        with torch.no_grad():
            a = float(torch.sigmoid(self.logit.double()) if self.learnable else self.get_buffer("fixed_alpha"))
        if not 0.0 <= a <= 1.0:  # loaded from somewhere, or NaN
            raise UnknownLipschitzConstant(f"expected alpha in [0, 1], got {a}; the combination is not convex")
        if branch == 1.0:
            return 1.0
        # The factor covers the rounding of these few float64 operations.
        return min(max(1.0, branch), ((1.0 - a) + a * branch) * (1.0 + 2.0**-48))

    def forward(self, x: Tensor) -> Tensor:
        y = self.branch(x)
        if y.shape != x.shape:
            raise ValueError(
                f"ConvexResidual expected a branch that keeps the shape {tuple(x.shape)}, got {tuple(y.shape)}; "
                "change the branch, or bring both to one shape before (PadChannels, FirstChannels, a pooling layer)"
            )
        return torch.lerp(x, y, self.alpha.to(x.dtype))

    def extra_repr(self) -> str:
        return f"alpha={float(self.alpha.detach()):.4g}, learnable={self.learnable}"
