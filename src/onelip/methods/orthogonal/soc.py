"""SOC, skew orthogonal convolutions ("SOP" in the table of the AOL paper), and SOC with certificate regularisation."""

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from onelip.core.errors import UnsupportedLayer, check_integer, check_number
from onelip.core.geometry import Geometry, geometry_of, padding_of
from onelip.core.lipschitz_module import Bound, LipschitzModule
from onelip.core.modes import full_precision
from onelip.core.parametrization import (
    LipschitzParametrization,
    SavedSettings,
    attach,
    check_lipschitz,
    original_of,
    parametrization_list,
    register,
    weight_of,
    working_type,
)
from onelip.core.rounding import multiply_up
from onelip.gram.products import absolute_row_sums
from onelip.graph.kinds import Exponential, gain
from onelip.graph.lowering import Lowering, lowers
from onelip.graph.ops.linear import affine
from onelip.graph.ops.movement import space_to_depth as lower_space_to_depth
from onelip.methods.last_layer import lln
from onelip.methods.numerics import UNIT64, of_moderate_size, stored_constant, widest_type
from onelip.methods.registry import NOT_TRANSPOSED, Method, PaperRow, check_kind, register_method
from onelip.methods.same_size import SameSizeConv
from onelip.nn import Householder
from onelip.nn.pooling import space_to_depth

# Added to the sums r (of a kernel with entries up to 2 or 4). Larger sums only lower the norm, and channels that are
# nearly zero, and their gradients, are not enlarged.
_FLOOR = 2.0**-20


def skew_part(M: Tensor) -> Tensor:
    r"""Return $(M - M^\top) / 2$ for a kernel (g, c, c, *taps) with an odd number of taps.

    The transpose exchanges channels and reverses taps. The two halves are exact negatives of each other, also in
    floating point.
    """
    taps = tuple(range(3, M.dim()))
    return (M - M.transpose(1, 2).flip(taps)) / 2


def skew_kernel(M: Tensor, norm: float) -> Tensor:
    r"""Return a skew kernel of norm at most `norm`, from the skew part $J$ of $M$, in float64.

    **Theorem.** By AOL, with $r_c = \sum_j |J^\top J|_{cj}$ for each channel, $\|J\,\mathrm{diag}(r)^{-1/2}\| \le 1$.
    With $D = \mathrm{diag}(r)^{-1/4}$, $D J D$ is skew and similar to $J\,\mathrm{diag}(r)^{-1/2}$, so its norm is a
    spectral radius:

    $$\|D J D\| = \rho(J\,\mathrm{diag}(r)^{-1/2}) \le 1.$$

    The result is `norm` times $D J D$. This, instead of a power iteration, is our own.

    A skew operator $J$ is normal with eigenvalues $i a$, $|a| \le \|J\|$. So for $p(x) = \sum_{j \le t} x^j / j!$,
    $\|p(J)\| = \max |p(ia)|$ is at most `gain(t, ||J||)` of `onelip.graph.kinds`, without an error term. For $t = 4$
    and $8$ it is at most 1 up to $\|J\| = 2.8$ and $3.3$, for $t = 5$ it is 1.005 at $\|J\| = 2$.

    Args:
        M: (g, c, c, *taps).
        norm: the norm.

    Examples:
        >>> skew_kernel(torch.tensor([[[1.0, 5.0], [-3.0, 9.0]]]), 0.5).flatten()[1:3].round(decimals=6)
        tensor([ 0.5000, -0.5000], dtype=torch.float64)
    """
    L = skew_part(M.to(widest_type(M)))
    L = of_moderate_size(L.flatten(2)).reshape(L.shape)
    r = absolute_row_sums(L) + _FLOOR  # (g, c)
    d = r.pow(-0.25)
    scale = d[:, :, None] * d[:, None, :] * norm  # symmetric to the last bit, so the kernel stays skew
    return L * scale.reshape(*scale.shape, *(1 for _ in L.shape[3:]))


