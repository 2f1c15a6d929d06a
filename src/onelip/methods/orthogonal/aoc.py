"""AOC, adaptive orthogonal convolutions: BCOP for any stride."""

from collections.abc import Sequence

from torch import Tensor

from onelip.core.geometry import LINEAR_LAYERS, Geometry
from onelip.methods.method import Layer, Method, attach_new
from onelip.methods.orthogonal.block_kernels import BlockOrthogonal


class AOC(BlockOrthogonal):
    r"""The map from matrices to the kernel of an orthogonal convolution of any stride by AOC; `aoc` registers it.

    **Theorem.** A convolution of stride $s$ and kernel size $s$ whose reshaped kernel $R$ (out, channels * s) has norm
    at most 1, after a convolution of stride 1 and kernel size $k - s + 1$ made of factors $P + (I - P) z$, is one
    convolution of stride $s$ and kernel size $k$ with norm at most 1: windows of $R$ do not overlap, and the factors
    have norm at most 1 (`BlockOrthogonal`). With dilation $d$, $s$ is the number of phases $s / \gcd(s, d)$. Between
    the two there are max(in, out // s) channels; those beyond the inputs are zero.

    **Assumptions.** Zero padding of any amount, or circular padding of at most `dilation * (kernel_size - 1)` in total;
    at least 2 channels in a group, unless the kernel size is the stride. Strides, groups, dilation and transposed
    layers are supported.

    **Guarantee.** Proved, with rounding, for every parameter and every number of steps.

    Boissin, Mamalet, Fel, Picard, Massena, Serrurier, "An Adaptive Orthogonal Convolution Scheme for Efficient and
    Flexible CNN Architectures", ICML 2025.

    Args:
        geometry: how the weight acts, from `onelip.core.geometry.geometry_of`.
        weight_shape: shape of the weight.
        steps: largest number of steps of Björck's iteration for each matrix, 1 to 100.
        lipschitz: the constant of the layer.
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

    See `AOC`. The weight cannot be kept: the layer starts with one orthogonal matrix in its middle taps.

    Args:
        module: Linear, Conv1d to Conv3d or ConvTranspose1d to ConvTranspose3d.
        name: name of the parameter to constrain.
        steps: largest number of steps of Björck's iteration for each matrix, 1 to 100.
        lipschitz: the constant to guarantee instead of 1.
        input_size: for strided convolutions with circular padding only: spatial size of every input.
            If the stride divides it, the layer can be orthogonal, and inputs of other sizes raise an error.

    Returns:
        The same module, with a parametrized weight.

    Raises:
        onelip.UnsupportedLayer: for padding modes that copy pixels, and single channels.
        ValueError: for options out of range.

    Examples:
        >>> import torch
        >>> from torch import nn
        >>> layer = aoc(nn.Conv2d(4, 16, 3, stride=2, padding=1, padding_mode="circular", bias=False), input_size=8)
        >>> x = torch.randn(1, 4, 8, 8)
        >>> bool((layer(x).norm() - x.norm()).abs() < 1e-3)
        True
    """
    return attach_new(AOC, module, name, input_size=input_size, steps=steps, lipschitz=lipschitz)


METHOD = Method(
    name="aoc",
    title="AOC, adaptive orthogonal convolution (Boissin et al., 2025)",
    citation="Thibaut Boissin, Franck Mamalet, Thomas Fel, Agustin Martin Picard, Thomas Massena, Mathieu Serrurier, "
    '"An Adaptive Orthogonal Convolution Scheme for Efficient and Flexible CNN Architectures", ICML 2025.',
    mechanism="parametrization",
    guarantee="proved",
    layers=LINEAR_LAYERS,
    apply=aoc,
    options=({"steps": 1}, {"lipschitz": 0.5}),
    hyperparameters={"lr": 0.02, "weight_decay": 0.0},  # only the direction of a matrix matters
    note="any stride, groups, dilation, transposed; at least 2 channels",
)
