r"""Margins, radii in real arithmetic, and certified robust accuracy (CRA): the one place that computes them.

If the difference $f_y - f_j$ of two scores has the Lipschitz constant $K_{yj}$ (L2), no perturbation of a norm below

$$ \min_{j \ne y} \frac{f_y - f_j}{K_{yj}} $$

changes the decision $y$. For scores with the constant $L$ every $K_{yj}$ is at most $\sqrt 2\,L$ (Tsuzuku et al., 2018;
paper, section Experiments). This is the ordinary evaluation of the literature: the rounding of the forward pass is not
part of it. Radii that include the rounding are in `onelip.certification.radius`.
"""

import math
from fractions import Fraction

import torch
from torch import Tensor

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
