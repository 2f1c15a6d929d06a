"""Weighted absolute row sums of the Gram operator of a kernel, differentiable to any order.

For a kernel P (g, rows, columns, *taps) of a stride-1 convolution, the Gram operator has the entries
A_delta[a, c] = sum over rows and taps t of P[:, a, t + delta] P[:, c, t], and this module computes

    s_c = sum_{delta, a} |A_delta[a, c]| w_a                                                                     (1)

which for w = 1 is the sum in the paper's Theorem 1 (no taps) and Lemma 2. Given the signs of A, the derivative of (1)
is a bilinear map, the signed product, whose own derivatives are again signed products. Two autograd functions that
refer to each other therefore cover every order. Automatic differentiation would store A and |A| and compute twice as
many products.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from onelip.core.precision import full_precision
from onelip.gram._laid_out import add_signed_product, lay_back, lay_out, weighted_sums


def absolute_row_sums(P: Tensor, w: Tensor | None = None) -> Tensor:
    """Return the sums (1), shape (g, columns).

    Args:
        P: kernel (g, rows, columns, *taps), real floating point.
        w: weights (g, columns), treated as constants; ones by default.

    Examples:
        >>> P = torch.tensor([[[1.0, 2.0], [0.0, 3.0]]])
        >>> absolute_row_sums(P)  # P^T P = [[1, 2], [2, 13]]
        tensor([[ 3., 15.]])
    """
    return row_sums_and_signs(P, P.new_ones(P.shape[0], P.shape[2]) if w is None else w.detach())[0]


def row_sums_and_signs(P: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sums (1), and the signs of A in the layout that `signed_product` expects."""
    sums, signs = _RowSums.apply(P, w)
    return sums, signs


class _RowSums(Function):
    @staticmethod
    def forward(P: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        with full_precision(P.device):
            return weighted_sums(lay_out(P), w)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        P, w = inputs
        ctx.save_for_backward(P, w, output[1])
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None]:
        P, w, signs = ctx.saved_tensors
        return (None if grads[0] is None else signed_product(P, signs, grads[0], w)), None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Tensor) -> tuple[Any, Any]:
        return fold_into_groups(info.batch_size, in_dims, _RowSums, *args)


class _SignedProduct(Function):
    """(X, u) -> X E(u), E_delta[a, c] = sign_delta[a, c] (u_a w_c + w_a u_c); linear in X and in u."""

    @staticmethod
    def forward(X: Tensor, signs: Tensor, u: Tensor, w: Tensor) -> Tensor:
        with full_precision(X.device):
            Q = lay_out(X)
            result = torch.zeros_like(Q)
            add_signed_product(result, Q, signs, u, w)
            return lay_back(result, X.shape)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, None, Tensor | None, None]:
        X, signs, u, w = ctx.saved_tensors
        (g,) = grads
        # E is symmetric, so it is its own adjoint in X. For u_c, each of the two terms of E contributes one scalar
        # product, with S v = sum_a sign[a, c] v_a written as a signed product for u = 1/2, w = 1.
        grad_X = signed_product(g, signs, u, w) if ctx.needs_input_grad[0] else None
        grad_u = None
        if ctx.needs_input_grad[2]:
            half, one = torch.full_like(u, 0.5), torch.ones_like(u)
            grad_u = column_dots(g, signed_product(X * per_column(w, X), signs, half, one))
            grad_u = grad_u + column_dots(X, signed_product(g * per_column(w, g), signs, half, one))
        return grad_X, None, grad_u, None

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], *args: Tensor) -> tuple[Any, Any]:
        return fold_into_groups(info.batch_size, in_dims, _SignedProduct, *args)


def signed_product(X: Tensor, signs: Tensor, u: Tensor, w: Tensor) -> Tensor:
    """Return X E(u) as in `_SignedProduct`: the derivative of <u, sums> with respect to P, at P = X."""
    result = _SignedProduct.apply(X, signs, u, w)
    assert isinstance(result, Tensor)
    return result


def per_column(v: Tensor, P: Tensor) -> Tensor:
    """Reshape (g, columns) to (g, 1, columns, 1, ...), to multiply P (g, rows, columns, *taps)."""
    return v.reshape(v.shape[0], 1, v.shape[1], *(1 for _ in P.shape[3:]))


def column_dots(X: Tensor, Y: Tensor) -> Tensor:
    """Return <X[:, c], Y[:, c]> over rows and taps, shape (g, columns)."""
    return (X * Y).transpose(1, 2).flatten(2).sum(2)


def fold_into_groups(
    batch: int, in_dims: tuple[int | None, ...], function: type[Function], *args: Tensor
) -> tuple[Any, Any]:
    """The vmap rule of all functions here: the group axis comes first, so a mapped axis is merged into the groups."""
    folded = []
    for tensor, dim in zip(args, in_dims, strict=True):
        moved = tensor.expand(batch, *tensor.shape) if dim is None else tensor.movedim(dim, 0)
        folded.append(moved.reshape(-1, *moved.shape[2:]))
    result = function.apply(*folded)
    if isinstance(result, Tensor):
        return result.unflatten(0, (batch, -1)), 0
    parts = tuple(part.unflatten(0, (batch, -1)) if isinstance(part, Tensor) else part for part in result)
    return parts, tuple(0 if isinstance(part, Tensor) else None for part in result)