@torch.no_grad()
def skew_norm_bound(L: Tensor, rounds: int = 16) -> float:
    r"""Return a proved bound of the norm of a stored kernel, with rounding.

    For every diagonal $D$, $\|L\| = \rho((D^{-1} L D^{-1}) D^2) \le \max_c r_c^{1/2} d_c^2$, where $r$ are the sums of
    $D^{-1} L D^{-1}$ as in `skew_kernel`. The $d$ of the construction is a fixed point of $d = r^{-1/4}$, which a few
    rounds approach; each of them gives a bound.

    Args:
        L: (g, c, c, *taps).
        rounds: number of diagonals that are tried.

    Returns:
        The bound; infinity if L is not exactly skew, not finite, or above 2^100.
    """
    L = L.to(torch.float64)
    mirrored = L.transpose(1, 2).flip(tuple(range(3, L.dim())))
    if not bool(((L + mirrored == 0) & (L.abs() <= 2.0**100)).all()):  # false for NaN
        return math.inf
    n = max(1, L[0, 0].numel())  # number of products in each sum
    best, d = math.inf, torch.ones(L.shape[:2], dtype=L.dtype)
    for _ in range(rounds):
        inverse = (1 / d[:, :, None] / d[:, None, :]).reshape(*L.shape[:3], *(1 for _ in L.shape[3:]))
        scaled = L * inverse
        # Sums of n products have an error of at most n 2^-53 times those of |L|.
        sizes = scaled.abs().flatten(3).sum(3) if L.dim() > 3 else scaled.abs()  # (g, c, c)
        error = 8 * n * 2.0**-53 * (sizes.mT @ sizes).sum(1)
        r = absolute_row_sums(scaled) + error + 2.0**-200  # far above the underflow of products
        best = min(best, float((r.sqrt() * d.square()).max()))
        d = (d * r.pow(-0.25)).sqrt()
        d = (d / d.amax(1, keepdim=True)).clamp(min=2.0**-8)
    return best * (1 + 32 * n * 2.0**-53)


def exponential(L: Tensor, terms: int) -> Tensor:
    """Return the truncated exponential of matrices (g, c, c), by Horner's rule in L^2: 1 + terms // 2 products."""
    one = torch.eye(L.shape[-1], dtype=L.dtype, device=L.device)
    square = L @ L
    result = torch.zeros_like(L)
    for j in range(terms - terms % 2, -1, -2):
        pair = one / math.factorial(j)
        if j < terms:
            pair = pair + L / math.factorial(j + 1)
        result = pair if j == terms - terms % 2 else pair + square @ result
    return result


# Relative bound of the rounding of the kernel in float32, u sqrt(channels * taps).
_SLACK = 2.0**-10
_WAY_OUT = "use bcop or aoc, which support any kernel and padding"


def _check_series(terms: object, norm: object) -> tuple[int, float]:
    return check_integer("terms", terms, 1, 30), check_number("norm", norm, 0, 4, open_low=True)


class SkewKernel(SavedSettings):
    """The map from a free kernel (g c, c, *taps) to a skew one of bounded norm, as a torch parametrization.

    Args:
        groups: number of groups g.
        norm: largest norm of the skew convolution.
    """

    def __init__(self, groups: int, norm: float) -> None:
        super().__init__()
        self.groups, self.norm = groups, norm

    def forward(self, M: Tensor) -> Tensor:
        with full_precision(M.device):
            kernel = M.to(working_type(M.dtype)).unflatten(0, (self.groups, -1))
            return skew_kernel(kernel, self.norm).flatten(0, 1).to(M.dtype)


