"""SLL, SDP-based Lipschitz layers."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from onelip.core.geometry import Geometry
from onelip.core.parametrization import attach
from onelip.methods.method import Method
from onelip.methods.residual.potential import ConvexPotential, reset_spread, with_hidden
from onelip.nn.aol import AOL


class SLLWeight(AOL):
    r"""The map $W \mapsto V = T^{1/2} W$ of SLL: AOL on the outputs with learned weights $q$; `sll` registers it.

    **Theorem.** $y = x - 2 W^\top T\,\mathrm{relu}(W x + b)$ with
    $T = \mathrm{diag}(1 / \sum_j |W W^\top|_{ij} q_j / q_i)$ has the constant 1 for all $q > 0$. As
    $\mathrm{relu}(t z) = t\,\mathrm{relu}(z)$ for $t > 0$, this is $x - 2 V^\top \mathrm{relu}(V x + b')$ with
    $V = T^{1/2} W$ and $b' = T^{1/2} b$; $V$ is AOL of $W$ on its outputs, so $\|V\| \le 1$. See `ConvexPotential`.

    **Assumptions.** As many outputs as inputs; convolutions with odd kernel size, stride 1 and padding that keeps the
    size.

    **Guarantee.** Proved for every weight. $q$ is the exponential of the learned parameter. (In the published
    convolutions $q$ cancels.)

    Araujo, Havens, Delattre, Allauzen, Hu, "A Unified Algebraic Perspective on Lipschitz Neural Networks", ICLR 2023.

    Args:
        geometry: how the weight acts, from `onelip.core.geometry.geometry_of`.
        weight_shape: shape of the weight.
        device: device of the parameter log q.
        dtype: type of the parameter log q.
    """

    def __init__(
        self,
        geometry: Geometry,
        weight_shape: Sequence[int],
        *,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(geometry, weight_shape, side="outputs", learn_weights=True, device=device, dtype=dtype)

    @torch.no_grad()
    def reset(self, P: Tensor) -> None:
        """Initialise as the authors do, but with q = 1."""
        reset_spread(P)
        if self.log_q is not None:
            self.log_q.zero_()

    def describe(self) -> str:
        return "SLL"


def sll(module: nn.Module, *, hidden: int | None = None, lipschitz: float = 1.0) -> ConvexPotential:
    """Return an SLL layer in place of the given layer, which must keep the shape of its input; see `SLLWeight`.

    Without `hidden` the weight of the layer is kept as W, up to a factor, and its bias as b'.

    Args:
        module: Linear, or Conv1d to Conv3d.
        hidden: rows of W; the number of channels by default.
        lipschitz: the constant to guarantee instead of 1.

    Returns:
        A new module.

    Raises:
        onelip.UnsupportedLayer: if the layer does not keep the shape of its input.
        ValueError: for options out of range.

    Examples:
        >>> layer = sll(nn.Conv2d(4, 4, 3, padding=1), hidden=8)
        >>> layer(torch.randn(1, 4, 6, 6)).shape, layer.lipschitz_constant
        (torch.Size([1, 4, 6, 6]), 1.0)
    """
    block = ConvexPotential(with_hidden(module, hidden), lipschitz=lipschitz)
    shape, weight = block.weight.shape, block.weight
    return attach(block, SLLWeight(block.geometry, shape, device=weight.device, dtype=weight.dtype))


METHOD = Method(
    name="sll",
    title="SLL, SDP-based Lipschitz layers (Araujo et al., 2023)",
    citation="Alexandre Araujo, Aaron Havens, Blaise Delattre, Alexandre Allauzen, Bin Hu, "
    '"A Unified Algebraic Perspective on Lipschitz Neural Networks", ICLR 2023.',
    mechanism="parametrization",
    guarantee="proved",
    layers=(nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d),
    apply=sll,
    options=({"hidden": 6}, {"lipschitz": 0.5}),
    replaces=True,
    hyperparameters={"lr": 0.5, "weight_decay": 0.0, "schedule": "one-cycle"},
    note="residual layer with a relu; square layers that keep the size",
)
