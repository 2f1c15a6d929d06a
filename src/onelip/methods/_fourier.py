"""Circular convolutions as one matrix per frequency, y^_f = M_f x^_f, and layers whose matrices are made orthogonal.

For real x of size n, rfft keeps half of the frequencies: with weights w_f = 1 where f is its own mirror along the last
axis and 2 elsewhere, ||x||^2 = sum_f w_f |x^_f|^2 / n. The way back drops the imaginary part of what is its own mirror,
which is a projection, so ||y||^2 <= sum_f w_f |M_f x^_f|^2 / n, for any complex matrices M_f. Hence

    ||y|| <= max_f ||M_f|| ||x||.                                                                                (1)

A convolution y_i = sum_t K_t x_{i + d t - p} has M_f = sum_t K_t exp(2 pi i f (d t - p) / n), written here as a product
with a small matrix: no FFT of kernels, so any size, odd ones too, any dilation, and kernels larger than the image.

Note [Precision]
    In eval mode matrices are computed in float64 (complex128), and the stated rounding is that of float64 and of the
    type in which the result is stored. In training wide layers are computed in the type of the weight: it is evaluation
    that a certificate is about. Under autocast all this, and the transforms, stay in full precision.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from onelip._precision import full_precision
from onelip.geometry import Geometry, UnsupportedLayer, _padding, geometry_of
from onelip.methods._orthogonal import of_moderate_size, stored_constant, widest_type
from onelip.methods._parametrization import (
    LipschitzParametrization,
    attach,
    check_lipschitz,
    find_parametrization,
    parametrization_list,
    weight_of,
    working_type,
)
from onelip.nn._base import LipschitzModule, UnknownLipschitzConstant

SERVED = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
# Up to this many columns float64 costs nothing that is felt.
_FEW_COLUMNS = 32


class Maker(nn.Module):
    """How a method makes matrices of norm at most 1: from free real kernels, through matrices that may be complex.

    Args:
        rows: of the matrices that are asked for.
        columns: of the matrices that are asked for.
    """

    title = "orthogonal"
    always_float64 = False

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.rows, self.columns = rows, columns

    def parameter(self, kernel: Tensor) -> Tensor:
        """The free kernel (g, m, n, *taps) to begin with, for a layer's (g, rows, columns, *taps)."""
        return kernel

    def prepare(self, kernel: Tensor) -> Tensor:
        """The free kernel brought to a moderate size, real float32 or float64."""
        return of_moderate_size(kernel.flatten(2)).reshape(kernel.shape)

    def forward(self, M: Tensor) -> Tensor:
        """Matrices (b, m, n) to such (b, rows, columns) of norm at most 1."""
        raise NotImplementedError

    def excess(self) -> float:
        """What rounding in float64 can add to the norm 1."""
        raise NotImplementedError


def shrunk(Q: Tensor) -> Tensor:
    """Nearly orthogonal matrices (b, m, n), divided by what rounding may have added: ||Q||^2 <= 1 + ||Q* Q - I||.

    However Q was computed, its norm is then at most 1 + 16 m n 2^-53 in float64: what the product itself rounds.
    """
    with torch.no_grad():
        small = Q if Q.shape[-2] >= Q.shape[-1] else Q.mH
        eye = torch.eye(small.shape[-1], dtype=Q.dtype, device=Q.device)
        residual = torch.linalg.matrix_norm(small.mH @ small - eye)
    return Q * (1 + residual).rsqrt()[:, None, None]


class _Map(LipschitzParametrization):
    """What the maps for dense layers and for frequencies share."""

    def __init__(
        self, geometry: Geometry, weight_shape: Sequence[int], maker: Maker, *, lipschitz: float = 1.0
    ) -> None:
        super().__init__(geometry, weight_shape, lipschitz=lipschitz)
        self.maker = maker

    def _type(self, P: Tensor) -> torch.dtype:
        """Note [Precision]."""
        few = min(self.maker.rows, self.maker.columns) <= _FEW_COLUMNS
        return widest_type(P) if few or not self.training or self.maker.always_float64 else working_type(P.dtype)

    @torch.no_grad()
    def reset(self, P: Tensor) -> None:
        """Begin as the authors do."""
        begin: Any = getattr(self.maker, "reset", None)
        if begin is not None and not P.is_meta and P.numel():
            begin(P)

    def describe(self) -> str:
        return self.maker.title

    def extra_repr(self) -> str:
        return f"lipschitz={self.lipschitz}"


