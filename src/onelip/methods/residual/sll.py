"""SLL, SDP-based Lipschitz layers.

Citation: Alexandre Araujo, Aaron Havens, Blaise Delattre, Alexandre Allauzen, Bin Hu, "A Unified Algebraic Perspective
on Lipschitz Neural Networks", ICLR 2023.

Inequality: y = x - 2 W^T T relu(W x + b), T = diag(1 / sum_j |W W^T|_ij q_j / q_i), has constant 1 for all q > 0.
Since relu(t z) = t relu(z) for t > 0, this is x - 2 V^T relu(V x + b') with V = T^(1/2) W and b' = T^(1/2) b; and V is
AOL of W on its outputs, with weights q, so ||V|| <= 1 (`onelip.gram.rescale`, (2)). The rest is
`onelip.methods.residual.potential`, (1).
Assumes: as many outputs as inputs; convolutions of odd kernel size, stride 1, whose padding keeps the size.
Guarantee: proved for every weight. q is the exponential of what is learned, and acts: in the published convolutions it
cancels.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from onelip.core.geometry import Geometry
from onelip.core.parametrization import attach
from onelip.methods.method import Method
from onelip.methods.residual.potential import ConvexPotential, reset_spread, with_hidden
from onelip.nn.aol import AOL


class SLLWeight(AOL):
    """The map W -> V = T^(1/2) W: AOL on the outputs with learned weights q; `sll` registers it.

    Args:
        geometry: how the weight acts, from `onelip.core.geometry.geometry_of`.
        weight_shape: shape of the weight.
        device: of the parameter log q.
        dtype: of the parameter log q.
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
        """Begin as the authors do, but with q = 1."""
        reset_spread(P)
        if self.log_q is not None:
            self.log_q.zero_()

    def describe(self) -> str:
        return "SLL"


def sll(layer: nn.Module, *, hidden: int | None = None, lipschitz: float = 1.0) -> ConvexPotential:
    """An SLL layer in the place of the given one, which must keep the shape of its input.

    The layer's weight is kept, up to a factor, as W, and its bias as b', if `hidden` is not given.

    Args:
        layer: Linear, Conv1d, Conv2d or Conv3d.
        hidden: rows of W; as many as there are channels by default.
        lipschitz: the constant to guarantee instead of 1.

    Raises:
        onelip.UnsupportedLayer: where outputs are not as many as inputs or the size of images is not kept.

    Examples:
        >>> layer = sll(nn.Conv2d(4, 4, 3, padding=1), hidden=8)
        >>> layer(torch.randn(1, 4, 6, 6)).shape, layer.lipschitz_constant
        (torch.Size([1, 4, 6, 6]), 1.0)
    """
    block = ConvexPotential(with_hidden(layer, hidden), lipschitz=lipschitz)
    shape, weight = block.weight.shape, block.weight
    return attach(block, SLLWeight(block.geometry, shape, device=weight.device, dtype=weight.dtype))


METHOD = Method(
    name="sll",
    title="SLL, SDP-based Lipschitz layers (Araujo et al., 2023)",
    mechanism="parametrization",
    guarantee="proved",
    layers=(nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d),
    apply=sll,
    options=({"hidden": 6}, {"lipschitz": 0.5}),
    replaces=True,
    hyperparameters={"lr": 0.5, "weight_decay": 0.0, "schedule": "one-cycle"},
    note="residual layer with relu inside; square layers that keep the size",
)
