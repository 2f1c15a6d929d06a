"""Bounds from the Gram operator G = W^T W in float64, with every rounding error counted: Schur test and Cholesky.

Note [Kernel]
    A kernel K is laid out as (g, *taps, rows, columns), one matrix K_t for each tap. Its Gram operator is the kernel

        A_delta = sum_t K_{t + delta}^T K_t        (columns x columns), one matrix for each offset delta,

    and A_{-delta} = A_delta^T, so half of the offsets are multiplied out and the others are their transposes: the
    result is symmetric to the last bit. Then A^T A = A A up to a reflection of space, so the Gram operator of A is its
    square.

Note [Schur]
    The scaled Schur test on G and its powers: ||W||^2 <= max_i sum_j |G_ij| q_j / q_i for every q > 0. Proof:

        x^T G x <= sum |G_ij| |x_i| |x_j| <= sum |G_ij| (q_j / q_i x_i^2 + q_i / q_j x_j^2) / 2,

    and G is symmetric. The bound is N(G), a norm of matrices (the greatest row sum of diag(q)^-1 |G| diag(q)) with
    N(A B) <= N(A) N(B). For a convolution the sum runs over offsets as well. The best q is the Perron vector of |G|;
    every other q proves something.

Note [Rounding of the Schur test]
    Float64, u = 2^-53, gamma_n = n u / (1 - n u). Let M_1 = G, M_{t+1} = M_t M_t be exact and H_t the computed one. An
    inner product of n terms, added in any order, with or without fused operations, is off by at most gamma_n times the
    inner product of the magnitudes. So entry by entry

        |H_1 - G| <= gamma_m |W|^T |W|,        |H_{t+1} - H_t H_t| <= gamma_n |H_t| |H_t|.

    Let d_t bound N(M_t - H_t). Because M M - H H = M (M - H) + (M - H) H and N(M) <= N(H) + d,

        d_1 = gamma_m N(|W|^T |W|),        d_{t+1} = gamma_n N(H_t)^2 + d_t (2 N(H_t) + d_t),

    and N(M_t) <= N(H_t) + d_t is the proved bound. N(|W|^T |W|) <= N(s^T s) with s_rc = sum over taps of |W_rct|. A sum
    of n non-negative terms loses at most a factor (1 - u) with each rounding, so the true one is at most (1 + gamma_n)
    times the computed one. The remaining scalars are computed as fractions.

    Products that underflow, and weights too small to matter (see `onelip.core.floats.scaled`), change an entry of G by
    less than 2^-930 for each product. Entries are then multiplied by at most q_j / q_i <= 2^100 and added up, less than
    2^100 of them: below 2^-700 in all, beside an N of at least 1, because the largest weight is at least 1.

Note [Cholesky]
    A bound of a matrix that is as good as its largest eigenvalue is known: ||W||^2 <= S if S I - G = R^T R + small. R
    is a float64 Cholesky factor, of which nothing is assumed. With delta = 2^-32 S, whatever R is,

        (S - delta) I - G = R^T R + E   =>   lambda_max(G) <= S - delta + ||E||,     ||E|| <= largest absolute row sum,

    so ||E|| <= delta proves ||W||^2 <= S. Here E is bounded in float64; `onelip.bounds.exact` computes it.

Note [Residual]
    H is the computed Gram matrix, c the float nearest to S - delta, A the computed c I - H, P the computed R^T R, D the
    computed A - P. Entry by entry,

        |E| <= |(S - delta) I - G - A| + |A - P| + |P - R^T R|
            <= 2 u S I + gamma_m |W|^T |W| + (1 + 2u) |D| + gamma_n |R|^T |R|,

    because |A_ii| <= S where R is real (a larger A_ii adds u |A_ii| to the first term).
"""

import itertools
import math
from collections.abc import Iterator
from fractions import Fraction
from typing import NamedTuple

import torch
from torch import Tensor

from onelip.core.rounding import gamma
from onelip.gram.rescale import block_maximum, connected_blocks

Offset = tuple[int, ...]


