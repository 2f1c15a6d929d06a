"""||W||^2 <= square as a fraction, proved in integers: no rounding anywhere, and so no error analysis.

Stored weights are integers times one power of two, W = 2^e M. With G = M^T M in integers (python-flint), and G as a
kernel over offsets for convolutions, a witness of `onelip.bounds.fast` is evaluated without any change:

    schur       square = max_i sum_j |G_ij| q_j / q_i * 4^e                             for t = 1 step
                square = v^2, v the least float64 with v^(2^t) >= max_i sum_j |M_t|_ij q_j / q_i, M_{t+1} = M_t M_t
    cholesky    square = S, if some R makes the row sums of |(S - delta) I - G - R^T R| at most delta = 2^-32 S
    frequencies square = S, if the tree of the witness proves it; the integers of `onelip.bounds._frequencies`
"""

import math
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from torch import Tensor

from onelip.bounds._frequencies import is_proved
from onelip.bounds._gram import Offset, half_of_offsets, lay_out, margin
from onelip.bounds.fast import ZERO, ExactBound, ProofFailed, Witness, candidates
from onelip.core import floats
from onelip.core.geometry import Geometry
from onelip.core.rounding import up_root, up_root_of_power

# One matrix of integers (rows, columns) for each tap that has one; python-flint gives its types no stubs.
Blocks = dict[Offset, Any]
_FACTOR_DIGITS = 54  # binary digits after the point that are kept of R
_INT64_DIGITS = 62
# Where remainders are faster than long integers: convolutions with many columns, of numbers that are not very long.
_MANY_COLUMNS, _FEW_DIGITS = 64, 300


@torch.no_grad()
def exact_bound(weight: Tensor, geometry: Geometry, witness: Witness | None = None) -> ExactBound:
    """A bound on the operator norm of a weight that is proved in rational arithmetic.

    Args:
        weight: the stored weight, float16, bfloat16, float32 or float64.
        geometry: how the layer acts.
        witness: the witness to prove; by default the best that `bound_weight` finds.

    Raises:
        ProofFailed: if the witness does not prove its claim.
        ImportError: without python-flint.

    Examples:
        >>> from onelip.core.geometry import geometry_of
        >>> layer = torch.nn.Conv1d(1, 1, 2, bias=False)
        >>> _ = torch.nn.init.constant_(layer.weight, 0.75)
        >>> exact_bound(layer.weight, geometry_of(layer)).square
        Fraction(9, 4)
    """
    if witness is not None:
        return _evaluate(weight, geometry, witness)
    found = sorted(candidates(weight, geometry, exact=True).values(), key=lambda candidate: candidate.square)
    for candidate in found[:-1]:
        try:
            return _evaluate(weight, geometry, candidate.witness)
        except ProofFailed:
            continue  # the Schur test never fails, and is among them
    return _evaluate(weight, geometry, found[-1].witness)


def _evaluate(weight: Tensor, geometry: Geometry, witness: Witness) -> ExactBound:
    numbers = floats.read(weight)
    zero = numbers.all_zero()
    if zero or witness.kind == "zero":
        if not zero:
            raise ProofFailed("expected a layer of zeros, got one with other weights; ask for another witness")
        return ExactBound(Fraction(0), 0.0, ZERO)
    if witness.side not in ("inputs", "outputs"):
        raise ProofFailed(f"expected the side 'inputs' or 'outputs', got {witness.side!r}")
    if witness.kind == "frequencies":
        return _frequencies(numbers, geometry, witness)
    groups, exponent = _integer_kernels(numbers, geometry, witness.side)
    if witness.kind == "schur":
        square = _schur(groups, exponent, witness)
    elif witness.kind == "cholesky":
        square = _cholesky(groups, exponent, witness)
    else:
        kinds = "'schur', 'cholesky', 'frequencies' or 'zero'"
        raise ProofFailed(f"expected a witness of kind {kinds}, got {witness.kind!r}")
    return ExactBound(square, up_root(square), witness)


def _frequencies(numbers: floats.Dyadic, geometry: Geometry, witness: Witness) -> ExactBound:
    S, tree = witness.square, witness.tree
    if S is None or tree is None or not S > 0:
        raise ProofFailed(f"expected a positive claim and a tree of frequencies, got {S} and {tree!r:.40}")
    scaled, exponent = floats.scaled(numbers)
    kernel = lay_out(geometry.to_kernel(scaled, witness.side))
    if not is_proved(kernel, S / Fraction(4) ** exponent, tree):
        raise ProofFailed(f"expected the claim ||W||^2 <= {float(S)} to be proved by the given frequencies, got none")
    return ExactBound(S, up_root(S), witness)


