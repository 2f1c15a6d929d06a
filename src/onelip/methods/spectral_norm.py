"""Spectral normalisation.

Citation: Takeru Miyato, Toshiki Kataoka, Masanori Koyama, Yuichi Yoshida, "Spectral Normalization for Generative
Adversarial Networks", ICLR 2018. On the true convolution operator: Farnia et al., ICLR 2019; Gouk et al., 2021.

Inequality: W = L P / b with b >= ||P|| has norm at most L. In training b is the estimate |A v| of one power iteration
per access, which is at most ||P||: the layer may stretch a little until v has converged. In evaluation b is the proved
bound of the stored weight.
Assumes: zero padding, or circular padding of at most dilation * (kernel_size - 1) in total.
Guarantee: at convergence in training; proved in evaluation, for every P.

`spectral_norm_reshaped` follows the kernel reshaped to (outputs, inputs * taps), as Miyato et al. and torch do. That
norm can be sqrt(taps) times below the layer's, so in training the layer may stretch by as much, also at convergence.
Its evaluation is the sound one all the same, and so differs from training.
"""

from collections.abc import Sequence
from typing import TypeVar

import torch.nn.functional as F
from torch import Tensor, nn

from onelip.geometry import LINEAR_LAYERS, geometry_of
from onelip.methods._method import Method, PaperRow
from onelip.methods._parametrization import attach, weight_of, working_type
from onelip.methods._power_iteration import Operator
from onelip.methods._sound import PowerIterated

Layer = TypeVar("Layer", bound=nn.Module)


class SpectralNorm(PowerIterated):
    """The map P -> L P / ||P||; see the module's docstring, and `spectral_norm` for the verb."""

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
    """The same with the norm of the reshaped kernel in training."""

    def make_operator(self, module: nn.Module, input_size: int | tuple[int, ...] | None) -> Operator:
        return _Reshaped(module)

    def describe(self) -> str:
        return "spectral norm, by its proved bound in eval mode (of the reshaped kernel in training)"


class _Reshaped(Operator):
    """x -> M x with M the weight as a matrix, one row per output."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        weight = module.weight
        assert isinstance(weight, Tensor)
        self.rows_are_second = isinstance(module, nn.modules.conv._ConvTransposeNd)
        self.input_shape = (self._matrix(weight).shape[1],)

    def _matrix(self, W: Tensor) -> Tensor:
        return (W.transpose(0, 1) if self.rows_are_second else W).flatten(1)

    def __call__(self, x: Tensor, W: Tensor) -> Tensor:
        return F.linear(x, self._matrix(W))


def spectral_norm(
    module: Layer,
    *,
    lipschitz: float = 1.0,
    iterations: int = 1,
    input_size: int | Sequence[int] | None = None,
) -> Layer:
    """Divide a layer's weight by its norm, in place; return the layer.

    Args:
        module: Linear, Conv1d to Conv3d, ConvTranspose1d to ConvTranspose3d.
        lipschitz: the constant to aim at instead of 1.
        iterations: steps of the power method at each access in training.
        input_size: spatial size of the images, for the estimate in training; the proof in eval mode needs none.

    Example:
        >>> import torch
        >>> layer = spectral_norm(nn.Linear(8, 8)).eval()
        >>> bool(torch.linalg.matrix_norm(layer.weight, 2) <= 1 + 1e-6)
        True
    """
    return _attach(SpectralNorm, module, lipschitz, iterations, input_size)


def spectral_norm_reshaped(module: Layer, *, lipschitz: float = 1.0, iterations: int = 1) -> Layer:
    """Divide by the norm of the reshaped kernel in training, which is not the layer's; in place; return the layer.

    Example:
        >>> layer = spectral_norm_reshaped(nn.Conv2d(2, 2, 3))
    """
    return _attach(ReshapedSpectralNorm, module, lipschitz, iterations, None)


def _attach(
    kind: type[SpectralNorm],
    module: Layer,
    lipschitz: float,
    iterations: int,
    input_size: int | Sequence[int] | None,
) -> Layer:
    size = tuple(input_size) if isinstance(input_size, Sequence) else input_size
    geometry = geometry_of(module, size)
    weight = weight_of(module, geometry)
    made = kind(module, geometry, weight.shape, lipschitz=lipschitz, iterations=iterations, input_size=size)
    made.warm_up(module)
    return attach(module, made)


_PAPER = PaperRow(E="no", F="partly", G="yes", M="yes", notes={"F": 2})

METHOD = Method(
    name="spectral-norm",
    title="SN, spectral normalisation (Miyato et al., 2018), of the true operator",
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
    title="SN as published: the norm of the reshaped kernel, which is not the layer's",
    mechanism="parametrization",
    guarantee="none",
    layers=LINEAR_LAYERS,
    apply=spectral_norm_reshaped,
    train_equals_eval=False,
    hyperparameters={"lr": 0.02, "weight_decay": 0.0},
    note="training may stretch by sqrt(taps); eval mode divides by the proved bound",
)