class Gram(NamedTuple):
    """A computed Gram operator.

    Attributes:
        sums: T_ij = sum_delta |A_delta[i, j]|, shape (g, columns, columns).
        kernel: A, shape (g, *offsets, columns, columns), if it was asked for.
        inner: the number of products in an entry of A.
        offsets: the number of terms in an entry of T.
    """

    sums: Tensor
    kernel: Tensor | None
    inner: int
    offsets: int


def lay_out(kernel: Tensor) -> Tensor:
    """(g, rows, columns, *taps) of `Geometry.to_kernel` -> (g, *taps, rows, columns)."""
    return kernel.permute(0, *range(3, kernel.dim()), 1, 2).contiguous()


def half_of_offsets(taps: tuple[int, ...]) -> Iterator[Offset]:
    """Offsets that are zero or come after zero in lexicographic order: one of each pair {delta, -delta}.

    Examples:
        >>> list(half_of_offsets((2, 2)))
        [(0, 0), (0, 1), (1, -1), (1, 0), (1, 1)]
    """
    offsets = itertools.product(*(range(1 - k, k) for k in taps))
    return (delta for delta in offsets if delta >= (0,) * len(taps))


def gram(K: Tensor, keep: bool = False) -> Gram:
    """The Gram operator of K (g, *taps, rows, columns); `keep`: return A itself, not only its sums.

    Examples:
        >>> import torch
        >>> K = torch.tensor([[[[1.0]], [[2.0]]]])  # one channel, taps 1 and 2: A = 2, 5, 2
        >>> gram(K).sums
        tensor([[[9.]]])
    """
    g, *taps, R, C = K.shape
    sums = K.new_zeros(g, C, C)
    kernel = K.new_zeros(g, *(2 * k - 1 for k in taps), C, C) if keep else None
    for delta in half_of_offsets(tuple(taps)):
        shifted = tuple(slice(max(i, 0), k + min(i, 0)) for i, k in zip(delta, taps, strict=True))
        base = tuple(slice(max(-i, 0), k + min(-i, 0)) for i, k in zip(delta, taps, strict=True))
        A = _stacked(K, shifted).mT @ _stacked(K, base)  # (g, C, C)
        if not any(delta):
            A = A.triu() + A.triu(1).mT
            sums += A.abs()
        else:
            sums += A.abs()
            sums += A.abs().mT
        if kernel is not None:
            kernel[(slice(None), *(k - 1 + i for i, k in zip(delta, taps, strict=True)))] = A
            kernel[(slice(None), *(k - 1 - i for i, k in zip(delta, taps, strict=True)))] = A.mT
    return Gram(sums, kernel, math.prod(taps) * R, math.prod(2 * k - 1 for k in taps))


def cost_of_gram(shape: tuple[int, ...]) -> float:
    """Multiplications and additions of `gram` for a kernel of the shape (g, *taps, rows, columns)."""
    g, *taps, R, C = shape
    return float(g) * C * C * R * math.prod(taps) ** 2


def _stacked(K: Tensor, taps: tuple[slice, ...]) -> Tensor:
    """Some taps of K, one below the other: (g, taps * rows, columns)."""
    chosen = K[(slice(None), *taps)]
    return chosen.reshape(K.shape[0], -1, K.shape[-1])


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
    # The common part of all diagonal entries changes no eigenvector, and without it the iteration is faster.
    common = sums.diagonal(dim1=1, dim2=2).amin(1, keepdim=True)
    s = torch.ones_like(common.expand(sums.shape[:2]))
    for _ in range(_ITERATIONS):
        product = (sums @ s[:, :, None]).squeeze(-1)
        ratio = product / s
        product = product - common * s
        top = block_maximum(product, blocks)
        # A quarter stays, so that the iteration does not oscillate for bipartite graphs of channels.
        renewed = torch.where(top > 0, 0.75 * product / top + 0.25 * s, s)
        if not bool((block_maximum(ratio, blocks) > -_CONVERGED * block_maximum(-ratio, blocks)).any()):
            break
        s = renewed.clamp(min=2.0**-200)
    return s


