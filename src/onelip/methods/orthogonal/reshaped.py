"""Björck, ONI, Cholesky: orthogonal matrices; convolutions as reshaped kernels, divided by the root of the overlap."""

import math
from collections.abc import Sequence
from fractions import Fraction

import torch
from torch import Tensor

from onelip.core.errors import check_integer, check_number
from onelip.core.geometry import Geometry
from onelip.core.modes import full_precision
from onelip.core.parametrization import LipschitzParametrization, working_type
from onelip.core.rounding import root_at_most
from onelip.methods.numerics import UNIT64, of_moderate_size, stored_constant, widest_type
from onelip.methods.orthogonal.steps import bjorck_steps, excess_of_steps
from onelip.methods.registry import Layer, Method, PaperRow, attach_new, register_method
from onelip.nn.init import tight_weight


class ReshapedOrthogonal(LipschitzParametrization):
    r"""Base of methods that make the reshaped kernel orthogonal and divide it by $\sqrt T$.

    **Theorem.** A kernel with $T$ taps reads each input at most $T$ times. Reshaped to $M$ (rows, columns * T), the
    layer maps windows, so its norm is at most $\sqrt T \|M\|$; a constant kernel attains it. For a strided layer
    $T = \prod \lceil k / s \rceil$. Linear layers, and convolutions whose windows do not overlap, have $T = 1$: there
    orthogonal means orthogonal.

    **Missing taps.** If the kernel size is not a multiple of the stride, some phases have fewer than $T$ taps. Their
    entries in $M$ are zero and dropped after $M$ is made orthogonal. Dropping whole columns cannot increase the norm,
    dropping single entries can (by 24 % for a 3x3 kernel of stride 2). They are whole columns if the phases belong to
    the columns: the inputs of a convolution, the outputs of a transposed one. A transposed layer is the adjoint of the
    convolution with the same weight and has its norm, so there $M$ has the outputs as columns. Without missing taps the
    inputs are the columns: then $M$ has more rows, and the layer keeps more of its norm.

    Li et al. (BCOP), NeurIPS 2019; Serrurier et al., CVPR 2021.

    The arguments are those of `LipschitzParametrization`.
    """

    def orthogonal(self, M: Tensor, norm: float) -> Tensor:
        """Map matrices (g, m, n) to norm at most norm * (1 + excess(m, n)), in float64; zero columns stay zero."""
        raise NotImplementedError

    def excess(self, m: int, n: int) -> float:
        """Return the most that rounding can add to the norm 1 of `orthogonal`, for n <= m."""
        return excess_of_steps(m, n)

    def forward(self, P: Tensor) -> Tensor:
        if P.numel() == 0:
            return P
        with full_precision(P.device):
            kernel = self.geometry.to_kernel(P.to(working_type(P.dtype)), self.columns)  # (g, rows, columns, *taps)
            W = self.orthogonal(kernel.flatten(2), self.lipschitz * root_at_most(Fraction(1, self.taps)))
            return self.geometry.to_weight(W.reshape(kernel.shape), self.columns).to(P.dtype)

    @property
    def orthogonal_side(self) -> str | None:
        if self.taps > 1:  # orthogonal as a reshaped kernel, not as an operator
            return None
        _, rows, columns, *_ = self.geometry.kernel_shape(self.weight_shape, "inputs")
        return "inputs" if columns <= rows else "outputs"

    @property
    def columns(self) -> str:
        """The side whose channels are the columns of M, "inputs" or "outputs"."""
        is_uneven = any(k % s for k, s in zip(self.geometry.kernel_size, self.geometry.phases, strict=True))
        return "outputs" if is_uneven and self.geometry.transposed else "inputs"

    @property
    def taps(self) -> int:
        """T, the largest number of taps that read the same input."""
        return math.prod(self.geometry.kernel_shape(self.weight_shape, self.columns)[3:])

    @torch.no_grad()
    def reset(self, P: Tensor) -> None:
        """Initialise with the identity if it is square, else orthogonal columns, on one tap.

        The layer then divides all norms by sqrt(T). Spread evenly over the taps it would keep the norm of constant
        images, but blur all others: after 8 epochs on digits the accuracy was 31 % instead of 63 %.
        """
        if not P.is_meta and P.numel():
            P.copy_(tight_weight(self.geometry, self.weight_shape, "inputs"))

    def constant_in(self, dtype: torch.dtype) -> float:
        """Return the constant, with the rounding of the last step and of each stored entry."""
        _, rows, columns, *taps = self.geometry.kernel_shape(self.weight_shape, self.columns)
        T = math.prod(taps)
        m, n = max(rows, columns * T), min(rows, columns * T)
        # The factor 1 / sqrt(T) cancels the factor sqrt(T) between the norm of M and that of the layer.
        return stored_constant(self.lipschitz, self.excess(m, n), n, m * n * T, dtype)

    def advice(self) -> str | None:
        if self.taps == 1:
            return None
        return f"dividing by sqrt({self.taps}) reduces norms; 'bcop' and 'aoc' make convolutions orthogonal without it"


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

    The arguments are those of `LipschitzParametrization`, and the options of `bjorck`.
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


register_method(
    Method(
        name="bjorck",
        title="GroupSort with Björck orthonormalisation (Anil et al., 2019)",
        citation="Cem Anil, James Lucas, Roger Grosse, "
        '"Sorting out Lipschitz function approximation", ICML 2019; the iteration is of Björck and Bowie, 1971.',
        guarantee="proved",
        apply=bjorck,
        options=({"steps": 1}, {"steps": 30}, {"lipschitz": 0.5}),
        paper=PaperRow(E="no", F="partly", G="no", M="yes", notes={"E": 4, "F": 2}),
        hyperparameters={"lr": 0.1, "weight_decay": 0.0},  # only the direction of a matrix matters
        note="order 1; convolutions as reshaped kernels, divided by the root of their overlap",
    )
)


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

    The arguments are those of `LipschitzParametrization`, and the options of `oni`.
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


