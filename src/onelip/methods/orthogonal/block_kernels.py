"""BCOP and AOC: orthogonal convolution kernels from matrices, grown by one tap at a time."""

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from onelip.core.errors import UnsupportedLayer, check_integer
from onelip.core.geometry import Geometry
from onelip.core.modes import full_precision
from onelip.core.parametrization import LipschitzParametrization, working_type
from onelip.methods.numerics import UNIT64, of_moderate_size, stored_constant
from onelip.methods.orthogonal.steps import bjorck_steps, excess_of_steps
from onelip.methods.registry import Layer, Method, PaperRow, attach_new, register_method
from onelip.nn.init import orthogonal_columns, tight_weight

# With more rows a singular value decomposition takes too long; Björck's iteration is close enough.
_LARGE = 256


class BlockOrthogonal(LipschitzParametrization):
    r"""Base of BCOP and AOC: a kernel as the product of a matrix and factors with two taps.

    **Theorem.** For symmetric $P$ with $0 \le P \le I$, the convolution with the two taps $P$, $I - P$ along an axis
    has the symbol $F(z) = P + (I - P) z$, which is normal with eigenvalues $p + (1 - p) z$, so

    $$\|F(z)\| \le 1 \quad \text{for } |z| = 1.$$

    It is unitary if $P$ is a projection. $P = V V^\top$ satisfies the assumption if $\|V\| \le 1$: $V$ need not be
    orthonormal to the last step of an iteration. The product of a matrix of norm at most 1 with any number of such
    factors, which adds one tap along an axis each, has norm at most 1. Growing $K$ by $V$ is $K V V^\top$ at the old
    taps and $K - K V V^\top$ one tap further, without a convolution of kernels.

    The parameter holds the matrix $R$ and the $V$ of each factor in one tensor (g, channels, ...): $R$ with its taps,
    (g, channels, rows * start), then the $V$ (g, channels, rank). The kernel starts as $R$ with the taps `start`.

    Xiao et al., ICML 2018 (2x2 blocks); Li et al. (BCOP), NeurIPS 2019. That no projection is needed, and growing along
    one axis at a time, are our own.

    Args:
        geometry: how the weight acts, from `onelip.core.geometry.geometry_of`.
        weight_shape: shape of the weight.
        kernel_shape: (g, rows, columns, *taps) of the kernel.
        start: taps of the first matrix, which must not overlap.
        steps: largest number of steps of Björck's iteration for each matrix.
        lipschitz: the constant of the layer.
    """

    def __init__(
        self,
        geometry: Geometry,
        weight_shape: Sequence[int],
        *,
        kernel_shape: Sequence[int],
        start: Sequence[int],
        steps: int,
        lipschitz: float,
    ) -> None:
        super().__init__(geometry, weight_shape, lipschitz=lipschitz)
        self.steps = check_integer("steps", steps, 1, 100)
        self.groups, rows, columns, *taps = kernel_shape
        self.start, self.taps = tuple(start), tuple(taps)
        # If R has one tap, the transpose can be built instead; R then has the fewest entries.
        self.is_transpose = math.prod(self.start) == 1 and rows > columns
        self.rows, self.columns = (columns, rows) if self.is_transpose else (rows, columns)
        # With more outputs than inputs R is not wider than tall, so that it is an isometry.
        self.channels = max(self.columns, self.rows // math.prod(self.start))
        self.factors = _order_of_factors([k - s for k, s in zip(self.taps, self.start, strict=True)])
        if self.factors and self.channels < 2:
            raise UnsupportedLayer(
                f"expected at least 2 channels (in a group), got {columns} to {rows} with {self.taps} taps: a single "
                "channel has no orthogonal convolutions except shifts; use more channels, or aol for this layer"
            )

    def to_weight(self, kernel: Tensor) -> Tensor:
        """Return the weight of the layer for a kernel (g, rows, columns, *taps)."""
        raise NotImplementedError

    def from_weight(self, weight: Tensor) -> Tensor:
        """Return the kernel (g, rows, columns, *taps) for a weight of the layer."""
        raise NotImplementedError

    def rank(self, level: int) -> int:
        """Return the rank of a factor: half of the channels; if odd, alternately rounded down and up."""
        half = self.channels // 2
        return half if level % 2 == 0 else self.channels - half

    def forward(self, P: Tensor) -> Tensor:
        if P.numel() == 0 or 0 in self.weight_shape:
            return P.new_zeros(self.weight_shape)
        with full_precision(P.device):
            R, Vs = self._split(P.to(working_type(P.dtype)))
            R = bjorck_steps(R, self.steps)  # (g, rows, start * channels)
            kernel = R.unflatten(2, (*self.start, self.channels))  # (g, rows, *start, channels)
            for (axis, _), V in zip(self.factors, self._orthogonal(Vs), strict=True):
                kernel = grown(kernel, V, axis)
            kernel = kernel[..., : self.columns].movedim(-1, 2) * self.lipschitz
            return self.to_weight(kernel.transpose(1, 2) if self.is_transpose else kernel).to(P.dtype)

    @torch.no_grad()
    def right_inverse(self, W: Tensor) -> Tensor:
        """Return a parameter whose kernel is one orthogonal matrix in the middle, the nearest to the sum of the taps.

        Few weights are orthogonal convolutions, so W itself cannot be kept (except for a matrix, which is kept). The
        factors are random and cancel in pairs, (P + (I - P) z) ((I - P) + P z) = z: training starts from a layer that
        keeps norms and does not mix pixels (or two of them, along axes with an odd number of factors).
        """
        W = super().right_inverse(W)
        if W.is_meta or 0 in self.weight_shape:
            return W.new_empty(self.parameter_shape)
        if not W.isfinite().all():
            return W.new_full(self.parameter_shape, torch.nan)
        kernel = self.from_weight(W.double())
        R = self._folded(kernel.transpose(1, 2) if self.is_transpose else kernel)  # (g, rows, start * channels)
        if self.factors or self.channels > self.columns:
            R = self._nearest_orthogonal(R)
        pieces = [self._laid_out(R), *self._cancelling_factors(W.device)]
        return torch.cat(pieces, 2).to(W.dtype)

    @property
    def parameter_shape(self) -> tuple[int, int, int]:
        """Shape of the parameter."""
        width = self.rows * math.prod(self.start) + sum(self.rank(level) for _, level in self.factors)
        return self.groups, self.channels, width

    @torch.no_grad()
    def reset(self, P: Tensor) -> None:
        """Initialise such that the layer is the identity, or the nearest orthogonal layer."""
        if not P.is_meta:
            weight = tight_weight(self.geometry, self.weight_shape, "inputs")
            P.copy_(self.right_inverse(weight.to(P.device)))

    def constant_in(self, dtype: torch.dtype) -> float:
        """Return the constant, with its rounding.

        Twice the excess of R; for each factor four times the excess of its V, and 4 c^2 2^-53 for each tap when growing
        (c channels). Storing changes each entry by u, the norm by u sqrt(rank * taps).
        """
        c, growing = self.channels, 4 * math.prod(self.taps) * self.channels**2 * UNIT64
        excess = 2 * excess_of_steps(self.rows, math.prod(self.start) * c)
        excess += sum(4 * excess_of_steps(c, self.rank(level)) + growing for _, level in self.factors)
        _, rows, columns, *reads = self.geometry.kernel_shape(self.weight_shape, "inputs")
        rank = min(rows, columns) * math.prod(reads)
        return stored_constant(self.lipschitz, excess, rank, rows * columns * math.prod(reads) ** 2, dtype)

    def _split(self, P: Tensor) -> tuple[Tensor, list[Tensor]]:
        first, *Vs = P.split([self.rows * math.prod(self.start), *(self.rank(level) for _, level in self.factors)], 2)
        # (g, channels, start * rows) -> (g, rows, start * channels)
        return first.unflatten(2, (-1, self.rows)).permute(0, 3, 2, 1).flatten(2), Vs

    def _laid_out(self, R: Tensor) -> Tensor:
        """The inverse of `_split` for R."""
        return R.unflatten(2, (-1, self.channels)).permute(0, 3, 2, 1).flatten(2)

    def _orthogonal(self, Vs: list[Tensor]) -> list[Tensor]:
        """Make all V orthogonal; those of one rank in one batch."""
        result: list[Tensor] = [*Vs]
        for rank in {V.shape[2] for V in Vs}:
            chosen = [i for i, V in enumerate(Vs) if V.shape[2] == rank]
            batch = bjorck_steps(torch.cat([Vs[i] for i in chosen]), self.steps)
            for i, V in zip(chosen, batch.split(self.groups), strict=True):
                result[i] = V
        return result

    def _folded(self, kernel: Tensor) -> Tensor:
        """Return R (g, rows, ...): sums of the taps that coincide if the factors only shift."""
        for axis, (k, s) in enumerate(zip(self.taps, self.start, strict=True)):
            place = (torch.arange(k, device=kernel.device) - (k - s) // 2) % s
            shape = [*kernel.shape]
            shape[3 + axis] = s
            kernel = kernel.new_zeros(shape).index_add_(3 + axis, place, kernel)
        padded = F.pad(kernel.movedim(2, -1), (0, self.channels - self.columns))
        return padded.flatten(2)

    def _nearest_orthogonal(self, R: Tensor) -> Tensor:
        """Return the polar factor (one of them without full rank): training starts from an orthogonal matrix."""
        R = of_moderate_size(R)
        if min(R.shape[1:]) > _LARGE and self.channels == self.columns:
            return bjorck_steps(R.float(), 25)
        U, _, Vh = torch.linalg.svd(R, full_matrices=False)
        return U @ Vh

    def _cancelling_factors(self, device: torch.device) -> list[Tensor]:
        c, half = self.channels, self.channels // 2
        pairs = max((level for _, level in self.factors), default=-1) // 2 + 1
        bases = [torch.stack([orthogonal_columns(c, c) for _ in range(self.groups)]) for _ in range(pairs)]
        return [
            bases[level // 2][:, :, half:].to(device) if level % 2 else bases[level // 2][:, :, :half].to(device)
            for _, level in self.factors
        ]


def grown(kernel: Tensor, V: Tensor, axis: int) -> Tensor:
    r"""Return the kernel of $K F$, where $F(z) = P + (I - P) z$ with $P = V V^\top$ acts along one axis of the taps.

    Args:
        kernel: (g, rows, *taps, c).
        V: (g, c, rank).
        axis: of the taps.

    Examples:
        >>> K, V = torch.eye(2)[None, :, None], torch.tensor([[[1.0], [0.0]]])
        >>> grown(K, V, 0)[0, :, 0], grown(K, V, 0)[0, :, 1]
        (tensor([[1., 0.],
                [0., 0.]]), tensor([[0., 0.],
                [0., 1.]]))
    """
    kept = (kernel.flatten(1, -2) @ V @ V.mT).reshape(kernel.shape)
    later = (0, 0) * (kernel.dim() - 3 - axis)  # F.pad counts axes from the last one
    return F.pad(kept, (*later, 0, 1)) + F.pad(kernel - kept, (*later, 1, 0))


def _order_of_factors(missing: list[int]) -> list[tuple[int, int]]:
    """Return (axis, level) of each factor: at each level one along each axis that lacks a tap, as in BCOP."""
    return [(axis, level) for level in range(max(missing, default=0)) for axis, n in enumerate(missing) if level < n]


class BCOP(BlockOrthogonal):
    r"""The map from matrices to the kernel of an orthogonal convolution by BCOP; `bcop` registers it.

    **Theorem.** A matrix $R$ with $\|R\| \le 1$, multiplied by factors $P + (I - P) z$ with $P = V V^\top$ and
    $\|V\| \le 1$, is a kernel whose layer has norm at most 1; see `BlockOrthogonal`. $V$ and $R$ come from Björck's
    iteration.

    **Assumptions.** Zero padding of any amount, or circular padding of at most `dilation * (kernel_size - 1)` in total;
    a stride divides the kernel size (the taps of a window are then channels); at least 2 channels in a group, unless
    the kernel size is 1.

    **Guarantee.** Proved, with rounding, for every parameter and every number of steps. All singular values are 1, up
    to convergence, with circular or full padding and as many inputs as outputs; with zero padding that keeps the size
    some are below 1, because the layer crops its output. The projections have half of the channels as rank, as
    published; kernels of other ranks are not reached. Linear layers and 1x1 convolutions are those of `Bjorck`.

    Li, Haque, Anil, Lucas, Grosse, Jacobsen, "Preventing Gradient Attenuation in Lipschitz Constrained Convolutional
    Networks", NeurIPS 2019.

    The arguments are those of `LipschitzParametrization`, and the options of `bcop`.
    """

    def __init__(
        self, geometry: Geometry, weight_shape: Sequence[int], *, steps: int = 12, lipschitz: float = 1.0
    ) -> None:
        if any(k % s for k, s in zip(geometry.kernel_size, geometry.phases, strict=True)):
            raise UnsupportedLayer(
                f"expected a kernel size that is a multiple of the stride, got kernel size {geometry.kernel_size} with "
                f"{geometry.phases} phases of the stride: cutting taps off an orthogonal kernel can raise its norm; "
                "use aoc, which supports any stride, or onelip.nn.ConcatenationPool2d and a convolution of stride 1"
            )
        kernel_shape = geometry.kernel_shape(weight_shape, "inputs")
        super().__init__(
            geometry,
            weight_shape,
            kernel_shape=kernel_shape,
            start=[1] * len(kernel_shape[3:]),
            steps=steps,
            lipschitz=lipschitz,
        )

    def to_weight(self, kernel: Tensor) -> Tensor:
        return self.geometry.to_weight(kernel, "inputs")

    def from_weight(self, weight: Tensor) -> Tensor:
        return self.geometry.to_kernel(weight, "inputs")

    def describe(self) -> str:
        return f"BCOP, {len(self.factors)} projections" if self.factors else "BCOP without taps: Björck"


def bcop(
    module: Layer,
    name: str = "weight",
    *,
    steps: int = 12,
    lipschitz: float = 1.0,
    input_size: int | Sequence[int] | None = None,
) -> Layer:
    """Make a convolution (or a linear layer) orthogonal by BCOP, in place, and return it; see `BCOP`.

    The weight cannot be kept, because few weights are orthogonal convolutions: the layer starts with one orthogonal
    matrix in its middle tap, the nearest to the sum of the taps. Assigning `module.weight = w` does the same.

    Args:
        module: Linear, Conv1d to Conv3d or ConvTranspose1d to ConvTranspose3d.
        name: name of the parameter to constrain.
        steps: largest number of steps of Björck's iteration for each matrix, 1 to 100.
        lipschitz: the constant to guarantee instead of 1.
        input_size: for strided convolutions with circular padding only: spatial size of every input.

    Returns:
        The same module, with a parametrized weight.

    Raises:
        onelip.UnsupportedLayer: for padding modes that copy pixels, strides that do not divide the kernel size, and
            single channels.
        ValueError: for options out of range.

    Examples:
        >>> import torch
        >>> from torch import nn
        >>> layer = bcop(nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular", bias=False))
        >>> x = torch.randn(1, 4, 8, 8)
        >>> bool((layer(x).norm() - x.norm()).abs() < 1e-3)
        True
    """
    return attach_new(BCOP, module, name, input_size=input_size, steps=steps, lipschitz=lipschitz)


register_method(
    Method(
        name="bcop",
        title="BCOP, block convolution orthogonal parametrization (Li et al., 2019)",
        citation="Qiyang Li, Saminul Haque, Cem Anil, James Lucas, Roger Grosse, Jörn-Henrik Jacobsen, "
        '"Preventing Gradient Attenuation in Lipschitz Constrained Convolutional Networks", NeurIPS 2019.',
        guarantee="proved",
        apply=bcop,
        options=({"steps": 1}, {"lipschitz": 0.5}),
        paper=PaperRow(E="no", F="yes", G="yes", M="yes", notes={"E": 4}),
        fast_lr=2.7,
        hyperparameters={"lr": 0.02, "weight_decay": 0.0},  # only the direction of a matrix matters
        note="strides that divide the kernel size; at least 2 channels",
    )
)


class AOC(BlockOrthogonal):
    r"""The map from matrices to the kernel of an orthogonal convolution of any stride by AOC; `aoc` registers it.

    **Theorem.** A convolution of stride $s$ and kernel size $s$ whose reshaped kernel $R$ (out, channels * s) has norm
    at most 1, after a convolution of stride 1 and kernel size $k - s + 1$ made of factors $P + (I - P) z$, is one
    convolution of stride $s$ and kernel size $k$ with norm at most 1: windows of $R$ do not overlap, and the factors
    have norm at most 1 (`BlockOrthogonal`). With dilation $d$, $s$ is the number of phases $s / \gcd(s, d)$. Between
    the two there are max(in, out // s) channels; those beyond the inputs are zero.

    **Assumptions.** Zero padding of any amount, or circular padding of at most `dilation * (kernel_size - 1)` in total;
    at least 2 channels in a group, unless the kernel size is the stride. Strides, groups, dilation and transposed
    layers are supported.

    **Guarantee.** Proved, with rounding, for every parameter and every number of steps.

    Boissin, Mamalet, Fel, Picard, Massena, Serrurier, "An Adaptive Orthogonal Convolution Scheme for Efficient and
    Flexible CNN Architectures", ICML 2025.

    The arguments are those of `LipschitzParametrization`, and the options of `aoc`.
    """

    def __init__(
        self, geometry: Geometry, weight_shape: Sequence[int], *, steps: int = 12, lipschitz: float = 1.0
    ) -> None:
        first, second, *taps = weight_shape
        super().__init__(
            geometry,
            weight_shape,
            # A transposed layer is the adjoint of the convolution with the same weight, so it has the same norm.
            kernel_shape=(geometry.groups, first // geometry.groups, second, *taps),
            start=geometry.phases,
            steps=steps,
            lipschitz=lipschitz,
        )

    def to_weight(self, kernel: Tensor) -> Tensor:
        return kernel.flatten(0, 1)

    def from_weight(self, weight: Tensor) -> Tensor:
        return weight.unflatten(0, (self.geometry.groups, -1))

    def describe(self) -> str:
        strided = f" after {'x'.join(map(str, self.start))} windows" if any(s > 1 for s in self.start) else ""
        return f"AOC, {len(self.factors)} projections{strided}" if self.factors else f"AOC: Björck{strided}"


def aoc(
    module: Layer,
    name: str = "weight",
    *,
    steps: int = 12,
    lipschitz: float = 1.0,
    input_size: int | Sequence[int] | None = None,
) -> Layer:
    """Make a convolution of any stride, dilation and number of groups orthogonal by AOC, in place, and return it.

    See `AOC`. The weight cannot be kept: the layer starts with one orthogonal matrix in its middle taps.

    Args:
        module: Linear, Conv1d to Conv3d or ConvTranspose1d to ConvTranspose3d.
        name: name of the parameter to constrain.
        steps: largest number of steps of Björck's iteration for each matrix, 1 to 100.
        lipschitz: the constant to guarantee instead of 1.
        input_size: for strided convolutions with circular padding only: spatial size of every input.
            If the stride divides it, the layer can be orthogonal, and inputs of other sizes raise an error.

    Returns:
        The same module, with a parametrized weight.

    Raises:
        onelip.UnsupportedLayer: for padding modes that copy pixels, and single channels.
        ValueError: for options out of range.

    Examples:
        >>> import torch
        >>> from torch import nn
        >>> layer = aoc(nn.Conv2d(4, 16, 3, stride=2, padding=1, padding_mode="circular", bias=False), input_size=8)
        >>> x = torch.randn(1, 4, 8, 8)
        >>> bool((layer(x).norm() - x.norm()).abs() < 1e-3)
        True
    """
    return attach_new(AOC, module, name, input_size=input_size, steps=steps, lipschitz=lipschitz)


register_method(
    Method(
        name="aoc",
        title="AOC, adaptive orthogonal convolution (Boissin et al., 2025)",
        citation="Thibaut Boissin, Franck Mamalet, Thomas Fel, Agustin Martin Picard, Thomas Massena, "
        "Mathieu Serrurier, "
        '"An Adaptive Orthogonal Convolution Scheme for Efficient and Flexible CNN Architectures", ICML 2025.',
        guarantee="proved",
        apply=aoc,
        options=({"steps": 1}, {"lipschitz": 0.5}),
        fast_lr=2.7,
        hyperparameters={"lr": 0.02, "weight_decay": 0.0},  # only the direction of a matrix matters
        note="any stride, groups, dilation, transposed; at least 2 channels",
    )
)
