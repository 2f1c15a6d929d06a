r"""Spectral normalisation: divide a weight by the norm of its operator, or of its reshaped kernel.

The norm is estimated by power iteration in training, which is cheap and never too large. In evaluation the weight is
divided by a proved bound instead, so that the constant holds for every weight. `PowerIterated` is the base class of all
parametrizations that follow the largest singular vector.
"""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from onelip.core.errors import check_integer, per_axis
from onelip.core.geometry import Geometry, geometry_of
from onelip.core.modes import full_precision
from onelip.core.parametrization import LipschitzParametrization, attach, weight_of, working_type
from onelip.methods.numerics import MATRIX, KnownBound, stored_constant
from onelip.methods.registry import Layer, Method, PaperRow, register_method
from onelip.nn.init import tight_weight

# Size of the image in units of the extent of the kernel, if no input size is given.
_EXTENTS = 3

# Steps of the power method when a layer is made.
_FIRST_STEPS = 15


class Operator:
    """The linear operator of a layer as a function of its weight: `operator(x, W)`, without the bias.

    Args:
        module: Linear, Conv1d to Conv3d or ConvTranspose1d to ConvTranspose3d.
        input_size: spatial size of the input; by default three times the extent of the kernel.

    Attributes:
        input_shape: shape of one input, (channels, *sizes).

    Examples:
        >>> operator = Operator(nn.Conv2d(2, 3, 3, padding=1), (8, 8))
        >>> operator.input_shape
        (2, 8, 8)
    """

    def __init__(self, module: nn.Module, input_size: int | Sequence[int] | None = None) -> None:
        self.wrapping: list[int] | None = None
        self.settings: dict[str, object] = {}
        self.dims = 0
        if isinstance(module, nn.Linear):
            self.input_shape: tuple[int, ...] = (module.in_features,)
            return
        assert isinstance(module, nn.modules.conv._ConvNd)
        self.dims = len(module.kernel_size)
        self.transposed = module.transposed
        self.settings = {"stride": module.stride, "dilation": module.dilation, "groups": module.groups}
        if module.padding_mode == "circular":
            self.wrapping = list(module._reversed_padding_repeated_twice)
        else:
            self.settings["padding"] = module.padding
        if module.transposed:
            self.settings["output_padding"] = module.output_padding
        size = _default_size(module) if input_size is None else per_axis("input_size", input_size, self.dims)
        self.input_shape = (module.in_channels, *size)

    def __call__(self, x: Tensor, W: Tensor) -> Tensor:
        if not self.dims:
            return F.linear(x, W)
        if self.wrapping is not None:
            x = F.pad(x, self.wrapping, mode="circular")
        return getattr(F, f"conv{'_transpose' * self.transposed}{self.dims}d")(x, W, **self.settings)

    def start(self, like: Tensor) -> Tensor:
        """Return the initial unit vector (1, *input_shape), always the same: all processes must agree on it."""
        generator = torch.Generator().manual_seed(0)
        v = torch.randn(1, *self.input_shape, generator=generator, dtype=torch.float64)
        return (v / v.norm()).to(device=like.device, dtype=like.dtype if like.dtype.itemsize >= 4 else torch.float32)


