"""Exact powers of two that keep a Gram matrix away from overflow and underflow.

P^T P leaves the range of floats long before P does, and an underflowing Gram matrix is unsound: without scaling the
norm of W comes out as 22 for the float32 column (4.5e-23, 999 x 2.6e-23). Multiplying by a power of two is exact.
"""

import torch
from torch import Tensor

_MODERATE = 16  # squares and sums of such numbers are far from both ends of float32


def exponent_reach(dtype: torch.dtype) -> int:
    """Powers of two from -reach to reach are normal numbers of the type."""
    reaches = {torch.float32: 126, torch.float64: 1022}
    if dtype not in reaches:
        raise TypeError(f"expected a float32 or float64 tensor, got {dtype}; cast it before")
    return reaches[dtype]


def negligible(dtype: torch.dtype) -> float:
    """What can be added to a sum of scaled Gram entries without being seen, unless the sum may be an underflow.

    The sum of an ordinary column is at least 2^-32. One far below the square root of the smallest float belongs to a
    column that is negligible beside the others; its products may have been flushed to zero.
    """
    return 2.0 ** -(exponent_reach(dtype) // 2 + 10)


def column_exponents(largest: Tensor) -> Tensor:
    """For the largest magnitude (g, columns) of each column: exponents e such that P_c 2^-e is of moderate size.

    Zero where all columns of the group are of moderate size already, as they are in every ordinary network: it can then
    be left as it is. Otherwise P_c 2^-e lies in [2, 4), but for columns too small beside the largest of their group.
    Those keep an e that is too large for them: 2^(e - max e) must not underflow, as it weights the column's products.
    """
    reach = exponent_reach(largest.dtype)
    exponent = torch.frexp(largest).exponent - 2
    exponent = torch.where(largest > 0, exponent, -reach).clamp(-reach, reach)
    exponent = torch.maximum(exponent, exponent.amax(1, keepdim=True) - (reach // 2 - 3))
    moderate = ((largest >= 2.0**-_MODERATE) & (largest <= 2.0**_MODERATE)) | (largest == 0)
    return torch.where(moderate.all(1, keepdim=True), 0, exponent)


def power_of_two(exponent: Tensor, dtype: torch.dtype) -> Tensor:
    """2^exponent exactly, by writing the exponent field of the float: exp2 and pow may be off by a rounding."""
    if dtype == torch.float64:
        return ((exponent.to(torch.int64) + 1023) << 52).view(torch.float64)
    return ((exponent.to(torch.int32) + 127) << 23).view(torch.float32)


def poisoned(scale: Tensor, largest: Tensor) -> Tensor:
    """The scale, NaN where the column holds a NaN or an infinity: no product may turn those into a number."""
    return torch.where(torch.isfinite(largest), scale, torch.nan)


def normalizer(P: Tensor) -> Tensor:
    """The power of two that brings the largest entry of each group of P (g, ...) into [2, 4), shaped to multiply P."""
    reach = exponent_reach(P.dtype)
    largest = P.detach().abs().amax(tuple(range(1, P.dim())), keepdim=True)
    exponent = (torch.frexp(largest).exponent - 2).clamp(-reach, reach)
    return poisoned(power_of_two(-exponent, P.dtype), largest)
