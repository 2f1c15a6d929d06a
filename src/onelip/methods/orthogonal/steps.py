"""Björck's iteration of order 1, from a scaling that is proved to suffice: matrices of norm at most 1.

Citation: Å. Björck, C. Bowie, "An iterative algorithm for computing the best estimate of an orthogonal matrix", 1971.

One step of order 1 maps X to X (3/2 I - 1/2 X^T X), hence every singular value s to f(s) = 3/2 s - 1/2 s^3, and

    |f(s)| <= 1   for all s in [0, 2],                                                                           (1)

so a matrix whose norm is at most 2 has norm at most 1 after one step, converged or not. The norm is brought under
sqrt(2) beforehand, by bounds on G = M^T M (n, n) that are proved: with a = tr(G) / n and R = (G - a I)^2, ||M||^2 is at
most ||G||_F, at most max_i sum_j |G_ij|, at most a + ((1 - 1/n) tr R)^(1/2) (Wolkowicz and Styan, 1980), and at most
a + ||R||^(1/2) with ||R|| at most ||R||_F or max_i sum_j |R_ij|. Beyond sqrt(2) f falls towards 0, and with it what one
would like to become 1.

All steps are polynomials in G. Matrices that are much taller than wide take several on the side of G, where they are
cheap, and are multiplied by the product of them; others are multiplied in each step.

Note [Rounding]
    To first order in u, the unit roundoff; sums in any order. X (m, n), n <= m, is what is stored before a step, and
    x = ||X||. The computed Gram matrix is X^T X + E, ||E|| <= m n u x^2.

    Step by step: by (1) the step misses norm 1 by at most ||X|| ||E|| / 2 and the n^2 u 3/2 x of its product. For
    m n u <= 1/16 this stays below 1.5 however many steps there are: within reach of (1). So they may be taken in
    float32 up to that size (float64 beyond), and only the last one matters. It is taken in float64, where it misses 1
    by at most 8 m n u, whatever happened before.

    On the side of G, m >= 2 n: let Z (n, n) be anything with ||X Z|| <= 2, and z = ||Z||. The computed C = Z^T G Z is
    (X Z)^T X Z + F with ||F|| <= (m n + 2 n^2) u x^2 z^2, so X Z (3/2 I - 1/2 C) misses norm 1 by at most ||F||, and
    the two products that make it add at most 3 n^2 u x z. Whatever Z was: each step starts from G anew, so errors do
    not add up. With u of float32 (but not for G itself, which is float64) and x^2 <= 2 this is less than 1/8 for
    n <= 256 and z <= 2.3, and less than 0.27 for z <= 3.6. So H = 3/2 I - 1/2 C, which multiplies Z, has norm at most
    1.51, 1.52, 1.55 and 1.61 in four such steps; z stays below 1.51, 2.3, 3.6 and 5.8, and X Z has norm at most 1.27.
    The last step is taken in float64, where it misses 1 by at most 150 m n u. X is never scaled: its factor, and the
    norm that is asked for, multiply small matrices, which adds 4 n u x z.
"""

import itertools
import math
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd import Function

from onelip.core.precision import full_precision
from onelip.core.tracing import is_traced
from onelip.gram.scaling import normalizer

Scaling = Literal["tight", "frobenius"]

UNIT64 = 2.0**-53
_FEW_COLUMNS = 64  # up to here float64 costs nothing that is felt
_MOST_COLUMNS = 256  # of a Gram matrix whose polynomials may be in float32
_STEPS_BEFORE_LAST = 4  # on the side of the Gram matrix, before the matrix itself is multiplied


def bjorck_steps(M: Tensor, steps: int, scaling: Scaling = "tight", norm: float = 1.0) -> Tensor:
    """Scale each matrix of M (g, m, n) by a proved bound, take `steps` steps of order 1; the last one in float64.

    The result is float64 and has norm at most `norm` (1 + `excess_of_steps(m, n)`), for every finite M. Zero stays
    zero; a matrix with a NaN or an infinity becomes NaN. Steps end early where the matrix is orthogonal to the
    precision of its type.

    Args:
        M: float32 or float64, of any scale.
        steps: at least 1.
        scaling: what M is divided by: by what the bounds on M^T M allow, or the root of its Frobenius norm.
        norm: what the result is multiplied by.

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
    """By how much the norm of `bjorck_steps` of an (m, n) matrix can miss 1; Note [Rounding]."""
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
    # What X is scaled by, and the result, multiplies small matrices: a pass over X costs as much as a product of those.
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
                break  # what follows is the last step anyway
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
    """X^T X for each matrix of X (g, m, n), multiplied out on and above the diagonal only; a constant for derivatives.

    Examples:
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


def _is_moderate(M: Tensor) -> bool:
    """Whether the size of each matrix is such that even eighth powers of it are in range of float64, and the derivative
    in float32; false where nobody may look. It saves a pass over the matrices.
    """
    if not _may_look(M):
        return False
    size = M.detach().abs().amax((-2, -1))
    return bool(((size >= 2.0**-20) & (size <= 2.0**20)).all())


