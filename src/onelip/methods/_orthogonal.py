"""Matrices without a singular value above 1, and nearly orthogonal: what the methods of this family are built from.

Citation: Å. Björck, C. Bowie, "An iterative algorithm for computing the best estimate of an orthogonal matrix", 1971.
The reshaped kernel: Li et al. (BCOP), NeurIPS 2019; Serrurier et al., CVPR 2021.

One step of order 1 maps X to X (3/2 I - 1/2 X^T X), hence every singular value s to f(s) = 3/2 s - 1/2 s^3, and

    |f(s)| <= 1   for all s in [0, 2],                                                                           (1)

so a matrix whose norm is at most 2 has norm at most 1 after one step, converged or not. The norm is brought under
sqrt(2) beforehand, by bounds on G = M^T M (n, n) that are proved: with a = tr(G) / n, ||M||^2 is at most ||G||_F, at
most max_i sum_j |G_ij|, and at most a + ((1 - 1/n) ||G - a I||_F^2)^(1/2) (Wolkowicz and Styan, 1980). Beyond sqrt(2)
f falls towards 0, and with it what one would like to become 1.

Note [Rounding]
    Let X (m, n), n <= m, be what is stored before a step, x = ||X||, u the unit roundoff. In any order of summation the
    computed Gram matrix is X^T X + E with ||E|| <= m n u x^2 =: e (to first order), and (1) for its eigenvalues gives
    ||X q||^2 <= 1 + e ||q||^2, where q, a product of r factors 3/2 - g/2, has norm at most 1.5^r. The product X q
    itself is off by at most n^2 u x 1.5^r. For m n u <= 1/16 and r = 1, or m n u <= 1/32, r = 3 and m >= 2 n, this
    stays below 1.5 however many steps there are: within reach of (1). So steps may be taken in float32 up to these
    sizes (float64 beyond), and only the last one matters. It is taken in float64, where it misses 1 by at most
    8 m n 2^-53, whatever happened before.

Note [Reshaped kernels]
    A kernel with T taps reads each input at most T times. Reshaped to M (rows, columns * T), the layer maps patches, so
    its norm is at most sqrt(T) ||M||, attained by a constant kernel. For a strided layer T is prod ceil(k / s).
"""

import itertools
import math
from fractions import Fraction
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd import Function

from onelip._precision import full_precision
from onelip.gram._floats import normalizer
from onelip.methods._parametrization import LipschitzParametrization, working_type
from onelip.methods._tight import tight_weight
from onelip.nn.pooling import root_below

Scaling = Literal["tight", "frobenius"]

UNIT64 = 2.0**-53
# Up to this many columns float64 costs nothing that is felt.
_FEW_COLUMNS = 64


def bjorck_steps(M: Tensor, steps: int, scaling: Scaling = "tight") -> Tensor:
    """Scale each matrix of M (g, m, n) by a proved bound, take `steps` steps of order 1; the last one in float64.

    The result is float64 and has norm at most 1 + 8 m n 2^-53, for every finite M. Zero stays zero; a matrix with a
    NaN or an infinity becomes NaN. Steps end early where the matrix is orthogonal to the precision of its type.

    Args:
        M: float32 or float64, of any scale.
        steps: at least 1.
        scaling: what M is divided by: by what the bounds on M^T M allow, or the root of its Frobenius norm.

    Example:
        >>> bjorck_steps(torch.tensor([[[3.0, 0.0], [0.0, 2.0]]]), steps=12).round(decimals=6)
        tensor([[[1., 0.],
                 [0., 1.]]], dtype=torch.float64)
    """
    if M.shape[-2] < M.shape[-1]:  # on the smaller side
        return bjorck_steps(M.mT, steps, scaling).mT
    m, n = M.shape[-2:]
    at_once = 3 if m >= 2 * n else 1
    X = of_moderate_size(M.to(_step_type(M, at_once)))
    X = X * _inverse_root(_divisor(X.mT @ X, scaling))[:, None, None]
    taken, is_end = 0, False
    while taken < steps - 1:
        r = min(at_once, steps - 1 - taken)
        G = symmetric_gram(X) if r == 1 else X.mT @ X
        is_end = _is_orthogonal(G.detach(), M.dtype)
        if is_end:
            break
        X = _Step.apply(X, G, X.dtype, False) if r == 1 else X @ _step_polynomial(G, r).to(X.dtype)
        taken += r
    return _Step.apply(X, symmetric_gram(X), widest_type(X), is_end)


