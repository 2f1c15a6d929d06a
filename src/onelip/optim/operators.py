r"""Retraction, tangent projection and orthogonalisation of operators, as pure functions of kernels.

A kernel $P$ of shape (groups, rows, columns, *taps) is the form of the weight of any linear layer in
`onelip.core.geometry`: a batch of convolutions of stride 1, or of matrices if there are no taps. Products of operators
are products of matrices, or correlations of kernels; $P G$ has more taps than $P$ and is cut back to those of $P$.
"""

import math
from typing import Literal

import torch
from torch import Tensor

from onelip.core.errors import check_integer
from onelip.core.floats import power_of_two
from onelip.core.modes import full_precision
from onelip.core.parametrization import working_type
from onelip.gram.products import composition, correlation, per_column

Retraction = Literal["r1", "r2"]
RETRACTIONS = ("r1", "r2")

_BLOCK = 512  # columns
# The quintic of Muon: it maps [0, 1] into about [0, 1.2], with slope 3.4445 at zero.
_MUON = (3.4445, -4.7750, 2.0315)


@torch.no_grad()
def retract(P: Tensor, kind: Retraction = "r2", *, dtype: torch.dtype | None = None) -> Tensor:
    r"""Move an operator towards the nearest one with orthonormal columns, by one step of Newton and Schulz.

    $$\text{R1:}\quad P \leftarrow \tfrac32 P - \tfrac12 P\,P^\top P$$

    converges for singular values below $\sqrt 3$. R2 applies it to the rescaling of AOL,

    $$\text{R2:}\quad Q = P\,\mathrm{diag}(r)^{-1/2},\; r_c = \sum_a |P^\top P|_{ca}, \qquad
    P \leftarrow \tfrac32 Q - \tfrac12 Q\,Q^\top Q.$$

    Since $\|Q\| \le 1$ and $s \mapsto \tfrac32 s - \tfrac12 s^3$ maps $[0, 1]$ into itself, the result of R2 has norm
    at most 1 for every matrix P. For a convolution the product is cut back to its taps, which can exceed 1 slightly.
    A kernel with more columns than rows cannot have orthonormal columns: R2 is then $Q$, and R1 changes nothing.

    Args:
        P: kernel (groups, rows, columns, *taps), float32 or float64.
        kind: "r1" or "r2".
        dtype: type of the product with the correction $P^\top P - I$ of a matrix, which is small where $P$ is nearly
            orthogonal; the Gram matrix always has the type of P. Default: that of P.

    Returns:
        The new kernel. Zero columns stay zero.

    Examples:
        >>> P = torch.eye(4)[None] + 0.1 * torch.randn(1, 4, 4)
        >>> for _ in range(10):
        ...     P = retract(P)
        >>> bool((P.mT @ P - torch.eye(4)).abs().max() < 1e-5)
        True
    """
    if kind not in RETRACTIONS:
        raise ValueError(f"expected the retraction to be 'r1' or 'r2', got {kind!r}")
    shape, is_tall = P.shape, P.shape[1] >= P.shape[2]
    if P.numel() == 0 or (kind == "r1" and not is_tall):
        return P
    with full_precision(P.device):
        P = _squeezed(P)
        P = P * _moderate(P) if kind == "r2" else P.clone()  # a copy, changed in place below: large P need much memory
        G = _gram(P, P)
        if kind == "r2":
            _rescale(P, G)
        if is_tall and P.dim() == 3:
            G.diagonal(dim1=1, dim2=2).sub_(1)  # in the form P - P (G - I) / 2 rounding is relative to the correction
            G = G.to(dtype or G.dtype)
            P.sub_(_product(P.to(G.dtype), G), alpha=0.5)
        elif is_tall:
            product = composition(P, G)
            P.mul_(1.5).sub_(product, alpha=0.5)
        return P.reshape(shape)


