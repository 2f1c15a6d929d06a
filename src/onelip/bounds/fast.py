"""||W|| <= value for the stored weights of a linear layer, in float64; witnesses, from which a checker proves it again.

There are three kinds of proof. Each holds for any value of its witness (q, R or the frequencies), so checking the
inequality is the proof. For the Gram operator G = W^T W of a layer,

    schur        ||W||^2 <= max_i sum_j |G_ij| q_j / q_i            for every q > 0, and the same for powers of G
    cholesky     ||W||^2 <= S     if S I - G - R^T R is small, for any matrix R
    frequencies  ||W||^2 <= S     if the matrices of W at some frequencies are below S by a margin for all others
"""

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

import torch
from torch import Tensor

from onelip.bounds._frequencies import cost_of_frequencies, frequency_bound
from onelip.bounds._gram import Gram, cholesky_bound, cost_of_gram, gram, lay_out, norm_of_square, scaling_of
from onelip.core import floats
from onelip.core.geometry import Geometry
from onelip.core.rounding import repeated_root, up_root


class ProofFailed(ValueError):
    """A witness does not prove its claim."""


@dataclass(frozen=True)
class Witness:
    """The numbers that a checker needs to repeat a proof. It does not trust them, and computes the rest.

    Attributes:
        kind: "schur", "cholesky", "frequencies", or "zero" for a layer without a non-zero weight.
        side: "inputs" or "outputs": which channels are the columns of the Gram operator.
        steps: 1 for the Gram operator G itself, 2 for G^2, 3 for G^4, and so on. Always 1 for kinds other than "schur".
        scale: for "schur": positive integers q, one tuple per group, in the order of the columns of
            `Geometry.to_kernel`, that is (channel, phase).
        square: for "cholesky" and "frequencies": the claim S, ||W||^2 <= S; for the latter the square of a float64.
        tree: for "frequencies": the frequencies, Note [Points] in `onelip.bounds._frequencies`.
    """

    kind: str
    side: str
    steps: int
    scale: tuple[tuple[int, ...], ...] | None
    square: Fraction | None
    tree: str | None = None


@dataclass(frozen=True)
class WeightBound:
    """A proved bound, computed in float64 with all of its rounding errors counted.

    Attributes:
        value: ||W|| <= value.
        witness: the proof of the smallest candidate.
        candidates: all bounds that were computed, by name; each of them is proved.
    """

    value: float
    witness: Witness
    candidates: dict[str, float]


@dataclass(frozen=True)
class ExactBound:
    """A bound proved in rational arithmetic, without any rounding.

    Attributes:
        square: ||W||^2 <= square.
        value: the smallest float64 that is not below the root of `square`.
        witness: the proof.
    """

    square: Fraction
    value: float
    witness: Witness


ZERO = Witness(kind="zero", side="inputs", steps=1, scale=None, square=None)


# ---- ||W|| <= value, with every rounding error counted
#
# Several proofs are tried and the smallest bound is taken:
#
#     schur        the scaled Schur test on the Gram operator, the basis of AOL: the bound of an AOL layer is 1 + 1e-10
#     cholesky     for matrices: the largest singular value itself, up to about 1e-9
#     frequencies  for convolutions: the norm up to 0.2 %, from the matrices at a few hundred frequencies
#     gram t       the Schur test on the power 2^(t-1) of the Gram operator, with too many channels for frequencies
#
# Each is proved again in rational arithmetic by `onelip.bounds.exact`, from the same witness, and cannot be larger
# there: both evaluate the same expression, one of them rounded up.


Effort = Literal["quick", "normal", "high"]
_SIDES = ("inputs", "outputs")

# Multiplications and additions that each effort may spend: on the second side's Gram operator, and on a power of it.
_BOTH_SIDES = 4e9
_POWERS = {"quick": 0.0, "normal": 3e10, "high": 5e11}
_STEPS = {"quick": 1, "normal": 2, "high": 4}
# The same for frequencies. If powers of the Gram operator would have to be proved again in integers, these are cheaper.
_FREQUENCIES = {"quick": 0.0, "normal": 0.0, "high": 1e11}
_FREQUENCIES_EXACT = 1e12
_STEPS_EXACT = 3
# Columns up to which a Cholesky decomposition is tried.
_MATRIX_SIDE = {"quick": 0, "normal": 4096, "high": 16384}
# Powers of a Gram operator have roots that are float64; beyond these exponents of the largest weight they may not fit.
_MODERATE = 100


@dataclass(frozen=True)
class Candidate:
    """||W||^2 <= square, proved in float64; exact arithmetic proves at least as much from the witness."""

    square: Fraction
    witness: Witness


@torch.no_grad()
def bound_weight(
    weight: Tensor, geometry: Geometry, *, effort: Effort = "normal", exact: bool = False, enough: float = 0.0
) -> WeightBound:
    """A proved bound on the operator norm of a weight.

    Args:
        weight: the stored weight of a layer, float16, bfloat16, float32 or float64, on any device.
        geometry: how the layer acts, see `onelip.core.geometry.geometry_of`.
        effort: "quick" for the Schur test alone, "normal" with the square of the Gram operator and the Cholesky
            certificate where they are affordable, "high" for more of both, and for frequencies.
        exact: whether the witness will be proved again by `exact_bound`: "normal" then has frequencies, too, since
            powers of the Gram operator are expensive in integers.
        enough: a bound that is small enough; no work is done for a smaller one.

    Raises:
        NonFiniteWeight: for infinities and NaNs.
        OverflowError: if the bound is beyond the range of float64.

    Examples:
        >>> from onelip.core.geometry import geometry_of
        >>> layer = torch.nn.Conv2d(1, 1, 3, bias=False)
        >>> _ = torch.nn.init.constant_(layer.weight, 1 / 3)
        >>> bound = bound_weight(layer.weight, geometry_of(layer))
        >>> round(bound.value, 6), bound.witness.kind
        (3.0, 'schur')
    """
    found = candidates(weight, geometry, effort, exact=exact, enough=enough)
    best = min(found.values(), key=lambda candidate: candidate.square)
    values = {name: up_root(candidate.square) for name, candidate in found.items()}
    return WeightBound(up_root(best.square), best.witness, values)


