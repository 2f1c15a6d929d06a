"""Functions of batches of matrices: the inverse, and the exponential of skew-Hermitian matrices."""

import math
from typing import Any

import torch
from torch import Tensor

from onelip.core.modes import full_precision, is_traced

# torch (2.13 and others; pytorch issues 141358, 142815) factorises the matrices of a batch in several threads after
# `torch.set_num_threads(n)`, n > 1. With MKL this is not safe: from about 150 rows on inverses are wrong by tens of per
# cent, mostly without an error. One matrix after the other is correct. Wrong results were seen from 151 rows on.
_SAFE_ROWS = 64


def inverse(A: Tensor) -> Tensor:
    """Return the inverse of each matrix of A (b, n, n), correct for any number of threads.

    Singular matrices give the result of `torch.linalg.inv_ex`. Compiled programs use torch's batched inverse, which is
    correct as long as the number of threads is not set.

    Examples:
        >>> inverse(torch.tensor([[[2.0, 0.0], [0.0, 4.0]]])).tolist()
        [[[0.5, 0.0], [0.0, 0.25]]]
    """
    if torch.compiler.is_compiling() or A.device.type != "cpu" or len(A) <= 1 or A.shape[-1] <= _SAFE_ROWS:
        return torch.linalg.inv_ex(A).inverse
    if is_traced(A):
        return torch.stack([torch.linalg.inv_ex(matrix).inverse for matrix in A])
    return torch.linalg.inv_ex(A).inverse if torch.get_num_threads() == 1 else _OneByOne.apply(A)


class _OneByOne(torch.autograd.Function):
    """Invert one matrix after the other; the derivative of all of them takes two batched products."""

    @staticmethod
    def forward(ctx: Any, A: Tensor) -> Tensor:
        X = torch.stack([torch.linalg.inv_ex(matrix).inverse for matrix in A])
        ctx.save_for_backward(X)
        return X

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (X,) = ctx.saved_tensors
        with full_precision(X.device):
            return -(X.mH @ gradients[0] @ X.mH)


# Coefficients of A, A^2, A^3, A^6 in B_1 .. B_5, and those of I.
_POWERS = (
    (-0.10036558103014462001, -0.00802924648241156960, -0.00089213849804572995, 0.0),
    (0.39784974949964507614, 1.36783778460411719922, 0.49828962252538267755, -0.00063789819459472330),
    (1.68015813878906197182, 0.05717798464788655127, -0.00698210122488052084, 0.00003349750170860705),
    (-0.06764045190713819075, 0.06759613017704596460, 0.02955525704293155274, -0.00001391802575160607),
    (0.0, -0.09233646193671185927, -0.01693649390020817171, -0.00001400867981820361),
)
_UNIT = (0.0, 0.0, -10.9676396052962062593, -0.09043168323908105619, 0.0)
_LARGEST = {torch.float32: 3.0, torch.float64: 1.0}


def skew_exponential(S: Tensor) -> Tensor:
    r"""Return $\exp(S)$ for skew-Hermitian matrices (b, n, n), to the precision of their type.

    $\exp$ is approximated by its Taylor polynomial of degree 18, with five products (P. Bader, S. Blanes, F. Casas,
    "Computing the Matrix Exponential with an Optimized Taylor Polynomial Approximation", Mathematics 7, 2019): from the
    powers $A, A^2, A^3, A^6$ five linear combinations $B_1 \ldots B_5$ are formed, then $C = B_4 + B_1 B_5$ and
    $T = B_2 + (B_3 + C) C$. For $\|A\| \le 3$ the remainder $3^{19}/19!$ is below the rounding of float32, for
    $\|A\| \le 1$ below that of float64. Larger matrices are halved first, and the result is squared the same number of
    times. The norm is bounded by $\|A^6\|_F^{1/6}$, which is 1.2 to 1.4 times the norm of Gaussian matrices.

    Compilers and the transforms of torch.func get `torch.matrix_exp`, because the number of halvings depends on the
    values.

    Args:
        S: real or complex, of norm below 1000.

    Examples:
        >>> Q = skew_exponential(torch.tensor([[[0.0, 1.0], [-1.0, 0.0]]]))
        >>> [[round(value, 5) for value in row] for row in Q[0].tolist()]
        [[0.5403, 0.84147], [-0.84147, 0.5403]]
    """
    if is_traced(S):
        return torch.matrix_exp(S)
    return _SkewExponential.apply(S)


