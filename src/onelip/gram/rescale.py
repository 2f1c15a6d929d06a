"""The almost-orthogonal rescaling of a kernel's columns.

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
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from onelip.core.floats import power_of_two
from onelip.core.precision import full_precision
from onelip.gram._laid_out import add_signed_product, lay_back, lay_out, weighted_sums
from onelip.gram.correlation import self_correlation
from onelip.gram.row_sums import (
    absolute_row_sums,
    column_dots,
    fold_into_groups,
    per_column,
    row_sums_and_signs,
    signed_product,
)
from onelip.gram.scaling import column_exponents, exponent_of, exponent_reach, negligible, poisoned, within_range

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
