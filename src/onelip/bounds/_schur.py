"""The scaled Schur test on the Gram operator and its powers: ||W||^2 <= max_i sum_j |G_ij| q_j / q_i for every q > 0.

Proof: x^T G x <= sum |G_ij| |x_i| |x_j| <= sum |G_ij| (q_j / q_i x_i^2 + q_i / q_j x_j^2) / 2, and G is symmetric. The
right side is N(G), a norm of matrices (the greatest row sum of diag(q)^-1 |G| diag(q)) with N(A B) <= N(A) N(B). For a
convolution the sum runs over offsets as well. The best q is the Perron vector of |G|; every other q proves something.

Note [Rounding]
    Float64, u = 2^-53, gamma_n = n u / (1 - n u). Let M_1 = G, M_{t+1} = M_t M_t be exact and H_t what was computed.
    An inner product of n terms, added in any order, with or without fused operations, is off by at most gamma_n times
    the inner product of the magnitudes. So entry by entry

        |H_1 - G| <= gamma_m |W|^T |W|,        |H_{t+1} - H_t H_t| <= gamma_n |H_t| |H_t|.

    Let d_t bound N(M_t - H_t). Because M M - H H = M (M - H) + (M - H) H and N(M) <= N(H) + d,

        d_1 = gamma_m N(|W|^T |W|),        d_{t+1} = gamma_n N(H_t)^2 + d_t (2 N(H_t) + d_t),

    and N(M_t) <= N(H_t) + d_t is what is proved. N(|W|^T |W|) <= N(s^T s) with s_rc = sum over taps of |W_rct|. A sum
    of n non-negative terms loses at most a factor (1 - u) with each rounding, so the true one is at most (1 + gamma_n)
    times the computed one. What is left are a few scalars, and these are fractions.

    Products that underflow, and weights too small to matter (see `_floats.scaled`), change an entry of G by less than
    2^-930 for each product. Entries are then multiplied by at most q_j / q_i <= 2^100 and added up, less than 2^100 of
    them: below 2^-700 in all, beside an N of at least 1, because the largest weight is at least 1.
"""

import itertools
import math
from fractions import Fraction

import torch
from torch import Tensor

from onelip.bounds._kernel import Gram
from onelip.core.rounding import gamma
from onelip.gram.perron import block_maximum, connected_blocks

UNDERFLOW = Fraction(1, 2**700)
_ITERATIONS = 100
_CONVERGED = 1 + 1e-12
_DIGITS, _SPREAD = 40, 60  # binary digits of the least q, and powers of two between the least and the largest


def scaling_of(sums: Tensor) -> Tensor:
    """Integers q (g, n), as float64, near the Perron vector of each matrix of sums (g, n, n).

    Any positive numbers would be sound. They are integers so that exact arithmetic can use the very same ones, and have
    40 digits so that rounding them costs about 1e-12.

    Examples:
        >>> scaling_of(torch.tensor([[[1.0, 2.0], [2.0, 1.0]]], dtype=torch.float64))
        tensor([[1., 1.]], dtype=torch.float64)
    """
    s = _perron(sums)
    s = s / s.amax(1, keepdim=True)
    spread = min(_SPREAD, -int(torch.frexp(s.amin()).exponent) + 1)
    q = torch.ceil(s * 2.0 ** (_DIGITS + spread))  # at least 1, as s > 0
    return torch.where((q == q[:, :1]).all(1, keepdim=True), 1.0, q)


def _perron(sums: Tensor) -> Tensor:
    """Power iteration on every block of channels that meet; columns of zeros get 1."""
    blocks = connected_blocks(sums)
    # What all diagonal entries have in common changes no eigenvector, and without it the iteration is faster.
    common = sums.diagonal(dim1=1, dim2=2).amin(1, keepdim=True)
    s = torch.ones_like(common.expand(sums.shape[:2]))
    for _ in range(_ITERATIONS):
        product = (sums @ s[:, :, None]).squeeze(-1)
        ratio = product / s
        product = product - common * s
        top = block_maximum(product, blocks)
        # A quarter stays, so that channels which only meet in turns (a bipartite graph) do not swing for ever.
        renewed = torch.where(top > 0, 0.75 * product / top + 0.25 * s, s)
        if not bool((block_maximum(ratio, blocks) > -_CONVERGED * block_maximum(-ratio, blocks)).any()):
            break
        s = renewed.clamp(min=2.0**-200)
    return s


def norm_of_square(K: Tensor, grams: list[Gram], q: Tensor) -> Fraction:
    """N(M_t) from above, t = len(grams): the bound of ||W||^(2^t) that q proves.

    Args:
        K: the kernel (g, *taps, rows, columns), its largest entry between 1 and 2.
        grams: what was computed of G, G^2, G^4, ...
        q: integers (g, columns).
    """
    g, *taps, R, C = K.shape
    s = K.abs().reshape(g, -1, R, C).sum(1)  # (g, rows, columns)
    products = s.mT @ (s @ q[:, :, None])
    roundings = math.prod(taps) + C + R  # of s, of s q and of s^T (s q)
    d = gamma(grams[0].inner) * _largest_ratio(products, q, roundings) + UNDERFLOW
    for before, after in itertools.pairwise(grams):
        norm = _row_sums(before, q)
        d = gamma(after.inner) * norm**2 + d * (2 * norm + d) + UNDERFLOW
    return _row_sums(grams[-1], q) + d


def _row_sums(gram: Gram, q: Tensor) -> Fraction:
    """N of a computed operator, from above."""
    return _largest_ratio(gram.sums @ q[:, :, None], q, gram.offsets + q.shape[1] + 1)


def _largest_ratio(products: Tensor, q: Tensor, roundings: int) -> Fraction:
    """max_i p_i / q_i from above, for sums of non-negative terms, each with the given number of roundings."""
    ratio = products.squeeze(-1) / q
    if not bool(torch.isfinite(ratio).all()):
        raise ArithmeticError("expected finite sums, got an overflow; this is a bug, please report the layer")
    return Fraction(float(ratio.max())) * (1 + gamma(roundings + 1))
