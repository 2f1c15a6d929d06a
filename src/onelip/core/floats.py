"""A float is an integer times a power of two. Stored numbers are read from their bits, so nothing is ever rounded.

Reading bits is also what makes this work in a process that flushes subnormal numbers to zero
(`torch.set_flush_denormal`): arithmetic on such weights would silently see zeros.
"""

from fractions import Fraction
from typing import NamedTuple

import torch
from torch import Tensor

from onelip.core.errors import NonFiniteWeight

# Number of bits of the fraction, and the bias of the exponent.
_FORMATS = {
    torch.float16: (torch.int16, 10, 15),
    torch.bfloat16: (torch.int16, 7, 127),
    torch.float32: (torch.int32, 23, 127),
    torch.float64: (torch.int64, 52, 1023),
}
# What lies further than this below the largest weight is left out of `scaled`; see there.
_DEPTH = 1000
_NONE = -(2**20)


class Dyadic(NamedTuple):
    """The numbers mantissa * 2^exponent, both int64 tensors, |mantissa| < 2^53.

    As a float stores them: a number with a smaller exponent than another one is not larger.
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
    """The stored numbers of a weight, exactly.

    Raises:
        NonFiniteWeight: if there is an infinity or a NaN.
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
            f"expected finite weights, got {count} of {weight.numel()} that are infinite or not a number; "
            "train again, or load weights from before it diverged"
        )
    mantissa = bits & (2**digits - 1)
    mantissa += field.clamp(max=1) << digits  # the leading 1 that is not stored, but for subnormal numbers
    return Dyadic(torch.where(bits < 0, -mantissa, mantissa), field.clamp_(min=1) - (bias + digits))


def scaled(numbers: Dyadic) -> tuple[Tensor, int]:
    """(K, e): float64 numbers K with 1 <= max |K| < 2, and the numbers are K 2^e.

    Exact, but for numbers below 2^-940 times the largest, which are zero in K. No number in K is subnormal.
    """
    top = numbers.top
    shift = numbers.exponent - top
    kept = shift >= -_DEPTH
    power = power_of_two(torch.where(kept, shift, 0), torch.float64)
    return torch.where(kept, numbers.mantissa, 0).to(torch.float64) * power, top


def integers(values: Tensor) -> tuple[list[int], int]:
    """The numbers in order as integers M and one exponent e with values = M 2^-e, exactly.

    Examples:
        >>> integers(torch.tensor([0.5, 3.0]))
        ([1, 6], 1)
    """
    mantissa, exponent = (part.flatten() for part in read(values))
    # Trailing zeros would only make the integers longer. m & -m is the lowest bit that is set, a power of two.
    zeros = torch.frexp((mantissa & -mantissa).to(torch.float64)).exponent - 1
    zeros = torch.where(mantissa != 0, zeros, 0)
    exponent = torch.where(mantissa != 0, exponent + zeros, 0)
    lowest = min(int(exponent.min()), 0) if len(exponent) else 0
    pairs = zip((mantissa >> zeros).tolist(), (exponent - lowest).tolist(), strict=True)
    return [m << shift for m, shift in pairs], -lowest


def squared_distance(point: Tensor, image: Tensor) -> Fraction:
    """||point - image||^2 of two tensors of one shape, exactly.

    Examples:
        >>> squared_distance(torch.tensor([1.0, 2.0**-60]), torch.zeros(2)) == 1 + Fraction(1, 2**120)
        True
    """
    if point.shape != image.shape:
        raise ValueError(f"expected two points of one shape, got {tuple(point.shape)} and {tuple(image.shape)}")
    numbers, exponent = integers(torch.stack([point.detach().double(), image.detach().double()]))
    half = len(numbers) // 2
    return Fraction(sum((a - b) ** 2 for a, b in zip(numbers[:half], numbers[half:], strict=True)), 1 << 2 * exponent)


def power_of_two(exponent: Tensor, dtype: torch.dtype) -> Tensor:
    """2^exponent exactly, by writing the exponent field of the float: exp2 and pow may be off by a rounding."""
    if dtype == torch.float64:
        return ((exponent.to(torch.int64) + 1023) << 52).view(torch.float64)
    return ((exponent.to(torch.int32) + 127) << 23).view(torch.float32)
