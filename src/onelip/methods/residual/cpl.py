"""CPL, convex potential layers."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from onelip.core.parametrization import attach
from onelip.methods.method import Method
from onelip.methods.norms.spectral_norm import SpectralNorm
from onelip.methods.residual.potential import ConvexPotential, reset_spread, with_hidden


class CPLWeight(SpectralNorm):
    r"""The map $W \mapsto V = W / \|W\|$ of CPL; `cpl` registers it.

    **Theorem.** $y = x - \frac{2}{\|W\|^2} W^\top \mathrm{relu}(W x + b)$ has the constant 1. With $V = W / \|W\|$ it
    is $x - 2 V^\top \mathrm{relu}(V x + b')$, $b' = b / \|W\|$; see `ConvexPotential`.

    **Assumptions.** As many outputs as inputs; convolutions with odd kernel size, stride 1 and padding that keeps the
    size.

    **Guarantee.** In training $\|W\|$ is estimated by one step of power iteration, which is never too large, as
    published: the constant holds at convergence. In evaluation $W$ is divided by a proved bound, and the constant is
    proved for every weight.

    Meunier, Delattre, Araujo, Allauzen, "A Dynamical System Perspective for Lipschitz Neural Networks", ICML 2022.

    Args:
        module: Linear, or Conv1d to Conv3d.
        name: name of the weight.
        lipschitz: the norm of $V$.
        iterations: steps of the power method at each access in training.
        input_size: spatial size of the inputs, for the estimate in training.
    """

    @torch.no_grad()
    def reset(self, P: Tensor) -> None:
        reset_spread(P)

    def describe(self) -> str:
        return "CPL, by the proved bound in eval mode (an estimate in training)"


def cpl(
    module: nn.Module,
    *,
    hidden: int | None = None,
    lipschitz: float = 1.0,
    iterations: int = 1,
    input_size: int | Sequence[int] | None = None,
) -> ConvexPotential:
    """Return a convex potential layer in place of the given layer, which must keep the shape of its input.

    See `CPLWeight`. Without `hidden` the weight of the layer is kept as W, and its bias as b'.

    Args:
        module: Linear, or Conv1d to Conv3d.
        hidden: rows of W; the number of channels by default.
        lipschitz: the constant to guarantee instead of 1.
        iterations: steps of the power method at each access in training.
        input_size: spatial size of the inputs, for the estimate in training; the proof in eval mode needs none.

    Returns:
        A new module.

    Raises:
        onelip.UnsupportedLayer: if the layer does not keep the shape of its input.
        ValueError: for options out of range.

    Examples:
        >>> layer = cpl(nn.Linear(4, 4)).eval()
        >>> layer(torch.randn(2, 4)).shape, round(layer.lipschitz_constant, 6)
        (torch.Size([2, 4]), 1.0)
    """
    inner = with_hidden(module, hidden)
    block = ConvexPotential(inner, lipschitz=lipschitz)
    return attach(block, CPLWeight(inner, iterations=iterations, input_size=input_size))


METHOD = Method(
    name="cpl",
    title="CPL, convex potential layers (Meunier et al., 2022)",
    citation="Laurent Meunier, Blaise Delattre, Alexandre Araujo, Alexandre Allauzen, "
    '"A Dynamical System Perspective for Lipschitz Neural Networks", ICML 2022.',
    mechanism="parametrization",
    guarantee="at convergence",
    layers=(nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d),
    apply=cpl,
    options=({"hidden": 6, "iterations": 3}, {"lipschitz": 0.5}),
    replaces=True,
    train_equals_eval=False,
    hyperparameters={"lr": 0.5, "weight_decay": 0.0, "schedule": "one-cycle"},
    note="residual layer with a relu; square layers that keep the size; eval mode divides by the proved bound",
)
