"""T_ij = sum_delta |A_delta[i, j]| for the Gram operator A of a kernel of long integers: exact, by products of floats.

A is computed modulo several small coprime numbers p. Remainders of magnitude at most p / 2 have inner products below
2^53, and sums of integers below 2^53 are exact in float64, in any order: an ordinary matrix product does it. An integer
x with |x| <= h = (p_1 p_2 ... p_r - 1) / 2 is known by its remainders. With the digits y_i of x + h in the mixed base

    x + h = y_1 + y_2 p_1 + y_3 p_1 p_2 + ...    and h_i those of h:    x = sum (y_i - h_i) p_1 p_2 ...

and the sign of x is the sign of the last difference that is not zero. Sums of |x| are sums of differences.
"""

import math
from typing import Any

import numpy as np

from onelip.bounds._gram import Offset, half_of_offsets

_EXACT = 53  # float64 holds all integers up to 2^53
_LIMB = 32


def absolute_gram_sums(kernel: dict[Offset, Any], rows: int, columns: int) -> list[int]:
    """The entries of T, row by row.

    Args:
        kernel: one matrix of integers (rows, columns) for each tap that is not zero; with `entries()`, as flint has it.
        rows: their number of rows.
        columns: their number of columns.

    Examples:
        >>> import flint
        >>> kernel = {(0,): flint.fmpz_mat([[2**70]]), (1,): flint.fmpz_mat([[-3]])}
        >>> absolute_gram_sums(kernel, 1, 1) == [2**140 + 9 + 2 * 3 * 2**70]
        True
    """
    taps = {tap: [int(entry) for entry in block.entries()] for tap, block in kernel.items()}
    digits = max(entry.bit_length() for entries in taps.values() for entry in entries)
    inner = rows * len(taps)
    bases = coprime_bases(inner, inner * 4**digits)
    limbs = {tap: _limbs(entries, digits).reshape(-1, rows, columns) for tap, entries in taps.items()}
    kernels = [{tap: _remainders(limb, digits, p) for tap, limb in limbs.items()} for p in bases]
    half = (math.prod(bases) - 1) // 2
    total = np.zeros((len(bases), columns, columns), np.int64)
    for delta in half_of_offsets(_extent(taps)):
        pairs = [(tuple(t + d for t, d in zip(tap, delta, strict=True)), tap) for tap in taps]
        pairs = [(shifted, tap) for shifted, tap in pairs if shifted in taps]
        if not pairs:
            continue
        products = [
            np.concatenate([K[a] for a, _ in pairs]).T @ np.concatenate([K[b] for _, b in pairs]) for K in kernels
        ]
        differences = _signed_digits([product.astype(np.int64) for product in products], bases, half)
        total += differences
        if any(delta):
            total += differences.transpose(0, 2, 1)
    entries = np.zeros(columns * columns, object)
    for i, digit in enumerate(total):
        entries += digit.ravel().astype(object) * math.prod(bases[:i])
    return entries.tolist()


def _extent(taps: dict[Offset, Any]) -> tuple[int, ...]:
    return tuple(max(axis) - min(axis) + 1 for axis in zip(*taps, strict=True))


def coprime_bases(inner: int, largest: int) -> list[int]:
    """Odd coprime numbers p with inner (p / 2)^2 <= 2^53, of which the product is above 2 largest.

    Examples:
        >>> coprime_bases(1024, 2**60)
        [5931639, 5931637, 5931635]
    """
    p = 2 * math.isqrt(2**_EXACT // inner) + 1
    bases: list[int] = []
    while math.prod(bases) <= 2 * largest:
        p -= 2
        if math.gcd(p, math.prod(bases)) == 1:
            bases.append(p)
    return bases


def _limbs(entries: list[int], digits: int) -> np.ndarray:
    """The entries + 2^digits, which are positive, in base 2^32: (limbs, entries)."""
    size = 4 * (digits // _LIMB + 1)
    offset = 1 << digits
    data = b"".join((entry + offset).to_bytes(size, "little") for entry in entries)
    return np.frombuffer(data, np.uint32).reshape(len(entries), -1).T.astype(np.int64)


def _remainders(limbs: np.ndarray, digits: int, p: int) -> np.ndarray:
    """The remainders of least magnitude, as float64 (rows, columns)."""
    total = np.full(limbs.shape[1:], -pow(2, digits, p), np.int64)
    for i, limb in enumerate(limbs):
        total += limb % p * pow(2, _LIMB * i, p)
    return ((total + p // 2) % p - p // 2).astype(np.float64)


def _signed_digits(remainders: list[np.ndarray], bases: list[int], half: int) -> np.ndarray:
    """For x with these remainders: the differences y_i - h_i, all with the sign that makes their sum |x|."""
    values: list[np.ndarray] = []
    differences: list[np.ndarray] = []
    sign = np.zeros_like(remainders[0])
    for i, p in enumerate(bases):
        digit = (remainders[i] + half % p) % p
        for value, base in zip(values, bases, strict=False):
            digit = (digit - value) % p * pow(base, -1, p) % p
        values.append(digit)
        differences.append(digit - half // math.prod(bases[:i]) % p)
        sign = np.where(differences[-1] != 0, np.sign(differences[-1]), sign)
    return np.stack(differences) * sign
