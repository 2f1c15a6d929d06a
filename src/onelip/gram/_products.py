"""Matrix products that accumulate into views, and the factor that the derivative multiplies with."""

from torch import Tensor


def add_product(target: Tensor, a: Tensor, b: Tensor) -> None:
    """target += a @ b for batches of matrices; target may be any strided view."""
    if target.shape[0] == 1:
        # One matrix: addmm goes straight to the BLAS with the view's leading dimension, baddbmm may copy.
        target[0].addmm_(a[0], b[0])
    else:
        target.baddbmm_(a, b)


def sign_matrix(signs: Tensor, u_a: Tensor, w_a: Tensor, u_c: Tensor, w_c: Tensor) -> Tensor:
    """sign_ac (u_a w_c + w_a u_c), shape (g, a, c); int8 signs are widened first, mixed-type products are slow."""
    E = u_a[:, :, None] * w_c[:, None]
    return E.addcmul_(w_a[:, :, None], u_c[:, None]).mul_(signs.to(E.dtype))
