"""ONI: orthogonalisation by Newton's iteration, from the Frobenius norm.

Citation: Lei Huang et al., "Controllable Orthogonalization in Training DNNs", CVPR 2020.

Inequality: Z divided by ||Z Z^T||_F^(1/2) has norm at most 1, and T steps B <- 3/2 B - 1/2 B^3 S from B = I multiply it
with a matrix B for which B Z has norm at most 1 again: the same polynomial as Björck's of order 1, so the same proof.
Assumes: zero padding of any amount, or circular padding of at most dilation * (kernel_size - 1) in total.
Guarantee: proved, with its rounding, for every P and every T. Few steps leave singular values between 0 and 1: T
controls how orthogonal the layer is. The published code multiplies by sqrt(2) for ReLU and leaves convolutions as
reshaped kernels, both of which exceed 1; here the factor is 1 and the overlap of the taps is divided out. Its centring
of the rows takes a direction from each of them, and is left out.
"""

from collections.abc import Sequence
from typing import TypeVar

from torch import Tensor, nn

from onelip.core.geometry import LINEAR_LAYERS, Geometry, geometry_of
from onelip.core.parametrization import attach, weight_of
from onelip.methods.method import Method, PaperRow
from onelip.methods.orthogonal.bjorck import Bjorck
from onelip.methods.orthogonal.steps import bjorck_steps

Layer = TypeVar("Layer", bound=nn.Module)


class ONI(Bjorck):
    """The map P -> W; `oni` registers it. Björck's iteration from another scaling.

    Args:
        geometry: how the weight acts, from `onelip.core.geometry.geometry_of`.
        weight_shape: shape of the weight.
        steps: T, the steps of Newton's iteration; the paper takes 2 to 7.
        lipschitz: the constant that the layer is to have instead of 1.
    """

    title = "ONI"

    def __init__(
        self, geometry: Geometry, weight_shape: Sequence[int], *, steps: int = 5, lipschitz: float = 1.0
    ) -> None:
        super().__init__(geometry, weight_shape, steps=steps, lipschitz=lipschitz)

    def orthogonal(self, M: Tensor, norm: float) -> Tensor:
        return bjorck_steps(M, self.steps, "frobenius", norm)


def oni(
    module: Layer,
    name: str = "weight",
    *,
    steps: int = 5,
    lipschitz: float = 1.0,
    input_size: int | Sequence[int] | None = None,
) -> Layer:
    """Make a linear layer 1-Lipschitz by ONI, in place, and return it; the present weight stays as the parameter.

    Args:
        module: Linear, Conv1d, Conv2d, Conv3d, ConvTranspose1d, ConvTranspose2d or ConvTranspose3d.
        name: the parameter to constrain.
        steps: steps of Newton's iteration: more are nearer to orthogonal.
        lipschitz: the constant to guarantee instead of 1.
        input_size: only for strided convolutions with circular padding: promise the spatial size of the input.

    Raises:
        onelip.UnsupportedLayer: if the bound does not hold for this layer or its padding.

    Examples:
        >>> import torch
        >>> values = torch.linalg.svdvals(oni(nn.Linear(16, 4)).weight)
        >>> bool(values.max() < 1 + 1e-6)
        True
    """
    geometry = geometry_of(module, input_size)
    weight = weight_of(module, geometry, name)
    return attach(module, ONI(geometry, weight.shape, steps=steps, lipschitz=lipschitz), name)


METHOD = Method(
    name="oni",
    title="ONI, orthogonalisation by Newton's iteration (Huang et al., 2020)",
    mechanism="parametrization",
    guarantee="proved",
    layers=LINEAR_LAYERS,
    apply=oni,
    options=({"steps": 2}, {"lipschitz": 0.5}),
    paper=PaperRow(E="no", F="partly", G="yes", M="yes", notes={"F": 2}),
    hyperparameters={"lr": 0.1, "weight_decay": 0.0},  # only the direction of a matrix matters
    note="convolutions as reshaped kernels, divided by the root of their overlap",
)
