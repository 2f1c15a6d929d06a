"""Björck's iteration of order 1 from a proved scaling: matrices of norm at most 1.

Note [Rounding]
    To first order in u, the unit roundoff; sums in any order. X (m, n), n <= m, is the stored matrix before a step, and
    x = ||X||. The computed Gram matrix is X^T X + E with ||E|| <= m n u x^2.

    Step by step: the step exceeds norm 1 by at most ||X|| ||E|| / 2 and the n^2 u 3/2 x of its product. For
    m n u <= 1/16 the norm stays below 1.5 for any number of steps, hence below 2. So steps may be taken in float32 up
    to that size (float64 beyond), and only the last one matters. It is taken in float64 and exceeds 1 by at most
    8 m n u, for any X of norm at most 2.

    On the side of G, m >= 2 n: let Z (n, n) be any matrix with ||X Z|| <= 2, and z = ||Z||. The computed C = Z^T G Z is
    (X Z)^T X Z + F with ||F|| <= (m n + 2 n^2) u x^2 z^2, so X Z (3/2 I - 1/2 C) exceeds norm 1 by at most ||F||, and
    its two products add at most 3 n^2 u x z. This holds for every Z: each step starts from G, so errors do not
    accumulate. With u of float32 (G itself is in float64) and x^2 <= 2 this is less than 1/8 for n <= 256 and z <= 2.3,
    and less than 0.27 for z <= 3.6. So H = 3/2 I - 1/2 C, which multiplies Z, has norm at most 1.51, 1.52, 1.55 and
    1.61 in four such steps; z stays below 1.51, 2.3, 3.6 and 5.8, and X Z has norm at most 1.27. The last step is taken
    in float64 and exceeds 1 by at most 150 m n u. X is never scaled: its factor, and the requested norm, multiply small
    matrices, which adds 4 n u x z.
"""

import itertools
import math
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd import Function

from onelip.core.modes import full_precision, is_traced
from onelip.methods.numerics import UNIT64, of_moderate_size, widest_type

Scaling = Literal["tight", "frobenius"]

_FEW_COLUMNS = 64  # up to here the cost of float64 is negligible
_MOST_COLUMNS = 256  # largest Gram matrix whose polynomials may be in float32
_STEPS_BEFORE_LAST = 4  # on the side of the Gram matrix, before the matrix itself is multiplied


def bjorck_steps(M: Tensor, steps: int, scaling: Scaling = "tight", norm: float = 1.0) -> Tensor:
    r"""Scale each matrix by a proved bound and take steps of Björck's iteration of order 1; the last one in float64.

    **Theorem.** One step maps $X$ to $X (\frac32 I - \frac12 X^\top X)$, hence each singular value $s$ to
    $f(s) = \frac32 s - \frac12 s^3$, and $|f(s)| \le 1$ for all $s \in [0, 2]$. So a matrix of norm at most 2 has norm
    at most 1 after one step, converged or not.

    **Scaling.** The norm is first reduced to at most $\sqrt 2$ (beyond it $f$ decreases to 0) by proved bounds on
    $G = M^\top M$ $(n, n)$: with $a = \mathrm{tr}(G) / n$ and $R = (G - aI)^2$, $\|M\|^2$ is at most $\|G\|_F$, at most
    $\max_i \sum_j |G_{ij}|$, at most $a + ((1 - 1/n)\,\mathrm{tr}\,R)^{1/2}$ (Wolkowicz and Styan, 1980), and at most
    $a + \|R\|^{1/2}$ with $\|R\|$ at most $\|R\|_F$ or $\max_i \sum_j |R_{ij}|$.

    All steps are polynomials in $G$. Matrices that are much taller than wide take several steps on the side of $G$,
    where they are cheap, and are multiplied by their product; others are multiplied in each step. The iteration stops
    early if the matrix is orthogonal to the precision of its type.

    Å. Björck, C. Bowie, "An iterative algorithm for computing the best estimate of an orthogonal matrix", 1971.

    Args:
        M: (g, m, n), float32 or float64, of any scale.
        steps: largest number of steps, at least 1.
        scaling: divisor of M: "tight" by the bounds above, or "frobenius" by the root of the Frobenius norm of
            $M^\top M$.
        norm: factor of the result.

    Returns:
        Matrices in float64 of norm at most `norm * (1 + excess_of_steps(m, n))`, for every finite M. Zero stays zero; a
        matrix with a NaN or an infinity becomes NaN.

    Examples:
        >>> bjorck_steps(torch.tensor([[[3.0, 0.0], [0.0, 2.0]]]), steps=12).round(decimals=6)
        tensor([[[1., 0.],
                 [0., 1.]]], dtype=torch.float64)
    """
    m, n = M.shape[-2:]
    if m < n:  # on the smaller side
        return bjorck_steps(M.mT, steps, scaling, norm).mT
    if m >= 2 * n:
        return _steps_of_tall(M, steps, scaling, norm)
    X = _steps_of_square(M, steps, scaling)
    return X if norm == 1 else X * norm


