"""Spectral normalisation: divide a weight by the norm of its operator, or of its reshaped kernel."""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from onelip.core.geometry import LINEAR_LAYERS
from onelip.core.parametrization import attach, working_type
from onelip.methods.method import Layer, Method, PaperRow
from onelip.methods.norms.power_iteration import MATRIX, Operator, PowerIterated, overlap_of_rows


class SpectralNorm(PowerIterated):
    r"""The map $P \mapsto L P / b$, $b$ an estimate or a bound of the norm; `spectral_norm` registers it.

    **Theorem.** $W = L P / b$ with $b \ge \|P\|$ has norm at most $L$.

    **Assumptions.** Zero padding of any amount, or circular padding of at most `dilation * (kernel_size - 1)` in total.

    **Guarantee.** In training $b = \|A v\| \le \|P\|$ is the estimate of one step of power iteration per access, so the
    constant $L$ holds once $v$ has converged. In evaluation $b$ is a proved bound of the stored weight, so $L$ is
    proved for every $P$.

    Miyato, Kataoka, Koyama, Yoshida, "Spectral Normalization for Generative Adversarial Networks", ICLR 2018. On the
    operator of the convolution: Farnia et al., ICLR 2019; Gouk et al., 2021.

    Args:
        module: Linear, Conv1d to Conv3d or ConvTranspose1d to ConvTranspose3d.
        name: name of the weight.
        lipschitz: the constant $L$.
        iterations: steps of the power method at each access in training.
        input_size: spatial size of the inputs, for the estimate in training.
    """

    def forward(self, P: Tensor) -> Tensor:
        if not self.training:
            return self.scaled_by_proof(P, only_down=False)
        norm = self.estimate(P)
        wide = P.to(working_type(P.dtype))
        return (wide * (self.lipschitz / norm.where(norm > 0, 1.0))).to(P.dtype)

    def estimated_constant(self, P: Tensor) -> Tensor:
        return P.new_tensor(self.lipschitz)

    def describe(self) -> str:
        return "spectral norm, by its proved bound in eval mode (an estimate in training)"


class ReshapedSpectralNorm(SpectralNorm):
    r"""Spectral normalisation by the norm of the reshaped kernel; `spectral_norm_reshaped` registers it.

    $M$ is the kernel reshaped to (outputs, inputs * taps), as in Miyato et al. and in torch. Its norm is not that of
    the layer $J$: $\|J\| \le \sqrt T \|M\|$, where $T$ is the number of taps that read one input, and a constant kernel
    attains it.

    **Guarantee.** As published the layer is $P / \|M\|$, and no constant is known by construction: evaluation uses the
    proved bound of the stored weight, at most about $\sqrt T$. With `overlap=True` the layer is
    $L P / (\sqrt T \|M\|)$, of norm at most $L$, proved in evaluation. In both cases evaluation computes the function
    of training, with a proved bound of $\|M\|$. (Dividing by a bound of $\|J\|$ in evaluation only would shrink the
    weights by up to $\sqrt T$ per layer, and not the biases: the accuracy on digits fell from 98 % to 15 %.)

    Args:
        module: Linear, Conv1d to Conv3d or ConvTranspose1d to ConvTranspose3d.
        name: name of the weight.
        lipschitz: the norm of the reshaped kernel, or the constant of the layer with `overlap`.
        iterations: steps of the power method at each access in training.
        overlap: whether to divide by $\sqrt T$ as well.
    """

    operator: "_Reshaped"

    def __init__(
        self,
        module: nn.Module,
        name: str = "weight",
        *,
        lipschitz: float = 1.0,
        iterations: int = 1,
        overlap: bool = False,
    ) -> None:
        super().__init__(module, name, lipschitz=lipschitz, iterations=iterations)
        self.overlap = bool(overlap)
        T = overlap_of_rows(self.geometry, self.weight_shape)
        self.root = math.isqrt(T) if math.isqrt(T) ** 2 == T else math.nextafter(math.sqrt(T), math.inf)

    def make_operator(self, module: nn.Module, weight: Tensor, input_size: int | Sequence[int] | None) -> Operator:
        return _Reshaped(module, weight)

    def estimate(self, P: Tensor, steps: int | None = None) -> Tensor:
        return super().estimate(P, steps) * (self.root if self.overlap else 1)

    def proved_bound(self, P: Tensor) -> float:
        """Return the divisor of the weight: a proved bound of ||M||, times sqrt(T) with `overlap`."""
        if not bool(P.isfinite().all()):
            return math.nan
        norm = self._known_bound(self.operator.matrix(P), MATRIX)
        # Zero stays zero: the next float would make gradients infinite.
        return math.nextafter(norm * self.root, math.inf) if self.overlap and norm > 0 else norm

    def constant_in(self, dtype: torch.dtype) -> float | None:
        # As published sqrt(T) L would hold, but the bound of the stored weight is smaller.
        return super().constant_in(dtype) if self.overlap or self.root == 1 else None

    def estimated_constant(self, P: Tensor) -> Tensor:
        return P.new_tensor(self.lipschitz * (1 if self.overlap else self.root))

    def describe(self) -> str:
        root = f"sqrt({overlap_of_rows(self.geometry, self.weight_shape)})"
        divided = f", divided by {root}" if self.overlap and self.root > 1 else ""
        return (
            f"spectral norm of the reshaped kernel{divided}, by its proved bound in eval mode (an estimate in training)"
        )

    def advice(self) -> str | None:
        if self.root == 1:
            return None
        return "the norm of the reshaped kernel is not that of the layer; 'spectral-norm' divides by that of the layer"


