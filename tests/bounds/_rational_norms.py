"""Lower bounds of norms in rational arithmetic, so that a proof can be compared with the truth at tolerance zero."""

from fractions import Fraction

import numpy as np
import torch

from onelip.testing import exact_jacobian


def integers(array):
    """(M, e): Python integers M, as an object array, with array = M 2^e exactly."""
    mantissa, exponent = np.frexp(np.asarray(array, dtype=np.float64))
    mantissa = np.ldexp(mantissa, 53).astype(np.int64).astype(object)
    exponent = exponent.astype(np.int64) - 53
    low = int(exponent[mantissa != 0].min()) if (mantissa != 0).any() else 0
    return mantissa << np.where(mantissa != 0, exponent - low, 0).astype(object), low


def square_from_below(J):
    """||J v||^2 / ||v||^2 for the leading singular vector v, rounded to integers: at most ||J||^2, exactly."""
    if J.size == 0 or not J.any():
        return Fraction(0)
    scale = -int(np.frexp(np.abs(J).max())[1])
    v = np.linalg.svd(np.ldexp(np.ldexp(J, scale // 2), scale - scale // 2))[2][0]
    v = np.rint(v * 2**40).astype(np.int64).astype(object)
    M, e = integers(J)
    Jv = [sum(row[j] * v[j] for j in np.flatnonzero(row)) for row in M]
    return Fraction(sum(y * y for y in Jv), int((v * v).sum())) * Fraction(4) ** e


def layer_square_from_below(layer, input_shape):
    """The same for a layer: its Jacobian's entries are its weights, or it is shrunk by more than float sums are off."""
    J = exact_jacobian(layer, input_shape).numpy()
    square = square_from_below(J)
    # Circular padding may wrap around and add weights to one another, which rounds.
    weights = torch.unique(layer.weight.detach().double()).numpy()
    exact = bool(np.isin(J[J != 0], weights).all())
    return square if exact else square * (1 - Fraction(1, 10**10))
