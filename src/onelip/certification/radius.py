"""From the bounds of the nodes to constants for each pair of logits, and from computed logits to certified radii.

A computed logit is within error of its value in real arithmetic, for the image and for every perturbed image, and the
difference f_y - f_j is slope_yj-Lipschitz in the input. So for an image with computed logits f^, the class y holds at
every distance R with

    f^_y - f^_j > slope_yj R + 8 error    for all j != y.

Half of these 8 errors is needed for rounding: two errors at x and two at x'. The other half is for the logits in a
certificate file: the checker runs the program itself, and two runs may differ by 2 error.

If the logits are rows of a linear node with the input node P, then slope_yj = ||w_y - w_j|| lipschitz_P, with the exact
distance of two rows. Otherwise sqrt(2) ||W|| holds for every pair. Slopes are stored as squares, which are fractions.

The radius is

    R_j = (f^_y - f^_j - 8 error) / slope_yj,    R = the largest float below min_j R_j and below sqrt(n).

The quotients are computed as fractions, squared like the slopes. Float64 is used only to select the j that can attain
the minimum: its estimate of R_j has an error of a few units in the last place of the margin, and every j that is not
above the minimum by much more than that is computed exactly.
"""

import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from onelip.core.floats import squared_distances
from onelip.core.rounding import root_below, up_root
from onelip.graph.kinds import Affine, Join, NodeBound, Program

# The number of pairs grows with the square of the number of classes; beyond this, all pairs have one constant.
MOST_CLASSES_WITH_PAIRS = 128


@dataclass(frozen=True)
class Head:
    """Constants of the differences of logits, for every pair of classes.

    Attributes:
        node: the linear node whose first rows are the logits; None if all pairs have one constant.
        squares: (classes, classes), squared slopes; zeros on the diagonal.
        slope: their roots, rounded up.
        rounding: 8 error, which every margin loses to rounding.
    """

    node: int | None
    squares: list[list[Fraction]]
    slope: list[list[float]]
    rounding: float


def make_head(program: Program, bounds: list[NodeBound]) -> Head:
    """Compute the constants of the pairs from the proved bounds of the nodes."""
    node = _logits_node(program)
    if node is None:
        return same_for_all(program.classes, bounds[-1])
    last = program.nodes[node]
    assert isinstance(last, Affine)
    rows = _rows(last)[: program.classes]  # (classes, inputs)
    lipschitz = Fraction(bounds[last.inputs[0]].lipschitz)
    squares = [[square * lipschitz**2 for square in line] for line in squared_distances(rows)]
    return Head(node, squares, [[up_root(square) for square in row] for row in squares], 8 * bounds[node].error)


def _logits_node(program: Program) -> int | None:
    """The linear node whose first rows are the logits, if the differences of its rows are those of the logits."""
    if program.classes > MOST_CLASSES_WITH_PAIRS:
        return None
    index = len(program.nodes) - 1
    while isinstance(node := program.nodes[index], Join) and len(node.inputs) == 1:
        index = node.inputs[0]  # a join of one input has its first entries
        if program.nodes[index].entries < node.entries:  # and zeros
            return None
    if type(node) is not Affine:
        return None
    if node.conv is None:
        return index
    # One position: each input meets at most one tap, so a row of the operator is a part of the row of the kernel. This
    # is not true for circular padding, where several taps can meet one pixel, nor for groups.
    single = math.prod(node.shape[1:]) == 1
    return index if single and not node.is_circular and node.groups == 1 else None


def same_for_all(classes: int, output: NodeBound) -> Head:
    """One constant for all pairs: sqrt(2) times that of the logits."""
    square = 2 * Fraction(output.lipschitz) ** 2
    root, zero, indices = up_root(square), Fraction(0), range(classes)
    squares = [[zero if i == j else square for j in indices] for i in indices]
    slope = [[0.0 if i == j else root for j in indices] for i in indices]
    return Head(None, squares, slope, 8 * output.error)


def _rows(node: Affine) -> Tensor:
    weight = node.weight.values
    return (weight.transpose(0, 1) if node.transposed else weight).flatten(1)


# Relative slack of the float64 estimate; its true error is a few 2^-53.
_SLACK = 2.0**-40

Floats = NDArray[np.float64]


def certified_radii(logits: Floats, classes: NDArray[np.int64], head: Head, entries: int) -> Floats:
    """Radius of the class of each image; 0 if nothing is certified: ties, NaN, margins within the rounding.

    Args:
        logits: (N, classes), the computed logits.
        classes: (N), the classes with the largest logits.
        head: constants of the pairs of classes.
        entries: number n of entries of an image; radii stay below sqrt(n), the domain of the proof.
    """
    cap = root_below(Fraction(entries))
    candidates = _candidates(logits, classes, head)
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


def _candidates(logits: Floats, classes: NDArray[np.int64], head: Head) -> NDArray[np.bool_]:
    """The other classes that can attain the minimum of each row, including all doubtful ones."""
    slope, rounding = np.asarray(head.slope)[classes], head.rounding
    with np.errstate(all="ignore"):
        margin = np.take_along_axis(logits, classes[:, None], 1) - logits
        estimate = (margin - rounding) / slope
        doubt = _SLACK * (np.abs(margin) + rounding) / slope
        highest = estimate + doubt
        own = np.arange(logits.shape[1]) == classes[:, None]
        highest[own | np.isnan(highest)] = np.inf
        # Written with `not >`, a NaN (a slope of 0, an overflow) leaves the class a candidate.
        candidates = ~(estimate - doubt > highest.min(1, keepdims=True))
    return candidates & ~own


def _exact_radius(logits: Floats, y: int, others: NDArray[np.int64], head: Head) -> float:
    nearest: Fraction | None = None
    best = Fraction(float(logits[y])) - Fraction(head.rounding)
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
