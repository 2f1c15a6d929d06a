"""The base class of methods on reshaped kernels, and the constant of a weight after it is rounded."""

import math
from fractions import Fraction

import torch
from torch import Tensor

from onelip.core.parametrization import LipschitzParametrization, working_type
from onelip.core.precision import full_precision
from onelip.core.rounding import root_at_most
from onelip.methods.orthogonal.steps import UNIT64, excess_of_steps
from onelip.nn.init import tight_weight


class ReshapedOrthogonal(LipschitzParametrization):
    r"""Base of methods that make the reshaped kernel orthogonal and divide it by $\sqrt T$.

    **Theorem.** A kernel with $T$ taps reads each input at most $T$ times. Reshaped to $M$ (rows, columns * T), the
    layer maps windows, so its norm is at most $\sqrt T \|M\|$; a constant kernel attains it. For a strided layer
    $T = \prod \lceil k / s \rceil$. Linear layers, and convolutions whose windows do not overlap, have $T = 1$: there
    orthogonal means orthogonal.

    **Missing taps.** If the kernel size is not a multiple of the stride, some phases have fewer than $T$ taps. Their
    entries in $M$ are zero and dropped after $M$ is made orthogonal. Dropping whole columns cannot increase the norm,
    dropping single entries can (by 24 % for a 3x3 kernel of stride 2). They are whole columns if the phases belong to
    the columns: the inputs of a convolution, the outputs of a transposed one. A transposed layer is the adjoint of the
    convolution with the same weight and has its norm, so there $M$ has the outputs as columns. Without missing taps the
    inputs are the columns: then $M$ has more rows, and the layer keeps more of its norm.

    Li et al. (BCOP), NeurIPS 2019; Serrurier et al., CVPR 2021.

    Args:
        geometry: how the weight acts, from `onelip.core.geometry.geometry_of`.
        weight_shape: shape of the weight.
        lipschitz: the constant of the layer.
    """

    def orthogonal(self, M: Tensor, norm: float) -> Tensor:
        """Map matrices (g, m, n) to norm at most norm * (1 + excess(m, n)), in float64; zero columns stay zero."""
        raise NotImplementedError

    def excess(self, m: int, n: int) -> float:
        """Return the most that rounding can add to the norm 1 of `orthogonal`, for n <= m."""
        return excess_of_steps(m, n)

    def forward(self, P: Tensor) -> Tensor:
        if P.numel() == 0:
            return P
        with full_precision(P.device):
            kernel = self.geometry.to_kernel(P.to(working_type(P.dtype)), self.columns)  # (g, rows, columns, *taps)
            W = self.orthogonal(kernel.flatten(2), self.lipschitz * root_at_most(Fraction(1, self.taps)))
            return self.geometry.to_weight(W.reshape(kernel.shape), self.columns).to(P.dtype)

    @property
    def orthogonal_side(self) -> str | None:
        if self.taps > 1:  # orthogonal as a reshaped kernel, not as an operator
            return None
        _, rows, columns, *_ = self.geometry.kernel_shape(self.weight_shape, "inputs")
        return "inputs" if columns <= rows else "outputs"

    @property
    def columns(self) -> str:
        """The side whose channels are the columns of M, "inputs" or "outputs"."""
        is_uneven = any(k % s for k, s in zip(self.geometry.kernel_size, self.geometry.phases, strict=True))
        return "outputs" if is_uneven and self.geometry.transposed else "inputs"

    @property
    def taps(self) -> int:
        """T, the largest number of taps that read the same input."""
        return math.prod(self.geometry.kernel_shape(self.weight_shape, self.columns)[3:])

    @torch.no_grad()
    def reset(self, P: Tensor) -> None:
        """Initialise with the identity if it is square, else orthogonal columns, on one tap.

        The layer then divides all norms by sqrt(T). Spread evenly over the taps it would keep the norm of constant
        images, but blur all others: after 8 epochs on digits the accuracy was 31 % instead of 63 %.
        """
        if not P.is_meta and P.numel():
            P.copy_(tight_weight(self.geometry, self.weight_shape, "inputs"))

    def constant_in(self, dtype: torch.dtype) -> float:
        """Return the constant, with the rounding of the last step and of each stored entry."""
        _, rows, columns, *taps = self.geometry.kernel_shape(self.weight_shape, self.columns)
        T = math.prod(taps)
        m, n = max(rows, columns * T), min(rows, columns * T)
        # The factor 1 / sqrt(T) cancels the factor sqrt(T) between the norm of M and that of the layer.
        return stored_constant(self.lipschitz, self.excess(m, n), n, m * n * T, dtype)

    def advice(self) -> str | None:
        if self.taps == 1:
            return None
        return f"dividing by sqrt({self.taps}) reduces norms; 'bcop' and 'aoc' make convolutions orthogonal without it"


def stored_constant(lipschitz: float, excess: float, rank: int, entries: int, dtype: torch.dtype) -> float:
    r"""Return the constant of a layer of norm `lipschitz * (1 + excess)` after its weight is rounded to a type.

    Each entry $W$ changes by at most $u |W|$, or by half the smallest subnormal number. The first changes the norm by
    at most $u \| |W| \|_F = u \sqrt{\mathrm{rank}}$ times the constant, the second by $\sqrt{\mathrm{entries}}$ of
    these numbers. Two more units are for the factor.

    Args:
        lipschitz: the constant.
        excess: relative error of the norm before it is stored.
        rank: rank of the weight as a matrix.
        entries: number of its entries.
        dtype: type in which it is stored.

    Returns:
        The constant, rounded up.

    Examples:
        >>> stored_constant(1.0, 0.0, 4, 16, torch.float32) < 1 + 2e-7
        True
    """
    limits = torch.finfo(dtype)
    relative = excess + (limits.eps / 2 + 4 * UNIT64) * math.sqrt(rank)
    # The last factor covers the rounding of the sum itself.
    return (lipschitz * (1 + relative) + limits.smallest_normal * limits.eps * math.sqrt(entries)) * (1 + 2.0**-50)