def _flint() -> Any:
    try:
        import flint
    except ImportError as error:
        raise ImportError("exact bounds need python-flint; pip install 'onelip[exact]'") from error
    return flint


def _integer_kernels(numbers: floats.Dyadic, geometry: Geometry, side: str) -> tuple[list[Blocks], int]:
    """(M, e): integer kernels, one per group, with W = 2^e M."""
    flint = _flint()
    mantissa, exponents = numbers.mantissa.flatten().numpy(), numbers.exponent.flatten().numpy()
    present = mantissa != 0
    # Trailing zeros go into the exponent: float32 weights stored as float64 stay numbers of 24 bits.
    lowest = np.maximum(mantissa & -mantissa, 1)
    zeros = np.frexp(lowest.astype(np.float64))[1].astype(np.int64) - 1
    mantissa, exponents = mantissa >> zeros, exponents + zeros
    exponent = int(exponents[present].min())
    shift = np.where(present, exponents - exponent, 0)
    if numbers.top + 1 - exponent > _INT64_DIGITS:
        mantissa, shift = mantissa.astype(object), shift.astype(object)  # Python's integers are unbounded
    integers = np.concatenate([np.zeros(1, mantissa.dtype), mantissa << shift])
    # The geometry itself shows where each number goes; 0 stands for taps that some phases do not have.
    place = torch.arange(1, len(integers)).reshape(numbers.mantissa.shape)
    places = geometry.to_kernel(place, side).numpy()  # (g, rows, columns, *taps)
    rows, columns = places.shape[1:3]
    groups: list[Blocks] = []
    for group in places:
        blocks = {}
        for tap in np.ndindex(group.shape[2:]):
            entries = integers[group[(slice(None), slice(None), *tap)]]
            if entries.any():
                blocks[tap] = flint.fmpz_mat(rows, columns, entries.ravel().tolist())
        groups.append(blocks)
    return groups, exponent


def _gram(blocks: Blocks) -> Blocks:
    """Half of the Gram operator: A_delta = sum_t K_{t + delta}^T K_t for delta zero or after zero."""
    transposed = {tap: block.transpose() for tap, block in blocks.items()}
    result: Blocks = {}
    dims = len(next(iter(blocks), ()))
    extent = tuple(max(tap[i] for tap in blocks) - min(tap[i] for tap in blocks) + 1 for i in range(dims))
    for delta in half_of_offsets(extent):
        for tap, block in blocks.items():
            partner = transposed.get(tuple(t + d for t, d in zip(tap, delta, strict=True)))
            if partner is not None:
                product = partner * block
                result[delta] = result[delta] + product if delta in result else product
    return result


def _completed(half: Blocks) -> Blocks:
    """All of a symmetric operator: A_{-delta} = A_delta^T."""
    return half | {tuple(-d for d in delta): block.transpose() for delta, block in half.items() if any(delta)}


def _absolute_sums(blocks: Blocks) -> Any:
    """T_ij = sum over all offsets of |A_delta[i, j]|, for the Gram operator A of a kernel."""
    flint = _flint()
    rows, columns = next((block.nrows(), block.ncols()) for block in blocks.values())
    if len(blocks) > 1 and columns >= _MANY_COLUMNS and _digits(blocks) <= _FEW_DIGITS:
        return flint.fmpz_mat(columns, columns, absolute_gram_sums(blocks, rows, columns))
    total = flint.fmpz_mat(columns, columns)
    for delta, block in _gram(blocks).items():
        absolute = flint.fmpz_mat(columns, columns, [abs(entry) for entry in block.entries()])
        total = total + absolute
        if any(delta):
            total = total + absolute.transpose()
    return total


def _digits(blocks: Blocks) -> int:
    return max(int(entry).bit_length() for block in blocks.values() for entry in block.entries())