class DenseMap(_Map):
    """The map for layers without overlap, Linear, 1x1 and k = stride: a free matrix (g, m, n) to the weight."""

    def forward(self, P: Tensor) -> Tensor:
        if P.numel() == 0 or 0 in self.weight_shape:
            return P.new_zeros(self.weight_shape)
        with full_precision(P.device):
            working_type(P.dtype)
            W = self.maker(self.maker.prepare(P.to(self._type(P)))) * self.lipschitz
            shape = self.geometry.kernel_shape(self.weight_shape, "inputs")
            return self.geometry.to_weight(W.reshape(shape), "inputs").to(P.dtype)

    @torch.no_grad()
    def right_inverse(self, W: Tensor) -> Tensor:
        if tuple(W.shape) != self.weight_shape:
            raise ValueError(f"expected a weight of shape {self.weight_shape}, got {tuple(W.shape)}")
        return self.maker.parameter(self.geometry.to_kernel(W, "inputs").flatten(2)).contiguous()

    def constant_in(self, dtype: torch.dtype) -> float:
        rows, columns = self.maker.rows, self.maker.columns
        return stored_constant(self.lipschitz, self.maker.excess(), min(rows, columns), rows * columns, dtype)


class FrequencyMap(_Map):
    """The map from a free kernel (m, n, *taps) to the matrices of all frequencies, (frequencies, rows, columns, 2).

    Args:
        geometry: of the layer.
        weight_shape: of the layer's weight.
        maker: what makes the matrices.
        size: of the period.
        shifts: for each axis, the pixel that each tap reads, relative to the one that is written.
        lipschitz: the constant that is aimed at.
    """

    def __init__(
        self,
        geometry: Geometry,
        weight_shape: Sequence[int],
        maker: Maker,
        *,
        size: tuple[int, ...],
        shifts: tuple[tuple[int, ...], ...],
        lipschitz: float = 1.0,
    ) -> None:
        super().__init__(geometry, weight_shape, maker, lipschitz=lipschitz)
        self.size, self.shifts = size, shifts
        self._known: tuple[list[Tensor], Tensor] | None = None

    def forward(self, P: Tensor) -> Tensor:
        if self.training or torch.is_grad_enabled() or torch.compiler.is_compiling() or P.is_meta:
            return self._matrices(P)
        # The numbers themselves are compared: a version counter does not see writes through `.data`.
        now = [P, *self.maker.parameters()]
        if self._known is None or not all(_same(a, b) for a, b in zip(self._known[0], now, strict=True)):
            self._known = [p.detach().clone() for p in now], self._matrices(P)
        return self._known[1].clone()

    def _matrices(self, P: Tensor) -> Tensor:
        with full_precision(P.device):
            working_type(P.dtype)
            K = self.maker.prepare(P.to(self._type(P)).flatten(2)[None])[0]  # (m, n, taps)
            waves = fourier_matrix(self.size, self.shifts, K)  # (2, frequencies, taps)
            parts = (waves.flatten(0, 1) @ K.flatten(0, 1).T).unflatten(0, (2, -1)).unflatten(2, K.shape[:2])
            Q = self.maker(torch.complex(parts[0], parts[1])) * self.lipschitz
            return torch.view_as_real(Q).to(P.dtype).contiguous()

    @torch.no_grad()
    def right_inverse(self, W: Tensor) -> Tensor:
        if tuple(W.shape) != self.weight_shape:
            raise ValueError(f"expected a kernel of shape {self.weight_shape}, got {tuple(W.shape)}")
        return self.maker.parameter(W[None])[0].contiguous()

    def constant_in(self, dtype: torch.dtype) -> float:
        # As real matrices of twice the size, with twice the squared entries.
        rows, columns = self.maker.rows, self.maker.columns
        return stored_constant(self.lipschitz, self.maker.excess(), 2 * min(rows, columns), 4 * rows * columns, dtype)


def _same(a: Tensor, b: Tensor) -> bool:
    return a.device == b.device and a.dtype == b.dtype and torch.equal(a, b)


