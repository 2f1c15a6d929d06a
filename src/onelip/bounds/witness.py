"""Bounds of layers, and their witnesses: the numbers from which a checker can prove a bound again.

There are three kinds of proof. Each holds for any value of its witness (q, R or the frequencies), so checking the
inequality is the proof. For the Gram operator G = W^T W of a layer,

    schur        ||W||^2 <= max_i sum_j |G_ij| q_j / q_i            for every q > 0, and the same for powers of G
    cholesky     ||W||^2 <= S     if S I - G - R^T R is small, for any matrix R
    frequencies  ||W||^2 <= S     if the matrices of W at some frequencies are below S by a margin for all others
"""

from dataclasses import dataclass
from fractions import Fraction


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
