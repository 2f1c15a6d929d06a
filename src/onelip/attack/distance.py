"""Distances without rounding: ‖x' - x‖² of two float tensors is a dyadic rational, and is computed as one.

A flip counts against a certificate only where the *true* distance is at most the radius. Both are rationals once
squared, so the comparison is exact: `exact_square(x', x) <= Fraction(radius) ** 2`.
"""

from fractions import Fraction

import numpy as np
from torch import Tensor

_MANTISSA_BITS = 53


def exact_square(point: Tensor, image: Tensor) -> Fraction:
    """‖point - image‖² of two floating tensors of one shape (float64 or narrower), exactly.

    Example:
        >>> import torch
        >>> exact_square(torch.tensor([1.0, 2.0**-60]), torch.zeros(2)) == 1 + Fraction(1, 2**120)
        True
    """
    if point.shape != image.shape:
        raise ValueError(f"expected two points of one shape, got {tuple(point.shape)} and {tuple(image.shape)}")
    numbers = np.stack([_flat(point), _flat(image)])
    if not np.isfinite(numbers).all():
        raise ValueError("expected finite coordinates, got a NaN or an infinity")
    mantissas, exponents = np.frexp(numbers)
    # Every coordinate is an integer times one common power of two; integers of Python do not overflow.
    lowest = int(exponents.min()) - _MANTISSA_BITS
    integers = np.ldexp(mantissas, _MANTISSA_BITS).astype(np.int64).astype(object)
    integers = integers << (exponents - _MANTISSA_BITS - lowest).astype(object)
    difference = integers[0] - integers[1]
    return Fraction(int(difference @ difference)) * Fraction(2) ** (2 * lowest)


def _flat(tensor: Tensor) -> np.ndarray:
    return tensor.detach().double().cpu().numpy().ravel()