def widest_type(x: Tensor) -> torch.dtype:
    """float64, or float32 on devices that have no other; there the stated rounding is not proved."""
    return torch.float32 if x.device.type == "mps" else torch.float64


def _divisor(X: Tensor | None, G: Tensor, scaling: Scaling) -> Tensor:
    """The squares (g) by whose roots to divide matrices X with Gram matrices G: their norms are then <= sqrt(2).

    The mean of the squared singular values goes to 1 if it can: matrices next to orthogonal stay what they are. Without
    X the derivative is that of G; with it G is a constant.
    """
    if scaling == "frobenius":
        return torch.linalg.matrix_norm(_with_derivative(X, G))
    mean = (G.diagonal(dim1=-2, dim2=-1) if X is None else X.square().sum(-2)).mean(-1)
    # Mostly the mean decides, whose derivative costs nothing. To look at values would stall a GPU or a compiler.
    if _may_look(G):
        constant = G.detach()
        if bool((mean >= _simple_bound(constant) / 2).all()) or bool((mean >= _bound(constant) / 2).all()):
            return mean
    return torch.maximum(mean, _bound(_with_derivative(X, G)) / 2)


def _simple_bound(G: Tensor) -> Tensor:
    """On the norm of each of G (g, n, n), without a product."""
    n = G.shape[-1]
    a, rest = _around_mean(G)
    spread = torch.minimum(G.abs().sum(-1).amax(-1), a + math.sqrt(1 - 1 / n) * torch.linalg.matrix_norm(rest))
    return torch.minimum(spread, torch.linalg.matrix_norm(G))


def _bound(G: Tensor) -> Tensor:
    """The same with one."""
    a, rest = _around_mean(G)
    R = rest.mT @ rest
    square = torch.minimum(torch.linalg.matrix_norm(R), R.abs().sum(-1).amax(-1))
    # For a multiple of the identity the derivative of a root would be infinite: there the simple bound is smallest.
    root = torch.where(square > 0, square, 1.0).sqrt() * (square > 0)
    return torch.minimum(_simple_bound(G), a + root + torch.where(square.isnan(), square, 0.0))


def _around_mean(G: Tensor) -> tuple[Tensor, Tensor]:
    a = G.diagonal(dim1=-2, dim2=-1).mean(-1)
    return a, G - a[:, None, None] * torch.eye(G.shape[-1], dtype=G.dtype, device=G.device)


def _with_derivative(X: Tensor | None, G: Tensor) -> Tensor:
    """The Gram matrix such that it can be differentiated: `symmetric_gram` gives a constant."""
    return G if X is None or not X.requires_grad else _Gram.apply(X, X.detach())


def _inverse_root(square: Tensor) -> Tensor:
    """square^(-1/2), and 0 for 0; NaN == 0 is false, so NaN stays NaN."""
    empty = square == 0
    return torch.where(empty, 0.0, torch.where(empty, 1.0, square).rsqrt())


def _one_step(G: Tensor) -> Tensor:
    return 1.5 * torch.eye(G.shape[-1], dtype=G.dtype, device=G.device) - 0.5 * G


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
                G = X.mT @ X  # such that it can be differentiated again
            elif ctx.is_end:
                return torch.baddbmm(g, X, S + S.mT, alpha=-0.5), None, None, None
            # Of 3/2 X - 1/2 X X^T X, one term for each factor X.
            result = torch.baddbmm(g, g, G, beta=1.5, alpha=-0.5)
            return torch.baddbmm(result, X, S + S.mT, alpha=-0.5), None, None, None


class _Gram(Function):
    """X^T X for X (g, m, n), given in two types: the wide one for the product, the narrow one for the derivative."""

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
    """X q for X (g, m, n), given in two types as for `_Gram`, and q (g, n, n)."""

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
    """Whether values may decide what is computed: on a GPU that would wait for them, and a compiler cannot."""
    return x.device.type == "cpu" and not is_traced(x)


def _is_orthogonal(G: Tensor, dtype: torch.dtype) -> bool:
    """Whether one more step gives orthogonal matrices to the precision of the type, by G = X^T X: it squares the
    distance. An estimate: too early an end costs orthogonality, not soundness."""
    if not _may_look(G):
        return False
    n = G.shape[-1]
    room = torch.finfo(dtype).eps ** 0.5
    # Cheap first: the trace misses n by at most n times the distance.
    trace = G.diagonal(dim1=-2, dim2=-1).sum(-1)
    if not bool(((trace - n).abs() <= n * room).all()):
        return False
    rest = G - torch.eye(n, dtype=G.dtype)
    total = torch.linalg.matrix_norm(rest)
    if bool((total <= room).all()):
        return True
    # The norm is between that and its n^(1/2)-th part: power iteration from the longest column.
    lengths = rest.square().sum(-2)
    v = rest.gather(-1, lengths.argmax(-1)[:, None, None].expand(-1, n, 1))
    for _ in range(3):
        v = rest @ (v / torch.linalg.vector_norm(v, dim=-2, keepdim=True).clamp(min=torch.finfo(G.dtype).tiny))
    return bool((torch.linalg.vector_norm(v, dim=-2)[:, 0] <= room).all())
