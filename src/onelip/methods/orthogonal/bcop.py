"""BCOP: orthogonal convolutions from pairs of projections.

Citation: Qiyang Li, Saminul Haque, Cem Anil, James Lucas, Roger Grosse, Jörn-Henrik Jacobsen, "Preventing Gradient
Attenuation in Lipschitz Constrained Convolutional Networks", NeurIPS 2019.

Inequality: a matrix R with ||R|| <= 1, grown by factors P + (I - P) z with P = V V^T, ||V|| <= 1, is a kernel whose
layer has norm at most 1; `onelip.methods.orthogonal.block_kernels`, (1). V and R come from Björck's iteration.
Assumes: zero padding of any amount, or circular padding of at most dilation * (kernel_size - 1) in total; a stride
divides the kernel size (the taps of a window are channels then); at least 2 channels in a group, unless k = 1.
Guarantee: proved, with its rounding, for every parameter and every number of steps. All singular values are 1, up to
convergence, with circular or full padding and as many inputs as outputs; with zero padding that keeps the size the
layer cuts off what would leave the image, so some are below. Projections have half of the channels as their rank, as
published; kernels of other ranks are not reached. Linear layers and 1x1 convolutions are Björck's.
"""

from collections.abc import Sequence
from typing import TypeVar

from torch import Tensor, nn

from onelip.core.errors import UnsupportedLayer
from onelip.core.geometry import LINEAR_LAYERS, Geometry, geometry_of
from onelip.core.parametrization import attach, weight_of
from onelip.methods.method import Method, PaperRow
from onelip.methods.orthogonal.block_kernels import BlockOrthogonal

Layer = TypeVar("Layer", bound=nn.Module)


class BCOP(BlockOrthogonal):
    """The map from matrices to an orthogonal kernel; `bcop` registers it.

    Args:
        geometry: how the weight acts, from `onelip.core.geometry.geometry_of`.
        weight_shape: shape of the weight.
        steps: steps of Björck's iteration for each matrix, at most.
        lipschitz: the constant that the layer is to have instead of 1.
    """

    def __init__(
        self, geometry: Geometry, weight_shape: Sequence[int], *, steps: int = 12, lipschitz: float = 1.0
    ) -> None:
        if any(k % s for k, s in zip(geometry.kernel_size, geometry.phases, strict=True)):
            raise UnsupportedLayer(
                f"expected a kernel size that is a multiple of the stride, got kernel size {geometry.kernel_size} with "
                f"{geometry.phases} phases of the stride: cutting taps off an orthogonal kernel can raise its norm; "
                "use aoc, which takes any stride, or onelip.nn.ConcatenationPool and a convolution of stride 1"
            )
        kernel_shape = geometry.kernel_shape(weight_shape, "inputs")
        super().__init__(
            geometry,
            weight_shape,
            kernel_shape=kernel_shape,
            start=[1] * len(kernel_shape[3:]),
            steps=steps,
            lipschitz=lipschitz,
        )

    def to_weight(self, kernel: Tensor) -> Tensor:
        return self.geometry.to_weight(kernel, "inputs")

    def from_weight(self, weight: Tensor) -> Tensor:
        return self.geometry.to_kernel(weight, "inputs")

    def describe(self) -> str:
        return f"BCOP, {len(self.factors)} projections" if self.factors else "BCOP without taps: Björck"


def bcop(
    module: Layer,
    name: str = "weight",
    *,
    steps: int = 12,
    lipschitz: float = 1.0,
    input_size: int | Sequence[int] | None = None,
) -> Layer:
    """Make a convolution (or a linear layer) orthogonal by BCOP, in place, and return it.

    The weight cannot be kept, as few are orthogonal convolutions: the layer starts with one orthogonal matrix in its
    middle tap, the one next to the sum of the taps. Assigning `module.weight = w` does the same.

    Args:
        module: Linear, Conv1d, Conv2d, Conv3d, ConvTranspose1d, ConvTranspose2d or ConvTranspose3d.
        name: the parameter to constrain.
        steps: steps of Björck's iteration for each matrix, at most.
        lipschitz: the constant to guarantee instead of 1.
        input_size: only for strided convolutions with circular padding: promise the spatial size of the input.

    Raises:
        onelip.UnsupportedLayer: for padding that copies pixels, strides that do not divide the kernel size, and single
            channels.

    Examples:
        >>> import torch
        >>> layer = bcop(nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular", bias=False))
        >>> x = torch.randn(1, 4, 8, 8)
        >>> bool((layer(x).norm() - x.norm()).abs() < 1e-3)
        True
    """
    geometry = geometry_of(module, input_size)
    weight = weight_of(module, geometry, name)
    return attach(module, BCOP(geometry, weight.shape, steps=steps, lipschitz=lipschitz), name)


METHOD = Method(
    name="bcop",
    title="BCOP, block convolution orthogonal parametrization (Li et al., 2019)",
    mechanism="parametrization",
    guarantee="proved",
    layers=LINEAR_LAYERS,
    apply=bcop,
    options=({"steps": 1}, {"lipschitz": 0.5}),
    paper=PaperRow(E="no", F="yes", G="yes", M="yes", notes={"E": 4}),
    hyperparameters={"lr": 0.02, "weight_decay": 0.0},  # only the direction of a matrix matters
    note="strides that divide the kernel size; at least 2 channels",
)