class SOC(LipschitzModule):
    r"""The truncated exponential of a skew convolution; `soc` makes it.

    **Theorem.** For a skew kernel, scaled such that its layer $J$ has norm at most `norm`,
    $y = \sum_{j \le \mathrm{terms}} J^j x / j!$ has norm at most `gain(terms, norm)` (`onelip.graph.kinds`), by which
    it is divided. The norm of $J$ is bounded by AOL, without power iteration; see
    `onelip.methods.orthogonal.soc.skew_kernel`.

    **Assumptions.** Padding that keeps the size (divided by the stride), zero or circular; odd kernel sizes; dilation
    only with stride 1; not transposed. Strides by space to depth, so they must divide the input size; more and fewer
    channels by zero channels and by keeping the first ones.

    **Guarantee.** Proved for every weight and every number of terms, which is the same in training and evaluation. The
    published layers, with 5 terms in training and a power iteration, have norms up to 1.004 each.

    `onelip.bake` stores the skew kernel, in which mirrored taps of exchanged channels are exact negatives of each
    other; the terms of the series stay convolutions. In a certificate the layer is one node, "exponential".

    Singla, Feizi, "Skew Orthogonal Convolutions", ICML 2021.

    Args:
        layer: the convolution that is replaced: its channels, kernel size, stride, dilation, groups, padding mode and
            bias are used, and its weight is the initial value.
        terms: highest power of the series, 1 to 30.
        norm: largest norm of the skew convolution, at most 4: how far the layer can be from the identity.
        lipschitz: the constant of the layer.

    Shape:
        - Input: $(N, C_{in}, *)$; the stride divides the spatial size.
        - Output: $(N, C_{out}, *)$, sizes divided by the stride.

    Attributes:
        weight: the skew kernel (groups * c, c, *taps), computed by `SkewKernel`.
        bias: (out_channels,), or None.

    Raises:
        onelip.UnsupportedLayer: for layers outside of the assumptions.
        ValueError: for options out of range.

    Examples:
        >>> layer = SOC(nn.Conv2d(4, 4, 3, padding=1))
        >>> layer(torch.randn(1, 4, 6, 6)).shape, layer.lipschitz_constant
        (torch.Size([1, 4, 6, 6]), 1.0)
    """

    def __init__(
        self, layer: nn.modules.conv._ConvNd, *, terms: int = 5, norm: float = 2.0, lipschitz: float = 1.0
    ) -> None:
        super().__init__()
        self.terms, self.norm = _check_series(terms, norm)
        self.lipschitz = check_lipschitz(lipschitz, layer.weight.dtype)
        _check_layer(layer)
        self.in_channels, self.out_channels, self.groups = layer.in_channels, layer.out_channels, layer.groups
        kernel = _square_kernel(layer)
        self.stride, self.channels, kernel_size = layer.stride, kernel.shape[1], tuple(kernel.shape[3:])
        is_circular = layer.padding_mode == "circular"
        self.skew = SameSizeConv(self.groups * self.channels, kernel_size, layer.dilation, self.groups, is_circular)
        self.weight = nn.Parameter(kernel.flatten(0, 1))  # (g c, c, *taps)
        self.bias = layer.bias
        register(self, SkewKernel(self.groups, self.norm))
        self.train(layer.training)

    @property
    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        return {"bias": (self.out_channels,)}

    def forward(self, x: Tensor) -> Tensor:
        self.skew.check(x, self.in_channels)
        axes, size = len(self.stride), tuple(x.shape[2:])
        if any(n % s for n, s in zip(size, self.stride, strict=True)):
            raise ValueError(
                f"expected an input whose spatial size is a multiple of the stride {self.stride}, got {size}; "
                "crop or zero-pad the input first, both are 1-Lipschitz"
            )
        x = space_to_depth(x, self.stride).unflatten(1, (self.groups, -1))  # (n, g, c_in * strides, *size)
        x = F.pad(x, (0, 0) * axes + (0, self.channels - x.shape[2])).flatten(1, 2)
        weight, z = self.weight, x
        for j in range(self.terms, 0, -1):  # Horner's rule: p(L) x = x + L (x + L (x + ...) / 2) / 1
            z = torch.add(x, self.skew(z, weight), alpha=1 / j)
        y = z.unflatten(1, (self.groups, -1))[:, :, : self.out_channels // self.groups].flatten(1, 2)
        if self.factor != 1:
            y = y * self.factor
        return y if self.bias is None else y + self.bias.reshape(-1, *(1 for _ in range(axes)))

    @property
    def factor(self) -> float:
        """The factor of the series, rounded down."""
        series = self._series
        return self.lipschitz if series == 1 else math.nextafter(self.lipschitz / series, 0.0)

    @property
    def _series(self) -> float:
        """Bound on the norm of the series for a kernel of the nominal norm, with slack for rounding."""
        return gain(self.terms, math.ceil(self.norm * (1 + _SLACK) * 256) / 256)

    def bound(self) -> Bound:
        """The proved constant: by construction, or from the stored kernel if there is no parametrization."""
        if self.skew.groups != self.groups:
            return Bound(None, f"its groups were changed from {self.skew.groups} to {self.groups}")
        taps = original_of(self) if parametrize.is_parametrized(self, "weight") else self.weight
        if not self.skew.is_for(tuple(taps.shape[2:])):
            return Bound(None, "its convolution was changed")
        norm = self.norm * (1 + _SLACK)
        if parametrize.is_parametrized(self, "weight"):
            found = parametrization_list(self)
            only = found[0] if found is not None and len(found) == 1 else None
            if not isinstance(only, SkewKernel) or only.norm != self.norm or only.groups != self.groups:
                return Bound(None, "SOC with another parametrization than its own")
            parameter = original_of(self)  # of the shape and type of the weight
            rounding = torch.finfo(parameter.dtype).eps / 2 * math.sqrt(parameter[0].numel())
            norm = max(norm, self.norm * (1 + 2 * rounding))
        else:
            norm = skew_norm_bound(self.weight.detach().unflatten(0, (self.groups, -1)))
        if not norm <= 6:
            return Bound(None, f"the norm of its skew kernel, up to {norm}, is above 6")
        # Rounded up to few values, so that the exact arithmetic is cached.
        series = gain(self.terms, math.ceil(norm * 256) / 256)
        constant = self.lipschitz if series <= self._series else multiply_up(self.factor, series)
        return Bound(constant, "exponential of a skew kernel")

    def extra_repr(self) -> str:
        return (
            f"{self.in_channels}, {self.out_channels}, kernel_size={self.skew.kernel_size}, stride={self.stride}, "
            f"terms={self.terms}, norm={self.norm}, lipschitz={self.lipschitz}"
        )


class SkewExponential(LipschitzParametrization):
    r"""SOC for layers whose windows do not overlap (Linear, 1x1, kernel size = stride); `soc` registers it.

    The weight is (a part of) the truncated exponential of a skew matrix, divided by the bound of its norm; see `SOC`.

    The arguments are those of `LipschitzParametrization`, and the options of `soc`.
    """

    def __init__(
        self,
        geometry: Geometry,
        weight_shape: Sequence[int],
        *,
        terms: int = 5,
        norm: float = 2.0,
        lipschitz: float = 1.0,
    ) -> None:
        super().__init__(geometry, weight_shape, lipschitz=lipschitz)
        self.terms, self.norm = _check_series(terms, norm)
        self.kernel_shape = geometry.kernel_shape(weight_shape, "inputs")
        self.groups, self.rows, self.columns = self.kernel_shape[:3]
        self.channels = max(self.rows, self.columns)

    def forward(self, P: Tensor) -> Tensor:
        if P.numel() == 0 or 0 in self.weight_shape:
            return P.new_zeros(self.weight_shape)
        with full_precision(P.device):
            W = exponential(skew_kernel(P.to(working_type(P.dtype)), self.norm), self.terms)
            W = W[:, : self.rows, : self.columns] * (self.lipschitz / gain(self.terms, self.norm))
            return self.geometry.to_weight(W.reshape(self.kernel_shape), "inputs").to(P.dtype)

    @torch.no_grad()
    def right_inverse(self, W: Tensor) -> Tensor:
        """Return the weight, padded with zeros to a square matrix; only its skew part is used."""
        M = self.geometry.to_kernel(super().right_inverse(W), "inputs").flatten(2)
        return F.pad(M, (0, self.channels - self.columns, 0, self.channels - self.rows)).contiguous()

    @torch.no_grad()
    def reset(self, P: Tensor) -> None:
        """Initialise with a random rotation, as the authors do."""
        P.normal_(0, self.channels**-0.5)

    def constant_in(self, dtype: torch.dtype) -> float:
        """Return the constant, with the rounding of products in float64 and of the stored weight."""
        excess = 2 * self.terms * max(1.0, self.norm**2) * math.exp(self.norm) * self.channels**2 * UNIT64
        return stored_constant(self.lipschitz, excess, min(self.rows, self.columns), self.rows * self.columns, dtype)

    def describe(self) -> str:
        return f"SOC, {self.terms} terms, divided by their norm"


def soc(module: nn.Module, *, terms: int = 5, norm: float = 2.0, lipschitz: float = 1.0) -> nn.Module:
    """Return a skew orthogonal layer in place of the given layer; see `SOC`.

    Linear layers, 1x1 convolutions and convolutions whose kernel size is their stride are parametrized in place
    (`SkewExponential`); other convolutions become a new module `SOC`. The skew part of the weight of the layer is the
    initial exponent, so the layer starts near the identity if the weight is small.

    Args:
        module: Linear, or Conv1d to Conv3d.
        terms: highest power of the series, 1 to 30; one convolution each.
        norm: largest norm of the exponent, at most 4. Larger values reach further and need more terms.
        lipschitz: the constant to guarantee instead of 1.

    Returns:
        The same module, or a new one.

    Raises:
        onelip.UnsupportedLayer: for even kernels, padding that does not keep the size, and transposed layers.
        ValueError: for options out of range.

    Examples:
        >>> layer = soc(nn.Conv2d(4, 8, 3, padding=1))
        >>> layer(torch.randn(1, 4, 6, 6)).shape, layer.lipschitz_constant
        (torch.Size([1, 8, 6, 6]), 1.0)
    """
    geometry = geometry_of(module)
    weight = weight_of(module, geometry)
    check_kind(module, NOT_TRANSPOSED, "soc", _WAY_OUT)
    if all(k == 1 for k in geometry.kernel_shape(weight.shape, "inputs")[3:]):
        return attach(module, SkewExponential(geometry, weight.shape, terms=terms, norm=norm, lipschitz=lipschitz))
    assert isinstance(module, nn.modules.conv._ConvNd)
    return SOC(module, terms=terms, norm=norm, lipschitz=lipschitz)


@lowers(SOC)
def _lower_soc(low: Lowering) -> int:
    """One node for the series with its channels, factor and bias, after space to depth for strides."""
    module, at = low.module, low.source
    if any(s > 1 for s in module.stride):
        at = lower_space_to_depth(low, list(module.stride))
    layer = module.skew.as_layer(module.skew.channels)
    series = {"terms": module.terms, "factor": float(module.factor)}
    return affine(low, layer, at, module.weight, module.bias, kind=Exponential, **series)


def _check_layer(layer: nn.modules.conv._ConvNd) -> None:
    geometry_of(layer)  # raises for padding modes that copy pixels
    if any(s > 1 and d > 1 for s, d in zip(layer.stride, layer.dilation, strict=True)):
        raise UnsupportedLayer(
            f"expected dilation with stride 1 only, got stride {layer.stride} and dilation {layer.dilation}; "
            "use stride 1, or no dilation"
        )
    for k, s, d, p in zip(layer.kernel_size, layer.stride, layer.dilation, padding_of(layer), strict=True):
        if s == 1 and k % 2 == 0:
            raise UnsupportedLayer(f"expected odd kernel sizes for SOC, got {layer.kernel_size}; {_WAY_OUT}")
        # The output has size n / s for every n that s divides if and only if the padding is between these.
        reach = d * (k - 1) + 1
        if not reach - s <= sum(p) < reach:
            raise UnsupportedLayer(
                f"expected padding that keeps the size (divided by the stride), {(reach - s + 1) // 2} on both sides "
                f"for kernel size {k}, stride {s} and dilation {d}, got {layer.padding}; change it, or {_WAY_OUT}"
            )


def _square_kernel(layer: nn.modules.conv._ConvNd) -> Tensor:
    """Return the weight after space to depth as a kernel (g, c, c, *taps), with zeros to odd numbers of taps."""
    sizes = [-(-k // s) for k, s in zip(layer.kernel_size, layer.stride, strict=True)]
    geometry = Geometry(False, layer.groups, layer.kernel_size, layer.stride, layer.kernel_size)
    kernel = geometry.to_kernel(layer.weight.detach(), "inputs")  # (g, out, in * strides, *sizes)
    channels = max(kernel.shape[1:3])
    taps = [amount for k in reversed(sizes) for amount in (0, 1 - k % 2)]
    return F.pad(kernel, [*taps, 0, channels - kernel.shape[2], 0, channels - kernel.shape[1]]).contiguous()


METHOD = register_method(
    Method(
        name="soc",
        title="SOC, skew orthogonal convolutions (Singla and Feizi, 2021)",
        citation='Sahil Singla, Soheil Feizi, "Skew Orthogonal Convolutions", ICML 2021.',
        guarantee="proved",
        layers=NOT_TRANSPOSED,
        apply=soc,
        options=({"terms": 4}, {"terms": 12, "norm": 3.0}, {"lipschitz": 0.5}),
        replaces=True,
        paper=PaperRow(E="no", F="partly", G="partly", M="yes", notes={"F": 2, "G": 7}),
        fast_lr=2.7,
        hyperparameters={
            "lr": 0.1,
            "momentum": 0.9,
            "nesterov": False,
            "weight_decay": 5e-4,
            "schedule": "steps",
            "drop_at": (0.5, 0.75),
            "drop_factor": 0.1,
        },
        note="odd kernels that keep the size; strides by space to depth",
    )
)

# The layers and the guarantee are those of `soc`; the loss is `onelip.losses.CertificateRegularisation`.
register_method(
    replace(
        METHOD,
        name="soc-cr",
        title="SOC + CR: Householder activations, normalised last layer, certificate regularisation "
        "(Singla et al., 2022)",
        citation="Sahil Singla, Surbhi Singla, Soheil Feizi, "
        '"Improved deterministic l2 robustness on CIFAR-10 and CIFAR-100", ICLR 2022.',
        paper=None,
        options=(),
        loss="certificate-regularisation",
        loss_options={"per_pair": True},
        certificate="pairs",
        activation=Householder,
        head=lln,
        fast_lr=0.9,
        hyperparameters={**METHOD.hyperparameters, "offset": 0.0, "temperature": 1.0},
        note="layers of SOC; certified per pair of classes",
    )
)
