"""Shared parts of the Fourier methods: parametrizations by one matrix per frequency, and the module `FourierConv`."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from onelip.core.errors import UnsupportedLayer, per_axis
from onelip.core.geometry import Geometry, geometry_of, padding_of
from onelip.core.lipschitz_module import Bound, LipschitzModule
from onelip.core.modes import Constant, full_precision, is_traced
from onelip.core.parametrization import (
    LipschitzParametrization,
    attach,
    check_lipschitz,
    find_parametrization,
    original_of,
    parametrization_list,
    settings_shown,
    weight_of,
    working_type,
)
from onelip.core.rounding import multiply_up
from onelip.methods.fourier.frequencies import Period, fourier_matrix, real_form
from onelip.methods.fourier.plain import check_shape, plain_periodic
from onelip.methods.numerics import MATRIX, UNIT64, of_moderate_size, stored_bound, stored_constant, widest_type
from onelip.methods.registry import NOT_TRANSPOSED, check_kind

# Up to this number of columns the cost of float64 is negligible.
_FEW_COLUMNS = 32


class OrthogonalMap(nn.Module):
    """Base of the Fourier methods: how matrices of norm at most 1 are computed from a free kernel.

    Args:
        rows: rows of the matrices.
        columns: columns of the matrices.

    Attributes:
        title: name of the method, for reports.
    """

    title = "orthogonal"

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.rows, self.columns = rows, columns

    def parameter(self, kernel: Tensor) -> Tensor:
        """Return the initial free kernel (g, m, n, *taps) for the kernel (g, rows, columns, *taps) of a layer."""
        return kernel

    def reset(self, kernel: Tensor) -> None:
        """Initialise the free kernel (g, m, n, *taps) in place as the authors do; by default it is unchanged."""

    def prepare(self, kernel: Tensor) -> Tensor:
        """Return the free kernel, scaled such that products stay in range; real float32 or float64."""
        return of_moderate_size(kernel.flatten(2)).reshape(kernel.shape)

    def forward(self, M: Tensor) -> Tensor:
        """Map matrices (b, m, n), real or complex, to matrices (b, rows, columns) of norm at most 1."""
        raise NotImplementedError

    def excess(self) -> float:
        """Return the most that rounding in float64 can add to the norm 1."""
        raise NotImplementedError

    @property
    def channels(self) -> int:
        """Rows and columns of the square matrix of which a method keeps the first ones."""
        return max(self.rows, self.columns)

    def squared(self, kernel: Tensor) -> Tensor:
        """Return the kernel (g, rows, columns, *taps), with zeros to as many rows as columns."""
        taps = (0, 0) * (kernel.dim() - 3)
        return F.pad(kernel, (*taps, 0, self.channels - self.columns, 0, self.channels - self.rows))

    @staticmethod
    def fill_with_units(P: Tensor, count: int) -> None:
        """Set a free kernel (g, m, n, *taps) to unit vectors in its middle tap, in place."""
        middle = tuple((k - 1) // 2 for k in P.shape[3:])
        P.zero_()
        for j in range(count):
            P[(slice(None), j, j, *middle)] = 1

    def extra_repr(self) -> str:
        return settings_shown(self)


def shrunk(Q: Tensor) -> Tensor:
    r"""Divide nearly orthogonal matrices by a bound of their norm, $\|Q\|^2 \le 1 + \|Q^* Q - I\|_F$.

    However Q was computed, the norm of the result is at most $1 + 16 m n 2^{-53}$ in float64, by the rounding of the
    product itself.

    Args:
        Q: (b, m, n), real or complex.
    """
    with torch.no_grad():
        small = Q if Q.shape[-2] >= Q.shape[-1] else Q.mH
        eye = torch.eye(small.shape[-1], dtype=Q.dtype, device=Q.device)
        residual = torch.linalg.matrix_norm(small.mH @ small - eye)
    return Q * (1 + residual).rsqrt()[:, None, None]


class _Map(LipschitzParametrization):
    """Base of the parametrizations for dense layers and for frequencies.

    Note [Precision]: in eval mode matrices are computed in float64 (complex128), and the stated rounding is that of
    float64 and of the type in which the result is stored. In training, wide layers are computed in the type of the
    weight, because certificates are about evaluation. Under autocast all this, and the transforms, stay in full
    precision.
    """

    def __init__(
        self, geometry: Geometry, weight_shape: Sequence[int], orthogonal: OrthogonalMap, *, lipschitz: float = 1.0
    ) -> None:
        super().__init__(geometry, weight_shape, lipschitz=lipschitz)
        self.orthogonal = orthogonal

    def _type(self, P: Tensor) -> torch.dtype:
        """Return the type to compute in; Note [Precision]."""
        few = min(self.orthogonal.rows, self.orthogonal.columns) <= _FEW_COLUMNS
        return widest_type(P) if few or not self.training else working_type(P.dtype)

    @torch.no_grad()
    def reset(self, P: Tensor) -> None:
        """Initialise as the authors do."""
        if not P.is_meta and P.numel():
            self.orthogonal.reset(P)

    def describe(self) -> str:
        return self.orthogonal.title


class DenseMap(_Map):
    """The parametrization for layers whose windows do not overlap (Linear, 1x1, kernel size = stride): one matrix.

    Args:
        geometry: how the weight acts, from `onelip.core.geometry.geometry_of`.
        weight_shape: shape of the weight.
        orthogonal: computes the matrix (g, rows, columns) from a free one (g, m, n).
        lipschitz: the constant of the layer.
    """

    def forward(self, P: Tensor) -> Tensor:
        if P.numel() == 0 or 0 in self.weight_shape:
            return P.new_zeros(self.weight_shape)
        with full_precision(P.device):
            working_type(P.dtype)
            W = self.orthogonal(self.orthogonal.prepare(P.to(self._type(P)))) * self.lipschitz
            shape = self.geometry.kernel_shape(self.weight_shape, "inputs")
            return self.geometry.to_weight(W.reshape(shape), "inputs").to(P.dtype)

    @torch.no_grad()
    def right_inverse(self, W: Tensor) -> Tensor:
        kernel = self.geometry.to_kernel(super().right_inverse(W), "inputs").flatten(2)
        return self.orthogonal.parameter(kernel).contiguous()

    def constant_in(self, dtype: torch.dtype) -> float:
        rows, columns = self.orthogonal.rows, self.orthogonal.columns
        return stored_constant(self.lipschitz, self.orthogonal.excess(), min(rows, columns), rows * columns, dtype)


class FrequencyMap(_Map):
    r"""The parametrization from a free kernel (m, n, *taps) to the matrices of all frequencies (f, rows, columns, 2).

    **Theorem.** A circular convolution acts on each frequency of an image by a matrix, $\hat y_f = M_f \hat x_f$. For
    real $x$ the kept frequencies (`onelip.methods.fourier.frequencies`) determine the image, with
    $\|x\|^2 = \sum_f w_f |\hat x_f|^2 / n$. The inverse transform drops the imaginary part where $f$ is its own mirror
    image, which is a projection. Hence, for any complex matrices $M_f$,

    $$\|y\|_2 \le \max_f \|M_f\|_2\, \|x\|_2.$$

    The convolution $y_i = \sum_t K_t x_{i + dt - p}$ has $M_f = \sum_t K_t \exp(2 \pi i f (dt - p) / n)$, computed as a
    product with a small matrix instead of an FFT. So every size, dilation and kernel size is possible.

    The constant also holds for the plain form that `onelip.bake` makes (`onelip.methods.fourier.plain`), which stores
    the real Fourier basis $\Phi$, with $\|\Phi\| = 1$ and $\|\Phi\|_F = \sqrt n$, twice in the type of the weight.

    Args:
        geometry: how the weight of the layer acts.
        weight_shape: shape of the weight of the layer.
        orthogonal: computes the matrices.
        size: period of the convolution.
        shifts: for each axis, the pixel that each tap reads, relative to the output pixel.
        lipschitz: the constant of the layer.
    """

    _caches = ("._known",)

    def __init__(
        self,
        geometry: Geometry,
        weight_shape: Sequence[int],
        orthogonal: OrthogonalMap,
        *,
        size: tuple[int, ...],
        shifts: tuple[tuple[int, ...], ...],
        lipschitz: float = 1.0,
    ) -> None:
        super().__init__(geometry, weight_shape, orthogonal, lipschitz=lipschitz)
        self.size = size
        self._waves = Constant(fourier_matrix(size, shifts))
        self._known: tuple[list[Tensor], list[Any], Tensor] | None = None

    def forward(self, P: Tensor) -> Tensor:
        if self.training or torch.is_grad_enabled() or is_traced(P):
            return self._matrices(P)
        # The values are compared: a version counter misses writes through `.data`.
        now, settings = [P, *self.orthogonal.parameters()], self._settings()
        known = self._known
        if known is None or known[1] != settings or not all(_same(a, b) for a, b in zip(known[0], now, strict=True)):
            known = self._known = [p.detach().clone() for p in now], settings, self._matrices(P)
        return known[2].clone()

    def _settings(self) -> list[Any]:
        """Return the settings that the matrices depend on; they can be changed after construction."""
        own = (bool, int, float, str, tuple)
        settings = sorted(vars(self.orthogonal).items())
        return [self.lipschitz, *(value for _, value in settings if isinstance(value, own))]

    def _matrices(self, P: Tensor) -> Tensor:
        with full_precision(P.device):
            working_type(P.dtype)
            K = self.orthogonal.prepare(P.to(self._type(P)).flatten(2)[None])[0]  # (m, n, taps)
            waves = self._waves.like(K)  # (2, frequencies, taps)
            parts = (waves.flatten(0, 1) @ K.flatten(0, 1).T).unflatten(0, (2, -1)).unflatten(2, K.shape[:2])
            Q = self.orthogonal(torch.complex(parts[0], parts[1])) * self.lipschitz
            return torch.view_as_real(Q).to(P.dtype).contiguous()

    @torch.no_grad()
    def right_inverse(self, W: Tensor) -> Tensor:
        return self.orthogonal.parameter(super().right_inverse(W)[None])[0].contiguous()

    def reset(self, P: Tensor) -> None:
        """Initialise as the authors do."""
        super().reset(P[None])  # one group

    def constant_in(self, dtype: torch.dtype) -> float:
        # As real matrices of twice the size.
        rows, columns = self.orthogonal.rows, self.orthogonal.columns
        matrices = stored_constant(
            self.lipschitz, self.orthogonal.excess(), 2 * min(rows, columns), 4 * rows * columns, dtype
        )
        pixels = math.prod(self.size)
        # At most 2 n rows. Angles are below 2 pi, and the float64 errors of an entry below 40 units of sqrt(2 / n).
        basis = stored_constant(1.0, 64 * UNIT64 * math.sqrt(pixels), pixels, 2 * pixels**2, dtype)
        return multiply_up(matrices, basis, basis)


def _same(a: Tensor, b: Tensor) -> bool:
    return a.device == b.device and a.dtype == b.dtype and torch.equal(a, b)


OTHER_PERIOD = "its period was changed"


class FourierConv(LipschitzModule):
    r"""A circular convolution given by one matrix per frequency; the Fourier methods make it.

    Inputs that are smaller than the period are padded with zeros, and outputs are cropped; both are 1-Lipschitz.
    Interleaved images, of pixels that are `spacing` apart, are treated as separate images, which is an isometry.

    `onelip.bake` turns the layer into real convolutions, by `onelip.methods.fourier.plain.plain_periodic`, whose
    constants are proved from the stored weights.

    Args:
        layer: the convolution that is replaced: its kernel is the initial value, its bias is kept.
        input_size: spatial size of all inputs.
        size: period of the convolution.
        spacing: distance of the pixels of one of several interleaved images, for each axis; 1 by default.

    Shape:
        - Input: $(N, C_{in}, *)$ with the spatial size `input_size`.
        - Output: $(N, C_{out}, *)$ with the same spatial size.

    Attributes:
        weight: the matrices (frequencies, out_channels, in_channels, 2), computed by `FrequencyMap` from a free kernel.
        bias: (out_channels,), or None.

    Examples:
        >>> from onelip.methods.fourier.maps import cayley
        >>> layer = cayley(nn.Conv2d(2, 2, 3, padding=1, padding_mode="circular"), input_size=4)
        >>> type(layer).__name__.endswith("FourierConv"), tuple(layer.weight.shape)
        (True, (10, 2, 2, 2))
    """

    def __init__(
        self,
        layer: nn.modules.conv._ConvNd,
        *,
        input_size: tuple[int, ...],
        size: tuple[int, ...],
        spacing: tuple[int, ...] | None = None,
    ) -> None:
        super().__init__()
        self.in_channels, self.out_channels = layer.in_channels, layer.out_channels
        self.input_size, self.size, self.period = input_size, size, Period(size)
        self.spacing = spacing or (1,) * len(size)
        self.weight = nn.Parameter(layer.weight.detach(), layer.weight.requires_grad)
        self.bias = layer.bias
        self.train(layer.training)

    @property
    def input_shape(self) -> tuple[int, ...]:
        return (self.in_channels, *self.input_size)

    @property
    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        return {"bias": (self.out_channels,)}

    def forward(self, x: Tensor) -> Tensor:
        check_shape(x, self.input_shape)
        with full_precision(x.device):
            y = self._filtered(x.to(working_type(x.dtype))).to(x.dtype)
        return y if self.bias is None else y + self.bias.reshape(-1, *(1 for _ in self.size))

    def _filtered(self, x: Tensor) -> Tensor:
        period = [n * d for n, d in zip(self.size, self.spacing, strict=True)]
        missing = [p - n for p, n in zip(period, self.input_size, strict=True)]
        if any(missing):
            x = F.pad(x, [amount for m in reversed(missing) for amount in (0, m)])
        weight = self.weight.to(working_type(self.weight.dtype))
        y = self._together(self.period(self._apart(x), torch.view_as_complex(weight)))
        for axis, n in enumerate(self.input_size):
            y = y.narrow(2 + axis, 0, n)
        return y

    def _apart(self, x: Tensor) -> Tensor:
        """Separate interleaved images: (batch, c, *size * spacing) -> (batch * spacings, c, *size)."""
        if all(d == 1 for d in self.spacing):
            return x
        for axis, d in enumerate(self.spacing):
            x = x.unflatten(2 + 2 * axis, (-1, d))
        places, offsets = range(2, x.dim(), 2), range(3, x.dim(), 2)
        return x.permute(0, *offsets, 1, *places).flatten(0, len(self.spacing))

    def _together(self, y: Tensor) -> Tensor:
        """The inverse of `_apart`."""
        if all(d == 1 for d in self.spacing):
            return y
        y = y.unflatten(0, (-1, *self.spacing))
        axes = len(self.spacing)
        order = [axis for i in range(axes) for axis in (2 + axes + i, 1 + i)]
        y = y.permute(0, 1 + axes, *order)
        for axis in range(axes):
            y = y.flatten(2 + axis, 3 + axis)
        return y

    def bound(self) -> Bound:
        """The proved constant: by construction, or from the stored matrices if there is no parametrization."""
        if not (isinstance(self.period, Period) and self.period.is_for(self.size)):
            return Bound(None, OTHER_PERIOD)
        if not parametrize.is_parametrized(self, "weight"):
            return stored_norm(self.weight.detach())
        found, maps = find_parametrization(self), parametrization_list(self)
        if not isinstance(found, FrequencyMap) or maps is None or len(maps) != 1 or found.size != self.size:
            return Bound(None, "FourierConv with another parametrization than its own")
        return Bound(found.constant_in(original_of(self).dtype), found.describe())

    def plain_form(self, tensors: Mapping[str, Tensor]) -> nn.Module:
        """Return the plain layers for `onelip.bake`."""
        return plain_periodic(
            tensors["weight"], self.bias, input_size=self.input_size, size=self.size, spacing=self.spacing
        )

    def extra_repr(self) -> str:
        spaced = f", spacing={self.spacing}" if any(d > 1 for d in self.spacing) else ""
        return f"{self.in_channels}, {self.out_channels}, input_size={self.input_size}, size={self.size}{spaced}"


def stored_norm(weight: Tensor) -> Bound:
    """Return a proved bound on the norms of complex matrices, stored as (b, rows, columns, 2)."""
    return stored_bound(real_form(weight).flatten(0, 1), replace(MATRIX, groups=len(weight)))


def replaced(
    layer: nn.Module,
    make: Callable[[Tensor], OrthogonalMap],
    *,
    method: str,
    input_size: int | Sequence[int] | None,
    lipschitz: float,
    zero_padding: bool = False,
    spaced: bool = False,
) -> nn.Module:
    """Apply a Fourier method: a dense layer gets a parametrization in place, a convolution becomes a `FourierConv`.

    Args:
        layer: Linear, or Conv1d to Conv3d.
        make: function that makes the `OrthogonalMap` for a kernel (g, rows, columns, *taps).
        method: name of the method, for errors.
        input_size: spatial size of the inputs.
        lipschitz: the constant to guarantee.
        zero_padding: whether zero padding is supported, by a border of zeros inside the period.
        spaced: whether taps are spread over the image, n / k apart.

    Returns:
        The same layer, or a new module.

    Raises:
        onelip.UnsupportedLayer: for layers that the method does not support.
    """
    geometry = supported_geometry(layer, method)
    weight = weight_of(layer, geometry)
    lipschitz = check_lipschitz(lipschitz, weight.dtype)
    kernel = geometry.to_kernel(weight.detach(), "inputs")
    if all(k == 1 for k in kernel.shape[3:]):
        return attach(layer, DenseMap(geometry, weight.shape, make(kernel.flatten(2)), lipschitz=lipschitz))
    assert isinstance(layer, nn.modules.conv._ConvNd)
    given = check_periodic(layer, method, input_size, zero_padding or spaced)
    padding = padding_of(layer)
    border = [0 if layer.padding_mode == "circular" else max(p) for p in padding]
    spacing, dilation = (1,) * len(given), layer.dilation
    size = tuple(n + b for n, b in zip(given, border, strict=True))
    starts = [-left for left, _ in padding]
    if spaced:
        size = layer.kernel_size
        spacing = tuple(-(-n // k) for n, k in zip(given, size, strict=True))
        dilation, starts = (1,) * len(size), [-((k - 1) // 2) for k in size]
    shifts = tap_shifts(layer.kernel_size, dilation, starts)
    made = FourierConv(layer, input_size=given, size=size, spacing=spacing)
    return attach(
        made, FrequencyMap(geometry, weight.shape, make(kernel), size=size, shifts=shifts, lipschitz=lipschitz)
    )


def tap_shifts(
    kernel_size: Sequence[int], dilation: Sequence[int], starts: Sequence[int]
) -> tuple[tuple[int, ...], ...]:
    """Return the pixel that each tap of an axis reads, relative to the output pixel; `starts`: those of first taps."""
    axes = zip(kernel_size, dilation, starts, strict=True)
    return tuple(tuple(d * t + start for t in range(k)) for k, d, start in axes)


def supported_geometry(layer: nn.Module, method: str) -> Geometry:
    """Return the geometry of a layer; raise `UnsupportedLayer` for transposed layers."""
    geometry = geometry_of(layer)
    check_kind(layer, NOT_TRANSPOSED, method, "use 'bcop' or 'aoc'")
    return geometry


def check_periodic(
    layer: nn.modules.conv._ConvNd, method: str, input_size: int | Sequence[int] | None, zero_padding: bool
) -> tuple[int, ...]:
    """Return the spatial size for which a periodic layer is built; raise `UnsupportedLayer` if there is none."""
    way_out = "use 'bcop', 'aoc' or 'soc', which work on pixels"
    if layer.groups > 1:
        raise UnsupportedLayer(f"expected a convolution with groups=1 for {method}, got {layer.groups}; {way_out}")
    if any(s > 1 for s in layer.stride):
        raise UnsupportedLayer(
            f"expected stride 1, or a kernel as large as the stride, for {method}, got stride {layer.stride}; use "
            f"onelip.nn.ConcatenationPool2d and a layer of stride 1, or {way_out}"
        )
    for k, d, p in zip(layer.kernel_size, layer.dilation, padding_of(layer), strict=True):
        if sum(p) != d * (k - 1):
            raise UnsupportedLayer(
                f"expected padding of dilation * (kernel_size - 1) = {d * (k - 1)} in total, which keeps the size, for "
                f"{method}, got {p[0]} + {p[1]}; use padding='same', or {way_out}"
            )
    if layer.padding_mode != "circular" and not zero_padding:
        raise UnsupportedLayer(
            f"expected padding_mode='circular' for {method}, got {layer.padding_mode!r}: its layers are periodic; "
            f"change it, or {way_out}"
        )
    if input_size is None:
        raise UnsupportedLayer(
            f"{method} needs the input size, because its layers are built for one size; pass "
            "input_size=(height, width), or onelip.constrain(model, ..., example=images)"
        )
    return per_axis("input_size", input_size, len(layer.kernel_size))