def excess_of_steps(m: int, n: int) -> float:
    """Return by how much the norm of `bjorck_steps` of an (m, n) matrix can exceed 1; Note [Rounding]."""
    m, n = max(m, n), min(m, n)
    return (160 if m >= 2 * n else 8) * m * n * UNIT64


def _steps_of_square(M: Tensor, steps: int, scaling: Scaling) -> Tensor:
    m, n = M.shape[-2:]
    in_float64 = n <= _FEW_COLUMNS or m * n > 2**20  # m n u = 1/16 in float32
    X = of_moderate_size(M.to(widest_type(M)) if in_float64 else M)
    G = symmetric_gram(X)
    factor = _inverse_root(_divisor(X, G, scaling))[:, None, None]
    X, G = X * factor, G * factor.detach().square()
    is_end = False
    for _ in range(steps - 1):
        is_end = _is_orthogonal(G, M.dtype)
        if is_end:
            break
        X = _Step.apply(X, G, X.dtype, False)
        G = symmetric_gram(X)
    return _Step.apply(X, G, widest_type(X), is_end)


def _steps_of_tall(M: Tensor, steps: int, scaling: Scaling, norm: float) -> Tensor:
    n = M.shape[-1]
    inner = widest_type(M) if n > _MOST_COLUMNS or n <= _FEW_COLUMNS else M.dtype
    narrow = M if _is_moderate(M) else of_moderate_size(M)
    X = narrow.detach().to(widest_type(M))
    G = _Gram.apply(narrow, X)
    # The factors of X and of the result multiply small matrices: a pass over X costs as much as a product of those.
    factor = _inverse_root(_divisor(None, G, scaling))[:, None, None]
    G = G * factor.square()
    while True:
        Z, C, is_end, rough = None, G, False, G.to(inner)
        for _ in range(min(_STEPS_BEFORE_LAST, steps - 1)):
            is_end = _is_orthogonal(C.detach(), M.dtype)
            if is_end:
                break
            H = _one_step(C.to(inner))
            Z = H if Z is None else Z @ H
            steps -= 1
            if steps == 1:
                break  # the last step follows
            C = Z.mT @ rough @ Z
        else:
            is_end = _is_orthogonal(C.detach(), M.dtype)
        if Z is None:
            q = _one_step(G)
        else:
            Z = Z.to(G.dtype)
            q = Z @ _one_step(Z.mT @ G @ Z)
        steps -= 1
        is_last = steps < 1 or is_end
        q = q if factor is None else q * factor
        made = _Product.apply(narrow, X, q * norm if is_last and norm != 1 else q)
        if is_last:
            return made
        narrow, X, factor = made.to(M.dtype), made.detach(), None
        G = _Gram.apply(narrow, X)


