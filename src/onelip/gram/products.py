"""Products of a kernel with itself: weighted absolute row sums, differentiable to any order, and whole kernels.

For a kernel P (g, rows, columns, *taps) of a stride-1 convolution, the Gram operator has the entries
A_delta[a, c] = sum over rows and taps t of P[:, a, t + delta] P[:, c, t], and this module computes

    s_c = sum_{delta, a} |A_delta[a, c]| w_a                                                                     (1)

which for w = 1 is the sum in the paper's Theorem 1 (no taps) and Lemma 2. Given the signs of A, the derivative of (1)
is a bilinear map, the signed product, whose own derivatives are again signed products. Two autograd functions that
refer to each other therefore cover every order. Automatic differentiation would store A and |A| and compute twice as
many products.
"""

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from onelip.core.modes import full_precision


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


# ---- Products of convolution operators as kernels: the Gram operator P^T P, P^T D, and P G for a Gram operator G


_CONVOLVE = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


def self_correlation(P: Tensor) -> Tensor:
    """Return the kernel of P^T P: (g, columns, columns, *(2k - 1)) for P (g, rows, columns, *k), differentiable.

    Entry [a, c, delta] is sum over rows and taps t of P[:, a, t + delta] P[:, c, t], with delta = 0 in the middle.
    """
    with full_precision(P.device):
        return correlation(P, P)


def correlation(P: Tensor, D: Tensor) -> Tensor:
    """Return the kernel of P^T D, of two kernels of one shape, in the form of `self_correlation`.

    Entry [a, c, delta] is sum over rows and taps t of P[:, a, t + delta] D[:, c, t].
    """
    if P.dim() == 3:
        return P.mT @ D
    g, _, C, *taps = P.shape
    # The input channels take the role of the batch; groups stay groups.
    signal = P.permute(2, 0, 1, *range(3, P.dim())).flatten(1, 2)  # (C, g * R, *k)
    kernel = D.transpose(1, 2).flatten(0, 1)  # (g * C, R, *k)
    padding = tuple(k - 1 for k in taps)
    G = _CONVOLVE[len(taps)](signal, kernel, padding=padding, groups=g)  # (C, g * C, *(2k - 1))
    return G.unflatten(1, (g, C)).transpose(0, 1)


def composition(P: Tensor, G: Tensor) -> Tensor:
    """Return the kernel of P G, cut back to the taps of P (g, rows, columns, *k), for G as `self_correlation` has it.

    The uncut product has 3k - 2 taps. Entry [r, c, t] is sum over a, s of P[r, a, s] G[a, c, s - t].
    """
    if P.dim() == 3:
        return P @ G
    g, _, C, *taps = P.shape
    signal = P.transpose(0, 1).flatten(1, 2)  # (R, g * C, *k)
    kernel = G.transpose(1, 2).flatten(0, 1)  # (g * C, C, *(2k - 1))
    product = _CONVOLVE[len(taps)](signal, kernel, padding=tuple(k - 1 for k in taps), groups=g)
    return product.unflatten(1, (g, C)).transpose(0, 1)


# ---- Products of a kernel with itself, in the layout in which they are fastest, with half of the products
#
# A_delta[a, c] = sum over rows and taps t of P[:, a, t + delta] P[:, c, t] is the Gram operator of a convolution, one
# (columns x columns) block for each offset delta. A_{-delta} = A_delta^T, so half of the offsets suffice. The
# derivative needs only the sign of each entry, one byte.
#
# Matrices (g, rows, columns) have one offset, and their Gram matrix is symmetric: only its blocks on and above the
# diagonal are computed; each block is used for its rows and, transposed, for its columns.
#
# A kernel with taps is laid out as Q (g, *leading taps, rows, last taps, columns). For one offset v of the leading taps
# let X be the part of Q shifted by v and Y its unshifted counterpart. All offsets of the last axis are then stored side
# by side in one array A (columns, offsets of the last axis, columns): the products of tap p of X with all taps of Y are
# one matrix product whose result is a contiguous window of A. The derivative reads the same windows, so nothing is
# copied.


# Narrower blocks save more of the symmetric half, but matrix products get slower; see benchmarks/rescaling.py.
_NARROWEST_BLOCK = 256
_MOST_BLOCKS = 4


def lay_out(P: Tensor) -> Tensor:
    """Lay out a kernel (g, rows, columns, *taps); tap axes of length one are dropped: a 1x1 convolution is a matrix."""
    P = P.reshape(*P.shape[:3], *(k for k in P.shape[3:] if k > 1))
    axes = P.dim()
    return P if axes == 3 else P.permute(0, *range(3, axes - 1), 1, axes - 1, 2).contiguous()


def lay_back(Q: Tensor, shape: torch.Size) -> Tensor:
    """Return a laid-out kernel in the shape that it had: the inverse of `lay_out`."""
    axes = Q.dim()
    return (Q if axes == 3 else Q.permute(0, axes - 3, axes - 1, *range(1, axes - 3), axes - 2)).reshape(shape)


