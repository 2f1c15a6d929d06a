"""Maps from free kernels to matrices of norm at most 1, one per frequency, as torch parametrizations."""

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

    def prepare(self, kernel: Tensor) -> Tensor:
        """Return the free kernel, scaled such that products stay in range; real float32 or float64."""
        return of_moderate_size(kernel.flatten(2)).reshape(kernel.shape)

    def forward(self, M: Tensor) -> Tensor:
        """Map matrices (b, m, n), real or complex, to matrices (b, rows, columns) of norm at most 1."""
        raise NotImplementedError

    def excess(self) -> float:
        """Return the most that rounding in float64 can add to the norm 1."""
        raise NotImplementedError


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
        reset: Any = getattr(self.orthogonal, "reset", None)
        if reset is not None and not P.is_meta and P.numel():
            reset(P)

    def describe(self) -> str:
        return self.orthogonal.title

    def extra_repr(self) -> str:
        return f"lipschitz={self.lipschitz}"


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
        if tuple(W.shape) != self.weight_shape:
            raise ValueError(f"expected a weight of shape {self.weight_shape}, got {tuple(W.shape)}")
        return self.orthogonal.parameter(self.geometry.to_kernel(W, "inputs").flatten(2)).contiguous()

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
        if tuple(W.shape) != self.weight_shape:
            raise ValueError(f"expected a kernel of shape {self.weight_shape}, got {tuple(W.shape)}")
        return self.orthogonal.parameter(W[None])[0].contiguous()

    def constant_in(self, dtype: torch.dtype) -> float:
        # As real matrices of twice the size.
        rows, columns = self.orthogonal.rows, self.orthogonal.columns
        return stored_constant(
            self.lipschitz, self.orthogonal.excess(), 2 * min(rows, columns), 4 * rows * columns, dtype
        )


def _same(a: Tensor, b: Tensor) -> bool:
    return a.device == b.device and a.dtype == b.dtype and torch.equal(a, b)
