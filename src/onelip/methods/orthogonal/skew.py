"""Skew kernels of bounded norm, and truncated exponentials of skew operators."""

import math

import torch
from torch import Tensor

from onelip.gram.row_sums import absolute_row_sums
from onelip.methods.orthogonal.steps import of_moderate_size, widest_type

# Added to the sums r (of a kernel with entries up to 2 or 4). Larger sums only lower the norm, and channels that are
# nearly zero, and their gradients, are not enlarged.
_FLOOR = 2.0**-20


def skew_part(M: Tensor) -> Tensor:
    r"""Return $(M - M^\top) / 2$ for a kernel (g, c, c, *taps) with an odd number of taps.

    The transpose exchanges channels and reverses taps. The two halves are exact negatives of each other, also in
    floating point.
    """
    taps = tuple(range(3, M.dim()))
    return (M - M.transpose(1, 2).flip(taps)) / 2


def skew_kernel(M: Tensor, norm: float) -> Tensor:
    r"""Return a skew kernel of norm at most `norm`, from the skew part $J$ of $M$, in float64.

    **Theorem.** By AOL, with $r_c = \sum_j |J^\top J|_{cj}$ for each channel, $\|J\,\mathrm{diag}(r)^{-1/2}\| \le 1$.
    With $D = \mathrm{diag}(r)^{-1/4}$, $D J D$ is skew and similar to $J\,\mathrm{diag}(r)^{-1/2}$, so its norm is a
    spectral radius:

    $$\|D J D\| = \rho(J\,\mathrm{diag}(r)^{-1/2}) \le 1.$$

    The result is `norm` times $D J D$. This, instead of a power iteration, is our own.

    A skew operator $J$ is normal with eigenvalues $i a$, $|a| \le \|J\|$. So for $p(x) = \sum_{j \le t} x^j / j!$,
    $\|p(J)\| = \max |p(ia)|$ is at most `gain(t, ||J||)` of `onelip.graph.exact`, without an error term. For $t = 4$
    and $8$ it is at most 1 up to $\|J\| = 2.8$ and $3.3$, for $t = 5$ it is 1.005 at $\|J\| = 2$.

    Args:
        M: (g, c, c, *taps).
        norm: the norm.

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
    r"""Return a proved bound of the norm of a stored kernel, with rounding.

    For every diagonal $D$, $\|L\| = \rho((D^{-1} L D^{-1}) D^2) \le \max_c r_c^{1/2} d_c^2$, where $r$ are the sums of
    $D^{-1} L D^{-1}$ as in `skew_kernel`. The $d$ of the construction is a fixed point of $d = r^{-1/4}$, which a few
    rounds approach; each of them gives a bound.

    Args:
        L: (g, c, c, *taps).
        rounds: number of diagonals that are tried.

    Returns:
        The bound; infinity if L is not exactly skew, not finite, or above 2^100.
    """
    L = L.to(torch.float64)
    mirrored = L.transpose(1, 2).flip(tuple(range(3, L.dim())))
    if not bool(((L + mirrored == 0) & (L.abs() <= 2.0**100)).all()):  # false for NaN
        return math.inf
    n = max(1, L[0, 0].numel())  # number of products in each sum
    best, d = math.inf, torch.ones(L.shape[:2], dtype=L.dtype)
    for _ in range(rounds):
        inverse = (1 / d[:, :, None] / d[:, None, :]).reshape(*L.shape[:3], *(1 for _ in L.shape[3:]))
        scaled = L * inverse
        # Sums of n products have an error of at most n 2^-53 times those of |L|.
        sizes = scaled.abs().flatten(3).sum(3) if L.dim() > 3 else scaled.abs()  # (g, c, c)
        error = 8 * n * 2.0**-53 * (sizes.mT @ sizes).sum(1)
        r = absolute_row_sums(scaled) + error + 2.0**-200  # far above the underflow of products
        best = min(best, float((r.sqrt() * d.square()).max()))
        d = (d * r.pow(-0.25)).sqrt()
        d = (d / d.amax(1, keepdim=True)).clamp(min=2.0**-8)
    return best * (1 + 32 * n * 2.0**-53)


def exponential(L: Tensor, terms: int) -> Tensor:
    """Return the truncated exponential of matrices (g, c, c), by Horner's rule in L^2: 1 + terms // 2 products."""
    one = torch.eye(L.shape[-1], dtype=L.dtype, device=L.device)
    square = L @ L
    result = torch.zeros_like(L)
    for j in range(terms - terms % 2, -1, -2):
        pair = one / math.factorial(j)
        if j < terms:
            pair = pair + L / math.factorial(j + 1)
        result = pair if j == terms - terms % 2 else pair + square @ result
    return result