@torch.no_grad()
def symmetric_gram(X: Tensor) -> Tensor:
    """Return X^T X for each matrix of X (g, m, n), computed on and above the diagonal only, without derivative.

    Examples:
        >>> symmetric_gram(torch.tensor([[[1.0, 2.0], [0.0, 3.0]]]))
        tensor([[[ 1.,  2.],
                 [ 2., 13.]]])
    """
    n = X.shape[-1]
    count = max(1, min(4, n // 256))
    edges = [n * i // count for i in range(count + 1)]
    # Block rows from the diagonal on; blocks left of it are transposes of blocks above.
    rows = [X[..., start:stop].mT @ X[..., start:] for start, stop in itertools.pairwise(edges)]
    if count == 1:
        return rows[0]
    whole = [
        torch.cat([*(rows[j][..., edges[i] - edges[j] : edges[i + 1] - edges[j]].mT for j in range(i)), rows[i]], -1)
        for i in range(count)
    ]
    return torch.cat(whole, -2)


def _is_moderate(M: Tensor) -> bool:
    """Return whether eighth powers of each matrix are in the range of float64, and the derivative in that of float32.

    This saves a pass over the matrices. False if values must not be read.
    """
    if not _may_look(M):
        return False
    size = M.detach().abs().amax((-2, -1))
    return bool(((size >= 2.0**-20) & (size <= 2.0**20)).all())


def _divisor(X: Tensor | None, G: Tensor, scaling: Scaling) -> Tensor:
    """Return the squares (g,) of the divisors of X with Gram matrices G, such that norms are at most sqrt(2).

    If possible the mean of the squared singular values becomes 1, so that nearly orthogonal matrices are unchanged.
    Without X the derivative is that of G; with X, G is a constant.
    """
    if scaling == "frobenius":
        return torch.linalg.matrix_norm(_with_derivative(X, G))
    mean = (G.diagonal(dim1=-2, dim2=-1) if X is None else X.square().sum(-2)).mean(-1)
    # Mostly the mean is larger, and its derivative is cheap. Reading values would stall a GPU or a compiler.
    if _may_look(G):
        constant = G.detach()
        if bool((mean >= _simple_bound(constant) / 2).all()) or bool((mean >= _bound(constant) / 2).all()):
            return mean
    return torch.maximum(mean, _bound(_with_derivative(X, G)) / 2)


def _simple_bound(G: Tensor) -> Tensor:
    """Return a bound on the norm of each of G (g, n, n), without a product."""
    n = G.shape[-1]
    a, rest = _around_mean(G)
    spread = torch.minimum(G.abs().sum(-1).amax(-1), a + math.sqrt(1 - 1 / n) * torch.linalg.matrix_norm(rest))
    return torch.minimum(spread, torch.linalg.matrix_norm(G))


def _bound(G: Tensor) -> Tensor:
    """Return a bound on the norm of each of G (g, n, n), with one product."""
    a, rest = _around_mean(G)
    R = rest.mT @ rest
    square = torch.minimum(torch.linalg.matrix_norm(R), R.abs().sum(-1).amax(-1))
    # For a multiple of the identity the derivative of the root is infinite; there the simple bound is smaller.
    root = torch.where(square > 0, square, 1.0).sqrt() * (square > 0)
    return torch.minimum(_simple_bound(G), a + root + torch.where(square.isnan(), square, 0.0))


def _around_mean(G: Tensor) -> tuple[Tensor, Tensor]:
    a = G.diagonal(dim1=-2, dim2=-1).mean(-1)
    return a, G - a[:, None, None] * torch.eye(G.shape[-1], dtype=G.dtype, device=G.device)


def _with_derivative(X: Tensor | None, G: Tensor) -> Tensor:
    """Return the Gram matrix with a derivative; `symmetric_gram` has none."""
    return G if X is None or not X.requires_grad else _Gram.apply(X, X.detach())


def _inverse_root(square: Tensor) -> Tensor:
    """Return square^(-1/2), and 0 for 0; NaN == 0 is false, so NaN stays NaN."""
    empty = square == 0
    return torch.where(empty, 0.0, torch.where(empty, 1.0, square).rsqrt())


def _one_step(G: Tensor) -> Tensor:
    return 1.5 * torch.eye(G.shape[-1], dtype=G.dtype, device=G.device) - 0.5 * G


class _Step(Function):
    """X (g, m, n) -> X (3/2 I - 1/2 X^T X), computed and returned in a wider type than the derivative needs.

    G is X^T X in the type of X. With `is_end` G is the identity to half of the digits of the type, which saves one
    product in the derivative. Second derivatives use the whole formula.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(X: Tensor, G: Tensor, dtype: torch.dtype, is_end: bool) -> Tensor:
        if dtype != X.dtype:
            X = X.to(dtype)
            G = symmetric_gram(X)
        return torch.baddbmm(X, X, G, beta=1.5, alpha=-0.5)

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
                G = X.mT @ X  # for second derivatives
            elif ctx.is_end:
                return torch.baddbmm(g, X, S + S.mT, alpha=-0.5), None, None, None
            # The derivative of 3/2 X - 1/2 X X^T X: one term for each factor X.
            result = torch.baddbmm(g, g, G, beta=1.5, alpha=-0.5)
            return torch.baddbmm(result, X, S + S.mT, alpha=-0.5), None, None, None


class _Gram(Function):
    """X^T X for X (g, m, n), given in two types: a wide one for the product, a narrow one for the derivative."""

    generate_vmap_rule = True

    @staticmethod
    def forward(narrow: Tensor, X: Tensor) -> Tensor:
        return X.mT @ X

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (narrow,) = ctx.saved_tensors
        with full_precision(narrow.device):
            return narrow @ (grads[0] + grads[0].mT).to(narrow.dtype), None


class _Product(Function):
    """X q for X (g, m, n), given in two types as in `_Gram`, and q (g, n, n)."""

    generate_vmap_rule = True

    @staticmethod
    def forward(narrow: Tensor, X: Tensor, q: Tensor) -> Tensor:
        return X @ q

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0], inputs[2])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, Tensor]:
        narrow, q = ctx.saved_tensors
        with full_precision(narrow.device):
            g = grads[0].to(narrow.dtype)
            return g @ q.mT.to(narrow.dtype), None, (narrow.mT @ g).to(q.dtype)


def _may_look(x: Tensor) -> bool:
    """Return whether values may be read: on a GPU this would wait for them, and a compiler cannot."""
    return x.device.type == "cpu" and not is_traced(x)


def _is_orthogonal(G: Tensor, dtype: torch.dtype) -> bool:
    """Return whether one more step, which squares the distance, makes X with G = X^T X orthogonal to the precision of
    the type. This is an estimate: stopping too early costs orthogonality, not soundness."""
    if not _may_look(G):
        return False
    n = G.shape[-1]
    room = torch.finfo(dtype).eps ** 0.5
    # A cheap test first: the trace differs from n by at most n times the distance.
    trace = G.diagonal(dim1=-2, dim2=-1).sum(-1)
    if not bool(((trace - n).abs() <= n * room).all()):
        return False
    rest = G - torch.eye(n, dtype=G.dtype)
    total = torch.linalg.matrix_norm(rest)
    if bool((total <= room).all()):
        return True
    # The norm is between this and this / sqrt(n): power iteration from the longest column.
    lengths = rest.square().sum(-2)
    v = rest.gather(-1, lengths.argmax(-1)[:, None, None].expand(-1, n, 1))
    for _ in range(3):
        v = rest @ (v / torch.linalg.vector_norm(v, dim=-2, keepdim=True).clamp(min=torch.finfo(G.dtype).tiny))
    return bool((torch.linalg.vector_norm(v, dim=-2)[:, 0] <= room).all())
