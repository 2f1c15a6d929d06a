"""LiResNet, linear residual layers, for the EMMA loss."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from onelip.core.arguments import check_integer
from onelip.core.errors import UnsupportedLayer
from onelip.core.geometry import LINEAR_LAYERS
from onelip.core.parametrization import attach, weight_of
from onelip.methods.free_weights import Tracked, track
from onelip.methods.method import Layer, Method
from onelip.methods.residual.potential import check_keeps_size


class LinearResidual(Tracked):
    r"""The map $K \mapsto W = I + \gamma K / \sqrt{\mathrm{depth}}$ with learned $\gamma$; `liresnet` registers it.

    The layer $x + \gamma K x / \sqrt{\mathrm{depth}}$ has no activation inside, so it is one convolution with the
    kernel $W$, which is bounded as a whole. The triangle inequality, $1 + \gamma \|K\| / \sqrt{\mathrm{depth}}$, would
    be larger than $\|W\|$, and much larger in a deep network.

    **Assumptions.** Convolutions with as many outputs as inputs, odd kernels, stride 1 and padding that keeps the size.

    **Guarantee.** None in training, where power iteration estimates $\|W\|$ for the loss `onelip.losses.EMMALoss`,
    which needs a chain of modules. Evaluation uses proved bounds of the stored $W$ and the distances of the rows of the
    last layer.

    Hu, Zou, Wang, Leino, Fredrikson, "Unlocking Deterministic Robustness Certification on ImageNet", NeurIPS 2023.

    Args:
        module: the convolution.
        name: name of the weight.
        depth: number of such layers in the network.
        iterations: steps of the power method in each step of training.
        input_size: spatial size of the inputs, for the estimate.

    Attributes:
        gamma: parameter, initialised with 1.
    """

    def __init__(
        self,
        module: nn.Module,
        name: str = "weight",
        *,
        depth: int = 12,
        iterations: int = 5,
        input_size: int | Sequence[int] | None = None,
    ) -> None:
        super().__init__(module, name, iterations=iterations, input_size=input_size)
        weight = weight_of(module, self.geometry, name)
        self.depth = check_integer("depth", depth)
        self.gamma = nn.Parameter(torch.ones((), dtype=weight.dtype, device=weight.device))

    def forward(self, P: Tensor) -> Tensor:
        return self._identity(P) + P * (self.gamma.to(P.dtype) / math.sqrt(self.depth))

    @torch.no_grad()
    def right_inverse(self, W: Tensor) -> Tensor:
        """Return the K for this W, if gamma is not zero."""
        return (W - self._identity(W)) * (math.sqrt(self.depth) / self.gamma.to(W.dtype))

    def estimated_constant(self, P: Tensor) -> Tensor:
        return self.estimate(self.forward(P))

    @torch.no_grad()
    def reset(self, P: Tensor) -> None:
        """Initialise with small Gaussian entries, as the authors do: near the identity."""
        if not P.is_meta:
            self.gamma.fill_(1)
            P.normal_(0, 1 / P[0].numel())

    def describe(self) -> str:
        return "free linear residual, with an estimate of its norm for the loss"

    def extra_repr(self) -> str:
        return f"depth={self.depth}"

    def _identity(self, like: Tensor) -> Tensor:
        """Return the kernel of the identity: output j reads input j of its group."""
        kernel = torch.zeros_like(like)
        j = torch.arange(self.weight_shape[0], device=like.device)
        place: tuple[Any, ...] = (j, j % self.weight_shape[1], *self.geometry.identity_tap)
        return kernel.index_put([torch.as_tensor(i, device=like.device) for i in place], like.new_ones(()))


def liresnet(
    module: Layer,
    name: str = "weight",
    *,
    depth: int = 12,
    iterations: int = 5,
    input_size: int | Sequence[int] | None = None,
) -> Layer:
    """Make a convolution a linear residual layer, in place, and return it; the function of the layer is unchanged.

    See `LinearResidual`. Layers that cannot be residual (strides, other numbers of outputs, Linear) stay free, with
    `track`.

    Args:
        module: Linear, Conv1d to Conv3d or ConvTranspose1d to ConvTranspose3d.
        name: name of the weight.
        depth: number of residual layers in the network; each is divided by its root.
        iterations: steps of the power method in each step of training.
        input_size: spatial size of the inputs, for the estimate.

    Returns:
        The same module, with a parametrized weight.

    Raises:
        onelip.UnsupportedLayer: if no bound is known for this layer or its padding.
        ValueError: for options out of range.

    Examples:
        >>> layer = nn.Conv2d(2, 2, 3, padding=1)
        >>> before = layer.weight.detach().clone()
        >>> bool((liresnet(layer).weight - before).abs().max() < 1e-6)
        True
    """
    if not _is_residual(module):
        return track(module, name, iterations=iterations, input_size=input_size)
    made = LinearResidual(module, name, depth=depth, iterations=iterations, input_size=input_size)
    return attach(module, made, name)


def _is_residual(module: nn.Module) -> bool:
    """Return whether the assumptions of `LinearResidual` hold."""
    if not isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)) or module.in_channels != module.out_channels:
        return False
    try:
        check_keeps_size(module)
    except UnsupportedLayer:
        return False
    return True


METHOD = Method(
    name="liresnet",
    title="LiResNet, linear residual layers with the EMMA loss (Hu et al., 2023)",
    citation="Kai Hu, Andy Zou, Zifan Wang, Klas Leino, Matt Fredrikson, "
    '"Unlocking Deterministic Robustness Certification on ImageNet", NeurIPS 2023.',
    mechanism="loss",
    guarantee=None,
    layers=LINEAR_LAYERS,
    apply=liresnet,
    options=({"depth": 1, "iterations": 1},),
    loss="emma",
    certificate="pairs",
    hyperparameters={"offset": 0.0, "temperature": 1.0, "lr": 0.005, "weight_decay": 0.0},
    note="kernel I + gamma K / sqrt(depth); bound of the stored weights in evaluation, per pair of classes",
)