@torch.no_grad()
def candidates(
    weight: Tensor, geometry: Geometry, effort: Effort = "normal", *, exact: bool = False, enough: float = 0.0
) -> dict[str, Candidate]:
    """All bounds that `bound_weight` chooses from, by name."""
    if effort not in _STEPS:
        raise ValueError(f"expected effort to be one of {', '.join(_STEPS)}, got {effort!r}")
    numbers = floats.read(weight)
    if numbers.all_zero():
        return {"zero": Candidate(Fraction(0), ZERO)}
    scaled, exponent = floats.scaled(numbers)
    kernels = {side: lay_out(geometry.to_kernel(scaled, side)) for side in _SIDES}
    cheap, costly = sorted(_SIDES, key=lambda side: cost_of_gram(tuple(kernels[side].shape)))
    grams = {cheap: gram(kernels[cheap], keep=_is_used_again(kernels[cheap], effort))}
    found = {f"schur {cheap}": _schur(kernels[cheap], [grams[cheap]], cheap, exponent)}
    if _is_matrix(kernels[cheap]) and kernels[cheap].shape[-1] <= _MATRIX_SIDE[effort]:
        certificate = _cholesky(kernels[cheap], grams[cheap], cheap, exponent)
        if certificate is not None:  # nothing else comes near it
            return found | {f"cholesky {cheap}": certificate}
    if cost_of_gram(tuple(kernels[costly].shape)) <= _BOTH_SIDES:
        grams[costly] = gram(kernels[costly], keep=_is_used_again(kernels[costly], effort))
        found[f"schur {costly}"] = _schur(kernels[costly], [grams[costly]], costly, exponent)
    side = min(grams, key=lambda side: found[f"schur {side}"].square)
    if found[f"schur {side}"].square <= Fraction(enough) ** 2:
        return found
    limit = _FREQUENCIES_EXACT if exact and effort != "quick" else _FREQUENCIES[effort]
    narrow = min(_SIDES, key=lambda side: kernels[side].shape[-1])
    if abs(exponent) <= _MODERATE and cost_of_frequencies(tuple(kernels[narrow].shape)) <= limit:
        known = found[f"schur {side}"].square
        certificate = _frequencies(kernels[narrow], narrow, exponent, known, Fraction(enough) ** 2)
        if certificate is not None:  # nothing else comes near it
            return found | {f"frequencies {narrow}": certificate}
    if abs(exponent) <= _MODERATE:
        steps = min(_STEPS[effort], _STEPS_EXACT) if exact else _STEPS[effort]
        found |= _powers(kernels[side], grams[side], side, exponent, effort, steps)
    return found


def _is_matrix(K: Tensor) -> bool:
    return math.prod(K.shape[1:-2]) == 1


def _is_used_again(K: Tensor, effort: Effort) -> bool:
    """Whether the Gram operator of K will be decomposed or squared: otherwise its sums do, and it may be large."""
    g, *taps, _, columns = K.shape
    squared = cost_of_gram((g, *(2 * k - 1 for k in taps), columns, columns))
    return squared <= _POWERS[effort] or (_is_matrix(K) and columns <= _MATRIX_SIDE[effort])


def _schur(K: Tensor, grams: list[Gram], side: str, exponent: int) -> Candidate:
    steps = len(grams)
    q = scaling_of(grams[-1].sums)
    power = norm_of_square(K, grams, q) * Fraction(4) ** (exponent * 2 ** (steps - 1))  # of ||W||^(2^steps)
    scale = tuple(tuple(int(number) for number in row) for row in q.tolist())
    return Candidate(repeated_root(power, steps - 1), Witness("schur", side, steps, scale, None))


def _powers(K: Tensor, start: Gram, side: str, exponent: int, effort: Effort, steps: int) -> dict[str, Candidate]:
    found = {}
    grams = [start]
    for step in range(2, steps + 1):
        kernel = grams[-1].kernel
        if kernel is None:
            break
        grams[-1] = grams[-1]._replace(kernel=None)
        grams.append(gram(kernel, keep=step < steps and _is_used_again(kernel, effort)))
        try:
            found[f"gram {step} {side}"] = _schur(K, grams, side, exponent)
        except OverflowError:  # a power out of range; earlier bounds are kept
            break
    return found


def _frequencies(K: Tensor, side: str, exponent: int, known: Fraction, enough: Fraction) -> Candidate | None:
    scale = Fraction(4) ** exponent
    proved = frequency_bound(K, known / scale, enough / scale)
    if proved is None:
        return None
    square, tree = proved[0] * scale, proved[1]
    return Candidate(square, Witness("frequencies", side, 1, None, square, tree))


def _cholesky(K: Tensor, start: Gram, side: str, exponent: int) -> Candidate | None:
    assert start.kernel is not None
    shape = K.shape[0], *K.shape[-2:]
    H = start.kernel.reshape(K.shape[0], K.shape[-1], K.shape[-1])
    proved = cholesky_bound(K.reshape(shape), H)
    if proved is None:
        return None
    square, claim = (number * Fraction(4) ** exponent for number in proved)
    return Candidate(square, Witness("cholesky", side, 1, None, claim))
