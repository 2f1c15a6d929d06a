"""From computed logits to certified radii, by the constants of a `Head`.

    R_j = (f^_y - f^_j - loss) / slope_yj,    R = the largest float below min_j R_j and below sqrt(n).

The quotients are computed as fractions, squared like the slopes. Float64 is used only to select the j that can attain
the minimum: its estimate of R_j has an error of a few units in the last place of the margin, and every j that is not
above the minimum by much more than that is computed exactly.
"""

import math
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from onelip.certification.head import Head
from onelip.core.rounding import root_below

# Relative slack of the float64 estimate; its true error is a few 2^-53.
_SLACK = 2.0**-40

Floats = NDArray[np.float64]


def certified_radii(logits: Floats, head: Head, entries: int) -> Floats:
    """Radius of each row of logits (N, classes); 0 if nothing is certified: ties, NaN, margins within the rounding.

    Args:
        logits: the computed logits.
        head: constants of the pairs of classes.
        entries: number n of entries of an image; radii stay below sqrt(n), the domain of the proof.
    """
    cap = root_below(Fraction(entries))
    classes, candidates = _candidates(logits, head)
    radii = np.zeros(len(logits))
    finite = np.isfinite(logits).all(1)
    for i in np.flatnonzero(finite):
        y = int(classes[i])
        found = _exact_radius(logits[i], y, np.flatnonzero(candidates[i]), head)
        radii[i] = min(found, cap)
    return radii


def pixel_distance(radius: float) -> int | None:
    """The largest integer N such that uint8 images with sum of squared differences <= N are within the radius.

    Examples:
        >>> pixel_distance(0.5), pixel_distance(0.0)
        (16256, None)
    """
    return math.floor((255 * Fraction(radius)) ** 2) if radius > 0 else None


def _candidates(logits: Floats, head: Head) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
    """The class of each row, and the others that can attain the minimum, including all doubtful ones."""
    classes = logits.argmax(1)
    slope, loss = np.asarray(head.slope)[classes], head.loss
    with np.errstate(all="ignore"):
        margin = np.take_along_axis(logits, classes[:, None], 1) - logits
        estimate = (margin - loss) / slope
        doubt = _SLACK * (np.abs(margin) + loss) / slope
        highest = estimate + doubt
        own = np.arange(logits.shape[1]) == classes[:, None]
        highest[own | np.isnan(highest)] = np.inf
        # Written with `not >`, a NaN (a slope of 0, an overflow) leaves the class a candidate.
        candidates = ~(estimate - doubt > highest.min(1, keepdims=True))
    return classes, candidates & ~own


def _exact_radius(logits: Floats, y: int, others: NDArray[np.int64], head: Head) -> float:
    nearest: Fraction | None = None
    best = Fraction(float(logits[y])) - Fraction(head.loss)
    for j in others.tolist():
        left = best - Fraction(float(logits[j]))
        if not left > 0:
            return 0.0
        if head.squares[y][j] > 0:
            square = left**2 / head.squares[y][j]
            nearest = square if nearest is None else min(nearest, square)
    if nearest is None:
        return math.inf  # rows that differ only in their biases: no perturbation changes their order
    return root_below(nearest)
