"""The almost-orthogonal rescaling of a kernel's columns, and its right inverse.

Paper: Prach, Lampert, "Almost-Orthogonal Layers for Efficient General-Purpose Lipschitz Networks" (2022), Theorem 1 and
Lemma 2. For t Gram steps: Delattre et al., "Spectral Norm of Convolutional Layers with Circular and Zero Paddings"
(2024), spectral rescaling.

Let G_1 = P^T P (as an operator; for a kernel with taps its entries are correlations), G_{t+1} = G_t^2, m = 2^(t-1), and
q > 0 any weights of the columns. Then

    r_c = sum_j |G_t|_cj q_j / q_c,      W = P diag(r)^(-1/(2m))      has norm at most 1.                        (2)

Proof: x^T G_t x <= sum_ij |G_t|_ij (q_j/q_i x_i^2 + q_i/q_j x_j^2)/2 = x^T diag(r) x, so P^T P = G_t^(1/m) <=
diag(r)^(1/m) because the m-th root is operator monotone (Loewner-Heinz), and D P^T P D <= 1. t = 1, q = 1 is AOL.

With t = 1 the weights q are equivalent to AOL of P diag(q), and they are applied in that form.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from onelip.core.floats import power_of_two
from onelip.core.modes import full_precision
from onelip.gram.products import (
    absolute_matrix,
    absolute_row_sums,
    add_signed_product,
    column_dots,
    fold_into_groups,
    lay_back,
    lay_out,
    per_column,
    row_sums_and_signs,
    self_correlation,
    signed_product,
    weighted_sums,
)

# BLAS libraries sum products with few columns sequentially: for 10,000 equal rows the norm of W was 1 + 6e-5 in
# float32. Such products are cheap, so float64 is used up to this number of columns; wider ones are summed in blocks.
_FEW_COLUMNS = 32
# Each step squares the ratio between the sizes of columns. From this number of steps on, float32 could not represent a
# column that is a thousand times smaller than ordinary ones.
_MANY_STEPS = 4


def rescaled(P: Tensor, *, steps: int = 1, log_q: Tensor | None = None) -> Tensor:
    """Return W of (2) for a kernel P (g, rows, columns, *taps), float32 or float64.

    A zero column stays zero and has gradient zero. If a kernel contains a NaN or an infinity, the result is all NaN.

    Args:
        P: the kernel, of any finite scale, from subnormal numbers to the largest float.
        steps: t in (2); 1 is the paper's AOL.
        log_q: logarithms of the weights q (g, columns); None for q = 1.

    Examples:
        >>> P = torch.tensor([[[3.0, 0.0], [0.0, 1e-15]]])
        >>> rescaled(P)
        tensor([[[1., 0.],
                 [0., 1.]]])
    """
    wants_float64 = P.shape[2] <= _FEW_COLUMNS or steps >= _MANY_STEPS
    if wants_float64 and P.dtype == torch.float32 and P.device.type != "mps":  # mps has no float64
        wide = None if log_q is None else log_q.double()
        return rescaled(P.double(), steps=steps, log_q=wide).to(P.dtype)
    if steps > 1:
        return _more_steps(P, steps, log_q)
    return _OneStep.apply(P if log_q is None else P * per_column(column_weights(log_q), P))[0]


def column_weights(log_q: Tensor) -> Tensor:
    """Return q = exp(log_q) up to a common factor, which prevents overflow and does not change W."""
    return torch.exp(log_q - log_q.detach().amax(1, keepdim=True))


def one_step(P: Tensor) -> Tensor:
    """Compute (2) for t = 1 and q = 1, like `_OneStep`, in operations that are differentiable to any order."""
    scale, v = _column_scale(P.movedim(2, -1))
    P = P * per_column(scale, P)
    # With P = P' diag(v): r_c = v_c sum_a |G'_ca| v_a, so AOL of P is P' diag(sum_a |G'_ca| v_a / v_c)^(-1/2).
    return P * per_column(_inverse_root(absolute_row_sums(P, v) / v), P)


class _OneStep(Function):
    """`one_step` with as few temporaries as possible; second derivatives use `_gradient`."""

    @staticmethod
    def forward(P: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, bool]:
        with full_precision(P.device):
            Q = lay_out(P)
            if _can_branch(P):
                # Almost always nothing under- or overflows, and checking the sums is cheaper than checking P.
                sums, signs = weighted_sums(Q, None)
                if _is_ordinary(sums, Q):
                    root, one = _inverse_root(sums), torch.ones_like(sums)
                    return P * per_column(root, P), signs, one, one.clone(), root, True
            scale, v = _column_scale(Q)
            sums, signs = weighted_sums(Q * _last(scale, Q), v)
            root = _inverse_root(sums / v)
            W = P * per_column(scale, P)
            W *= per_column(root, W)
        return W, signs, scale, v, root, False

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Any, ...]) -> None:
        *saved, ctx.is_ordinary = output[1:]
        ctx.save_for_backward(*inputs, *saved)
        ctx.mark_non_differentiable(*saved)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Tensor | None:
        g = grads[0]
        if g is None:
            return None
        P, signs, scale, v, root = ctx.saved_tensors
        if torch.is_grad_enabled():
            return _gradient(P, g)
        with full_precision(P.device):
            Q = lay_out(P)
            Q = Q if ctx.is_ordinary else Q * _last(scale, Q)
            target = lay_out(g)
            # W = P' root(s / v): the gradient of each sum s is <g_c, P'_c> root'(s_c / v_c) / v_c, root' = -root^3 / 2.
            result = target * Q
            u = result.flatten(1, -2).sum(1) * root.pow(3).mul_(-0.5) / v
            torch.mul(target, _last(root, Q), out=result)
            add_signed_product(result, Q, signs, u, None if ctx.is_ordinary else v)
            if not ctx.is_ordinary:
                result *= _last(scale, Q)
            return lay_back(result, P.shape)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Tensor) -> tuple[Any, Any]:
        return fold_into_groups(info.batch_size, in_dims, _OneStep, *args)


def _gradient(P: Tensor, g: Tensor) -> Tensor:
    """The gradient of `_OneStep.backward`, in operations that can themselves be differentiated."""
    scale, v = _column_scale(P.movedim(2, -1))
    P = P * per_column(scale, P)
    sums, signs = row_sums_and_signs(P, v)
    root = _inverse_root(sums / v)
    u = column_dots(g, P) * root.pow(3) * -0.5 / v
    return (g * per_column(root, g) + signed_product(P, signs, u, v)) * per_column(scale, P)


def _more_steps(P: Tensor, steps: int, log_q: Tensor | None) -> Tensor:
    # G_t is stored as D K^T K D with a diagonal D = diag(2^e) of exact powers of two, so that the columns of K are of
    # moderate size even if those of P are not; squaring doubles the differences of their exponents.
    # D (K^T K) D^2 (K^T K) D is the square, so the next kernel is D K^T K with its columns rescaled.
    scale, e = _scale_and_exponent(P.movedim(2, -1))
    P = K = P * per_column(scale, P)
    first = e
    for _ in range(steps - 1):
        K, e = _squared(self_correlation(K), e)
    m = 2 ** (steps - 1)
    # r_c = 2^(2 e_c) sum_a |K^T K|_ca w_a / w_c with w = 2^e q. Any positive w gives a bound, so w may be clamped to
    # the range of the dtype. The fractional part of log2 q is multiplied into the columns, where it is differentiated.
    part = torch.ones_like(e, dtype=P.dtype)
    if log_q is not None:
        log2_q = log_q / math.log(2.0)
        whole = log2_q.detach().floor().clamp(-(2**20), 2**20)
        part = torch.exp2((log2_q - whole).clamp(0, 1))
        weight = e + whole.to(e.dtype)
    else:
        weight = e
    w = power_of_two(within_range(weight, P.dtype) - weight.amax(1, keepdim=True), P.dtype)
    sums = absolute_row_sums(K * per_column(part, K), w) / (w * part.square())
    back = torch.exp2(first - e.double() / m).to(P.dtype)
    return P * per_column(_inverse_root(sums, m) * back, P)


def _squared(G: Tensor, e: Tensor) -> tuple[Tensor, Tensor]:
    """Return a kernel K of moderate size and exponents f with (D G D)^2 = diag(2^f) K^T K diag(2^f), D = diag(2^e)."""
    reach = exponent_reach(G.dtype)
    size = G.detach().abs().flatten(3).amax(3) if G.dim() > 3 else G.detach().abs()  # (g, rows, columns)
    nothing = -(2**24)
    exponent = torch.where(size > 0, exponent_of(size) + e[:, :, None], nothing)
    f = within_range(torch.where(size.amax(1) > 0, e + exponent.amax(1), nothing), G.dtype)
    f = torch.where(f > nothing // 2, f, 0)  # all entries of the group are zero
    factor = power_of_two((e[:, :, None] - (f - e)[:, None]).clamp(-reach, reach), G.dtype)
    return G * factor.reshape(*factor.shape, *(1 for _ in G.shape[3:])), f


def _inverse_root(sums: Tensor, m: int = 1) -> Tensor:
    """sums^(-1/(2m)), zero where the sum is zero; NaN == 0 is false, so NaN stays NaN."""
    lifted = sums + negligible(sums.dtype)
    root = torch.rsqrt(lifted) if m == 1 else lifted.pow(-0.5 / m)
    return torch.where(sums == 0, torch.zeros_like(root), root)


def _column_scale(Q: Tensor) -> tuple[Tensor, Tensor]:
    """Scales 2^-e that bring each column of a laid-out kernel (g, ..., columns) to about 1, and v = 2^(e - max e)."""
    scale, exponent = _scale_and_exponent(Q)
    return scale, power_of_two(exponent - exponent.amax(1, keepdim=True), Q.dtype)


def _scale_and_exponent(Q: Tensor) -> tuple[Tensor, Tensor]:
    rows = Q.detach().flatten(1, -2)
    largest = torch.maximum(rows.amax(1), -rows.amin(1))
    exponent = column_exponents(largest)
    return poisoned(power_of_two(-exponent, Q.dtype), largest), exponent


def _can_branch(P: Tensor) -> bool:
    """Whether values can be read at no cost: reading stalls a GPU, and is impossible while compiling."""
    return P.device.type == "cpu" and not torch.compiler.is_compiling()


def _is_ordinary(sums: Tensor, Q: Tensor) -> bool:
    """Whether the sums of the unscaled kernel are correct: well within range, or zero for zero columns.

    Underflow loses at most 2^-126 per product in float32, which is negligible compared with 2^-16. An overflow cannot
    become a finite number again.
    """
    right = (sums >= 2.0**-16) & (sums <= 2.0**60)
    empty = sums == 0
    if bool(empty.any()):
        right |= empty & (Q.flatten(1, -2) == 0).all(1)
    return bool(right.all())


def _last(v: Tensor, Q: Tensor) -> Tensor:
    """Reshape (g, columns) to (g, 1, ..., columns), to multiply a laid-out kernel Q (g, ..., columns)."""
    return v.reshape(v.shape[0], *(1 for _ in Q.shape[2:]), v.shape[1])


# ---- Scale kernels by exact powers of two, so that their Gram matrix neither overflows nor underflows
#
# P^T P leaves the range of floats long before P does, and an underflowing Gram matrix is unsound: without scaling, the
# norm of W is 22 for the float32 column (4.5e-23, 999 x 2.6e-23). Multiplying by a power of two is exact.


# Columns whose largest entry lies between these are not scaled: their products are well within the range of float32.
_SMALLEST_MODERATE, _LARGEST_MODERATE = 2.0**-8, 2.0**16


def exponent_reach(dtype: torch.dtype) -> int:
    """Return the reach: 2^-reach to 2^reach are normal numbers of the dtype.

    Raises:
        TypeError: for types other than float32 and float64.
    """
    reaches = {torch.float32: 126, torch.float64: 1022}
    if dtype not in reaches:
        raise TypeError(f"expected a float32 or float64 tensor, got {dtype}; cast it first")
    return reaches[dtype]


def exponent_range(dtype: torch.dtype) -> int:
    """Return how far apart the exponents of columns may be: half the reach, so that products do not underflow."""
    return exponent_reach(dtype) // 2 - 3


def negligible(dtype: torch.dtype) -> float:
    """Return a number that does not change the scaled sum of a column when added, unless the sum may have underflowed.

    A sum is at least 2^-16 for a column of moderate size and 4 for one that was scaled. A sum near this number or below
    belongs to a column that is so small compared with the others that its products, weighted by up to 2^range, may have
    been flushed to zero.
    """
    return 2.0 ** -(exponent_reach(dtype) - exponent_range(dtype) - 20)


def column_exponents(largest: Tensor) -> Tensor:
    """Return exponents e such that P_c 2^-e is of moderate size, from the largest magnitude (g, columns) per column.

    e is zero if all columns of the group are of moderate size already, as in every ordinary network. Otherwise the
    largest entry of P_c 2^-e lies in [2, 4), except for columns that are too small compared with the largest of their
    group. Their e is larger than that: 2^(e - max e) must not underflow, because it weights the products of the column.
    """
    reach = exponent_reach(largest.dtype)
    exponent = exponent_of(largest) - 2
    exponent = torch.where(largest > 0, exponent, -reach).clamp(-reach, reach)
    moderate = ((largest >= _SMALLEST_MODERATE) & (largest <= _LARGEST_MODERATE)) | (largest == 0)
    return torch.where(moderate.all(1, keepdim=True), 0, within_range(exponent, largest.dtype))


def within_range(exponent: Tensor, dtype: torch.dtype) -> Tensor:
    """Raise exponents (g, columns) that are too far below the largest of their group."""
    return torch.maximum(exponent, exponent.amax(1, keepdim=True) - exponent_range(dtype))


def exponent_of(x: Tensor) -> Tensor:
    """Return the integer e with 2^(e-1) <= |x| < 2^e from the bits of x; the lowest possible e for zero and subnormals.

    torch.frexp computes the same, but torch.compile generates code for it that does not build.
    """
    if x.dtype == torch.float64:
        return (((x.view(torch.int64) >> 52) & 0x7FF) - 1022).to(torch.int32)
    return ((x.view(torch.int32) >> 23) & 0xFF) - 126


def poisoned(scale: Tensor, largest: Tensor) -> Tensor:
    """Return the scale, with NaN where the column contains a NaN or an infinity, so that they reach the result."""
    return torch.where(torch.isfinite(largest), scale, torch.nan)


def normalizer(P: Tensor) -> Tensor:
    """Return the powers of two (g, 1, ...) that scale the largest entry of each group of P (g, ...) to [2, 4)."""
    reach = exponent_reach(P.dtype)
    largest = P.detach().abs().amax(tuple(range(1, P.dim())), keepdim=True)
    exponent = (exponent_of(largest) - 2).clamp(-reach, reach)
    return poisoned(power_of_two(-exponent, P.dtype), largest)


# ---- Column weights that equalise the row sums of a Gram operator: the right inverse of AOL
#
# For W and its symmetric matrix T of absolute Gram entries let s > 0 be the Perron vector, T s = rho s. Then the row
# sums of W diag(s) are s_c (T s)_c = rho s_c^2, so AOL(W diag(s)) = W / sqrt(rho): the same layer up to one factor. The
# factor is 1 for every weight that AOL can produce, because T then has Perron root 1. If T splits into blocks (groups
# of channels without common products), AOL rescales them independently, and each block has its own rho.


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
