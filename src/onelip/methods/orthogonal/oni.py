"""ONI, orthogonalisation by Newton's iteration."""

from collections.abc import Sequence

from torch import Tensor

from onelip.core.geometry import LINEAR_LAYERS, Geometry
from onelip.methods.method import Layer, Method, PaperRow, attach_new
from onelip.methods.orthogonal.bjorck import Bjorck
from onelip.methods.orthogonal.steps import bjorck_steps


class ONI(Bjorck):
    r"""The map from $P$ to a nearly orthogonal weight by Newton's iteration; `oni` registers it.

    **Theorem.** $Z$ divided by $\|Z Z^\top\|_F^{1/2}$ has norm at most 1. $T$ steps
    $B \leftarrow \frac32 B - \frac12 B^3 S$ from $B = I$ give a matrix $B$ such that $B Z$ has norm at most 1: it is
    the polynomial of Björck's iteration of order 1, with the same proof (`Bjorck`).

    **Assumptions.** Zero padding of any amount, or circular padding of at most `dilation * (kernel_size - 1)` in total.

    **Guarantee.** Proved, with rounding, for every $P$ and every $T$. Few steps leave singular values between 0 and 1:
    $T$ controls how orthogonal the layer is. The published code multiplies by $\sqrt 2$ for ReLU and uses reshaped
    kernels as they are, which both exceed 1; here the factor is 1 and the overlap of the taps is divided out. The
    published centering of the rows, which removes a direction of each row, is omitted.

    Huang et al., "Controllable Orthogonalization in Training DNNs", CVPR 2020.

    Args:
        geometry: how the weight acts, from `onelip.core.geometry.geometry_of`.
        weight_shape: shape of the weight.
        steps: the number $T$ of steps, 1 to 100; 2 to 7 in the paper.
        lipschitz: the constant of the layer.
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
    """Make a linear layer 1-Lipschitz by ONI, in place, and return it; see `ONI`.

    The current weight becomes the parameter.

    Args:
        module: Linear, Conv1d to Conv3d or ConvTranspose1d to ConvTranspose3d.
        name: name of the parameter to constrain.
        steps: steps of Newton's iteration, 1 to 100; more steps are nearer to orthogonal.
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
        >>> values = torch.linalg.svdvals(oni(nn.Linear(16, 4)).weight)
        >>> bool(values.max() < 1 + 1e-6)
        True
    """
    return attach_new(ONI, module, name, input_size=input_size, steps=steps, lipschitz=lipschitz)


METHOD = Method(
    name="oni",
    title="ONI, orthogonalisation by Newton's iteration (Huang et al., 2020)",
    citation='Lei Huang et al., "Controllable Orthogonalization in Training DNNs", CVPR 2020.',
    mechanism="parametrization",
    guarantee="proved",
    layers=LINEAR_LAYERS,
    apply=oni,
    options=({"steps": 2}, {"lipschitz": 0.5}),
    paper=PaperRow(E="no", F="partly", G="yes", M="yes", notes={"F": 2}),
    hyperparameters={"lr": 0.1, "weight_decay": 0.0},  # only the direction of a matrix matters
    note="convolutions as reshaped kernels, divided by the root of their overlap",
)
