"""CPL, convex potential layers.

Citation: Laurent Meunier, Blaise Delattre, Alexandre Araujo, Alexandre Allauzen, "A Dynamical System Perspective for
Lipschitz Neural Networks", ICML 2022.

Inequality: y = x - 2 / ||W||^2 W^T relu(W x + b) has constant 1. With V = W / ||W|| it is x - 2 V^T relu(V x + b'),
b' = b / ||W||; `onelip.methods.residual.potential`, (1).
Assumes: as many outputs as inputs; convolutions of odd kernel size, stride 1, whose padding keeps the size.
Guarantee: at convergence in training, where ||W|| is estimated by one step of power iteration, which is never too
large, as published; in evaluation W is divided by its proved bound, and the constant is proved for every weight.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from onelip.core.parametrization import attach
from onelip.methods.method import Method
from onelip.methods.norms.spectral_norm import SpectralNorm
from onelip.methods.residual.potential import ConvexPotential, reset_spread, with_hidden


class CPLWeight(SpectralNorm):
    """The map W -> V = W / ||W||; `cpl` registers it."""

    @torch.no_grad()
    def reset(self, P: Tensor) -> None:
        reset_spread(P)

    def describe(self) -> str:
        return "CPL, by the proved bound in eval mode (an estimate in training)"


def cpl(
    layer: nn.Module,
    *,
    hidden: int | None = None,
    lipschitz: float = 1.0,
    iterations: int = 1,
    input_size: int | Sequence[int] | None = None,
) -> ConvexPotential:
    """A convex potential layer in the place of the given one, which must keep the shape of its input.

    The layer's weight is kept as W, and its bias as b', if `hidden` is not given.

    Args:
        layer: Linear, Conv1d, Conv2d or Conv3d.
        hidden: rows of W; as many as there are channels by default.
        lipschitz: the constant to guarantee instead of 1.
        iterations: steps of the power method at each access in training.
        input_size: spatial size of the images, for the estimate in training; the proof in eval mode needs none.

    Raises:
        onelip.UnsupportedLayer: where outputs are not as many as inputs or the size of images is not kept.

    Examples:
        >>> layer = cpl(nn.Linear(4, 4)).eval()
        >>> layer(torch.randn(2, 4)).shape, round(layer.lipschitz_constant, 6)
        (torch.Size([2, 4]), 1.0)
    """
    inner = with_hidden(layer, hidden)
    block = ConvexPotential(inner, lipschitz=lipschitz)
    size = tuple(input_size) if isinstance(input_size, Sequence) else input_size
    found = CPLWeight(inner, block.geometry, block.weight.shape, iterations=iterations, input_size=size)
    found.warm_up(block)
    return attach(block, found)


METHOD = Method(
    name="cpl",
    title="CPL, convex potential layers (Meunier et al., 2022)",
    mechanism="parametrization",
    guarantee="at convergence",
    layers=(nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d),
    apply=cpl,
    options=({"hidden": 6, "iterations": 3}, {"lipschitz": 0.5}),
    replaces=True,
    train_equals_eval=False,
    hyperparameters={"lr": 0.5, "weight_decay": 0.0, "schedule": "one-cycle"},
    note="residual layer with relu inside; square layers that keep the size; eval mode divides by the proved bound",
)
