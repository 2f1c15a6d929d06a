"""LiResNet, linear residual layers, with the EMMA loss.

Citation: Kai Hu, Andy Zou, Zifan Wang, Klas Leino, Matt Fredrikson, "Unlocking Deterministic Robustness Certification
on ImageNet", NeurIPS 2023.

The layer is x + gamma / sqrt(depth) K x, without an activation inside, so it is one convolution, whose kernel
W = I + gamma / sqrt(depth) K is what is bounded. The triangle inequality, 1 + gamma / sqrt(depth) ||K||, would give
more than ||W||, and in a deep network far more.
Assumes: convolutions with as many outputs as inputs, odd kernels, stride 1, padding that keeps the size. Other layers
are left free. All are followed by power iteration, for the loss `onelip.losses.EMMALoss`, which needs a chain of
modules.
Guarantee: none in training. Evaluation goes by proved bounds of the stored W, and the distances of the last rows.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from onelip.core.errors import UnsupportedLayer
from onelip.core.geometry import LINEAR_LAYERS, geometry_of
from onelip.core.parametrization import attach, weight_of, working_type
from onelip.methods.free_weights import Tracked, track
from onelip.methods.method import Method
from onelip.methods.norms.power_iteration import iterate
from onelip.methods.residual.potential import check_keeps_size


class LinearResidual(Tracked):
    """The map K -> W = I + gamma / sqrt(depth) K, gamma learned; `liresnet` registers it.

    Args:
        module: the convolution.
        depth: number of such layers in the network.
        iterations: steps of the power method in each step of training.
        input_size: spatial size of the images that the layer sees.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        depth: int = 12,
        iterations: int = 5,
        input_size: int | tuple[int, ...] | None = None,
    ) -> None:
        geometry = geometry_of(module, input_size)
        weight = weight_of(module, geometry)
        super().__init__(module, geometry, weight.shape, iterations=iterations, input_size=input_size)
        if isinstance(depth, bool) or not isinstance(depth, int) or depth < 1:
            raise ValueError(f"expected depth to be a whole number of at least 1, got {depth!r}; count the layers")
        self.depth = depth
        self.gamma = nn.Parameter(torch.ones((), dtype=weight.dtype, device=weight.device))

    def forward(self, P: Tensor) -> Tensor:
        return self._identity(P) + P * (self.gamma.to(P.dtype) / math.sqrt(self.depth))

    @torch.no_grad()
    def right_inverse(self, W: Tensor) -> Tensor:
        """The K that gives this W, if gamma is not zero."""
        return (W - self._identity(W)) * (math.sqrt(self.depth) / self.gamma.to(W.dtype))

    def estimated_constant(self, P: Tensor) -> Tensor:
        return self.estimate(self.forward(P))

    @torch.no_grad()
    def reset(self, P: Tensor) -> None:
        """Small Gaussian entries, as the authors begin: next to the identity."""
        if not P.is_meta:
            self.gamma.fill_(1)
            P.normal_(0, 1 / P[0].numel())

    def warm_up(self, module: nn.Module, steps: int = 15) -> None:
        """Begin near the largest singular vector of W, which is the weight of the plain module."""
        weight = module.weight
        if isinstance(weight, Tensor) and not weight.is_meta and weight.numel():
            self.v.copy_(iterate(self.operator, weight.detach().to(working_type(weight.dtype)), self.v, steps))

    def describe(self) -> str:
        return "free linear residual, with an estimate of its norm for the loss"

    def extra_repr(self) -> str:
        return f"depth={self.depth}"

    def _identity(self, like: Tensor) -> Tensor:
        """The kernel of the identity: output j reads input j of its group."""
        kernel = torch.zeros_like(like)
        j = torch.arange(self.weight_shape[0], device=like.device)
        place: tuple[Any, ...] = (j, j % self.weight_shape[1], *self.geometry.identity_tap)
        return kernel.index_put([torch.as_tensor(i, device=like.device) for i in place], like.new_ones(()))


def liresnet(
    module: nn.Module,
    *,
    depth: int = 12,
    iterations: int = 5,
    input_size: int | Sequence[int] | None = None,
) -> nn.Module:
    """Make a convolution a linear residual one, in place; other layers are only followed. The function stays the same.

    Args:
        module: Linear, Conv1d to Conv3d, ConvTranspose1d to ConvTranspose3d.
        depth: number of residual layers in the network; each is divided by its root.
        iterations: steps of the power method in each step of training.
        input_size: spatial size of the images that the layer sees.

    Examples:
        >>> layer = nn.Conv2d(2, 2, 3, padding=1)
        >>> before = layer.weight.detach().clone()
        >>> bool((liresnet(layer).weight - before).abs().max() < 1e-6)
        True
    """
    size = tuple(input_size) if isinstance(input_size, Sequence) else input_size
    if not _is_residual(module):
        return track(module, iterations=iterations, input_size=size)
    found = LinearResidual(module, depth=depth, iterations=iterations, input_size=size)
    found.warm_up(module)
    return attach(module, found)


def _is_residual(module: nn.Module) -> bool:
    """Whether the identity can be added to the layer: see what the module's docstring assumes."""
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
    mechanism="loss",
    guarantee="none",
    layers=LINEAR_LAYERS,
    apply=liresnet,
    options=({"depth": 1, "iterations": 1},),
    loss="emma",
    certificate="pairs",
    hyperparameters={"offset": 0.0, "temperature": 1.0, "lr": 0.005, "weight_decay": 0.0},
    note="kernel I + gamma K / sqrt(depth); bound of the stored weights in evaluation, per pair of classes",
)
