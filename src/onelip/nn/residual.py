"""Sums of functions: a convex combination of input and branch, an average over mirrored images, a monotone network."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from onelip.core.lipschitz_module import Bound, LipschitzModule
from onelip.core.parametrization import check_lipschitz
from onelip.graph.modules import bound_chain, links


class ConvexResidual(LipschitzModule):
    r"""Convex combination of the input and a branch: $y = (1 - a)\,x + a\,\mathrm{branch}(x)$ with $a \in [0, 1]$.

    If the branch has the Lipschitz constant $L$, the layer has the constant $(1 - a) + aL \le \max(1, L)$ by the
    triangle inequality. The weight $a$ is one number: with one weight per channel the constant is only bounded by
    $\sqrt 2$. A learned $a$ is the sigmoid of a parameter, so that no optimizer step can leave $[0, 1]$.

    Args:
        branch: a module whose output has the shape of its input.
        alpha: initial value of $a$; strictly between 0 and 1 if it is learned.
        learnable: whether $a$ is trained (through its logit) or a fixed buffer.
        device: device of $a$.
        dtype: type of $a$.

    Shape:
        - Input: any shape that the branch accepts.
        - Output: same shape as the input.

    Attributes:
        logit: parameter, the logit of $a$, if `learnable`.
        fixed_alpha: buffer, $a$ itself, if not.

    Raises:
        ValueError: if `alpha` is outside of its range.

    Examples:
        >>> from onelip.nn.activations import MaxMin
        >>> layer = ConvexResidual(MaxMin(), alpha=0.25, learnable=False)
        >>> layer(torch.tensor([[0.0, 4.0]])), layer.lipschitz_constant
        (tensor([[1., 3.]]), 1.0)
    """

    def __init__(
        self,
        branch: nn.Module,
        alpha: float = 0.5,
        learnable: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        inside = 0.0 < alpha < 1.0 if learnable else 0.0 <= alpha <= 1.0
        if not inside:
            raise ValueError(
                f"expected alpha in {'(0, 1)' if learnable else '[0, 1]'}, got {alpha!r}; "
                "0 and 1 themselves require learnable=False, because a sigmoid never attains them"
            )
        self.branch = branch
        self.learnable = learnable
        factory_kwargs: Any = {"device": device, "dtype": dtype}
        if learnable:
            self.logit = nn.Parameter(torch.tensor(math.log(alpha) - math.log1p(-alpha), **factory_kwargs))
        else:
            self.register_buffer("fixed_alpha", torch.tensor(float(alpha), **factory_kwargs))

    @property
    def alpha(self) -> Tensor:
        """The weight $a$ of the branch, a number in [0, 1]."""
        return torch.sigmoid(self.logit) if self.learnable else self.get_buffer("fixed_alpha")

    def bound(self) -> Bound:
        """$(1 - a) + aL$, rounded up, where $L$ is the proved constant of the branch."""
        inner = bound_chain(links(self.branch))
        branch = inner.constant
        if branch is None:
            return Bound(None, f"no bound of its branch is known ({inner.why})")
        with torch.no_grad():
            a = float(torch.sigmoid(self.logit.double()) if self.learnable else self.get_buffer("fixed_alpha"))
        if not 0.0 <= a <= 1.0:  # loaded from a state dict, or NaN
            return Bound(None, f"its alpha is {a}, not in [0, 1]: the combination is not convex")
        # The factor covers the rounding of these few float64 operations.
        constant = 1.0 if branch == 1.0 else min(max(1.0, branch), ((1.0 - a) + a * branch) * (1.0 + 2.0**-48))
        return Bound(constant, "convex combination")

    def forward(self, x: Tensor) -> Tensor:
        y = self.branch(x)
        if y.shape != x.shape:
            raise ValueError(
                f"ConvexResidual expected a branch that keeps the shape {tuple(x.shape)}, got {tuple(y.shape)}; "
                "change the branch, or the shape before it (PadChannels, FirstChannels, a pooling layer)"
            )
        return torch.lerp(x, y, self.alpha.to(x.dtype))

    def extra_repr(self) -> str:
        return f"alpha={float(self.alpha.detach()):.4g}, learnable={self.learnable}"


class MirrorAverage(LipschitzModule):
    r"""The mean of a network for an image and for its mirror image, in evaluation mode.

    $$y = \tfrac12 \big(f(x) + f(Mx)\big), \qquad M \text{ reverses the last axis.}$$

    Mirroring keeps distances, so the mean has the Lipschitz constant of $f$. In training mode the layer is $f$ itself:
    training with mirrored images costs nothing more, and prediction costs two passes.

    Args:
        network: the network $f$; its outputs have no spatial axes, such as logits.

    Shape:
        - Input: images $(N, C, H, W)$, or any shape that the network accepts.
        - Output: that of the network.

    Examples:
        >>> layer = MirrorAverage(nn.Flatten()).eval()
        >>> layer(torch.tensor([[[[1.0, 5.0]]]])), layer.lipschitz_constant
        (tensor([[3., 3.]]), 1.0)
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def bound(self) -> Bound:
        """The constant of the network."""
        inner = bound_chain(links(self.network))
        if inner.constant is None:
            return Bound(None, f"no bound of its network is known ({inner.why})")
        return Bound(inner.constant, "mean over mirrored images")

    def forward(self, x: Tensor) -> Tensor:
        y = self.network(x)
        return y if self.training else 0.5 * (y + self.network(x.flip(-1)))


