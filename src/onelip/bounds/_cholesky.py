"""A bound of a matrix that is as good as its largest eigenvalue is known: ||W||^2 <= S if S I - W^T W = R^T R + small.

R comes from a float64 Cholesky decomposition and is trusted in nothing. With delta = 2^-32 S, whatever R is,

    (S - delta) I - G = R^T R + E   =>   lambda_max(G) <= S - delta + ||E||,        ||E|| <= greatest absolute row sum,

so ||E|| <= delta proves ||W||^2 <= S. Here E is bounded in float64; `onelip.bounds.exact` computes it.

Note [Residual]
    H is the computed Gram matrix, c the float nearest to S - delta, A the computed c I - H, P the computed R^T R, D the
    computed A - P. With gamma_n and u as in `_schur`, entry by entry,

        |E| <= |(S - delta) I - G - A| + |A - P| + |P - R^T R|
            <= 2 u S I + gamma_m |W|^T |W| + (1 + 2u) |D| + gamma_n |R|^T |R|,

    because |A_ii| <= S where R is real (and a larger A_ii shows up in the first term: u |A_ii| is what is added).
"""

from fractions import Fraction

import torch
from torch import Tensor

from onelip.bounds._schur import UNDERFLOW
from onelip.core.rounding import gamma

# How far above the estimated largest eigenvalue S is tried. The first is meant to work; 2^-31 of it are spent on delta.
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