def norm_of_square(K: Tensor, grams: list[Gram], q: Tensor) -> Fraction:
    """N(M_t) from above, t = len(grams): the bound of ||W||^(2^t) that q proves.

    Args:
        K: the kernel (g, *taps, rows, columns), its largest entry between 1 and 2.
        grams: the computed G, G^2, G^4, ...
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


# Relative distances of S above the estimated largest eigenvalue, in the order they are tried. The first should work.
_GAPS = (2.0**-30, 2.0**-26, 2.0**-21, 2.0**-16)
_LANCZOS_STEPS = 120
_SMALL = 200  # up to this many columns all eigenvalues are computed


def margin(S: Fraction) -> Fraction:
    """delta, the part of S that is left for the residual."""
    return S / 2**32


def cholesky_bound(W: Tensor, H: Tensor) -> tuple[Fraction, Fraction] | None:
    """(square, S): ||W||^2 <= square is proved here, and S <= square is what exact arithmetic can prove.

    Args:
        W: matrices (g, rows, columns), largest entry between 1 and 2.
        H: the computed W^T W (g, columns, columns), symmetric.

    Returns:
        None if no decomposition was found.
    """
    estimate = _largest_eigenvalue(H)
    for gap in _GAPS:
        S = estimate * (1 + gap)
        A = -H
        A.diagonal(dim1=1, dim2=2).add_(float(Fraction(S) - margin(Fraction(S))))
        R, failed = torch.linalg.cholesky_ex(A, upper=True)
        if not bool(failed.any()) and bool(torch.isfinite(R).all()):
            residual = _residual(W, A, R, S)
            delta = margin(Fraction(S))
            return Fraction(S) + max(residual - delta, Fraction(0)), Fraction(S)
    return None


def _residual(W: Tensor, A: Tensor, R: Tensor, S: float) -> Fraction:
    """||E|| from above, see Note [Residual]."""
    m, n = W.shape[-2:]
    difference = _row_sum((A - R.mT @ R).abs().sum(2), n)
    of_product = _row_sum(_absolute_gram_sums(R), 4 * n)
    of_gram = _row_sum(_absolute_gram_sums(W), 2 * (m + n))
    largest = max(Fraction(S), Fraction(float(A.diagonal(dim1=1, dim2=2).abs().max())))
    u = Fraction(1, 2**53)
    return 2 * u * largest + gamma(m) * of_gram + (1 + 2 * u) * difference + gamma(n) * of_product + UNDERFLOW


def _absolute_gram_sums(X: Tensor) -> Tensor:
    """Row sums of |X|^T |X|."""
    return (X.abs().mT @ X.abs().sum(2, keepdim=True)).squeeze(-1)


def _row_sum(sums: Tensor, roundings: int) -> Fraction:
    return Fraction(float(sums.max())) * (1 + gamma(roundings))


def _largest_eigenvalue(H: Tensor) -> float:
    """An estimate, nothing more: S only has to be large enough for the decomposition to exist."""
    if H.shape[-1] <= _SMALL:
        return float(torch.linalg.eigvalsh(H)[:, -1].max())
    return max(_by_lanczos(matrix) for matrix in H)


def _by_lanczos(H: Tensor) -> float:
    generator = torch.Generator().manual_seed(0)
    basis = H.new_zeros(_LANCZOS_STEPS, len(H))
    projected = H.new_zeros(_LANCZOS_STEPS, _LANCZOS_STEPS)
    v = torch.randn(len(H), dtype=H.dtype, generator=generator)
    for k in range(_LANCZOS_STEPS):
        basis[k] = v / v.norm()
        known = basis[: k + 1]
        v = H @ basis[k]
        projected[k, : k + 1] = known @ v
        # Twice is enough to keep the basis orthogonal, which is what keeps spurious copies of eigenvalues away.
        for _ in range(2):
            v = v - known.mT @ (known @ v)
        if not float(v.norm()) > 1e-13 * float(projected.diagonal().max()):
            projected = projected[: k + 1, : k + 1]  # an invariant subspace: nothing new to be found
            break
    return float(torch.linalg.eigvalsh(projected)[-1])
