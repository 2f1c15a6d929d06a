"""BCOP: orthogonal convolutions from pairs of projections."""

from collections.abc import Sequence

from torch import Tensor

from onelip.core.errors import UnsupportedLayer
from onelip.core.geometry import LINEAR_LAYERS, Geometry
from onelip.methods.method import Layer, Method, PaperRow, attach_new
from onelip.methods.orthogonal.block_kernels import BlockOrthogonal


class BCOP(BlockOrthogonal):
    r"""The map from matrices to the kernel of an orthogonal convolution by BCOP; `bcop` registers it.

    **Theorem.** A matrix $R$ with $\|R\| \le 1$, multiplied by factors $P + (I - P) z$ with $P = V V^\top$ and
    $\|V\| \le 1$, is a kernel whose layer has norm at most 1; see `BlockOrthogonal`. $V$ and $R$ come from Björck's
    iteration.

    **Assumptions.** Zero padding of any amount, or circular padding of at most `dilation * (kernel_size - 1)` in total;
    a stride divides the kernel size (the taps of a window are then channels); at least 2 channels in a group, unless
    the kernel size is 1.

    **Guarantee.** Proved, with rounding, for every parameter and every number of steps. All singular values are 1, up
    to convergence, with circular or full padding and as many inputs as outputs; with zero padding that keeps the size
    some are below 1, because the layer crops its output. The projections have half of the channels as rank, as
    published; kernels of other ranks are not reached. Linear layers and 1x1 convolutions are those of `Bjorck`.

    Li, Haque, Anil, Lucas, Grosse, Jacobsen, "Preventing Gradient Attenuation in Lipschitz Constrained Convolutional
    Networks", NeurIPS 2019.

    Args:
        geometry: how the weight acts, from `onelip.core.geometry.geometry_of`.
        weight_shape: shape of the weight.
        steps: largest number of steps of Björck's iteration for each matrix, 1 to 100.
        lipschitz: the constant of the layer.
    """

    def __init__(
        self, geometry: Geometry, weight_shape: Sequence[int], *, steps: int = 12, lipschitz: float = 1.0
    ) -> None:
        if any(k % s for k, s in zip(geometry.kernel_size, geometry.phases, strict=True)):
            raise UnsupportedLayer(
                f"expected a kernel size that is a multiple of the stride, got kernel size {geometry.kernel_size} with "
                f"{geometry.phases} phases of the stride: cutting taps off an orthogonal kernel can raise its norm; "
                "use aoc, which supports any stride, or onelip.nn.ConcatenationPool2d and a convolution of stride 1"
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
    """Make a convolution (or a linear layer) orthogonal by BCOP, in place, and return it; see `BCOP`.

    The weight cannot be kept, because few weights are orthogonal convolutions: the layer starts with one orthogonal
    matrix in its middle tap, the nearest to the sum of the taps. Assigning `module.weight = w` does the same.

    Args:
        module: Linear, Conv1d to Conv3d or ConvTranspose1d to ConvTranspose3d.
        name: name of the parameter to constrain.
        steps: largest number of steps of Björck's iteration for each matrix, 1 to 100.
        lipschitz: the constant to guarantee instead of 1.
        input_size: for strided convolutions with circular padding only: spatial size of every input.

    Returns:
        The same module, with a parametrized weight.

    Raises:
        onelip.UnsupportedLayer: for padding modes that copy pixels, strides that do not divide the kernel size, and
            single channels.
        ValueError: for options out of range.

    Examples:
        >>> import torch
        >>> from torch import nn
        >>> layer = bcop(nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular", bias=False))
        >>> x = torch.randn(1, 4, 8, 8)
        >>> bool((layer(x).norm() - x.norm()).abs() < 1e-3)
        True
    """
    return attach_new(BCOP, module, name, input_size=input_size, steps=steps, lipschitz=lipschitz)


METHOD = Method(
    name="bcop",
    title="BCOP, block convolution orthogonal parametrization (Li et al., 2019)",
    citation="Qiyang Li, Saminul Haque, Cem Anil, James Lucas, Roger Grosse, Jörn-Henrik Jacobsen, "
    '"Preventing Gradient Attenuation in Lipschitz Constrained Convolutional Networks", NeurIPS 2019.',
    mechanism="parametrization",
    guarantee="proved",
    layers=LINEAR_LAYERS,
    apply=bcop,
    options=({"steps": 1}, {"lipschitz": 0.5}),
    paper=PaperRow(E="no", F="yes", G="yes", M="yes", notes={"E": 4}),
    hyperparameters={"lr": 0.02, "weight_decay": 0.0},  # only the direction of a matrix matters
    note="strides that divide the kernel size; at least 2 channels",
)
