"""Kernels made of matrices without a singular value above 1: what methods of this family share.

The reshaped kernel: Li et al. (BCOP), NeurIPS 2019; Serrurier et al., CVPR 2021.

Note [Reshaped kernels]
    A kernel with T taps reads each input at most T times. Reshaped to M (rows, columns * T), the layer maps patches, so
    its norm is at most sqrt(T) ||M||, attained by a constant kernel. For a strided layer T is prod ceil(k / s).

Note [Missing taps]
    Where the kernel size is no multiple of the stride, some phases have fewer than T taps. Their entries in M are zero
    and dropped after M is made orthogonal. Dropping whole columns cannot raise a norm, dropping single entries can
    (by 24 % for a 3x3 kernel of stride 2). They are whole columns if the phases belong to the columns: the inputs of a
    convolution, the outputs of a transposed one. A transposed layer is the adjoint of the convolution with the same
    weight and has its norm, so there M is taken with the outputs as columns. Without missing taps the inputs are the
    columns: M has more rows then, and the layer keeps more of its norm.
"""

import math
from fractions import Fraction

import torch
from torch import Tensor

from onelip.core.parametrization import LipschitzParametrization, working_type
from onelip.core.precision import full_precision
from onelip.core.rounding import root_at_most
from onelip.methods.orthogonal.steps import UNIT64, excess_of_steps
from onelip.nn.init import tight_weight


def check_steps(steps: object) -> int:
    """A whole number from 1 to 100, or an error."""
    if isinstance(steps, bool) or not isinstance(steps, int) or not 1 <= steps <= 100:
        raise ValueError(f"expected steps to be a whole number from 1 to 100, got {steps!r}; 12 is ordinary")
    return steps


class ReshapedOrthogonal(LipschitzParametrization):
    """Base of methods that make the reshaped kernel orthogonal and divide by sqrt(T), Note [Reshaped kernels].

    Linear layers, and convolutions whose windows do not overlap, have T = 1: there orthogonal means orthogonal.
    """

    def orthogonal(self, M: Tensor, norm: float) -> Tensor:
        """Matrices (g, m, n) to such of norm at most `norm` (1 + `excess(m, n)`), in float64; zero columns stay."""
        raise NotImplementedError

    def excess(self, m: int, n: int) -> float:
        """What rounding can add to the norm 1 of `orthogonal`, for n <= m."""
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
        """Whose channels are the columns of M, "inputs" or "outputs"; Note [Missing taps]."""
        is_uneven = any(k % s for k, s in zip(self.geometry.kernel_size, self.geometry.phases, strict=True))
        return "outputs" if is_uneven and self.geometry.transposed else "inputs"

    @property
    def taps(self) -> int:
        """T, the most taps that read the same input."""
        return math.prod(self.geometry.kernel_shape(self.weight_shape, self.columns)[3:])

    @torch.no_grad()
    def reset(self, P: Tensor) -> None:
        """Fill the parameter with the identity where it is square, else orthogonal columns, on one tap.

        Everything shrinks by sqrt(T) then. Spread evenly over the taps a constant image would keep its norm, but a blur
        in each layer forgets what is to be told apart: after 8 epochs on digits 31 % were right instead of 63 %.
        """
        if not P.is_meta and P.numel():
            P.copy_(tight_weight(self.geometry, self.weight_shape, "inputs"))

    def constant_in(self, dtype: torch.dtype) -> float:
        """The constant with its rounding: of the last step, and of each entry when it is stored."""
        _, rows, columns, *taps = self.geometry.kernel_shape(self.weight_shape, self.columns)
        T = math.prod(taps)
        m, n = max(rows, columns * T), min(rows, columns * T)
        # The factor 1 / sqrt(T) brings the entries' norm n^(1/2) down as far as Note [Reshaped kernels] brings it up.
        return stored_constant(self.lipschitz, self.excess(m, n), n, m * n * T, dtype)

    def advice(self) -> str | None:
        if self.taps == 1:
            return None
        return f"dividing by sqrt({self.taps}) costs norm; 'bcop' and 'aoc' make convolutions orthogonal without it"


def stored_constant(lipschitz: float, excess: float, rank: int, entries: int, dtype: torch.dtype) -> float:
    """The constant of a layer of norm lipschitz (1 + excess) after its weight is rounded to a type.

    Each entry W moves by at most u |W|, or half the smallest subnormal. The first moves the norm by at most
    u || |W| ||_F = u sqrt(rank) times the constant, the second by sqrt(entries) of them. Two more units for the factor.
    """
    limits = torch.finfo(dtype)
    relative = excess + (limits.eps / 2 + 4 * UNIT64) * math.sqrt(rank)
    # The sum itself is rounded, by less than the last factor.
    return (lipschitz * (1 + relative) + limits.smallest_normal * limits.eps * math.sqrt(entries)) * (1 + 2.0**-50)
