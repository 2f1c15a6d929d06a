"""Truncated exponentials of skew operators, with their exact norms.

A skew operator J is normal with eigenvalues i a, |a| <= ||J||, so for p(x) = sum_{j <= t} x^j / j! there is no need of
an error term: ||p(J)|| = max |p(i a)| <= gain(t, ||J||) of `onelip.graph.exact`.                                (1)
For t = 4 and 8 it is below 1 up to ||J|| = 2.8 and 3.3, for t = 5 it is 1.005 up to ||J|| = 2.

The norm of J is bounded by AOL: with r_c = sum_j |J^T J|_cj per channel, ||J diag(r)^(-1/2)|| <= 1. Now
D J D with D = diag(r)^(-1/4) is skew, and similar to J diag(r)^(-1/2), so its norm is a spectral radius:

    ||D J D|| = spectral radius of J diag(r)^(-1/2) <= 1.                                                        (2)

Both, and (2) in place of a power iteration, are our own.
"""

import math

import torch
from torch import Tensor

from onelip.gram.row_sums import absolute_row_sums
from onelip.methods.orthogonal.steps import of_moderate_size, widest_type

# Added to the sums r (of a kernel with entries up to 2 or 4): larger sums only lower the norm, and a channel of next to
# nothing is not blown up, nor are its gradients.
_FLOOR = 2.0**-20


def skew_part(M: Tensor) -> Tensor:
    """(M - M^T) / 2 for a kernel (g, c, c, *taps) with an odd number of taps: transposed in channels, taps reversed.

    The two halves are exact negatives of each other, in floating point too.
    """
    taps = tuple(range(3, M.dim()))
    return (M - M.transpose(1, 2).flip(taps)) / 2


def skew_kernel(M: Tensor, norm: float) -> Tensor:
    """The kernel of norm * D J D, (2), of the skew part of M (g, c, c, *taps), in float64.

    Examples:
        >>> skew_kernel(torch.tensor([[[1.0, 5.0], [-3.0, 9.0]]]), 0.5).flatten()[1:3].round(decimals=6)
        tensor([ 0.5000, -0.5000], dtype=torch.float64)
    """
    L = skew_part(M.to(widest_type(M)))
    L = of_moderate_size(L.flatten(2)).reshape(L.shape)
    r = absolute_row_sums(L) + _FLOOR  # (g, c)
    d = r.pow(-0.25)
    scale = d[:, :, None] * d[:, None, :] * norm  # symmetric to the last bit, so the kernel stays skew
    return L * scale.reshape(*scale.shape, *(1 for _ in L.shape[3:]))


@torch.no_grad()
def skew_norm_bound(L: Tensor, rounds: int = 16) -> float:
    """A proved bound of the norm of a stored kernel L (g, c, c, *taps), with the rounding of it.

    (2) the other way round: for any diagonal D, ||L|| = spectral radius of (D^-1 L D^-1) D^2 <= max_c r_c^(1/2) d_c^2,
    r being the sums of D^-1 L D^-1. The d that made the kernel reproduces itself under d = r^(-1/4), so that is where
    a few rounds go; whatever they find is a bound. Infinity if L is not skew to the last bit, not finite or huge.
    """
    L = L.to(torch.float64)
    mirrored = L.transpose(1, 2).flip(tuple(range(3, L.dim())))
    if not bool(((L + mirrored == 0) & (L.abs() <= 2.0**100)).all()):  # false for NaN
        return math.inf
    n = max(1, L[0, 0].numel())  # c T products in each sum
    best, d = math.inf, torch.ones(L.shape[:2], dtype=L.dtype)
    for _ in range(rounds):
        inverse = (1 / d[:, :, None] / d[:, None, :]).reshape(*L.shape[:3], *(1 for _ in L.shape[3:]))
        scaled = L * inverse
        # Products of n terms are off by at most n 2^-53 times those of |L|, whose sums are below those of the norms.
        sizes = scaled.abs().flatten(3).sum(3) if L.dim() > 3 else scaled.abs()  # (g, c, c)
        error = 8 * n * 2.0**-53 * (sizes.mT @ sizes).sum(1)
        r = absolute_row_sums(scaled) + error + 2.0**-200  # far above what products lose by underflow
        best = min(best, float((r.sqrt() * d.square()).max()))
        d = (d * r.pow(-0.25)).sqrt()
        d = (d / d.amax(1, keepdim=True)).clamp(min=2.0**-8)
    return best * (1 + 32 * n * 2.0**-53)


def exponential(L: Tensor, terms: int) -> Tensor:
    """p(L) of a batch of matrices (g, c, c), by Horner's rule in L^2: 1 + terms // 2 products."""
    one = torch.eye(L.shape[-1], dtype=L.dtype, device=L.device)
    square = L @ L
    result = torch.zeros_like(L)
    for j in range(terms - terms % 2, -1, -2):
        pair = one / math.factorial(j)
        if j < terms:
            pair = pair + L / math.factorial(j + 1)
        result = pair if j == terms - terms % 2 else pair + square @ result
    return result
