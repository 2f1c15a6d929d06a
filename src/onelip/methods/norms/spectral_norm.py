"""Spectral normalisation.

Citation: Takeru Miyato, Toshiki Kataoka, Masanori Koyama, Yuichi Yoshida, "Spectral Normalization for Generative
Adversarial Networks", ICLR 2018. On the true convolution operator: Farnia et al., ICLR 2019; Gouk et al., 2021.

Inequality: W = L P / b with b >= ||P|| has norm at most L. In training b is the estimate |A v| of one power iteration
per access, which is at most ||P||: the layer may stretch a little until v has converged. In evaluation b is the proved
bound of the stored weight.
Assumes: zero padding, or circular padding of at most dilation * (kernel_size - 1) in total.
Guarantee: at convergence in training; proved in evaluation, for every P.

`spectral_norm_reshaped` follows M, the kernel reshaped to (outputs, inputs * taps), as Miyato et al. and torch do. That
is not the layer's norm: ||J|| <= sqrt(T) ||M||, T the number of taps that read the same input, and a constant kernel
attains it. As published the layer is P / ||M||, and proves no constant: evaluation goes by the proved bound
of the stored weight, at most about sqrt(T). With overlap=True it is L P / (sqrt(T) ||M||), of norm at most L. Either
way evaluation computes what training did, by a proved bound of ||M||. Dividing by a bound of the layer's own norm in
evaluation alone would be sound, too; but it shrinks weights and not the biases after them, by up to sqrt(T) in each
layer: of the digits 98 % were right in training and 15 % in evaluation.
"""

import math
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from onelip.core.geometry import LINEAR_LAYERS, Geometry, geometry_of
from onelip.core.parametrization import attach, weight_of, working_type
from onelip.methods.method import Method, PaperRow
from onelip.methods.norms.estimated import PowerIterated, overlap_of_rows
from onelip.methods.norms.power_iteration import Operator

Layer = TypeVar("Layer", bound=nn.Module)

# A matrix as it stands.
_MATRIX = Geometry(transposed=False, groups=1, kernel_size=(), phases=(), identity_tap=())


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
    """The same with the norm of the reshaped kernel.

    Args:
        module: the layer.
        geometry: of the layer.
        weight_shape: of its weight.
        overlap: whether to divide by sqrt(T) too; see the module's docstring.
        **settings: those of `SpectralNorm`.
    """

    operator: "_Reshaped"

    def __init__(
        self,
        module: nn.Module,
        geometry: Geometry,
        weight_shape: Sequence[int],
        *,
        overlap: bool = False,
        **settings: Any,
    ) -> None:
        super().__init__(module, geometry, weight_shape, **settings)
        self.overlap = bool(overlap)
        T = overlap_of_rows(geometry, weight_shape)
        self.root = math.isqrt(T) if math.isqrt(T) ** 2 == T else math.nextafter(math.sqrt(T), math.inf)

    def make_operator(self, module: nn.Module, input_size: int | tuple[int, ...] | None) -> Operator:
        return _Reshaped(module)

    def estimate(self, P: Tensor, steps: int | None = None) -> Tensor:
        return super().estimate(P, steps) * (self.root if self.overlap else 1)

    def proved_bound(self, P: Tensor) -> float:
        """What a weight is divided by: a number proved not to be below ||M||, times sqrt(T) if that is divided out."""
        if not bool(P.isfinite().all()):
            return math.nan
        norm = self._known_bound(self.operator.matrix(P), _MATRIX)
        # Zero stays zero: the smallest float in its place would make gradients infinite.
        return math.nextafter(norm * self.root, math.inf) if self.overlap and norm > 0 else norm

    def constant_in(self, dtype: torch.dtype) -> float | None:
        # sqrt(T) L would be true as published, but what is stored is shorter.
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
        return "the reshaped kernel's norm is not the layer's, which costs norm; 'spectral-norm' takes the layer's own"


class _Reshaped(Operator):
    """x -> M x with M the weight as a matrix, one row per output."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        weight = module.weight
        assert isinstance(weight, Tensor)
        self.rows_are_second = isinstance(module, nn.modules.conv._ConvTransposeNd)
        self.input_shape = (self.matrix(weight).shape[1],)

    def matrix(self, W: Tensor) -> Tensor:
        """M (outputs, inputs * taps), the groups of a convolution one below the other."""
        return (W.transpose(0, 1) if self.rows_are_second else W).flatten(1)

    def __call__(self, x: Tensor, W: Tensor) -> Tensor:
        return F.linear(x, self.matrix(W))


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

    Examples:
        >>> layer = spectral_norm(nn.Linear(8, 8)).eval()
        >>> bool(torch.linalg.matrix_norm(layer.weight, 2) <= 1 + 1e-6)
        True
    """
    return _attach(SpectralNorm, module, lipschitz, iterations, input_size)


def spectral_norm_reshaped(
    module: Layer, *, lipschitz: float = 1.0, iterations: int = 1, overlap: bool = False
) -> Layer:
    """Divide a layer's weight by the norm of its reshaped kernel, which is not the layer's, in place; return the layer.

    Args:
        module: Linear, Conv1d to Conv3d, ConvTranspose1d to ConvTranspose3d.
        lipschitz: the norm that the reshaped kernel gets.
        iterations: steps of the power method at each access in training.
        overlap: divide by the root of the overlap of the taps, too: then the layer has the constant `lipschitz`.

    Examples:
        >>> from onelip.graph.modules import bound_module
        >>> bound_module(spectral_norm_reshaped(nn.Conv2d(2, 2, 3))).constant is None
        True
        >>> round(bound_module(spectral_norm_reshaped(nn.Conv2d(2, 2, 3), overlap=True)).constant, 6)
        1.0
    """
    return _attach(ReshapedSpectralNorm, module, lipschitz, iterations, None, overlap=overlap)


def _attach(
    kind: type[SpectralNorm],
    module: Layer,
    lipschitz: float,
    iterations: int,
    input_size: int | Sequence[int] | None,
    **options: bool,
) -> Layer:
    size = tuple(input_size) if isinstance(input_size, Sequence) else input_size
    geometry = geometry_of(module, size)
    weight = weight_of(module, geometry)
    made = kind(module, geometry, weight.shape, lipschitz=lipschitz, iterations=iterations, input_size=size, **options)
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
    options=({"overlap": True}, {"iterations": 3, "lipschitz": 0.5}),
    train_equals_eval=False,
    # A layer may stretch by sqrt(taps), so the margin that is asked for is to be larger than that of a constant of 1.
    hyperparameters={"lr": 0.01, "weight_decay": 0.0, "offset": 2.0, "temperature": 0.5},
    note="bound of the stored weights in evaluation, up to sqrt(taps); overlap=true divides that out",
)
