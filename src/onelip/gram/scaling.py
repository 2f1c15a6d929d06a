"""Exact powers of two that keep a Gram matrix away from overflow and underflow.

P^T P leaves the range of floats long before P does, and an underflowing Gram matrix is unsound: without scaling the
norm of W comes out as 22 for the float32 column (4.5e-23, 999 x 2.6e-23). Multiplying by a power of two is exact.
"""

import torch
from torch import Tensor

from onelip.core.floats import power_of_two

# Columns whose largest entry lies between these are left as they are: their products are far from float32's ends.
_SMALLEST_MODERATE, _LARGEST_MODERATE = 2.0**-8, 2.0**16


def exponent_reach(dtype: torch.dtype) -> int:
    """Powers of two from -reach to reach are normal numbers of the type."""
    reaches = {torch.float32: 126, torch.float64: 1022}
    if dtype not in reaches:
        raise TypeError(f"expected a float32 or float64 tensor, got {dtype}; cast it before")
    return reaches[dtype]


def exponent_range(dtype: torch.dtype) -> int:
    """How far apart the exponents of columns may be: half of the reach, so that their products do not underflow."""
    return exponent_reach(dtype) // 2 - 3


def negligible(dtype: torch.dtype) -> float:
    """What can be added to the scaled sum of a column without being seen, unless the sum may be an underflow.

    A sum is at least 2^-16 for a column of moderate size and 4 for one that was scaled. Below this belongs to a column
    so small beside the others that its products, weighted by up to 2^range, may have been flushed to zero.
    """
    return 2.0 ** -(exponent_reach(dtype) - exponent_range(dtype) - 20)


def column_exponents(largest: Tensor) -> Tensor:
    """For the largest magnitude (g, columns) of each column: exponents e such that P_c 2^-e is of moderate size.

    Zero where all columns of the group are of moderate size already, as they are in every ordinary network: it can then
    be left as it is. Otherwise P_c 2^-e lies in [2, 4), but for columns too small beside the largest of their group.
    Those keep an e that is too large for them: 2^(e - max e) must not underflow, as it weights the column's products.
    """
    reach = exponent_reach(largest.dtype)
    exponent = exponent_of(largest) - 2
    exponent = torch.where(largest > 0, exponent, -reach).clamp(-reach, reach)
    moderate = ((largest >= _SMALLEST_MODERATE) & (largest <= _LARGEST_MODERATE)) | (largest == 0)
    return torch.where(moderate.all(1, keepdim=True), 0, within_range(exponent, largest.dtype))


def within_range(exponent: Tensor, dtype: torch.dtype) -> Tensor:
    """Exponents (g, columns), raised where they are too far below the largest of their group."""
    return torch.maximum(exponent, exponent.amax(1, keepdim=True) - exponent_range(dtype))


def exponent_of(x: Tensor) -> Tensor:
    """The integer e with 2^(e-1) <= |x| < 2^e, from the float's own bits; the lowest possible for zero and subnormal x.

    torch.frexp would do, but the code that torch.compile makes of it does not build.
    """
    if x.dtype == torch.float64:
        return (((x.view(torch.int64) >> 52) & 0x7FF) - 1022).to(torch.int32)
    return ((x.view(torch.int32) >> 23) & 0xFF) - 126


def poisoned(scale: Tensor, largest: Tensor) -> Tensor:
    """The scale, NaN where the column holds a NaN or an infinity: no product may turn those into a number."""
    return torch.where(torch.isfinite(largest), scale, torch.nan)


def normalizer(P: Tensor) -> Tensor:
    """The power of two that brings the largest entry of each group of P (g, ...) into [2, 4), shaped to multiply P."""
    reach = exponent_reach(P.dtype)
    largest = P.detach().abs().amax(tuple(range(1, P.dim())), keepdim=True)
    exponent = (exponent_of(largest) - 2).clamp(-reach, reach)
    return poisoned(power_of_two(-exponent, P.dtype), largest)
