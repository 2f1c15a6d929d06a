"""Matrix products that accumulate into views, and the factor that the derivative multiplies with."""

from torch import Tensor


def add_product(target: Tensor, a: Tensor, b: Tensor) -> None:
    """target += a @ b for batches of matrices; target may be any strided view."""
    if target.shape[0] == 1:
        # One matrix: addmm goes straight to the BLAS with the view's leading dimension, baddbmm may copy.
        target[0].addmm_(a[0], b[0])
    else:
        target.baddbmm_(a, b)


def sign_matrix(signs: Tensor, u_a: Tensor, w_a: Tensor | None, u_c: Tensor, w_c: Tensor | None) -> Tensor:
    """sign_ac (u_a w_c + w_a u_c), shape (g, a, c); int8 signs are widened first, mixed-type products are slow."""
    if w_a is None or w_c is None:
        E = u_a[:, :, None] + u_c[:, None]
    else:
        E = (u_a[:, :, None] * w_c[:, None]).addcmul_(w_a[:, :, None], u_c[:, None])
    return E.mul_(signs.to(E.dtype))


def weighted(A: Tensor, w: Tensor | None, dim: int) -> Tensor:
    """A (g, a, c) with each row (dim 1) or column (dim 2) times its weight; no weights are ones, and cost nothing."""
    if w is None:
        return A
    return A * (w[:, :, None] if dim == 1 else w[:, None])


def some(w: Tensor | None, columns: slice) -> Tensor | None:
    """The weights of some columns."""
    return None if w is None else w[:, columns]
