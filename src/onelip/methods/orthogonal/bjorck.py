"""GroupSort networks' orthonormal layers: Björck's iteration of order 1.

Citation: Cem Anil, James Lucas, Roger Grosse, "Sorting out Lipschitz function approximation", ICML 2019; the iteration
is of Björck and Bowie, 1971. The activation is `onelip.nn.GroupSort`.

Inequality: with ||X|| <= 2, the step X (3/2 I - 1/2 X^T X) has norm at most 1; `onelip.methods.orthogonal.steps`, (1).
Assumes: zero padding of any amount, or circular padding of at most dilation * (kernel_size - 1) in total.
Guarantee: proved, with its rounding, for every P and every number of steps: too few cost orthogonality, not soundness.
Higher orders exceed 1 for singular values above 1 and are left out. A convolution is made orthogonal as a reshaped
kernel and divided by the root of the number of taps that read one input; without that it is not 1-Lipschitz.
"""

from collections.abc import Sequence
from typing import TypeVar

from torch import Tensor, nn

from onelip.core.geometry import LINEAR_LAYERS, Geometry, geometry_of
from onelip.core.parametrization import attach, weight_of
from onelip.methods.method import Method, PaperRow
from onelip.methods.orthogonal.reshaped import ReshapedOrthogonal, check_steps
from onelip.methods.orthogonal.steps import bjorck_steps

Layer = TypeVar("Layer", bound=nn.Module)


class Bjorck(ReshapedOrthogonal):
    """The map P -> W; `bjorck` registers it.

    Args:
        geometry: how the weight acts, from `onelip.core.geometry.geometry_of`.
        weight_shape: shape of the weight.
        steps: steps of the iteration at most; it ends early where the weight is orthogonal.
        lipschitz: the constant that the layer is to have instead of 1.
    """

    title = "Björck"

    def __init__(
        self, geometry: Geometry, weight_shape: Sequence[int], *, steps: int = 12, lipschitz: float = 1.0
    ) -> None:
        super().__init__(geometry, weight_shape, lipschitz=lipschitz)
        self.steps = check_steps(steps)

    def orthogonal(self, M: Tensor, norm: float) -> Tensor:
        return bjorck_steps(M, self.steps, norm=norm)

    def describe(self) -> str:
        reshaped = f", reshaped kernel / sqrt({self.taps})" if self.taps > 1 else ""
        return f"{self.title}, {self.steps} steps{reshaped}"

    def extra_repr(self) -> str:
        return f"steps={self.steps}, lipschitz={self.lipschitz}"


def bjorck(
    module: Layer,
    name: str = "weight",
    *,
    steps: int = 12,
    lipschitz: float = 1.0,
    input_size: int | Sequence[int] | None = None,
) -> Layer:
    """Make a linear layer 1-Lipschitz and nearly orthogonal by Björck's iteration, in place, and return it.

    The present weight stays as the parameter: the new one is the orthogonal matrix next to it, as far as the steps go.

    Args:
        module: Linear, Conv1d, Conv2d, Conv3d, ConvTranspose1d, ConvTranspose2d or ConvTranspose3d.
        name: the parameter to constrain.
        steps: steps of the iteration at most, the same in training and evaluation.
        lipschitz: the constant to guarantee instead of 1.
        input_size: only for strided convolutions with circular padding: promise the spatial size of the input.

    Raises:
        onelip.UnsupportedLayer: if the bound does not hold for this layer or its padding.

    Examples:
        >>> import torch
        >>> W = bjorck(nn.Linear(4, 8), steps=20).weight
        >>> bool((W.T @ W - torch.eye(4)).abs().max() < 1e-5)
        True
    """
    geometry = geometry_of(module, input_size)
    weight = weight_of(module, geometry, name)
    return attach(module, Bjorck(geometry, weight.shape, steps=steps, lipschitz=lipschitz), name)


METHOD = Method(
    name="bjorck",
    title="GroupSort with Björck orthonormalisation (Anil et al., 2019)",
    mechanism="parametrization",
    guarantee="proved",
    layers=LINEAR_LAYERS,
    apply=bjorck,
    options=({"steps": 1}, {"steps": 30}, {"lipschitz": 0.5}),
    paper=PaperRow(E="no", F="partly", G="no", M="yes", notes={"E": 4, "F": 2}),
    hyperparameters={"lr": 0.1, "weight_decay": 0.0},  # only the direction of a matrix matters
    note="order 1; convolutions as reshaped kernels, divided by the root of their overlap",
)
