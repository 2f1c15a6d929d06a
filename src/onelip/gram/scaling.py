"""Scale kernels by exact powers of two, so that their Gram matrix neither overflows nor underflows.

P^T P leaves the range of floats long before P does, and an underflowing Gram matrix is unsound: without scaling, the
norm of W is 22 for the float32 column (4.5e-23, 999 x 2.6e-23). Multiplying by a power of two is exact.
"""

import torch
from torch import Tensor

from onelip.core.floats import power_of_two

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