def tangent(P: Tensor, D: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    r"""Project a direction to the tangent space of the operators with orthonormal columns.

    $$D \leftarrow D - P\,\mathrm{sym}(P^\top D), \qquad \mathrm{sym}(X) = \tfrac12 (X + X^\top).$$

    If $P^\top P = I$, a step along the result changes $P^\top P$ of a matrix only in second order. For a kernel with
    taps the product with $P$ is cut back to its taps, so some of the first order stays.

    Args:
        P: kernel (groups, rows, columns, *taps) with columns near orthonormal.
        D: direction of the same shape.
        dtype: type of the products, such as torch.bfloat16. Default: that of P.

    Examples:
        >>> P, D = torch.eye(3)[None], torch.randn(1, 3, 3)
        >>> X = tangent(P, D)
        >>> bool((X + X.mT).abs().max() < 1e-6)  # at the identity: the skew-symmetric part
        True
    """
    if P.numel() == 0:
        return D
    with full_precision(P.device):
        low = _squeezed(P).to(dtype or P.dtype)
        X = _gram(low, _squeezed(D).to(low.dtype))
        # The adjoint exchanges the channels and the sign of the offset.
        X = 0.5 * (X + X.flip(tuple(range(3, X.dim()))).transpose(1, 2))
        PX = _product(low, X) if X.dim() == 3 else composition(low, X)
        return D - PX.to(D.dtype).reshape(D.shape)


@torch.no_grad()
def orthogonalize(D: Tensor, iterations: int = 2, *, dtype: torch.dtype | None = None) -> Tensor:
    r"""Bring the singular values of a direction near 1, as Muon does, with AOL as pre-conditioner.

    The kernel is read as a matrix from (columns, taps) to rows, transposed if that is wide. With $A = X^\top X$,

    $$X = D\,\mathrm{diag}(r)^{-1/2},\; r_c = \sum_a |D^\top D|_{ca}, \qquad
    X \leftarrow 3.4445\,X - X (4.775\,A - 2.0315\,A^2).$$

    AOL keeps the singular values at most 1 without losing those of a matrix with nearly orthogonal columns, where the
    Frobenius norm of Muon divides by the root of the rank. After two iterations small singular values are smaller than
    after the five of Muon; results/fast_ablation.json has trainings with other numbers of iterations.

    Args:
        D: kernel (groups, rows, columns, *taps).
        iterations: number of iterations; 0 returns the pre-conditioned direction.
        dtype: type of the products, such as torch.bfloat16. Default: that of D.

    Examples:
        >>> X = orthogonalize(torch.randn(1, 64, 16))
        >>> s = torch.linalg.svdvals(X)
        >>> bool(0.3 < s.min() and s.max() < 1.3)
        True
    """
    check_integer("iterations", iterations, 0, 100)
    if D.numel() == 0:
        return D
    with full_precision(D.device):
        X = D.flatten(2)
        is_wide = X.shape[1] < X.shape[2]
        X = (X.mT if is_wide else X).to(dtype or D.dtype)  # bfloat16 has the exponents of float32
        X = X * _moderate(X)
        A = _gram(X, X)
        _rescale(X, A)
        a, b, c = _MUON
        for i in range(iterations):
            A = _gram(X, X) if i else A
            B = torch.baddbmm(A, A, A, beta=b, alpha=c)
            X = torch.baddbmm(X, X, B, beta=a) if X.is_contiguous() else torch.baddbmm(X.mT, B, X.mT, beta=a).mT
        return (X.mT if is_wide else X).to(D.dtype).reshape(D.shape)


def _product(P: Tensor, G: Tensor) -> Tensor:
    """P G for symmetric matrices G, in the memory layout of P: sums of tensors of different layouts are slow."""
    return _matmul(P, G) if P.is_contiguous() else _matmul(G, P.mT).mT


def _matmul(A: Tensor, B: Tensor) -> Tensor:
    """A B of batches of matrices; a batch of one as matrices, which takes half the time of bmm in bfloat16."""
    return (A[0] @ B[0])[None] if len(A) == 1 else A @ B


def _gram(P: Tensor, D: Tensor) -> Tensor:
    """The operator P^T D."""
    return _matmul(P.mT, D) if P.dim() == 3 else correlation(P, D)


def _squeezed(P: Tensor) -> Tensor:
    """Without tap axes of length one: a 1x1 convolution is a matrix."""
    return P.reshape(*P.shape[:3], *(k for k in P.shape[3:] if k > 1))


def _moderate(P: Tensor) -> Tensor:
    """A power of two for each group (g, 1, ...) that brings the largest entry to about 1: squares are then finite."""
    axes = tuple(range(1, P.dim()))
    largest = torch.maximum(P.amax(axes), -P.amin(axes))
    _, exponent = torch.frexp(torch.where(largest > 0, largest, 1.0))
    reach = 1 - math.frexp(torch.finfo(P.dtype).tiny)[1]  # powers of two from -reach to reach are normal numbers
    power = power_of_two((-exponent).clamp(-reach, reach), P.dtype)
    return power.to(P.dtype).reshape(-1, *(1 for _ in P.shape[1:]))  # float32 would make bfloat16 products float32


def _rescale(P: Tensor, G: Tensor) -> None:
    """Multiply the columns of P by r^(-1/2) (zero where r is), and its Gram operator G on both sides, in place.

    r (g, columns) are the absolute row sums of G, computed in blocks: |G| would be as large as G.
    """
    sums = [B.abs().transpose(1, 2).flatten(2).sum(2, dtype=working_type(G.dtype)) for B in G.split(_BLOCK, 2)]
    r = torch.cat(sums, 1)
    d = torch.where(r > 0, torch.rsqrt(r), 0.0).to(G.dtype)
    P *= per_column(d, P)
    G *= per_column(d, G)
    G *= d.reshape(*d.shape, *(1 for _ in G.shape[2:]))
