"""Exact access to floats as integers times powers of two, by reading their bits. Nothing is rounded.

Reading bits also works in a process that flushes subnormal numbers to zero (`torch.set_flush_denormal`), where
arithmetic on such weights would silently use zeros.
"""

from fractions import Fraction
from typing import NamedTuple

import torch
from torch import Tensor

from onelip.core.errors import NonFiniteWeight

# Integer type of the same size, number of bits of the fraction, and bias of the exponent.
_FORMATS = {
    torch.float16: (torch.int16, 10, 15),
    torch.bfloat16: (torch.int16, 7, 127),
    torch.float32: (torch.int32, 23, 127),
    torch.float64: (torch.int64, 52, 1023),
}
# `scaled` sets numbers to zero whose exponent is more than this below that of the largest.
_DEPTH = 1000
_NONE = -(2**20)


class Dyadic(NamedTuple):
    """The numbers mantissa * 2^exponent, both int64 tensors, |mantissa| < 2^53.

    Exponents are as in the floats: a number with a smaller exponent than another one is not larger in magnitude.
    """

    mantissa: Tensor
    exponent: Tensor

    def all_zero(self) -> bool:
        return not bool((self.mantissa != 0).any())

    @property
    def top(self) -> int:
        """The integer e with 2^e <= largest magnitude < 2^(e+1); at least one number must not be zero."""
        exponent = torch.where(self.mantissa != 0, self.exponent, _NONE).max()
        largest = int(torch.where(self.exponent == exponent, self.mantissa.abs(), 0).max())
        return int(exponent) + largest.bit_length() - 1


def read(weight: Tensor) -> Dyadic:
    """Return the stored numbers of a weight, exactly.

    Raises:
        NonFiniteWeight: if the weight contains an infinity or a NaN.
        TypeError: for types other than float16, bfloat16, float32 and float64.

    Examples:
        >>> read(torch.tensor([0.75, -2.0], dtype=torch.bfloat16))
        Dyadic(mantissa=tensor([ 192, -128]), exponent=tensor([-8, -6]))
    """
    if weight.dtype not in _FORMATS:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in _FORMATS)
        raise TypeError(f"expected a weight of type {names}, got {weight.dtype}; convert it first")
    integer, digits, bias = _FORMATS[weight.dtype]
    bits = weight.detach().cpu().contiguous().view(integer).to(torch.int64)
    field = (bits >> digits) & (2 * bias + 1)
    if weight.numel() and int(field.max()) == 2 * bias + 1:
        count = int((field == 2 * bias + 1).sum())
        raise NonFiniteWeight(
            f"expected finite weights, got {count} NaN or infinite of {weight.numel()} values; "
            "load weights from before the training diverged"
        )
    mantissa = bits & (2**digits - 1)
    mantissa += field.clamp(max=1) << digits  # the implicit leading 1, which subnormal numbers do not have
    return Dyadic(torch.where(bits < 0, -mantissa, mantissa), field.clamp_(min=1) - (bias + digits))


def scaled(numbers: Dyadic) -> tuple[Tensor, int]:
    """Return (K, e): float64 numbers K with 1 <= max |K| < 2 such that the numbers are K 2^e.

    Exact, except that numbers below 2^-940 times the largest may be zero in K. No number in K is subnormal.
    """
    top = numbers.top
    shift = numbers.exponent - top
    kept = shift >= -_DEPTH
    power = power_of_two(torch.where(kept, shift, 0), torch.float64)
    return torch.where(kept, numbers.mantissa, 0).to(torch.float64) * power, top


def integers(values: Tensor) -> tuple[list[int], int]:
    """Return the numbers in order as integers M and one exponent e with values = M 2^-e, exactly.

    Examples:
        >>> integers(torch.tensor([0.5, 3.0]))
        ([1, 6], 1)
    """
    mantissa, exponent = (part.flatten() for part in read(values))
    # Remove trailing zeros, which would only make the integers longer. m & -m is the lowest set bit, a power of two.
    zeros = torch.frexp((mantissa & -mantissa).to(torch.float64)).exponent - 1
    zeros = torch.where(mantissa != 0, zeros, 0)
    exponent = torch.where(mantissa != 0, exponent + zeros, 0)
    lowest = min(int(exponent.min()), 0) if len(exponent) else 0
    pairs = zip((mantissa >> zeros).tolist(), (exponent - lowest).tolist(), strict=True)
    return [m << shift for m, shift in pairs], -lowest


def squared_distance(point: Tensor, image: Tensor) -> Fraction:
    """Return ||point - image||^2 of two tensors of the same shape, exactly.

    Examples:
        >>> squared_distance(torch.tensor([1.0, 2.0**-60]), torch.zeros(2)) == 1 + Fraction(1, 2**120)
        True
    """
    if point.shape != image.shape:
        raise ValueError(f"expected two points of the same shape, got {tuple(point.shape)} and {tuple(image.shape)}")
    numbers, exponent = integers(torch.stack([point.detach().double(), image.detach().double()]))
    half = len(numbers) // 2
    return Fraction(sum((a - b) ** 2 for a, b in zip(numbers[:half], numbers[half:], strict=True)), 1 << 2 * exponent)


def power_of_two(exponent: Tensor, dtype: torch.dtype) -> Tensor:
    """Return 2^exponent exactly, by writing the exponent field of the float: exp2 and pow may round."""
    if dtype == torch.float64:
        return ((exponent.to(torch.int64) + 1023) << 52).view(torch.float64)
    return ((exponent.to(torch.int32) + 127) << 23).view(torch.float32)