def fourier_matrix(size: tuple[int, ...], shifts: tuple[tuple[int, ...], ...], like: Tensor) -> Tensor:
    """Real and imaginary part of exp(2 pi i f s / n), (2, frequencies of rfftn, taps); whole numbers are reduced first.

    Example:
        >>> fourier_matrix((4,), ((-1, 0, 1),), torch.zeros(1)).round().tolist()[1]
        [[0.0, 0.0, 0.0], [-1.0, 0.0, 1.0], [0.0, 0.0, 0.0]]
    """
    turns = torch.zeros(1, 1, dtype=torch.float64)
    for axis, (n, reads) in enumerate(zip(size, shifts, strict=True)):
        frequencies = torch.arange(n // 2 + 1 if axis == len(size) - 1 else n)
        phase = (frequencies[:, None] * torch.tensor(reads)[None] % n).double() / n  # (n, taps)
        turns = (turns[:, None, :, None] + phase[None, :, None, :]).flatten(2, 3).flatten(0, 1)
    angle = (2 * math.pi) * turns
    return torch.stack([angle.cos(), angle.sin()]).to(like)


class FourierConv(LipschitzModule):
    """A convolution of period `size` by its matrices at each frequency; the Fourier methods make it.

    `onelip.bake` stores the matrices; the constant of the baked layer is proved from what is stored.

    Args:
        layer: the convolution that it stands for: its kernel is where it begins, its bias is kept.
        input_size: spatial size of all its inputs.
        size: period of the convolution; inputs are filled up to it with zeros, outputs are cut.
        spacing: distance of the pixels that belong to one of several interleaved images, for each axis.
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
        self.input_size, self.size = input_size, size
        self.spacing = spacing or (1,) * len(size)
        self.weight = nn.Parameter(layer.weight.detach(), layer.weight.requires_grad)
        self.bias = layer.bias

    def forward(self, x: Tensor) -> Tensor:
        if tuple(x.shape[1:]) != (self.in_channels, *self.input_size):
            raise ValueError(
                f"expected an input (batch, {self.in_channels}, {', '.join(map(str, self.input_size))}), the size that "
                f"the layer was made for, got shape {tuple(x.shape)}; make the layer anew with input_size of your "
                "images, or resize them"
            )
        with full_precision(x.device):
            y = self._periodic(x.to(working_type(x.dtype))).to(x.dtype)
        return y if self.bias is None else y + self.bias.reshape(-1, *(1 for _ in self.size))

    def _periodic(self, x: Tensor) -> Tensor:
        axes = tuple(range(-len(self.size), 0))
        period = [n * d for n, d in zip(self.size, self.spacing, strict=True)]
        missing = [p - n for p, n in zip(period, self.input_size, strict=True)]
        if any(missing):
            x = F.pad(x, [amount for m in reversed(missing) for amount in (0, m)])
        x = self._apart(x)
        spectrum = torch.fft.rfftn(x, dim=axes)
        frequencies = spectrum.shape[2:]
        spectrum = torch.bmm(torch.view_as_complex(self.weight), spectrum.flatten(2).permute(2, 1, 0))
        spectrum = spectrum.permute(2, 1, 0).unflatten(2, frequencies)
        y = self._together(torch.fft.irfftn(spectrum, s=self.size, dim=axes))
        for axis, n in zip(axes, self.input_size, strict=True):
            y = y.narrow(axis, 0, n)
        return y

    def _apart(self, x: Tensor) -> Tensor:
        """(batch, c, *size * spacing) -> (batch * spacings, c, *size)"""
        if all(d == 1 for d in self.spacing):
            return x
        for axis, d in enumerate(self.spacing):
            x = x.unflatten(2 + 2 * axis, (-1, d))
        places, offsets = range(2, x.dim(), 2), range(3, x.dim(), 2)
        return x.permute(0, *offsets, 1, *places).flatten(0, len(self.spacing))

    def _together(self, y: Tensor) -> Tensor:
        if all(d == 1 for d in self.spacing):
            return y
        y = y.unflatten(0, (-1, *self.spacing))
        axes = len(self.spacing)
        order = [axis for i in range(axes) for axis in (2 + axes + i, 1 + i)]
        y = y.permute(0, 1 + axes, *order)
        for axis in range(axes):
            y = y.flatten(2 + axis, 3 + axis)
        return y

    @property
    def lipschitz_constant(self) -> float:
        """Proved: by construction, or for a baked layer from the matrices that are stored; see (1)."""
        if not parametrize.is_parametrized(self, "weight"):
            return stored_norm(self.weight.detach())
        found, maps = find_parametrization(self), parametrization_list(self)
        if not isinstance(found, FrequencyMap) or maps is None or len(maps) != 1 or found.size != self.size:
            raise UnknownLipschitzConstant("expected a layer with its own parametrization, got another one")
        original = maps.original
        assert isinstance(original, Tensor)
        return found.constant_in(original.dtype)

    def extra_repr(self) -> str:
        spaced = f", spacing={self.spacing}" if any(d > 1 for d in self.spacing) else ""
        return f"{self.in_channels}, {self.out_channels}, input_size={self.input_size}, size={self.size}{spaced}"


def stored_norm(weight: Tensor) -> float:
    """A proved bound on the norms of complex matrices stored as (b, rows, columns, 2)."""
    from onelip.bounds import NonFiniteWeight, bound_weight  # which know all layers

    real, imaginary = weight.unbind(-1)
    matrices = torch.cat([torch.cat([real, -imaginary], 2), torch.cat([imaginary, real], 2)], 1)
    try:
        return bound_weight(matrices.flatten(0, 1), Geometry(False, len(weight), (), (), ())).value
    except (NonFiniteWeight, OverflowError) as error:
        raise UnknownLipschitzConstant(str(error)) from error


def replaced(
    layer: nn.Module,
    make: Callable[[Tensor], Maker],
    *,
    method: str,
    input_size: int | Sequence[int] | None,
    lipschitz: float,
    zero_padding: bool = False,
    spaced: bool = False,
) -> nn.Module:
    """The shared verb: a dense layer gets a parametrization, a convolution becomes a `FourierConv`.

    Args:
        layer: one of SERVED.
        make: gives the maker for a kernel (g, rows, columns, *taps).
        method: its name, for errors.
        input_size: spatial size of the images.
        lipschitz: the constant to guarantee.
        zero_padding: whether zero padding is served, by a border of zeros around which the circle closes.
        spaced: whether taps are spread over the image, n / k apart.
    """
    if not isinstance(layer, SERVED):
        names = ", ".join(kind.__name__ for kind in SERVED)
        raise UnsupportedLayer(f"expected one of {names} for {method}, got {type(layer).__name__}; use 'bcop' or 'aoc'")
    geometry = geometry_of(layer)
    weight = weight_of(layer, geometry)
    lipschitz = check_lipschitz(lipschitz, weight.dtype)
    kernel = geometry.to_kernel(weight.detach(), "inputs")
    if all(k == 1 for k in kernel.shape[3:]):
        return attach(layer, DenseMap(geometry, weight.shape, make(kernel.flatten(2)), lipschitz=lipschitz))
    assert isinstance(layer, nn.modules.conv._ConvNd)
    given = _check(layer, method, input_size, zero_padding or spaced)
    padding = _padding(layer)
    border = [0 if layer.padding_mode == "circular" else max(p) for p in padding]
    spacing, dilation = (1,) * len(given), layer.dilation
    size = tuple(n + b for n, b in zip(given, border, strict=True))
    starts = [-left for left, _ in padding]
    if spaced:
        size = layer.kernel_size
        spacing = tuple(-(-n // k) for n, k in zip(given, size, strict=True))
        dilation, starts = (1,) * len(size), [-((k - 1) // 2) for k in size]
    shifts = tuple(
        tuple(d * t + start for t in range(k)) for k, d, start in zip(layer.kernel_size, dilation, starts, strict=True)
    )
    made = FourierConv(layer, input_size=given, size=size, spacing=spacing)
    return attach(
        made, FrequencyMap(geometry, weight.shape, make(kernel), size=size, shifts=shifts, lipschitz=lipschitz)
    )


def _check(
    layer: nn.modules.conv._ConvNd, method: str, input_size: int | Sequence[int] | None, zero_padding: bool
) -> tuple[int, ...]:
    way_out = "use 'bcop', 'aoc' or 'soc', which work on pixels"
    if layer.groups > 1:
        raise UnsupportedLayer(f"expected a convolution with groups=1 for {method}, got {layer.groups}; {way_out}")
    if any(s > 1 for s in layer.stride):
        raise UnsupportedLayer(
            f"expected stride 1, or a kernel as large as the stride, for {method}, got stride {layer.stride}; put "
            f"onelip.nn.ConcatenationPool2d before a layer of stride 1, or {way_out}"
        )
    for k, d, p in zip(layer.kernel_size, layer.dilation, _padding(layer), strict=True):
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
            f"expected the size of the images for {method}, whose layers are made for one size, got none; give "
            "input_size=(height, width), or onelip.constrain(model, ..., example=images)"
        )
    axes = len(layer.kernel_size)
    sizes = (input_size,) * axes if isinstance(input_size, int) else tuple(input_size)
    if len(sizes) != axes or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in sizes):
        raise ValueError(f"expected input_size to be a positive number or {axes} of them, got {input_size!r}")
    return sizes
