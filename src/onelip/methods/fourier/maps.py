"""Circular convolutions as one matrix per frequency, y^_f = M_f x^_f, and maps that make these matrices orthogonal.

For real x of size n, half of the frequencies are enough (`onelip.methods.fourier.frequencies`, which has the weights
w_f): the norm is ||x||^2 = sum_f w_f |x^_f|^2 / n. The way back drops the imaginary part of what is its own mirror,
which is a projection, so ||y||^2 <= sum_f w_f |M_f x^_f|^2 / n, for any complex matrices M_f. Hence

    ||y|| <= max_f ||M_f|| ||x||.                                                                                (1)

A convolution y_i = sum_t K_t x_{i + d t - p} has M_f = sum_t K_t exp(2 pi i f (d t - p) / n), written here as a product
with a small matrix: no FFT of kernels, so any size, odd ones too, any dilation, and kernels larger than the image.

Note [Precision]
    In eval mode matrices are computed in float64 (complex128), and the stated rounding is that of float64 and of the
    type in which the result is stored. In training wide layers are computed in the type of the weight: it is evaluation
    that a certificate is about. Under autocast all this, and the transforms, stay in full precision.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from onelip.core.geometry import Geometry
from onelip.core.parametrization import LipschitzParametrization, working_type
from onelip.core.precision import full_precision
from onelip.core.tracing import Constant, is_traced
from onelip.methods.fourier.frequencies import fourier_matrix
from onelip.methods.orthogonal.reshaped import stored_constant
from onelip.methods.orthogonal.steps import of_moderate_size, widest_type

# Up to this many columns float64 costs nothing that is felt.
_FEW_COLUMNS = 32


class OrthogonalMap(nn.Module):
    """How a method makes matrices of norm at most 1: from free real kernels, through matrices that may be complex.

    Args:
        rows: of the matrices that are asked for.
        columns: of the matrices that are asked for.
    """

    title = "orthogonal"

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
        self, geometry: Geometry, weight_shape: Sequence[int], orthogonal: OrthogonalMap, *, lipschitz: float = 1.0
    ) -> None:
        super().__init__(geometry, weight_shape, lipschitz=lipschitz)
        self.orthogonal = orthogonal

    def _type(self, P: Tensor) -> torch.dtype:
        """Note [Precision]."""
        few = min(self.orthogonal.rows, self.orthogonal.columns) <= _FEW_COLUMNS
        return widest_type(P) if few or not self.training else working_type(P.dtype)

    @torch.no_grad()
    def reset(self, P: Tensor) -> None:
        """Begin as the authors do."""
        begin: Any = getattr(self.orthogonal, "reset", None)
        if begin is not None and not P.is_meta and P.numel():
            begin(P)

    def describe(self) -> str:
        return self.orthogonal.title

    def extra_repr(self) -> str:
        return f"lipschitz={self.lipschitz}"


class DenseMap(_Map):
    """The map for layers without overlap, Linear, 1x1 and k = stride: a free matrix (g, m, n) to the weight."""

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
        if tuple(W.shape) != self.weight_shape:
            raise ValueError(f"expected a weight of shape {self.weight_shape}, got {tuple(W.shape)}")
        return self.orthogonal.parameter(self.geometry.to_kernel(W, "inputs").flatten(2)).contiguous()

    def constant_in(self, dtype: torch.dtype) -> float:
        rows, columns = self.orthogonal.rows, self.orthogonal.columns
        return stored_constant(self.lipschitz, self.orthogonal.excess(), min(rows, columns), rows * columns, dtype)


class FrequencyMap(_Map):
    """The map from a free kernel (m, n, *taps) to the matrices of all frequencies, (frequencies, rows, columns, 2).

    Args:
        geometry: of the layer.
        weight_shape: of the layer's weight.
        orthogonal: what makes the matrices.
        size: of the period.
        shifts: for each axis, the pixel that each tap reads, relative to the one that is written.
        lipschitz: the constant that is aimed at.
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
        # The numbers themselves are compared: a version counter does not see writes through `.data`.
        now, settings = [P, *self.orthogonal.parameters()], self._settings()
        known = self._known
        if known is None or known[1] != settings or not all(_same(a, b) for a, b in zip(known[0], now, strict=True)):
            known = self._known = [p.detach().clone() for p in now], settings, self._matrices(P)
        return known[2].clone()

    def _settings(self) -> list[Any]:
        """What the matrices depend on besides tensors: it can be changed after the layer was made."""
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
        if tuple(W.shape) != self.weight_shape:
            raise ValueError(f"expected a kernel of shape {self.weight_shape}, got {tuple(W.shape)}")
        return self.orthogonal.parameter(W[None])[0].contiguous()

    def constant_in(self, dtype: torch.dtype) -> float:
        # As real matrices of twice the size, with twice the squared entries.
        rows, columns = self.orthogonal.rows, self.orthogonal.columns
        return stored_constant(
            self.lipschitz, self.orthogonal.excess(), 2 * min(rows, columns), 4 * rows * columns, dtype
        )


def _same(a: Tensor, b: Tensor) -> bool:
    return a.device == b.device and a.dtype == b.dtype and torch.equal(a, b)