def _default_size(module: nn.modules.conv._ConvNd) -> tuple[int, ...]:
    extents = [d * (k - 1) + 1 for k, d in zip(module.kernel_size, module.dilation, strict=True)]
    # A multiple of the stride, so that the phases of circular convolutions close.
    sizes = [_EXTENTS * n for n in extents]
    if module.transposed:  # its padding crops the output
        sizes = [n + 2 * int(p) for n, p in zip(sizes, module.padding, strict=True)]
    return tuple(-(-n // s) * s for n, s in zip(sizes, module.stride, strict=True))


def iterate(operator: Operator, W: Tensor, v: Tensor, steps: int = 1) -> Tensor:
    r"""Return $v$ after steps $v \leftarrow A^\top A v / \|A^\top A v\|$ of the power method.

    The adjoint $A^\top$ is the derivative of the operator, so it fits all settings of the layer.

    Args:
        operator: the operator $A$ of a layer.
        W: its weight.
        v: unit vector (1, *input_shape).
        steps: number of steps.

    Examples:
        >>> operator = Operator(nn.Linear(2, 2))
        >>> v = iterate(operator, torch.diag(torch.tensor([2.0, 1.0])), operator.start(torch.ones(1)), 20)
        >>> [round(abs(x), 4) for x in v.flatten().tolist()]
        [1.0, 0.0]
    """
    W = W.detach()
    with full_precision(W.device), torch.enable_grad():
        for _ in range(steps):
            x = v.detach().to(W.dtype).requires_grad_()
            y = operator(x, W)
            (z,) = torch.autograd.grad(y, x, y.detach())
            size = torch.linalg.vector_norm(z)
            # A zero weight, or one out of range, does not change the vector: it must stay a unit vector.
            v = torch.where((size > 0) & (size < torch.inf), z / size, x.detach())
    return v.detach()


def estimated_norm(operator: Operator, W: Tensor, v: Tensor) -> Tensor:
    r"""Return $\sigma = \|A v\| \le \|A\|$, differentiable in $W$: the derivative of $\|A\|$ if $v$ has converged."""
    with full_precision(W.device):
        return torch.linalg.vector_norm(operator(v.detach().to(W.dtype), W))


def overlap_of_rows(geometry: Geometry, weight_shape: Sequence[int]) -> int:
    r"""Return $T$ with $\|J\| \le \sqrt T \|M\|$ for a layer $J$ and its reshaped kernel $M$ (outputs, inputs * taps).

    $M$ maps windows, and each input is in at most $T$ windows: all taps, or with a stride those of one phase. The
    phases of a transposed layer are outputs that share no row of $M$; their squares add up to all taps again.

    Examples:
        >>> for layer in (nn.Conv2d(2, 2, 3), nn.Conv2d(2, 2, 3, stride=2), nn.ConvTranspose2d(2, 2, 3, stride=2)):
        ...     overlap_of_rows(geometry_of(layer), layer.weight.shape)
        9
        4
        9
    """
    if geometry.transposed:
        return math.prod(geometry.kernel_size)
    return math.prod(geometry.kernel_shape(tuple(weight_shape), "inputs")[3:])


class PowerIterated(LipschitzParametrization):
    r"""Base of parametrizations that follow the largest singular vector $v$ of their layer through training.

    Training may use the estimate $\|A v\| \le \|A\|$. In eval mode the weight is $P \cdot L / b$ (or
    $P \cdot \min(1, L / b)$), where $b \ge \|P\|$ is a proved bound. So the layer has the constant $L$ for every $P$,
    also if the iteration has not converged.

    Args:
        module: Linear, Conv1d to Conv3d or ConvTranspose1d to ConvTranspose3d.
        name: name of the weight.
        lipschitz: the constant $L$.
        iterations: steps of the power method at a time.
        input_size: spatial size of the inputs, for the estimate.

    Attributes:
        v: buffer, the unit vector. It is part of the state dict, so that a resumed run continues with it.
    """

    v: Tensor

    def __init__(
        self,
        module: nn.Module,
        name: str = "weight",
        *,
        lipschitz: float = 1.0,
        iterations: int = 1,
        input_size: int | Sequence[int] | None = None,
    ) -> None:
        geometry = geometry_of(module, input_size)
        weight = weight_of(module, geometry, name)
        super().__init__(geometry, weight.shape, lipschitz=lipschitz)
        self.iterations = check_integer("iterations", iterations)
        self.operator = self.make_operator(module, weight, input_size)
        v = self.operator.start(weight)
        if not weight.is_meta and weight.numel():
            v = iterate(self.operator, weight.detach().to(working_type(weight.dtype)), v, _FIRST_STEPS).to(v.dtype)
        self.register_buffer("v", v)
        self._known_bound = KnownBound()

    def make_operator(self, module: nn.Module, weight: Tensor, input_size: int | Sequence[int] | None) -> Operator:
        """Return the operator whose norm is estimated."""
        return Operator(module, input_size)

    def estimate(self, P: Tensor, steps: int | None = None) -> Tensor:
        """Return the estimated norm of the layer with weight P, differentiable; in training it moves the vector."""
        P = P.to(working_type(P.dtype))
        v = self.v
        if self.training:
            v = iterate(self.operator, P, v, self.iterations if steps is None else steps)
            with torch.no_grad():
                self.v.copy_(v)
        return estimated_norm(self.operator, P, v)

    def proved_bound(self, P: Tensor) -> float:
        """Return a proved upper bound on the norm of the layer; NaN for a weight that is not finite."""
        return self._known_bound(P, self.geometry) if bool(P.isfinite().all()) else math.nan

    def scaled_by_proof(self, P: Tensor, *, only_down: bool) -> Tensor:
        """Return P * lipschitz / bound; with `only_down`, P itself if its bound is not above the constant."""
        if P.numel() == 0 or P.is_meta:
            return P
        bound = self.proved_bound(P)
        if bound == 0 or (only_down and bound <= self.lipschitz):
            return P
        return (P.double() / bound * self.lipschitz).to(P.dtype)

    def constant_in(self, dtype: torch.dtype) -> float | None:
        """Return the constant, with the rounding of the stored weight."""
        _, rows, columns, *taps = self.geometry.kernel_shape(self.weight_shape, "inputs")
        T = math.prod(taps)
        return stored_constant(self.lipschitz, 0.0, min(rows, columns) * T, rows * columns * T * T, dtype)

    @torch.no_grad()
    def reset(self, P: Tensor) -> None:
        """Initialise with singular values 1: the identity, or orthogonal columns on the side with fewer channels."""
        columns = {side: self.geometry.kernel_shape(self.weight_shape, side)[2] for side in ("inputs", "outputs")}
        if not P.is_meta:
            P.copy_(tight_weight(self.geometry, self.weight_shape, min(columns, key=lambda side: columns[side])))


class SpectralNorm(PowerIterated):
    r"""The map $P \mapsto L P / b$, $b$ an estimate or a bound of the norm; `spectral_norm` registers it.

    **Theorem.** $W = L P / b$ with $b \ge \|P\|$ has norm at most $L$.

    **Assumptions.** Zero padding of any amount, or circular padding of at most `dilation * (kernel_size - 1)` in total.

    **Guarantee.** In training $b = \|A v\| \le \|P\|$ is the estimate of one step of power iteration per access, so the
    constant $L$ holds once $v$ has converged. In evaluation $b$ is a proved bound of the stored weight, so $L$ is
    proved for every $P$.

    Miyato, Kataoka, Koyama, Yoshida, "Spectral Normalization for Generative Adversarial Networks", ICLR 2018. On the
    operator of the convolution: Farnia et al., ICLR 2019; Gouk et al., 2021.

    The arguments are those of `spectral_norm`.
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

    The arguments are those of `spectral_norm_reshaped`.
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

register_method(
    Method(
        name="spectral-norm",
        title="SN, spectral normalisation (Miyato et al., 2018), of the true operator",
        citation=_CITATION,
        guarantee="at convergence",
        apply=spectral_norm,
        options=({"iterations": 3}, {"lipschitz": 0.5}),
        train_equals_eval=False,
        paper=_PAPER,
        fast_lr=0.3,
        hyperparameters={"lr": 0.02, "weight_decay": 0.0},  # only the direction of a weight matters
        note="eval mode divides by the proved bound",
    )
)

register_method(
    Method(
        name="spectral-norm-reshaped",
        title="SN as published: norm of the reshaped kernel, which is not that of the layer",
        citation=_CITATION,
        apply=spectral_norm_reshaped,
        options=({"overlap": True}, {"iterations": 3, "lipschitz": 0.5}),
        train_equals_eval=False,
        fast_lr=2.7,
        # The constant of a layer can be sqrt(taps), so the loss asks for a larger margin than with constant 1.
        hyperparameters={"lr": 0.01, "weight_decay": 0.0, "offset": 2.0, "temperature": 0.5},
        note="bound of the stored weights in evaluation, up to sqrt(taps); overlap=true divides by it",
    )
)
