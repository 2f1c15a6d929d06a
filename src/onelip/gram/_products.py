"""Matrix products that accumulate into views, and the sign matrix of the derivative."""

from torch import Tensor


def add_product(target: Tensor, a: Tensor, b: Tensor) -> None:
    """Compute target += a @ b for batches of matrices; target may be any strided view."""
    if target.shape[0] == 1:
        # One matrix: addmm passes the view's leading dimension to BLAS, baddbmm may copy.
        target[0].addmm_(a[0], b[0])
    else:
        target.baddbmm_(a, b)


def sign_matrix(signs: Tensor, u_a: Tensor, w_a: Tensor | None, u_c: Tensor, w_c: Tensor | None) -> Tensor:
    """Return sign_ac (u_a w_c + w_a u_c), shape (g, a, c). Weights None are ones."""
    if w_a is None or w_c is None:
        E = u_a[:, :, None] + u_c[:, None]
    else:
        E = (u_a[:, :, None] * w_c[:, None]).addcmul_(w_a[:, :, None], u_c[:, None])
    return E.mul_(signs.to(E.dtype))  # cast the int8 signs first: mixed-type products are slow


def weighted(A: Tensor, w: Tensor | None, dim: int) -> Tensor:
    """Multiply each row (dim 1) or column (dim 2) of A (g, a, c) by its weight. Weights None are ones."""
    if w is None:
        return A
    return A * (w[:, :, None] if dim == 1 else w[:, None])


def some(w: Tensor | None, columns: slice) -> Tensor | None:
    """Return the weights of the given columns."""
    return None if w is None else w[:, columns]