class Monotone(nn.Module):
    r"""A network that is monotone in chosen inputs: $y = f(x) + L \sum_i s_i x_i$ with $s_i \in \{-1, 0, 1\}$.

    If no partial derivative of $f$ is larger than $L$ in magnitude, every output increases (weakly) with each input of
    sign 1 and decreases with each input of sign -1. This holds if $f$ has the constant $L$ in any $p$-norm; the 1-norm
    restricts $f$ least (`onelip.methods.sum_norm`). The layer relies on the given $L$ and does not prove it.

    O. Kitouni, N. Nolte, M. Williams, "Expressive Monotonic Neural Networks", ICLR 2023.

    Args:
        network: the module $f$.
        lipschitz: $L$, a proved constant of $f$.
        signs: $s_i$ for each input: 1 increasing, -1 decreasing, 0 free. None for 1 everywhere.
        device: device of the signs.
        dtype: type of the signs.

    Shape:
        - Input: $(*, H_{in})$ with as many inputs as signs.
        - Output: the shape of the output of the network, $(*, H_{out})$.

    Raises:
        ValueError: for other signs, or a constant that is not positive.

    Examples:
        >>> layer = Monotone(nn.ReLU(), signs=(1, 0))
        >>> layer(torch.tensor([[-3.0, 5.0]]))
        tensor([[-3.,  2.]])
    """

    signs: Tensor | None

    def __init__(
        self,
        network: nn.Module,
        lipschitz: float = 1.0,
        signs: Sequence[int] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if signs is not None and not all(sign in (-1, 0, 1) for sign in signs):
            raise ValueError(f"expected signs 1 (increasing), -1 (decreasing) and 0 (free), got {signs!r}")
        self.network, self.lipschitz = network, check_lipschitz(lipschitz)
        kind = dtype or torch.get_default_dtype()
        self.register_buffer("signs", None if signs is None else torch.tensor(signs, device=device, dtype=kind))

    def forward(self, x: Tensor) -> Tensor:
        chosen = x if self.signs is None else x * self.signs.to(x.dtype)
        return self.network(x) + self.lipschitz * chosen.sum(-1, keepdim=True)

    def extra_repr(self) -> str:
        signs = None if self.signs is None or self.signs.is_meta else self.signs.int().tolist()
        return f"lipschitz={self.lipschitz}, signs={signs}"
