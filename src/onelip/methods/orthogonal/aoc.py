"""AOC: adaptive orthogonal convolutions, BCOP for any stride.

Citation: Thibaut Boissin, Franck Mamalet, Thomas Fel, Agustin Martin Picard, Thomas Massena, Mathieu Serrurier, "An
Adaptive Orthogonal Convolution Scheme for Efficient and Flexible CNN Architectures", ICML 2025.

Inequality: a convolution of stride s and kernel size s whose reshaped kernel R (out, channels * s) has norm at most 1,
after a convolution of stride 1 and kernel size k - s + 1 made of factors P + (I - P) z, is one convolution of stride s
and kernel size k with norm at most 1: windows of R do not overlap, and the factors have norm at most 1
(`onelip.methods.orthogonal.block_kernels`, (1)). With dilation d, s is the number of phases s / gcd(s, d). Between the
two stand max(in, out // s) channels, those beyond the inputs being zero.
Assumes: zero padding of any amount, or circular padding of at most dilation * (kernel_size - 1) in total; at least 2
channels in a group, unless the kernel size is the stride. Strides, groups, dilation and transposed layers are served.
Guarantee: proved, with its rounding, for every parameter and every number of steps.
"""

from collections.abc import Sequence
from typing import TypeVar

from torch import Tensor, nn

from onelip.core.geometry import LINEAR_LAYERS, Geometry, geometry_of
from onelip.core.parametrization import attach, weight_of
from onelip.methods.method import Method
from onelip.methods.orthogonal.block_kernels import BlockOrthogonal

Layer = TypeVar("Layer", bound=nn.Module)


class AOC(BlockOrthogonal):
    """The map from matrices to an orthogonal kernel; `aoc` registers it.

    Args:
        geometry: how the weight acts, from `onelip.core.geometry.geometry_of`.
        weight_shape: shape of the weight.
        steps: steps of Björck's iteration for each matrix, at most.
        lipschitz: the constant that the layer is to have instead of 1.
    """

    def __init__(
        self, geometry: Geometry, weight_shape: Sequence[int], *, steps: int = 12, lipschitz: float = 1.0
    ) -> None:
        first, second, *taps = weight_shape
        super().__init__(
            geometry,
            weight_shape,
            # A transposed layer is the adjoint of the convolution with the same weight, so it has the same norm.
            kernel_shape=(geometry.groups, first // geometry.groups, second, *taps),
            start=geometry.phases,
            steps=steps,
            lipschitz=lipschitz,
        )

    def to_weight(self, kernel: Tensor) -> Tensor:
        return kernel.flatten(0, 1)

    def from_weight(self, weight: Tensor) -> Tensor:
        return weight.unflatten(0, (self.geometry.groups, -1))

    def describe(self) -> str:
        strided = f" after {'x'.join(map(str, self.start))} windows" if any(s > 1 for s in self.start) else ""
        return f"AOC, {len(self.factors)} projections{strided}" if self.factors else f"AOC: Björck{strided}"


def aoc(
    module: Layer,
    name: str = "weight",
    *,
    steps: int = 12,
    lipschitz: float = 1.0,
    input_size: int | Sequence[int] | None = None,
) -> Layer:
    """Make a convolution of any stride, dilation and number of groups orthogonal by AOC, in place, and return it.

    As with `bcop` the weight cannot be kept: the layer starts with one orthogonal matrix in its middle taps.

    Args:
        module: Linear, Conv1d, Conv2d, Conv3d, ConvTranspose1d, ConvTranspose2d or ConvTranspose3d.
        name: the parameter to constrain.
        steps: steps of Björck's iteration for each matrix, at most.
        lipschitz: the constant to guarantee instead of 1.
        input_size: only for strided convolutions with circular padding: promise the spatial size of the input. If the
            stride divides it the layer can be orthogonal, and it will refuse inputs that break the promise.

    Raises:
        onelip.UnsupportedLayer: for padding that copies pixels, and single channels.

    Examples:
        >>> import torch
        >>> layer = aoc(nn.Conv2d(4, 16, 3, stride=2, padding=1, padding_mode="circular", bias=False), input_size=8)
        >>> x = torch.randn(1, 4, 8, 8)
        >>> bool((layer(x).norm() - x.norm()).abs() < 1e-3)
        True
    """
    geometry = geometry_of(module, input_size)
    weight = weight_of(module, geometry, name)
    return attach(module, AOC(geometry, weight.shape, steps=steps, lipschitz=lipschitz), name)


METHOD = Method(
    name="aoc",
    title="AOC, adaptive orthogonal convolution (Boissin et al., 2025)",
    mechanism="parametrization",
    guarantee="proved",
    layers=LINEAR_LAYERS,
    apply=aoc,
    options=({"steps": 1}, {"lipschitz": 0.5}),
    hyperparameters={"lr": 0.02, "weight_decay": 0.0},  # only the direction of a matrix matters
    note="any stride, groups, dilation, transposed; at least 2 channels",
)