class _SkewExponential(torch.autograd.Function):
    """Note [Derivative]: only the skew-Hermitian part of the gradient at A matters, of the gradients at A^2 and A^6 the
    Hermitian part, at A^3 the skew one. For Hermitian H and skew A, H A* + A* H = -(A H - (A H)*): one product instead
    of two. So the backward pass has eight products, where automatic differentiation has ten, and torch.matrix_exp needs
    those of a matrix of twice the size.
    """

    @staticmethod
    def forward(ctx: Any, S: Tensor) -> Tensor:
        powers = S.new_empty(4, *S.shape)
        powers[0] = S
        torch.bmm(S, S, out=powers[1])
        torch.bmm(powers[1], S, out=powers[2])
        torch.bmm(powers[2], powers[2], out=powers[3])
        halvings = _halvings(powers[3])
        if halvings:
            for power, exponent in zip(powers, (1, 2, 3, 6), strict=True):
                power.mul_(2.0 ** (-halvings * exponent))
        B = _parts(powers)
        C = torch.baddbmm(B[3], B[0], B[4])
        Q = torch.baddbmm(B[1], B[2] + C, C)
        roots = []
        for _ in range(halvings):
            roots.append(Q)
            Q = torch.bmm(Q, Q)
        ctx.save_for_backward(S, powers, C, *roots)
        return Q

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        S, *saved = ctx.saved_tensors
        with full_precision(S.device):
            if torch.is_grad_enabled():  # for second derivatives
                return torch.autograd.grad(torch.matrix_exp(S), S, gradients, create_graph=True)[0]
            return _gradient(gradients[0], *saved)


def _gradient(G: Tensor, powers: Tensor, C: Tensor, *roots: Tensor) -> Tensor:
    """Return the gradient at S for the gradient G at exp(S): the derivative of each product, in reverse order."""
    B = _parts(powers)  # cheaper to recompute than to keep
    for Q in reversed(roots):
        G = torch.baddbmm(torch.bmm(Q.mH, G), G, Q.mH)
    to_3 = torch.bmm(G, C.mH)
    to_4 = torch.baddbmm(to_3, (B[2] + C).mH, G)
    to_B = torch.stack([torch.bmm(to_4, B[4].mH), G, to_3, to_4, torch.bmm(B[0].mH, to_4)])
    one, two, three, six = _combined(tuple(zip(*_POWERS, strict=True)), to_B)
    A, A2, A3, _ = powers  # Note [Derivative]
    three = three - _twice_skew(torch.bmm(A3, _twice_hermitian(six) / 2))
    three = _twice_skew(three) / 2
    two = two - torch.bmm(three, A)
    one = one + torch.bmm(A2, three) - _twice_skew(torch.bmm(A, _twice_hermitian(two) / 2))
    return _twice_skew(one) / 2 * 2.0 ** -len(roots)


def _parts(powers: Tensor) -> Tensor:
    """Return B_1 .. B_5 (5, b, n, n) for the powers (4, b, n, n)."""
    B = _combined(_POWERS, powers)
    for part, unit in zip(B, _UNIT, strict=True):
        if unit:
            part.diagonal(dim1=1, dim2=2).add_(unit)
    return B


def _combined(factors: tuple[tuple[float, ...], ...], parts: Tensor) -> Tensor:
    """Return linear combinations (len(factors), b, n, n) of the parts (m, b, n, n), in one pass over memory."""
    real = torch.view_as_real(parts) if parts.is_complex() else parts
    table = torch.tensor(factors, dtype=torch.float64).to(real)
    sums = (table @ real.reshape(len(parts), -1)).reshape(len(factors), *real.shape[1:])
    return torch.view_as_complex(sums) if parts.is_complex() else sums


def _halvings(A6: Tensor) -> int:
    """Return how often to halve A until ||A^6||_F^(1/6) is in the range of the polynomial; 0 if A is not finite."""
    real = torch.view_as_real(A6) if A6.is_complex() else A6  # norms of complex tensors are slow in torch
    sums = real.flatten(1).square().sum(1)
    bound = float(torch.where(sums.isfinite(), sums, 0.0).max()) ** (1 / 12) if len(A6) else 0.0
    return max(0, math.ceil(math.log2(bound / _LARGEST[real.dtype]))) if bound > 0 else 0


def _twice_skew(M: Tensor) -> Tensor:
    return M - M.mH


def _twice_hermitian(M: Tensor) -> Tensor:
    return M + M.mH
