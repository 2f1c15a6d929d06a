r"""Residual layers: a gradient step on a convex function (SLL, CPL), and linear residual layers (LiResNet).

The layer $x - 2 V^\top \mathrm{relu}(V x + b)$ is 1-Lipschitz for every $V$ of norm at most 1. SLL and CPL differ in
how they bound $V$: SLL by AOL on the outputs, CPL by spectral normalisation. A linear residual layer is one
convolution, whose norm is bounded as a whole.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from onelip.core.errors import UnsupportedLayer, check_integer
from onelip.core.geometry import Geometry, geometry_of, padding_of
from onelip.core.lipschitz_module import Bound, LipschitzModule, why_other_map
from onelip.core.parametrization import attach, check_lipschitz, find_parametrization, original_of, weight_of
from onelip.core.rounding import multiply_up
from onelip.graph.kinds import Potential, Scale
from onelip.graph.lowering import Lowering, lowers
from onelip.graph.ops.linear import affine
from onelip.methods.fourier.plain import plain_dense
from onelip.methods.free_weights import Tracked, track
from onelip.methods.numerics import KnownBound, stored_bound
from onelip.methods.power_iteration import SpectralNorm
from onelip.methods.registry import NOT_TRANSPOSED, Layer, Method, check_kind, register_method
from onelip.methods.same_size import SameSizeConv
from onelip.nn.aol import AOL

_WAY_OUT = "use a method without residual connection, e.g. 'aol' or 'soc'"


class ConvexPotential(LipschitzModule):
    r"""The residual layer $y = L\,(x - 2 V^\top \mathrm{relu}(V x + b))$; `sll` and `cpl` make it.

    **Theorem.** For two inputs, $f(x) - f(y) = (I - 2 V^\top D V)(x - y)$ with a diagonal matrix $D$ of entries in
    $[0, 1]$, because relu is monotone with slope at most 1. If $\|V\| \le c$, the eigenvalues of $V^\top D V$ are in
    $[0, c^2]$, so

    $$\|f(x) - f(y)\|_2 \le L \max(1, 2 c^2 - 1)\, \|x - y\|_2,$$

    which is $L$ for $c \le 1$.

    **Assumptions.** $V^\top$ is exactly the adjoint of $V$, also at the borders; the layer keeps the shape of its
    input.

    **Guarantee.** Proved from the constant of the parametrization of $V$, or from the stored $V$ of a baked layer.

    `onelip.bake` turns the layer into two linear layers with MaxMin between them if $V$ is a matrix (Linear, 1x1), by
    `onelip.methods.fourier.plain.plain_dense`; otherwise it stores $V$.

    Args:
        layer: Linear, or Conv1d to Conv3d that keep the spatial size: its weight is $V$, its bias $b$.
        lipschitz: the constant $L$.

    Shape:
        - Input: $(*, H_{in})$ for Linear, $(N, C, *)$ for convolutions.
        - Output: same shape as the input.

    Attributes:
        weight: $V$.
        bias: $b$, or None.

    Raises:
        onelip.UnsupportedLayer: if the layer does not keep the shape of its input.

    Examples:
        >>> layer = ConvexPotential(nn.Linear(2, 1, bias=False))
        >>> _ = nn.init.constant_(layer.weight, 1.0)
        >>> layer(torch.tensor([[1.0, 0.0]])).tolist(), round(layer.lipschitz_constant, 6)  # 2 ||V||^2 - 1
        ([[-1.0, -2.0]], 3.0)
    """

    bias: nn.Parameter | None

    def __init__(self, layer: nn.Module, *, lipschitz: float = 1.0) -> None:
        super().__init__()
        self.geometry = geometry_of(layer)
        weight = weight_of(layer, self.geometry)
        check_keeps_size(layer)
        self.lipschitz = check_lipschitz(lipschitz, weight.dtype)
        self.hidden = weight.shape[0]
        self.channels = weight.shape[1] * self.geometry.groups
        self.convolution: SameSizeConv | None = None
        if isinstance(layer, nn.modules.conv._ConvNd):
            is_circular = layer.padding_mode == "circular"
            self.convolution = SameSizeConv(self.channels, layer.kernel_size, layer.dilation, layer.groups, is_circular)
        self.weight = nn.Parameter(weight.detach(), weight.requires_grad)
        self._known_bound = KnownBound()
        bias = layer.bias
        self.register_parameter("bias", bias if isinstance(bias, nn.Parameter) else None)
        self.train(layer.training)

    def forward(self, x: Tensor) -> Tensor:
        V = self.weight
        if self.convolution is None:
            step = F.linear(F.relu(F.linear(x, V, self.bias)), V.T)
        else:
            self.convolution.check(x)
            step = self.convolution.adjoint(F.relu(self.convolution(x, V, self.bias)), V)
        y = torch.add(x, step, alpha=-2)  # one pass over memory, also for the derivative; doubling is exact
        return y if self.lipschitz == 1 else y * self.lipschitz

    def bound(self) -> Bound:
        """The proved constant: from the parametrization of V, or for a baked layer from the stored V."""
        taps, conv = self.geometry.kernel_size, self.convolution
        if not (conv.is_for(taps) and conv.groups == self.geometry.groups if conv is not None else not taps):
            return Bound(None, "its convolution was changed")
        found = self._norm_of_weight()
        if (norm := found.constant) is None:
            return found
        expansion = 1.0 if norm <= 1 else 2 * norm**2 * (1 + 2.0**-50) - 1
        if not expansion < math.inf:
            return Bound(None, f"the norm of its weight, up to {norm}, is too large")
        constant = self.lipschitz if expansion == 1 else multiply_up(self.lipschitz, expansion)
        return Bound(constant, found.why)

    def plain_form(self, tensors: Mapping[str, Tensor]) -> nn.Module | None:
        """Return the plain layers for `onelip.bake`; None if the layer is kept."""
        is_matrix = math.prod(self.geometry.kernel_size) == 1 and self.geometry.groups == 1
        if not is_matrix or not self._is_bounded():
            return None
        V = tensors["weight"].flatten(1)
        everything = slice(None)
        return plain_dense(V, self.bias, everything, everything, self.lipschitz, axes=len(self.geometry.kernel_size))

    def _is_bounded(self) -> bool:
        """Return whether ||V|| <= 1 is proved in eval mode, up to rounding."""
        if why_other_map(self):
            return False
        norm = self._norm_of_weight().constant
        return norm is not None and norm <= 1 + 2.0**-10

    def _norm_of_weight(self) -> Bound:
        if not parametrize.is_parametrized(self, "weight"):
            return stored_bound(self.weight, self.geometry, self._known_bound)
        found = find_parametrization(self)
        fits = found is not None and found.geometry == self.geometry and found.weight_shape == tuple(self._shape)
        claimed = found.constant_in(original_of(self).dtype) if found is not None and fits else None
        if found is None or claimed is None:
            return Bound(None, "no parametrization that bounds its weight")
        return Bound(claimed, found.describe())

    @property
    def _shape(self) -> tuple[int, ...]:
        return (self.hidden, self.channels // self.geometry.groups, *self.geometry.kernel_size)

    def extra_repr(self) -> str:
        taps = ""
        if (conv := self.convolution) is not None:
            taps = f", kernel_size={conv.kernel_size}, dilation={conv.dilation}, groups={conv.groups}"
            taps += ", circular" * conv.circular
        return f"{self.channels}, hidden={self.hidden}{taps}, lipschitz={self.lipschitz}"


@lowers(ConvexPotential)
def _lower_potential(low: Lowering) -> int:
    """One node, and one for the constant if it is not 1.

    Dense layers and 1x1 convolutions are baked to linear layers (`onelip.methods.fourier.plain`), so this rule is for
    larger kernels and for groups.
    """
    module = low.module
    if module.convolution is None:
        return low.refuse()
    layer = module.convolution.as_layer(module.hidden)
    found = affine(low, layer, low.source, module.weight, module.bias, kind=Potential)
    return found if module.lipschitz == 1 else low.emit(Scale, found, factor=float(module.lipschitz))


def check_keeps_size(layer: nn.Module) -> None:
    """Raise `UnsupportedLayer` unless the output of the layer has the spatial size of its input."""
    check_kind(layer, NOT_TRANSPOSED, "a residual layer", _WAY_OUT)
    if not isinstance(layer, nn.modules.conv._ConvNd):
        return
    if any(s != 1 for s in layer.stride):
        raise UnsupportedLayer(
            f"expected stride 1 for a residual layer, got {layer.stride}; use onelip.nn.ConcatenationPool2d and "
            f"a layer of stride 1, or {_WAY_OUT}"
        )
    for k, d, p in zip(layer.kernel_size, layer.dilation, padding_of(layer), strict=True):
        if k % 2 == 0 or sum(p) != d * (k - 1):
            raise UnsupportedLayer(
                f"expected an odd kernel and padding dilation * (kernel_size - 1) / 2, which keep the size of images, "
                f"got kernel size {k}, dilation {d} and padding {layer.padding}; change them, or {_WAY_OUT}"
            )


def with_hidden(layer: nn.Module, hidden: int | None) -> nn.Module:
    """Return the layer V for a square layer: the layer itself, or a new one with `hidden` outputs."""
    geometry = geometry_of(layer)
    weight = weight_of(layer, geometry)
    check_keeps_size(layer)
    inputs, outputs = weight.shape[1] * geometry.groups, weight.shape[0]
    if inputs != outputs:
        raise UnsupportedLayer(
            f"expected as many outputs as inputs for a residual layer, got {inputs} inputs and {outputs} outputs; use "
            "onelip.nn.PadChannels before, or onelip.nn.FirstChannels after, a square layer"
        )
    if hidden is None or hidden == outputs:
        return layer
    if check_integer("hidden", hidden) % geometry.groups:
        raise ValueError(f"expected hidden to be a multiple of the number of groups, {geometry.groups}, got {hidden}")
    place: dict[str, Any] = {"bias": layer.bias is not None, "device": weight.device, "dtype": weight.dtype}
    if isinstance(layer, nn.Linear):
        return nn.Linear(inputs, hidden, **place).train(layer.training)
    assert isinstance(layer, nn.modules.conv._ConvNd)
    kind: Any = type(layer)
    settings = {name: getattr(layer, name) for name in ("kernel_size", "padding", "dilation", "groups", "padding_mode")}
    return kind(inputs, hidden, **settings, **place).train(layer.training)


@torch.no_grad()
def reset_spread(P: Tensor) -> None:
    """Initialise with Gaussian entries, as the authors of both methods do.

    With the identity, x - 2 relu(x) = -|x| would give the next layer only negative inputs, and no gradient.
    """
    if not P.is_meta:
        nn.init.xavier_normal_(P)


class SLLWeight(AOL):
    r"""The map $W \mapsto V = T^{1/2} W$ of SLL: AOL on the outputs with learned weights $q$; `sll` registers it.

    **Theorem.** $y = x - 2 W^\top T\,\mathrm{relu}(W x + b)$ with
    $T = \mathrm{diag}(1 / \sum_j |W W^\top|_{ij} q_j / q_i)$ has the constant 1 for all $q > 0$. As
    $\mathrm{relu}(t z) = t\,\mathrm{relu}(z)$ for $t > 0$, this is $x - 2 V^\top \mathrm{relu}(V x + b')$ with
    $V = T^{1/2} W$ and $b' = T^{1/2} b$; $V$ is AOL of $W$ on its outputs, so $\|V\| \le 1$. See `ConvexPotential`.

    **Assumptions.** As many outputs as inputs; convolutions with odd kernel size, stride 1 and padding that keeps the
    size.

    **Guarantee.** Proved for every weight. $q$ is the exponential of the learned parameter. (In the published
    convolutions $q$ cancels.)

    Araujo, Havens, Delattre, Allauzen, Hu, "A Unified Algebraic Perspective on Lipschitz Neural Networks", ICLR 2023.

    Args:
        geometry: how the weight acts, from `onelip.core.geometry.geometry_of`.
        weight_shape: shape of the weight.
        device: device of the parameter log q.
        dtype: type of the parameter log q.
    """

    def __init__(
        self,
        geometry: Geometry,
        weight_shape: Sequence[int],
        *,
        device: torch.device | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(geometry, weight_shape, side="outputs", learn_weights=True, device=device, dtype=dtype)

    @torch.no_grad()
    def reset(self, P: Tensor) -> None:
        """Initialise as the authors do, but with q = 1."""
        reset_spread(P)
        if self.log_q is not None:
            self.log_q.zero_()

    def describe(self) -> str:
        return "SLL"


def sll(module: nn.Module, *, hidden: int | None = None, lipschitz: float = 1.0) -> ConvexPotential:
    """Return an SLL layer in place of the given layer, which must keep the shape of its input; see `SLLWeight`.

    Without `hidden` the weight of the layer is kept as W, up to a factor, and its bias as b'.

    Args:
        module: Linear, or Conv1d to Conv3d.
        hidden: rows of W; the number of channels by default.
        lipschitz: the constant to guarantee instead of 1.

    Returns:
        A new module.

    Raises:
        onelip.UnsupportedLayer: if the layer does not keep the shape of its input.
        ValueError: for options out of range.

    Examples:
        >>> layer = sll(nn.Conv2d(4, 4, 3, padding=1), hidden=8)
        >>> layer(torch.randn(1, 4, 6, 6)).shape, layer.lipschitz_constant
        (torch.Size([1, 4, 6, 6]), 1.0)
    """
    block = ConvexPotential(with_hidden(module, hidden), lipschitz=lipschitz)
    shape, weight = block.weight.shape, block.weight
    return attach(block, SLLWeight(block.geometry, shape, device=weight.device, dtype=weight.dtype))


register_method(
    Method(
        name="sll",
        title="SLL, SDP-based Lipschitz layers (Araujo et al., 2023)",
        citation="Alexandre Araujo, Aaron Havens, Blaise Delattre, Alexandre Allauzen, Bin Hu, "
        '"A Unified Algebraic Perspective on Lipschitz Neural Networks", ICLR 2023.',
        guarantee="proved",
        layers=NOT_TRANSPOSED,
        apply=sll,
        options=({"hidden": 6}, {"lipschitz": 0.5}),
        replaces=True,
        fast_lr=8.1,
        hyperparameters={"lr": 0.5, "weight_decay": 0.0, "schedule": "one-cycle"},
        note="residual layer with a relu; square layers that keep the size",
    )
)


class CPLWeight(SpectralNorm):
    r"""The map $W \mapsto V = W / \|W\|$ of CPL; `cpl` registers it.

    **Theorem.** $y = x - \frac{2}{\|W\|^2} W^\top \mathrm{relu}(W x + b)$ has the constant 1. With $V = W / \|W\|$ it
    is $x - 2 V^\top \mathrm{relu}(V x + b')$, $b' = b / \|W\|$; see `ConvexPotential`.

    **Assumptions.** As many outputs as inputs; convolutions with odd kernel size, stride 1 and padding that keeps the
    size.

    **Guarantee.** In training $\|W\|$ is estimated by one step of power iteration, which is never too large, as
    published: the constant holds at convergence. In evaluation $W$ is divided by a proved bound, and the constant is
    proved for every weight.

    Meunier, Delattre, Araujo, Allauzen, "A Dynamical System Perspective for Lipschitz Neural Networks", ICML 2022.

    The arguments are those of `spectral_norm`.
    """

    @torch.no_grad()
    def reset(self, P: Tensor) -> None:
        reset_spread(P)

    def describe(self) -> str:
        return "CPL, by the proved bound in eval mode (an estimate in training)"


def cpl(
    module: nn.Module,
    *,
    hidden: int | None = None,
    lipschitz: float = 1.0,
    iterations: int = 1,
    input_size: int | Sequence[int] | None = None,
) -> ConvexPotential:
    """Return a convex potential layer in place of the given layer, which must keep the shape of its input.

    See `CPLWeight`. Without `hidden` the weight of the layer is kept as W, and its bias as b'.

    Args:
        module: Linear, or Conv1d to Conv3d.
        hidden: rows of W; the number of channels by default.
        lipschitz: the constant to guarantee instead of 1.
        iterations: steps of the power method at each access in training.
        input_size: spatial size of the inputs, for the estimate in training; the proof in eval mode needs none.

    Returns:
        A new module.

    Raises:
        onelip.UnsupportedLayer: if the layer does not keep the shape of its input.
        ValueError: for options out of range.

    Examples:
        >>> layer = cpl(nn.Linear(4, 4)).eval()
        >>> layer(torch.randn(2, 4)).shape, round(layer.lipschitz_constant, 6)
        (torch.Size([2, 4]), 1.0)
    """
    inner = with_hidden(module, hidden)
    block = ConvexPotential(inner, lipschitz=lipschitz)
    return attach(block, CPLWeight(inner, iterations=iterations, input_size=input_size))


register_method(
    Method(
        name="cpl",
        title="CPL, convex potential layers (Meunier et al., 2022)",
        citation="Laurent Meunier, Blaise Delattre, Alexandre Araujo, Alexandre Allauzen, "
        '"A Dynamical System Perspective for Lipschitz Neural Networks", ICML 2022.',
        guarantee="at convergence",
        layers=NOT_TRANSPOSED,
        apply=cpl,
        options=({"hidden": 6, "iterations": 3}, {"lipschitz": 0.5}),
        replaces=True,
        train_equals_eval=False,
        fast_lr=0.9,
        hyperparameters={"lr": 0.5, "weight_decay": 0.0, "schedule": "one-cycle"},
        note="residual layer with a relu; square layers that keep the size; eval mode divides by the proved bound",
    )
)


class LinearResidual(Tracked):
    r"""The map $K \mapsto W = I + \gamma K / \sqrt{\mathrm{depth}}$ with learned $\gamma$; `liresnet` registers it.

    The layer $x + \gamma K x / \sqrt{\mathrm{depth}}$ has no activation inside, so it is one convolution with the
    kernel $W$, which is bounded as a whole. The triangle inequality, $1 + \gamma \|K\| / \sqrt{\mathrm{depth}}$, would
    be larger than $\|W\|$, and much larger in a deep network.

    **Assumptions.** Convolutions with as many outputs as inputs, odd kernels, stride 1 and padding that keeps the size.

    **Guarantee.** None in training, where power iteration estimates $\|W\|$ for the loss `onelip.losses.EMMALoss`,
    which needs a chain of modules. Evaluation uses proved bounds of the stored $W$ and the distances of the rows of the
    last layer.

    Hu, Zou, Wang, Leino, Fredrikson, "Unlocking Deterministic Robustness Certification on ImageNet", NeurIPS 2023.

    The arguments are those of `liresnet`.

    Attributes:
        gamma: parameter, initialised with 1.
    """

    def __init__(
        self,
        module: nn.Module,
        name: str = "weight",
        *,
        depth: int = 12,
        iterations: int = 5,
        input_size: int | Sequence[int] | None = None,
    ) -> None:
        super().__init__(module, name, iterations=iterations, input_size=input_size)
        weight = weight_of(module, self.geometry, name)
        self.depth = check_integer("depth", depth)
        self.gamma = nn.Parameter(torch.ones((), dtype=weight.dtype, device=weight.device))

    def forward(self, P: Tensor) -> Tensor:
        return self._identity(P) + P * (self.gamma.to(P.dtype) / math.sqrt(self.depth))

    @torch.no_grad()
    def right_inverse(self, W: Tensor) -> Tensor:
        """Return the K for this W, if gamma is not zero."""
        W = super().right_inverse(W)
        return (W - self._identity(W)) * (math.sqrt(self.depth) / self.gamma.to(W.dtype))

    def estimated_constant(self, P: Tensor) -> Tensor:
        return self.estimate(self.forward(P))

    @torch.no_grad()
    def reset(self, P: Tensor) -> None:
        """Initialise with small Gaussian entries, as the authors do: near the identity."""
        if not P.is_meta:
            self.gamma.fill_(1)
            P.normal_(0, 1 / P[0].numel())

    def describe(self) -> str:
        return "free linear residual, with an estimate of its norm for the loss"

    def _identity(self, like: Tensor) -> Tensor:
        """Return the kernel of the identity: output j reads input j of its group."""
        kernel = torch.zeros_like(like)
        j = torch.arange(self.weight_shape[0], device=like.device)
        place: tuple[Any, ...] = (j, j % self.weight_shape[1], *self.geometry.identity_tap)
        return kernel.index_put([torch.as_tensor(i, device=like.device) for i in place], like.new_ones(()))


def liresnet(
    module: Layer,
    name: str = "weight",
    *,
    depth: int = 12,
    iterations: int = 5,
    input_size: int | Sequence[int] | None = None,
) -> Layer:
    """Make a convolution a linear residual layer, in place, and return it; the function of the layer is unchanged.

    See `LinearResidual`. Layers that cannot be residual (strides, other numbers of outputs, Linear) stay free, with
    `track`.

    Args:
        module: Linear, Conv1d to Conv3d or ConvTranspose1d to ConvTranspose3d.
        name: name of the weight.
        depth: number of residual layers in the network; each is divided by its root.
        iterations: steps of the power method in each step of training.
        input_size: spatial size of the inputs, for the estimate.

    Returns:
        The same module, with a parametrized weight.

    Raises:
        onelip.UnsupportedLayer: if no bound is known for this layer or its padding.
        ValueError: for options out of range.

    Examples:
        >>> layer = nn.Conv2d(2, 2, 3, padding=1)
        >>> before = layer.weight.detach().clone()
        >>> bool((liresnet(layer).weight - before).abs().max() < 1e-6)
        True
    """
    if not _is_residual(module):
        return track(module, name, iterations=iterations, input_size=input_size)
    made = LinearResidual(module, name, depth=depth, iterations=iterations, input_size=input_size)
    return attach(module, made, name)


def _is_residual(module: nn.Module) -> bool:
    """Return whether the assumptions of `LinearResidual` hold."""
    if not isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)) or module.in_channels != module.out_channels:
        return False
    try:
        check_keeps_size(module)
    except UnsupportedLayer:
        return False
    return True


register_method(
    Method(
        name="liresnet",
        title="LiResNet, linear residual layers with the EMMA loss (Hu et al., 2023)",
        citation="Kai Hu, Andy Zou, Zifan Wang, Klas Leino, Matt Fredrikson, "
        '"Unlocking Deterministic Robustness Certification on ImageNet", NeurIPS 2023.',
        mechanism="loss",
        apply=liresnet,
        options=({"depth": 1, "iterations": 1},),
        loss="emma",
        certificate="pairs",
        hyperparameters={"offset": 0.0, "temperature": 1.0, "lr": 0.005, "weight_decay": 0.0},
        fast_lr=0.1,
        note="kernel I + gamma K / sqrt(depth); bound of the stored weights in evaluation, per pair of classes",
    )
)