class _Reshaped(Operator):
    """x -> M x, where M is the weight as a matrix with one row per output."""

    def __init__(self, module: nn.Module, weight: Tensor) -> None:
        super().__init__(module)
        self.rows_are_second = isinstance(module, nn.modules.conv._ConvTransposeNd)
        self.input_shape = (self.matrix(weight).shape[1],)

    def matrix(self, W: Tensor) -> Tensor:
        """Return M (outputs, inputs * taps), with the groups of a convolution stacked."""
        return (W.transpose(0, 1) if self.rows_are_second else W).flatten(1)

    def __call__(self, x: Tensor, W: Tensor) -> Tensor:
        return F.linear(x, self.matrix(W))


def spectral_norm(
    module: Layer,
    name: str = "weight",
    *,
    lipschitz: float = 1.0,
    iterations: int = 1,
    input_size: int | Sequence[int] | None = None,
) -> Layer:
    """Divide the weight of a layer by the norm of its operator, in place, and return the layer; see `SpectralNorm`.

    Args:
        module: Linear, Conv1d to Conv3d or ConvTranspose1d to ConvTranspose3d.
        name: name of the parameter to constrain.
        lipschitz: the constant of the layer instead of 1.
        iterations: steps of the power method at each access in training.
        input_size: spatial size of the inputs, for the estimate in training; the proof in eval mode needs none.

    Returns:
        The same module, with a parametrized weight.

    Raises:
        onelip.UnsupportedLayer: if no bound is known for this layer or its padding.
        ValueError: for options out of range.

    Examples:
        >>> layer = spectral_norm(nn.Linear(8, 8)).eval()
        >>> bool(torch.linalg.matrix_norm(layer.weight, 2) <= 1 + 1e-6)
        True
    """
    made = SpectralNorm(module, name, lipschitz=lipschitz, iterations=iterations, input_size=input_size)
    return attach(module, made, name)


def spectral_norm_reshaped(
    module: Layer,
    name: str = "weight",
    *,
    lipschitz: float = 1.0,
    iterations: int = 1,
    overlap: bool = False,
) -> Layer:
    """Divide the weight of a layer by the norm of its reshaped kernel, in place, and return the layer.

    That is not the norm of the layer; see `ReshapedSpectralNorm`.

    Args:
        module: Linear, Conv1d to Conv3d or ConvTranspose1d to ConvTranspose3d.
        name: name of the parameter to constrain.
        lipschitz: the norm of the reshaped kernel, or the constant of the layer with `overlap`.
        iterations: steps of the power method at each access in training.
        overlap: also divide by the root of the number of taps that read one input: then the layer has the constant
            `lipschitz`.

    Returns:
        The same module, with a parametrized weight.

    Raises:
        onelip.UnsupportedLayer: if no bound is known for this layer or its padding.
        ValueError: for options out of range.

    Examples:
        >>> layer = spectral_norm_reshaped(nn.Conv2d(2, 2, 3), overlap=True).eval()
        >>> constant = layer.parametrizations.weight[0].constant_in(torch.float32)
        >>> round(constant, 4)
        1.0
    """
    made = ReshapedSpectralNorm(module, name, lipschitz=lipschitz, iterations=iterations, overlap=overlap)
    return attach(module, made, name)


_CITATION = (
    "Takeru Miyato, Toshiki Kataoka, Masanori Koyama, Yuichi Yoshida, "
    '"Spectral Normalization for Generative Adversarial Networks", ICLR 2018.'
)
_PAPER = PaperRow(E="no", F="partly", G="yes", M="yes", notes={"F": 2})

METHOD = Method(
    name="spectral-norm",
    title="SN, spectral normalisation (Miyato et al., 2018), of the true operator",
    citation=_CITATION,
    mechanism="parametrization",
    guarantee="at convergence",
    layers=LINEAR_LAYERS,
    apply=spectral_norm,
    options=({"iterations": 3}, {"lipschitz": 0.5}),
    train_equals_eval=False,
    paper=_PAPER,
    hyperparameters={"lr": 0.02, "weight_decay": 0.0},  # only the direction of a weight matters
    note="eval mode divides by the proved bound",
)

RESHAPED = Method(
    name="spectral-norm-reshaped",
    title="SN as published: norm of the reshaped kernel, which is not that of the layer",
    citation=_CITATION,
    mechanism="parametrization",
    guarantee=None,
    layers=LINEAR_LAYERS,
    apply=spectral_norm_reshaped,
    options=({"overlap": True}, {"iterations": 3, "lipschitz": 0.5}),
    train_equals_eval=False,
    # The constant of a layer can be sqrt(taps), so the loss asks for a larger margin than with constant 1.
    hyperparameters={"lr": 0.01, "weight_decay": 0.0, "offset": 2.0, "temperature": 0.5},
    note="bound of the stored weights in evaluation, up to sqrt(taps); overlap=true divides by it",
)
