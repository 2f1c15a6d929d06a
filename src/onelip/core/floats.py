"""Exact access to floats as integers times powers of two, by reading their bits, and exact sums. Nothing is rounded.

Reading bits also works in a process that flushes subnormal numbers to zero (`torch.set_flush_denormal`), where
arithmetic on such weights would silently use zeros.
"""

import itertools
from collections.abc import Sequence
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


# ---- Exact sums over weights: floats are integers times a power of two, and integers can be summed without rounding


# Error of a float64 sum of n non-negative numbers, relative: below n 2^-53 (1 + ...), so this is safe up to 2^28 terms.
_SLACK = 2.0**-24
_MOST_TERMS = 2**28


def squared_norm(values: Tensor) -> Fraction:
    """The sum of squares, without rounding.

    Examples:
        >>> squared_norm(Tensor([0.5, 1.5]))
        Fraction(5, 2)
    """
    numbers, exponent = integers(values)
    return Fraction(sum(n * n for n in numbers), 1 << 2 * exponent)


def largest_sum(rows: Tensor) -> Fraction:
    """max_i sum_j |rows_ij|, without rounding; 0 for an empty matrix.

    Float64 sums tell which rows can be the largest; only those are summed exactly.

    Examples:
        >>> largest_sum(Tensor([[1.0, -2.0], [0.5, 0.5]]))
        Fraction(3, 1)
    """
    rows = rows.detach().double().abs()
    if rows.numel() == 0:
        return Fraction(0)
    if rows.shape[1] > _MOST_TERMS:
        raise ValueError(f"expected rows of at most 2^28 numbers, got {rows.shape[1]}; split the layer")
    # Halved exponents for huge rows: a sum must not overflow to infinity and hide which one is the largest.
    sums = rows.mul(2.0**-600 if float(rows.max()) > 2.0**900 else 1.0).sum(1)
    # Tiny rows: below 2^-900 the relative error is no longer small, so all such rows stay candidates.
    candidates = rows[sums >= sums.max() * (1 - _SLACK) - 2.0**-900]
    numbers, exponent = integers(candidates[candidates > 0])
    ends = itertools.accumulate((candidates > 0).sum(1).tolist(), initial=0)
    return Fraction(max(sum(numbers[a:b]) for a, b in itertools.pairwise(ends)), 1 << exponent)


def squared_distances(rows: Tensor) -> list[list[Fraction]]:
    """||rows_i - rows_j||^2 for all pairs, without rounding.

    Examples:
        >>> squared_distances(Tensor([[0.0, 1.0], [1.0, 0.0]]))[0]
        [Fraction(0, 1), Fraction(2, 1)]
    """
    count, width = rows.shape
    numbers, exponent = integers(rows)
    lines = [numbers[i * width : (i + 1) * width] for i in range(count)]
    table = [[Fraction(0)] * count for _ in range(count)]
    for i in range(count):
        for j in range(i):
            table[i][j] = table[j][i] = Fraction(_square_of_difference(lines[i], lines[j]), 1 << 2 * exponent)
    return table


def _square_of_difference(one: Sequence[int], other: Sequence[int]) -> int:
    return sum((a - b) ** 2 for a, b in zip(one, other, strict=True))


def is_below(values: Tensor | None, limit: Fraction) -> bool:
    """Whether all numbers are finite and below the limit in magnitude; NaN is not."""
    return values is None or values.numel() == 0 or bool((values.detach().abs() < float(limit)).all())
