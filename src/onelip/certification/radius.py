r"""From margins to radii, in real arithmetic and with rounding for each pair of logits; certified robust accuracy.

If the difference $f_y - f_j$ of two scores has the Lipschitz constant $K_{yj}$ (L2), no perturbation of a norm below

$$ \min_{j \ne y} \frac{f_y - f_j}{K_{yj}} $$

changes the decision $y$. For scores with the constant $L$ every $K_{yj}$ is at most $\sqrt 2\,L$ (Tsuzuku et al., 2018;
paper, section Experiments). This is the ordinary evaluation of the literature: the rounding of the forward pass is not
part of it. `certified_radii` includes the rounding.
"""

import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from onelip.core.floats import squared_distances
from onelip.core.rounding import root_below, up_root
from onelip.graph.kinds import Affine, Join, NodeBound
from onelip.graph.lowering import Program

# The radii of the paper's tables.
PAPER_RADII = (36 / 255, 72 / 255, 108 / 255, 1.0)


def margins(scores: Tensor, labels: Tensor) -> Tensor:
    """Score of the right class minus the best of the others, in float64; negative where the decision is wrong.

    Args:
        scores: (N, classes), at least two classes.
        labels: (N) int64.

    Returns:
        (N) float64; NaN for a row with a NaN or an infinity, so that it never compares as certified.

    Examples:
        >>> margins(torch.tensor([[2.0, 0.5, 1.0]]), torch.tensor([0]))
        tensor([1.], dtype=torch.float64)
    """
    _check_scores(scores)
    if labels.shape != scores.shape[:1]:
        raise ValueError(f"expected a label for each of the {len(scores)} rows, got {tuple(labels.shape)}")
    scores, right = scores.detach().double(), labels[:, None]
    others = scores.scatter(1, right, -math.inf)
    difference = scores.gather(1, right)[:, 0] - others.amax(1)
    return torch.where(scores.isfinite().all(1), difference, math.nan)


def real_radii(scores: Tensor, slopes: Tensor | float) -> Tensor:
    """Certified radius of the predicted class in real arithmetic: min_j (f_y - f_j) / slope_yj.

    The decision holds for every perturbation of a norm *below* the radius.

    Args:
        scores: (N, classes), at least two classes.
        slopes: Lipschitz constants of f_i - f_j, (classes, classes); or one number that holds for every pair, which is
            sqrt(2) L for a network with the constant L.

    Returns:
        (N) float64; 0 where nothing is certified (ties, NaN, a slope that is NaN or infinite); infinity where no
        perturbation changes the decision.

    Examples:
        >>> real_radii(torch.tensor([[3.0, 1.0], [1.0, 1.0]]), 2.0)
        tensor([1., 0.], dtype=torch.float64)
    """
    _check_scores(scores)
    scores = scores.detach().double().cpu()
    predicted = scores.argmax(1, keepdim=True)
    if isinstance(slopes, Tensor):
        slope = slopes.detach().double().cpu()[predicted[:, 0]]
    else:
        slope = torch.full_like(scores, slopes)
    margin = scores.gather(1, predicted) - scores
    # A slope of 0: the difference of the two scores is the same everywhere.
    quotient = torch.where(slope == 0, torch.where(margin > 0, math.inf, 0.0), margin / slope)
    nearest = quotient.scatter(1, predicted, math.inf).amin(1)  # amin is NaN if any quotient is
    return torch.where((nearest > 0) & scores.isfinite().all(1), nearest, 0.0)


def certified_accuracy(right: Tensor, radii: Tensor, radius: float, *, inclusive: bool) -> float:
    """CRA: the share of all images that are classified correctly and certified at a radius.

    Args:
        right: (N) bool, whether the predicted class is the label.
        radii: (N), the certified radius of the predicted class.
        radius: where; 36/255 and the like are taken as fractions, see `radius_fraction`.
        inclusive: whether a decision holds at its radius itself. Radii of the sound mode are rounded down and include
            their end; those of real arithmetic do not.

    Examples:
        >>> right = torch.tensor([True, True, False])
        >>> certified_accuracy(right, torch.tensor([2.0, 0.5, 2.0]), 0.5, inclusive=False)
        0.3333333333333333
    """
    if not len(right) or right.shape != radii.shape:
        raise ValueError(
            f"expected a radius for each of one or more images, got {tuple(radii.shape)} for {tuple(right.shape)}"
        )
    return int((right & _reaches(radii, radius, inclusive)).sum()) / len(right)


def _reaches(radii: Tensor, radius: float, inclusive: bool) -> Tensor:
    """Whether radii are above (or at) a radius, compared as the rational numbers they are; NaN never is."""
    wanted = radius_fraction(radius)
    below = float(wanted)  # the largest float64 that is not above it: no radius lies between the two
    if Fraction(below) > wanted:
        below = math.nextafter(below, -math.inf)
    wide = radii.double()
    return wide >= below if inclusive and Fraction(below) == wanted else wide > below


def radius_fraction(radius: float) -> Fraction:
    """The exact radius of a float: k/255 if the float is the nearest one to it, else the decimal that Python prints.

    Examples:
        >>> radius_fraction(36 / 255), radius_fraction(0.1)
        (Fraction(12, 85), Fraction(1, 10))
    """
    if not 0 <= radius < math.inf:
        raise ValueError(f"expected a finite radius of at least 0, got {radius!r}")
    near = Fraction(round(radius * 255), 255)
    return near if abs(near - Fraction(radius)) < Fraction(1, 10**12) else Fraction(repr(float(radius)))


def radius_name(radius: float) -> str:
    """The radius as tables and files name it: 36/255 as in papers, other fractions reduced.

    Examples:
        >>> radius_name(36 / 255), radius_name(1.0), radius_name(0.5)
        ('36/255', '1', '1/2')
    """
    exact = radius_fraction(radius)
    if 255 % exact.denominator == 0 and exact.denominator > 1:
        return f"{exact * 255}/255"
    return str(exact) if max(exact.numerator, exact.denominator) < 10**9 else repr(float(radius))


def _check_scores(scores: Tensor) -> None:
    if scores.dim() != 2 or scores.shape[1] < 2 or not scores.is_floating_point():
        raise ValueError(
            f"expected floating-point scores (N, classes) of two classes or more, got {scores.dtype} "
            f"{tuple(scores.shape)}; pass the outputs of a classifier"
        )


# ---- Radii with rounding: from the bounds of the nodes to constants for each pair of logits, and to certified radii
#
# A computed logit is within error of its value in real arithmetic, for the image and for every perturbed image, and the
# difference f_y - f_j is slope_yj-Lipschitz in the input. So for an image with computed logits f^, the class y holds at
# every distance R with
#
#     f^_y - f^_j > slope_yj R + 8 error    for all j != y.
#
# Half of these 8 errors is needed for rounding: two errors at x and two at x'. The other half is for the logits in a
# certificate file: the checker runs the program itself, and two runs may differ by 2 error.
#
# If the logits are rows of a linear node with the input node P, then slope_yj = ||w_y - w_j|| lipschitz_P, with the
# exact distance of two rows. Otherwise sqrt(2) ||W|| holds for every pair. Slopes are stored as squares, which are
# fractions.
#
# The radius is
#
#     R_j = (f^_y - f^_j - 8 error) / slope_yj,    R = the largest float below min_j R_j and below sqrt(n).
#
# The quotients are computed as fractions, squared like the slopes. Float64 is used only to select the j that can attain
# the minimum: its estimate of R_j has an error of a few units in the last place of the margin, and every j that is not
# above the minimum by much more than that is computed exactly.


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