register_method(
    Method(
        name="oni",
        title="ONI, orthogonalisation by Newton's iteration (Huang et al., 2020)",
        citation='Lei Huang et al., "Controllable Orthogonalization in Training DNNs", CVPR 2020.',
        guarantee="proved",
        apply=oni,
        options=({"steps": 2}, {"lipschitz": 0.5}),
        paper=PaperRow(E="no", F="partly", G="yes", M="yes", notes={"F": 2}),
        fast_lr=2.7,
        hyperparameters={"lr": 0.1, "weight_decay": 0.0},  # only the direction of a matrix matters
        note="convolutions as reshaped kernels, divided by the root of their overlap",
    )
)


class Cholesky(ReshapedOrthogonal):
    r"""The map from $P$ to a nearly orthogonal weight by a Cholesky factor; `cholesky` registers it.

    **Theorem.** For $X$ $(n, m)$ with $n \le m$ and $C C^\top = X X^\top + \varepsilon I$, $W = C^{-1} X$ satisfies
    $W W^\top = I - \varepsilon C^{-1} C^{-\top} \le I$. Convolutions are treated as reshaped kernels; see
    `ReshapedOrthogonal`.

    **Assumptions.** Zero padding of any amount, or circular padding of at most `dilation * (kernel_size - 1)` in total.

    **Guarantee.** Proved, with rounding, for every $P$. A singular value $s$ becomes $s / \sqrt{s^2 + \varepsilon}$:
    below 1, and near 1 unless $s$ is small.

    **Rounding.** All is computed in float64. The errors of the Gram matrix and its factor are at most
    $2 m n 2^{-53}\,\mathrm{tr}(X X^\top)$, far less than half of
    $\varepsilon = \mathrm{relative} \cdot \mathrm{tr}(X X^\top) / n$, so $X X^\top \le C C^\top$ holds for the computed
    factor. The error of the solve is at most
    $n 2^{-53} \| |C^{-1}| |C| |W| \| \le n^{5/2} 2^{-53} \sqrt{2 (1 + \mathrm{relative}) / \mathrm{relative}}$.

    Hu, Leino, Wang, Fredrikson, "A Recipe for Improved Certifiable Robustness", ICLR 2024.

    The arguments are those of `LipschitzParametrization`, and the options of `cholesky`.
    """

    def __init__(
        self, geometry: Geometry, weight_shape: Sequence[int], *, relative: float = 1e-3, lipschitz: float = 1.0
    ) -> None:
        super().__init__(geometry, weight_shape, lipschitz=lipschitz)
        self.relative = check_number("relative", relative, 1e-6, 1)

    def orthogonal(self, M: Tensor, norm: float) -> Tensor:
        if M.shape[-2] > M.shape[-1]:  # on the smaller side
            return self.orthogonal(M.mT, norm).mT
        X = of_moderate_size(M.to(widest_type(M)))
        S = X @ X.mT  # (g, n, n)
        mean = S.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None]
        shift = self.relative * torch.where(mean == 0, 1.0, mean)
        C, failed = torch.linalg.cholesky_ex(S + shift * torch.eye(S.shape[-1], dtype=S.dtype, device=S.device))
        W = torch.linalg.solve_triangular(C, X, upper=False)
        return W * torch.where(failed == 0, norm, torch.nan)[:, None, None]

    def excess(self, m: int, n: int) -> float:
        return 2 * n**2.5 * UNIT64 * math.sqrt(2 * (1 + self.relative) / self.relative)

    def describe(self) -> str:
        reshaped = f", reshaped kernel / sqrt({self.taps})" if self.taps > 1 else ""
        return f"Cholesky orthogonalisation{reshaped}"


def cholesky(
    module: Layer,
    name: str = "weight",
    *,
    relative: float = 1e-3,
    lipschitz: float = 1.0,
    input_size: int | Sequence[int] | None = None,
) -> Layer:
    """Make a linear layer 1-Lipschitz by a Cholesky factor, in place, and return it; see `Cholesky`.

    The current weight becomes the parameter.

    Args:
        module: Linear, Conv1d to Conv3d or ConvTranspose1d to ConvTranspose3d.
        name: name of the parameter to constrain.
        relative: number added to the squared singular values, relative to their mean, from 1e-6 to 1.
        lipschitz: the constant to guarantee instead of 1.
        input_size: for strided convolutions with circular padding only: spatial size of every input.

    Returns:
        The same module, with a parametrized weight.

    Raises:
        onelip.UnsupportedLayer: if the bound does not hold for this layer or its padding.
        ValueError: for options out of range.

    Examples:
        >>> from torch import nn
        >>> W = cholesky(nn.Linear(16, 4)).weight
        >>> bool((W @ W.T - torch.eye(4)).abs().max() < 0.01)
        True
    """
    return attach_new(Cholesky, module, name, input_size=input_size, relative=relative, lipschitz=lipschitz)


register_method(
    Method(
        name="cholesky",
        title="Cholesky orthogonalisation (Hu et al., 2024)",
        citation="Kai Hu, Klas Leino, Zifan Wang, Matt Fredrikson, "
        '"A Recipe for Improved Certifiable Robustness", ICLR 2024.',
        guarantee="proved",
        apply=cholesky,
        options=({"relative": 1e-6}, {"lipschitz": 0.5}),
        fast_lr=0.9,
        hyperparameters={"lr": 0.1, "weight_decay": 0.0},  # only the direction of a matrix matters
        note="convolutions as reshaped kernels, divided by the root of their overlap",
    )
)
