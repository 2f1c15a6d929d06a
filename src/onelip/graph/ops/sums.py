"""Sums along axes, whose norms have closed forms.

Sum over n entries: the rows of the matrix have n ones each and share no column, so A A^T = n I and ||A|| = sqrt(n).
Mean: divided by n, so 1 / sqrt(n).

Fold (col2im): every entry is added to one pixel or dropped, so the rows are again apart, and ||A||^2 is the largest
number of entries that are added to one pixel: the largest value of A 1.

Cumulative sum: the matrix L of ones on and below the diagonal has the inverse D with 1 on the diagonal and -1 below it.
D D^T = tridiag(-1, 2, -1), but for 1 in its first corner, has the eigenvalues 4 sin^2((2k - 1) pi / (2 (2n + 1))),
k = 1 .. n, so

    ||L|| = 1 / (2 sin(pi / (2 (2n + 1)))).

Difference of neighbours: D D^T = tridiag(-1, 2, -1) of n - 1 rows has the eigenvalues 4 sin^2(k pi / (2n)), the largest
of which is 4 cos^2(pi / (2n)).
"""

import math
from fractions import Fraction

import torch

from onelip.core.rounding import multiply_up, up, up_root
from onelip.graph.step import Refusal, Step, StepBound, aten, check_axes, register_rule

_PI = Fraction(314159265358979323846, 10**20)  # below pi


@register_rule("aten.sum.dim_IntList", "aten.sum.default")
def sum_up(step: Step) -> StepBound:
    """sqrt(n)."""
    count = check_axes(step, step.argument("dim") if "dim" in step.call.op else None)
    return step.times(up_root(Fraction(count)), f"sum of {count} entries")


@register_rule("aten.mean.dim", "aten.mean.default")
def mean(step: Step) -> StepBound:
    """1 / sqrt(n)."""
    count = check_axes(step, step.argument("dim") if "dim" in step.call.op else None)
    if not count:
        raise Refusal("is a mean of no entries")
    return step.times(up_root(Fraction(1, count)), f"mean of {count} entries")


@register_rule("aten.col2im.default")
def fold(step: Step) -> StepBound:
    """Root of the most entries that are added to one pixel."""
    shape = step.source.shape
    if len(shape) != 3:
        raise Refusal("works along the batch axis, so samples depend on each other")
    ones = torch.ones(1, *shape[1:], dtype=torch.float64)
    counts = aten(step.call.op)(ones, *step.call.arguments[1:], **step.call.keywords)
    most = round(float(counts.max()))
    return step.times(up_root(Fraction(most)), f"adds up to {most} entries to one")


@register_rule("aten.cumsum.default")
def cumulative_sum(step: Step) -> StepBound:
    """1 / (2 sin(pi / (2 (2n + 1))))."""
    count = check_axes(step, step.argument("dim"))
    return step.times(cumsum_norm_up(count), f"cumulative sum of {count} entries")


def cumsum_norm_up(count: int) -> float:
    """A float not below the norm of the cumulative sum of `count` entries.

    Examples:
        >>> round(cumsum_norm_up(1), 9), round(cumsum_norm_up(2), 9)
        (1.0, 1.618033989)
    """
    x = _PI / (2 * (2 * count + 1))
    # sin is increasing on [0, pi/2], and its series, ended after a negative term, is below it.
    terms = ((-1) ** k * x ** (2 * k + 1) / math.factorial(2 * k + 1) for k in range(8))
    sine = sum(terms, Fraction(0))
    return up_root(1 / (2 * sine) ** 2)


@register_rule("aten.diff.default")
def difference(step: Step) -> StepBound:
    """2 cos(pi / (2n)), the next ones on n - 1, n - 2, ... entries."""
    count, times = check_axes(step, step.argument("dim")), step.argument("n")
    if step.argument("prepend") is not None or step.argument("append") is not None:
        raise Refusal("only differences without prepended or appended entries have a rule")
    factors = [difference_norm_up(count - k) for k in range(min(times, count))]
    return step.times(multiply_up(1.0, *factors), f"differences of {count} entries")


def difference_norm_up(count: int) -> float:
    """A float not below the norm of the differences of `count` neighbours.

    Examples:
        >>> round(difference_norm_up(2), 9), difference_norm_up(1) < 1e-15
        (1.414213562, True)
    """
    x = _PI / (2 * count)
    # cos is decreasing on [0, pi/2], and its series, ended after a positive term, is above it.
    terms = ((-1) ** k * x ** (2 * k) / math.factorial(2 * k) for k in range(13))
    return up(2 * sum(terms, Fraction(0)))