def weighted_sums(Q: Tensor, w: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return s_c = sum_{delta, a} |A_delta[a, c]| w_a and the signs of A. Weights None are ones."""
    return _weighted_sums_of_matrices(Q, w) if Q.dim() == 3 else _weighted_sums_of_kernels(Q, w)


def absolute_matrix(Q: Tensor) -> Tensor:
    """Return the symmetric matrix T_ac = sum_delta |A_delta[a, c]|, shape (g, columns, columns)."""
    if Q.dim() == 3:
        return (Q.mT @ Q).abs_()
    batch, *leading, _, k, C = Q.shape
    T = Q.new_zeros(batch, C, C)
    for pair in _half_of_offsets(tuple(leading)):
        A = _correlations(Q, pair).abs_()
        T += A.unflatten(2, (-1, C)).sum(2)
        T += _transposed_offsets(A, k, C, pair).sum(2).mT
    return T


def add_signed_product(target: Tensor, Q: Tensor, signs: Tensor, u: Tensor, w: Tensor | None) -> None:
    """Add sum_{delta, a} Q_{t+delta, a} E_delta[a, c] to target_t,c; E_delta = sign(A_delta) (u_a w_c + w_a u_c)."""
    if Q.dim() == 3:
        _add_signed_product_of_matrices(target, Q, signs, u, w)
    else:
        _add_signed_product_of_kernels(target, Q, signs, u, w)


# ---- matrices


def _weighted_sums_of_matrices(Q: Tensor, w: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return |Q^T Q| w and the signs of Q^T Q, of blocks on and above the diagonal."""
    batch, _, columns = Q.shape
    sums = Q.new_zeros(batch, columns)
    signs = torch.zeros(batch, columns, columns, dtype=torch.int8, device=Q.device)
    for start, stop in _blocks(columns):
        G = Q[:, :, start:stop].mT @ Q[:, :, start:]  # (g, block, columns from the block on)
        signs[:, start:stop, start:] = G.sign()
        G.abs_()
        # sum() adds pairwise. A matrix-vector product may add sequentially, and thousands of equal terms then round in
        # the same direction: the norm of W was 1 + 1.5e-5.
        sums[:, start:stop] += _weighted(G, _some(w, slice(start, columns)), 2).sum(2)
        sums[:, stop:] += _weighted(G[:, :, stop - start :], _some(w, slice(start, stop)), 1).sum(1)
    return sums, signs


def _add_signed_product_of_matrices(target: Tensor, Q: Tensor, signs: Tensor, u: Tensor, w: Tensor | None) -> None:
    """Compute target += Q E with E_ac = sign_ac (u_a w_c + w_a u_c), with one block row of E in memory at a time."""
    columns = Q.shape[-1]
    for start, stop in _blocks(columns):
        block, rest = slice(start, stop), slice(start, columns)
        E = _sign_matrix(signs[:, block, rest], u[:, block], _some(w, block), u[:, rest], _some(w, rest))
        _add_product(target[:, :, rest], Q[:, :, block], E)
        if stop < columns:
            _add_product(target[:, :, block], Q[:, :, stop:], E[:, :, stop - start :].mT)


def _blocks(columns: int) -> Iterator[tuple[int, int]]:
    count = max(1, min(_MOST_BLOCKS, columns // _NARROWEST_BLOCK))
    edges = [columns * i // count for i in range(count + 1)]
    yield from itertools.pairwise(edges)


# ---- kernels with taps


def _weighted_sums_of_kernels(Q: Tensor, w: Tensor | None) -> tuple[Tensor, Tensor]:
    batch, *leading, _, k, C = Q.shape
    pairs = list(_half_of_offsets(tuple(leading)))
    signs = torch.zeros(batch, len(pairs), C, (2 * k - 1) * C, dtype=torch.int8, device=Q.device)
    sums = Q.new_zeros(batch, C)
    for i, pair in enumerate(pairs):
        A = _correlations(Q, pair)
        signs[:, i, :, : A.shape[2]] = A.sign()
        A.abs_()
        # Sums, not matrix-vector products: see `_weighted_sums_of_matrices`.
        sums += _weighted(A, w, 1).sum(1).unflatten(1, (-1, C)).sum(1)
        sums += _weighted(_transposed_offsets(A, k, C, pair).sum(2), w, 2).sum(2)
    return sums, signs


def _add_signed_product_of_kernels(target: Tensor, Q: Tensor, signs: Tensor, u: Tensor, w: Tensor | None) -> None:
    _, *leading, _, k, C = Q.shape
    u_all, w_all = u.repeat(1, 2 * k - 1), None if w is None else w.repeat(1, 2 * k - 1)
    for i, pair in enumerate(_half_of_offsets(tuple(leading))):
        E = _sign_matrix(signs[:, i], u, w, u_all, w_all)  # (g, C, (2k - 1) * C)
        if pair.is_centre:
            by_offset = E.unflatten(2, (2 * k - 1, C))
            for j in range(1, k):
                by_offset[:, :, k - 1 + j] = by_offset[:, :, k - 1 - j].mT
        shifted, base = _part(Q, pair.shifted), _part(Q, pair.base)
        for p in range(k):
            window = _taps(E, C, k - 1 - p, 2 * k - 1 - p)  # (g, C, k * C)
            _add_into(target, pair.base, slice(0, k * C), _taps(shifted, C, p, p + 1), window)
            if not pair.is_centre:
                _add_into(target, pair.shifted, slice(p * C, (p + 1) * C), base, window.mT)


class _Pair(NamedTuple):
    """Index ranges, along the leading tap axes, of a kernel shifted by an offset and of its unshifted counterpart."""

    shifted: tuple[slice, ...]
    base: tuple[slice, ...]
    is_centre: bool


def _half_of_offsets(taps: tuple[int, ...]) -> Iterator[_Pair]:
    """Offsets v of the leading axes with v >= 0 in lexicographic order: one of each pair {v, -v}, zero first."""
    for v in itertools.product(*(range(-k + 1, k) for k in taps)):
        if v >= (0,) * len(taps):
            shifted = tuple(slice(max(i, 0), k + min(i, 0)) for i, k in zip(v, taps, strict=True))
            base = tuple(slice(max(-i, 0), k + min(-i, 0)) for i, k in zip(v, taps, strict=True))
            yield _Pair(shifted, base, not any(v))


def _correlations(Q: Tensor, pair: _Pair) -> Tensor:
    """A (g, C, windows * C) for one offset of the leading taps and all (at the centre: half of the) last offsets."""
    k, C = Q.shape[-2:]
    X, Y = _part(Q, pair.shifted), _part(Q, pair.base)
    # At the centre only offsets j >= 0 of the last axis are needed: windows 0 to k - 1, the last of which is j = 0.
    A = Q.new_zeros(Q.shape[0], C, (k if pair.is_centre else 2 * k - 1) * C)
    for p in range(k):
        met = p + 1 if pair.is_centre else k
        window = _taps(A, C, k - 1 - p, k - 1 - p + met)
        _add_product(window, _taps(X, C, p, p + 1).mT, _taps(Y, C, 0, met))
    return A


def _transposed_offsets(A: Tensor, k: int, C: int, pair: _Pair) -> Tensor:
    """The windows (g, C, n, C) of A whose transposes are those of -delta; all but delta = 0."""
    return (A[:, :, : (k - 1) * C] if pair.is_centre else A).unflatten(2, (-1, C))


def _part(Q: Tensor, index: tuple[slice, ...]) -> Tensor:
    """The selected leading taps as one batch of matrices (g, taps * rows, last taps * columns)."""
    chosen = Q[(slice(None), *index)]
    return chosen.reshape(Q.shape[0], -1, Q.shape[-2] * Q.shape[-1])


def _taps(matrix: Tensor, columns: int, start: int, stop: int) -> Tensor:
    """Taps start to stop of the last axis out of (g, n, last taps * columns)."""
    return matrix[:, :, start * columns : stop * columns]


def _add_into(target: Tensor, index: tuple[slice, ...], columns: slice, a: Tensor, b: Tensor) -> None:
    """Add a @ b to the selected leading taps and columns of target (g, *leading, rows, last, columns)."""
    chosen = target[(slice(None), *index)].flatten(-2)[..., columns]
    if chosen.dim() <= 4:
        # At most one leading axis: the selected rows are adjacent, so this is a view.
        _add_product(chosen.view(chosen.shape[0], -1, chosen.shape[-1]), a, b)
    else:
        chosen += (a @ b).view(chosen.shape)


# ---- both


def _add_product(target: Tensor, a: Tensor, b: Tensor) -> None:
    """Compute target += a @ b for batches of matrices; target may be any strided view."""
    if target.shape[0] == 1:
        # One matrix: addmm passes the view's leading dimension to BLAS, baddbmm may copy.
        target[0].addmm_(a[0], b[0])
    else:
        target.baddbmm_(a, b)


def _sign_matrix(signs: Tensor, u_a: Tensor, w_a: Tensor | None, u_c: Tensor, w_c: Tensor | None) -> Tensor:
    """Return sign_ac (u_a w_c + w_a u_c), shape (g, a, c). Weights None are ones."""
    if w_a is None or w_c is None:
        E = u_a[:, :, None] + u_c[:, None]
    else:
        E = (u_a[:, :, None] * w_c[:, None]).addcmul_(w_a[:, :, None], u_c[:, None])
    return E.mul_(signs.to(E.dtype))  # cast the int8 signs first: mixed-type products are slow


def _weighted(A: Tensor, w: Tensor | None, dim: int) -> Tensor:
    """Multiply each row (dim 1) or column (dim 2) of A (g, a, c) by its weight. Weights None are ones."""
    if w is None:
        return A
    return A * (w[:, :, None] if dim == 1 else w[:, None])


def _some(w: Tensor | None, columns: slice) -> Tensor | None:
    """Return the weights of the given columns."""
    return None if w is None else w[:, columns]