@torch.no_grad()
def symmetric_gram(X: Tensor) -> Tensor:
    """X^T X for each matrix of X (g, m, n), multiplied out on and above the diagonal only; a constant for derivatives.

    Example:
        >>> symmetric_gram(torch.tensor([[[1.0, 2.0], [0.0, 3.0]]]))
        tensor([[[ 1.,  2.],
                 [ 2., 13.]]])
    """
    n = X.shape[-1]
    count = max(1, min(4, n // 256))
    edges = [n * i // count for i in range(count + 1)]
    # Block rows, from the diagonal on; what is left of it is the transpose of blocks above.
    rows = [X[..., start:stop].mT @ X[..., start:] for start, stop in itertools.pairwise(edges)]
    if count == 1:
        return rows[0]
    whole = [
        torch.cat([*(rows[j][..., edges[i] - edges[j] : edges[i + 1] - edges[j]].mT for j in range(i)), rows[i]], -1)
        for i in range(count)
    ]
    return torch.cat(whole, -2)


def of_moderate_size(M: Tensor) -> Tensor:
    """Each matrix of M (g, m, n) times the power of two that keeps its products in range; NaN if it is not finite."""
    empty = (M.detach() == 0).all(-1, keepdim=True).all(-2, keepdim=True)
    return M * torch.where(empty, 1.0, normalizer(M))


def widest_type(x: Tensor) -> torch.dtype:
    """float64, or float32 on devices that have no other; there the stated rounding is not proved."""
    return torch.float32 if x.device.type == "mps" else torch.float64


def excess_of_last_step(m: int, n: int) -> float:
    """By how much the norm of `bjorck_steps` of an (m, n) matrix can miss 1; Note [Rounding]."""
    return 8 * m * n * UNIT64


def check_steps(steps: object) -> int:
    """A whole number from 1 to 100, or an error."""
    if isinstance(steps, bool) or not isinstance(steps, int) or not 1 <= steps <= 100:
        raise ValueError(f"expected steps to be a whole number from 1 to 100, got {steps!r}; 12 is ordinary")
    return steps


def _step_type(M: Tensor, at_once: int) -> torch.dtype:
    m, n = M.shape[-2:]
    largest = 2**20 if at_once == 1 else 2**19  # m n u = 1/16 and 1/32 in float32
    return widest_type(M) if n <= _FEW_COLUMNS or m * n > largest else M.dtype


def _divisor(G: Tensor, scaling: Scaling) -> Tensor:
    """The squares (g) by whose roots to divide matrices of Gram matrices G (g, n, n): their norms are then <= sqrt(2).

    The mean of the squared singular values goes to 1 if it can: matrices next to orthogonal stay what they are.
    """
    frobenius = torch.linalg.matrix_norm(G)
    if scaling == "frobenius":
        return frobenius
    n = G.shape[-1]
    mean = G.diagonal(dim1=-2, dim2=-1).mean(-1)
    around = torch.linalg.matrix_norm(G - mean[:, None, None] * torch.eye(n, dtype=G.dtype, device=G.device))
    bound = torch.minimum(G.abs().sum(-1).amax(-1), mean + math.sqrt(1 - 1 / n) * around)
    return torch.maximum(mean, torch.minimum(bound, frobenius) / 2)


def _inverse_root(square: Tensor) -> Tensor:
    """square^(-1/2), and 0 for 0; NaN == 0 is false, so NaN stays NaN."""
    empty = square == 0
    return torch.where(empty, 0.0, torch.where(empty, 1.0, square).rsqrt())


class _Step(Function):
    """X (g, m, n) -> X (3/2 I - 1/2 X^T X), computed and returned in a wider type than the derivative needs.

    G is X^T X in the type of X. `is_end` says that it is the identity to half of the type's digits, and one product can
    be spared in the derivative. Second derivatives take the whole formula.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(X: Tensor, G: Tensor, dtype: torch.dtype, is_end: bool) -> Tensor:
        if dtype != X.dtype:
            X = X.to(dtype)
            G = symmetric_gram(X)
        return X @ _one_step(G)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:2])
        ctx.is_end = inputs[3]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None, None]:
        X, G = ctx.saved_tensors
        with full_precision(X.device):
            g = grads[0].to(X.dtype)
            S = X.mT @ g
            if torch.is_grad_enabled():
                G = X.mT @ X  # such that it can be differentiated again
            elif ctx.is_end:
                return torch.baddbmm(g, X, S + S.mT, alpha=-0.5), None, None, None
            # Of 3/2 X - 1/2 X X^T X, one term for each factor X.
            return 1.5 * g - 0.5 * (g @ G + X @ (S + S.mT)), None, None, None


def _one_step(G: Tensor) -> Tensor:
    return 1.5 * torch.eye(G.shape[-1], dtype=G.dtype, device=G.device) - 0.5 * G


def _step_polynomial(G: Tensor, steps: int) -> Tensor:
    """The matrix q with which `steps` steps multiply X: all are polynomials in G = X^T X, so they run on its side."""
    G = G.to(widest_type(G))
    H = q = _one_step(G)
    for _ in range(steps - 1):
        G = G @ H @ H
        H = _one_step(G)
        q = q @ H
    return q


def _is_orthogonal(G: Tensor, dtype: torch.dtype) -> bool:
    """Whether one more step gives an orthogonal matrix to the precision of the type, by G = X^T X: it squares the
    distance."""
    if G.device.type != "cpu" or torch.compiler.is_compiling():
        return False  # to look at a value would stall a GPU, and a compiler cannot
    n = G.shape[-1]
    room = torch.finfo(dtype).eps ** 0.5
    # Cheap first: the trace misses n by at most sqrt(n) times the distance.
    trace = G.diagonal(dim1=-2, dim2=-1).sum(-1)
    if not bool(((trace - n).abs() <= n**0.5 * room).all()):
        return False
    return bool((torch.linalg.matrix_norm(G - torch.eye(n, dtype=G.dtype)) <= room).all())


class ReshapedOrthogonal(LipschitzParametrization):
    """Base of methods that make the reshaped kernel orthogonal and divide by sqrt(T), Note [Reshaped kernels].

    Linear layers, and convolutions whose windows do not overlap, have T = 1: there orthogonal means orthogonal.
    """

    def orthogonal(self, M: Tensor) -> Tensor:
        """Matrices (g, m, n) to such of norm at most 1 + `excess(m, n)`, in float64. Zero columns must stay zero."""
        raise NotImplementedError

    def excess(self, m: int, n: int) -> float:
        """What rounding can add to the norm 1 of `orthogonal`, for n <= m."""
        return excess_of_last_step(m, n)

    def forward(self, P: Tensor) -> Tensor:
        if P.numel() == 0:
            return P
        with full_precision(P.device):
            kernel = self.geometry.to_kernel(P.to(working_type(P.dtype)), "inputs")  # (g, rows, columns, *taps)
            W = self.orthogonal(kernel.flatten(2)) * (self.lipschitz * root_below(Fraction(1, self.taps)))
            return self.geometry.to_weight(W.reshape(kernel.shape), "inputs").to(P.dtype)

    @property
    def taps(self) -> int:
        """T, the most taps that read the same input."""
        return math.prod(self.geometry.kernel_shape(self.weight_shape, "inputs")[3:])

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
        _, rows, columns, *taps = self.geometry.kernel_shape(self.weight_shape, "inputs")
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
