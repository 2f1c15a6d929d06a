"""Orthonormal layers by Björck's iteration, as in GroupSort networks."""

from collections.abc import Sequence

from torch import Tensor

from onelip.core.arguments import check_integer
from onelip.core.geometry import LINEAR_LAYERS, Geometry
from onelip.methods.method import Layer, Method, PaperRow, attach_new
from onelip.methods.orthogonal.reshaped import ReshapedOrthogonal
from onelip.methods.orthogonal.steps import bjorck_steps


class Bjorck(ReshapedOrthogonal):
    r"""The map from $P$ to an orthogonal weight by Björck's iteration of order 1; `bjorck` registers it.

    **Theorem.** If $\|X\| \le 2$, the step $X (\frac32 I - \frac12 X^\top X)$ has norm at most 1; see
    `onelip.methods.orthogonal.steps.bjorck_steps`. A convolution is made orthogonal as a reshaped kernel and divided by
    the root of the number of taps that read one input; see `ReshapedOrthogonal`.

    **Assumptions.** Zero padding of any amount, or circular padding of at most `dilation * (kernel_size - 1)` in total.

    **Guarantee.** Proved, with rounding, for every $P$ and every number of steps: too few steps cost orthogonality, not
    soundness. Higher orders exceed 1 for singular values above 1 and are not offered.

    Anil, Lucas, Grosse, "Sorting out Lipschitz function approximation", ICML 2019; the iteration is from Björck and
    Bowie, 1971. The activation of the paper is `onelip.nn.GroupSort`.

    Args:
        geometry: how the weight acts, from `onelip.core.geometry.geometry_of`.
        weight_shape: shape of the weight.
        steps: largest number of steps, 1 to 100; the iteration stops early when the weight is orthogonal.
        lipschitz: the constant of the layer.
    """

    title = "Björck"

    def __init__(
        self, geometry: Geometry, weight_shape: Sequence[int], *, steps: int = 12, lipschitz: float = 1.0
    ) -> None:
        super().__init__(geometry, weight_shape, lipschitz=lipschitz)
        self.steps = check_integer("steps", steps, 1, 100)

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

    See `Bjorck`. The current weight becomes the parameter; the new weight is the nearest orthogonal matrix, as far as
    the steps converge.

    Args:
        module: Linear, Conv1d to Conv3d or ConvTranspose1d to ConvTranspose3d.
        name: name of the parameter to constrain.
        steps: largest number of steps, 1 to 100; the same in training and evaluation.
        lipschitz: the constant to guarantee instead of 1.
        input_size: for strided convolutions with circular padding only: spatial size of every input.

    Returns:
        The same module, with a parametrized weight.

    Raises:
        onelip.UnsupportedLayer: if the bound does not hold for this layer or its padding.
        ValueError: for options out of range.

    Examples:
        >>> import torch
        >>> from torch import nn
        >>> W = bjorck(nn.Linear(4, 8), steps=20).weight
        >>> bool((W.T @ W - torch.eye(4)).abs().max() < 1e-5)
        True
    """
    return attach_new(Bjorck, module, name, input_size=input_size, steps=steps, lipschitz=lipschitz)


METHOD = Method(
    name="bjorck",
    title="GroupSort with Björck orthonormalisation (Anil et al., 2019)",
    citation="Cem Anil, James Lucas, Roger Grosse, "
    '"Sorting out Lipschitz function approximation", ICML 2019; the iteration is of Björck and Bowie, 1971.',
    mechanism="parametrization",
    guarantee="proved",
    layers=LINEAR_LAYERS,
    apply=bjorck,
    options=({"steps": 1}, {"steps": 30}, {"lipschitz": 0.5}),
    paper=PaperRow(E="no", F="partly", G="no", M="yes", notes={"E": 4, "F": 2}),
    hyperparameters={"lr": 0.1, "weight_decay": 0.0},  # only the direction of a matrix matters
    note="order 1; convolutions as reshaped kernels, divided by the root of their overlap",
)
