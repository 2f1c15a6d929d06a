"""Column weights that equalise the row sums of a Gram operator: the right inverse of AOL.

For W and its symmetric matrix T of absolute Gram entries let s > 0 be the Perron vector, T s = rho s. Then the row sums
of W diag(s) are s_c (T s)_c = rho s_c^2, so AOL(W diag(s)) = W / sqrt(rho): the same layer up to one factor. The factor
is 1 for every weight that AOL can produce, because T then has Perron root 1. If T splits into blocks (groups of
channels without common products), AOL rescales them independently, and each block has its own rho.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from onelip.core.precision import full_precision
from onelip.gram._laid_out import absolute_matrix, lay_out
from onelip.gram.row_sums import per_column
from onelip.gram.scaling import normalizer

_ITERATIONS = 2000
_FIXED_POINT_ITERATIONS = 100
_PATIENCE = 10


def balanced(W: Tensor) -> Tensor:
    """Return W diag(s) for a kernel W (g, rows, columns, *taps), with s scaled to maximum 1 on each block."""
    return W * per_column(perron_vector(_absolute_matrix(W), _tolerance(W)).to(W.dtype), W)


def _tolerance(W: Tensor) -> float:
    """Tolerance on the relative spread of the result, well below the precision of W's dtype."""
    return max(torch.finfo(W.dtype).eps / 16, 1e-14)


def balanced_for(W: Tensor, rescale: Callable[[Tensor], Tensor]) -> Tensor:
    """Return W diag(s) such that rescale(W diag(s)) is W up to a factor per block, for a map that rescales columns.

    With more than one Gram step s is not a Perron vector; it is found by fixed-point iteration. A result that has not
    converged is still a valid parameter.

    Args:
        W: kernel (g, rows, columns, *taps).
        rescale: map of kernels that multiplies each column by a factor.
    """
    blocks = connected_blocks(_absolute_matrix(W))
    V = W.double() * normalizer(W.double())  # the same columns up to a factor; their lengths do not underflow
    length = _column_lengths(V)
    s = torch.ones_like(length)
    history: list[float] = []
    for _ in range(_FIXED_POINT_ITERATIONS):
        factor = _column_lengths(rescale(V * per_column(s, V))) / length
        factor = torch.where(length > 0, factor, 1.0)
        top = block_maximum(factor, blocks)
        history.append(float((top / -block_maximum(-factor, blocks) - 1).max()))
        stalled = len(history) > _PATIENCE and not history[-1] < 0.8 * history[-1 - _PATIENCE]
        if stalled or not history[-1] > 100 * _tolerance(W):
            break
        s = s / factor
        s = s / block_maximum(s, blocks)
    return W * per_column(s.to(W.dtype), W)


def _column_lengths(W: Tensor) -> Tensor:
    return torch.linalg.vector_norm(W.transpose(1, 2).flatten(2), dim=2)


def _absolute_matrix(W: Tensor) -> Tensor:
    Q = lay_out(W.double())
    with full_precision(W.device):
        return absolute_matrix(Q * normalizer(Q))


def perron_vector(T: Tensor, tolerance: float = 1e-14) -> Tensor:
    """Return positive s with T s = rho s on each connected block of symmetric non-negative matrices T (g, n, n).

    Power iteration that stops when T s / s is constant on every block up to rounding. If it converges slowly, the
    result is an approximation. It is still positive, which is all that soundness requires.

    Examples:
        >>> perron_vector(torch.tensor([[[1.0, 1.0], [1.0, 1.0]]], dtype=torch.float64))
        tensor([[1., 1.]], dtype=torch.float64)
    """
    blocks = connected_blocks(T)
    # Subtracting the smallest diagonal entry keeps the eigenvectors and speeds up the convergence.
    shifted = T - torch.diag_embed(T.diagonal(dim1=1, dim2=2).amin(1, keepdim=True).expand(T.shape[:2]))
    s = torch.ones_like(T[:, 0])
    for _ in range(_ITERATIONS):
        product = (shifted @ s[:, :, None]).squeeze(-1)
        top = block_maximum(product, blocks)
        # A block of size one may be zero after the shift; its s is final.
        renewed = torch.where(top > 0, product / top, s)
        renewed = torch.where(renewed > 0, renewed, s)
        ratio = torch.where(s > 0, renewed / s, torch.ones_like(s))
        spread = block_maximum(ratio, blocks) / -block_maximum(-ratio, blocks)
        s = renewed
        if not bool((spread > 1 + tolerance).any()):
            break
    return s


def connected_blocks(T: Tensor) -> Tensor:
    """A label (g, n) for each index; two labels are equal if a chain of non-zero entries connects the indices."""
    n = T.shape[1]
    labels = torch.arange(n, device=T.device).expand(T.shape[:2])
    meets = T > 0
    while True:
        reached = torch.where(meets, labels[:, None, :], n).amin(2)
        renewed = torch.minimum(labels, reached)
        renewed = renewed.gather(1, renewed)  # labels are indices: jump to the label of the label
        if torch.equal(renewed, labels):
            return labels
        labels = renewed


def block_maximum(values: Tensor, blocks: Tensor) -> Tensor:
    largest = torch.full_like(values, -torch.inf).scatter_reduce(1, blocks, values, "amax")
    return largest.gather(1, blocks)
