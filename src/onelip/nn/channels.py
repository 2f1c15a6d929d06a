"""More or fewer channels at no cost in the Lipschitz constant.

Prach, Lampert, "Almost-orthogonal layers", ECCV 2022 (the first channels of the last layer are the logits).
Equalities: appending zeros is an isometry, ||(x, 0)||_2 = ||x||_2.  Keeping the first channels is an orthogonal
projection, ||x[:n]||_2 <= ||x||_2.  Both assume nothing and are exact in floating point.
"""

from torch import Tensor
from torch.nn import functional as F

from onelip.core.arguments import check_integer
from onelip.core.lipschitz_module import LipschitzModule
from onelip.graph.kinds import Join
from onelip.graph.lowering import Lowering, lowers
from onelip.nn._base import axis_length


class FirstChannels(LipschitzModule):
    """Keep the first `n` channels along `dim`.

    Examples:
        >>> import torch
        >>> FirstChannels(2)(torch.tensor([[1.0, 2.0, 3.0]]))
        tensor([[1., 2.]])
    """

    proved_constant = 1.0

    def __init__(self, n: int, dim: int = 1) -> None:
        super().__init__()
        self.n = check_integer("n", n)
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        length = axis_length(x, self.dim, "FirstChannels")
        if length < self.n:
            raise ValueError(
                f"FirstChannels expected at least {self.n} channels on axis {self.dim}, got {length} "
                f"(input of shape {tuple(x.shape)}); keep fewer, or widen with PadChannels({self.n}, {self.dim})"
            )
        return x.narrow(self.dim, 0, self.n)

    def extra_repr(self) -> str:
        return f"{self.n}, dim={self.dim}"


class PadChannels(LipschitzModule):
    """Append zero channels along `dim` until there are `n`.

    Examples:
        >>> import torch
        >>> PadChannels(4)(torch.tensor([[1.0, 2.0]]))
        tensor([[1., 2., 0., 0.]])
    """

    proved_constant = 1.0

    def __init__(self, n: int, dim: int = 1) -> None:
        super().__init__()
        self.n = check_integer("n", n)
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        length = axis_length(x, self.dim, "PadChannels")
        if length > self.n:
            raise ValueError(
                f"PadChannels expected at most {self.n} channels on axis {self.dim}, got {length} "
                f"(input of shape {tuple(x.shape)}); ask for more, or narrow with FirstChannels({self.n}, {self.dim})"
            )
        # F.pad counts axes from the last one, two numbers each.
        later_axes = x.dim() - 1 - self.dim % x.dim()
        return F.pad(x, (0, 0) * later_axes + (0, self.n - length))

    def extra_repr(self) -> str:
        return f"{self.n}, dim={self.dim}"


@lowers(FirstChannels, PadChannels)
def _lower(low: Lowering) -> int:
    return low.emit(Join, low.source) if low.sample_axis == 0 else low.refuse()