def _schur(groups: list[Blocks], exponent: int, witness: Witness) -> Fraction:
    flint = _flint()
    scale, steps = witness.scale, witness.steps
    columns = {block.ncols() for blocks in groups for block in blocks.values()}
    if type(steps) is not int or not 1 <= steps <= 8:
        raise ProofFailed(f"expected a number of steps from 1 to 8, got {steps!r}")
    if scale is None or [len(row) for row in scale] != [max(columns)] * len(groups):
        shape = None if scale is None else [len(row) for row in scale]
        raise ProofFailed(f"expected {len(groups)} scalings of {max(columns)} numbers, got lengths {shape}")
    if not all(type(q) is int and q > 0 for row in scale for q in row):
        raise ProofFailed("expected scalings of positive integers")
    largest = Fraction(0)
    for blocks, q in zip(groups, scale, strict=True):
        if not blocks:  # a group of zeros
            continue
        for _ in range(steps - 1):
            blocks = _completed(_gram(blocks))
        sums = _absolute_sums(blocks) * flint.fmpz_mat(len(q), 1, list(q))
        largest = max(largest, *(Fraction(int(s), q_i) for s, q_i in zip(sums.entries(), q, strict=True)))
    power = largest * Fraction(4) ** (exponent * 2 ** (steps - 1))  # of ||W||^(2^steps)
    return power if steps == 1 else Fraction(up_root_of_power(power, steps)) ** 2


def _cholesky(groups: list[Blocks], exponent: int, witness: Witness) -> Fraction:
    S = witness.square
    if S is None or not S > 0:
        raise ProofFailed(f"expected a positive claim, got {S}")
    for blocks in groups:
        if any(any(delta) for delta in _gram(blocks)):
            raise ProofFailed("expected a matrix or a kernel with one tap, got a convolution; use a Schur witness")
        for G in _gram(blocks).values():
            _require_above(S, G, exponent)
    return S


def _require_above(S: Fraction, G: Any, exponent: int) -> None:
    """Prove G 4^exponent <= S I."""
    flint = _flint()
    n = G.nrows()
    # In units of 4^p the claim is between 1/4 and 4, so that the matrix to factor is within the range of floats.
    p = (S.numerator.bit_length() - S.denominator.bit_length()) // 2
    R = _factor(S / Fraction(4) ** p, G, exponent - p)
    # Everything in units of 4^w, in which both products are integers.
    w = min(exponent, p - _FACTOR_DIGITS)
    rest = G * 4 ** (exponent - w) + (R.transpose() * R) * 4 ** (p - _FACTOR_DIGITS - w)
    diagonal = (S - margin(S)) / Fraction(4) ** w
    allowed = margin(S) / Fraction(4) ** w
    entries = [abs(entry) for entry in rest.entries()]
    for i in range(n):
        row = entries[i * n : (i + 1) * n]
        others = int(sum(row, flint.fmpz(0)) - row[i])
        if not others + abs(diagonal - int(rest[i, i])) <= allowed:
            raise ProofFailed(f"expected the claim ||W||^2 <= {float(S)} to be proved by a Cholesky factor, got none")


def _factor(S: Fraction, G: Any, exponent: int) -> Any:
    """Integers near 2^54 R with R^T R = (S - delta) I - G 4^exponent; how near is for the caller to check."""
    flint = _flint()
    n = G.nrows()
    entries = [int(entry) for entry in G.entries()]
    # A float holds 53 digits and some exponents: cut the integers to 200 digits before.
    cut = max(0, max(entry.bit_length() for entry in entries) - 200)
    floats = np.array([float(entry >> cut) for entry in entries]).reshape(n, n)
    A = -np.ldexp(floats, cut + 2 * exponent)
    A[np.diag_indices(n)] += float(S - margin(S))
    try:
        R = np.linalg.cholesky(A).T
    except np.linalg.LinAlgError:
        raise ProofFailed(f"expected the claim to be above the largest eigenvalue, got {float(S)} below it") from None
    integers = np.rint(np.ldexp(R, _FACTOR_DIGITS)).astype(np.int64)
    return flint.fmpz_mat(n, n, integers.ravel().tolist())


# ---- Long integers by products of floats
#
# T_ij = sum_delta |A_delta[i, j]| for the Gram operator A of a kernel of long integers is exact. A is computed modulo
# several small coprime numbers p. Remainders of magnitude at most p / 2 have inner products below 2^53, and sums of
# integers below 2^53 are exact in float64, in any order: an ordinary matrix product does it. An integer x with |x| <= h
# = (p_1 p_2 ... p_r - 1) / 2 is known by its remainders. With the digits y_i of x + h in the mixed base
#
#     x + h = y_1 + y_2 p_1 + y_3 p_1 p_2 + ...    and h_i those of h:    x = sum (y_i - h_i) p_1 p_2 ...
#
# and the sign of x is the sign of the last difference that is not zero. Sums of |x| are sums of differences.


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
