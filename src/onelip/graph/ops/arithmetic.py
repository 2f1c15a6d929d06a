"""Sums, differences and products with constants, and sums along axes.

||(x + y) - (x' + y')|| <= ||x - x'|| + ||y - y'||, so the constants of the terms add up. An operand that is broadcast
is copied n times, which costs the factor sqrt(n). A product of two things that depend on the input has no constant.

In a certified program these are written in the few kinds that have a rule for their rounding:

    a - b         the sum of a and -1 b: signs are exact
    a + t b       the sum of a and t times b; a fused multiply-add rounds once less
    x + c, x - c  (x - mean) / std with std 1: a quotient by 1 is exact
    x / c         the same with mean 0, where 1 / c is no float

Numbers of the code are not in a weight file, so a network with the last two has radii, but no certificate file; see
docs/certificates.md. `onelip.nn.Normalize` holds its numbers as tensors.
"""

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor

from onelip.core.rounding import LIMIT, add_up, hypotenuse_up, inverse_up, multiply_up, up, up_root
from onelip.graph import kinds
from onelip.graph.lowering import Lowering, lowers
from onelip.graph.ops.potential import gradient_step
from onelip.graph.ops.squares import square
from onelip.graph.step import (
    Ref,
    Refusal,
    Step,
    StepBound,
    aten,
    check_alike,
    check_axes,
    finite,
    largest,
    register_rule,
)


def _copies(step: Step, operand: Ref) -> float:
    """sqrt(n) for an operand that is copied n times to the shape of the result."""
    shape, result = step.graph.calls[operand.index].shape, step.call.shape
    # Axes are counted from the last one: with fewer of them, axis 0 would not meet axis 0.
    if len(shape) != len(result) or shape[0] != result[0]:
        raise Refusal(f"stretches {shape} to {result}, where the batch is not kept apart")
    return up_root(Fraction(math.prod(result), max(1, math.prod(shape))))


def _terms(step: Step, operands: Sequence[Any], factors: Sequence[float]) -> list[float]:
    """The constant of each term, 0 for constants."""
    check_alike(step, *operands)
    return [
        multiply_up(factor, _copies(step, operand), step.constants[operand.index]) if isinstance(operand, Ref) else 0.0
        for operand, factor in zip(operands, factors, strict=True)
    ]


@register_rule("aten.add.Tensor", "aten.sub.Tensor", "aten.rsub.Tensor", "aten.subtract.Tensor")
def add(step: Step) -> StepBound:
    """a ± alpha b; rsub is b - alpha a."""
    operands = [step.argument("self"), step.argument("other")]
    alpha = largest(step.argument("alpha"))
    factors = [alpha, 1.0] if step.call.op == "aten.rsub.Tensor" else [1.0, alpha]
    if sum(isinstance(operand, Ref) for operand in operands) == 2:
        if (found := _centred(step) or gradient_step(step)) is not None:
            return found
        return step.gives(add_up(*_terms(step, operands, factors)), "sum of both")
    check_alike(step, *operands)
    return _shift(step, *_moving(operands, factors))


def _centred(step: Step) -> StepBound | None:
    """x - c mean(x): the mean, copied, is an orthogonal projection, so the eigenvalues are 1 and 1 - c."""
    if step.call.op not in ("aten.sub.Tensor", "aten.subtract.Tensor"):
        return None
    x, mean = step.argument("self"), step.graph.calls[step.argument("other").index]
    is_mean = mean.op == "aten.mean.dim" and mean.arguments[0] == x and mean.shape[:1] == step.call.shape[:1]
    if not is_mean or len(mean.shape) != len(step.call.shape) or mean.dtype != step.call.dtype:
        return None
    if Step(mean, step.graph, step.constants).argument("dim") in (None, []):
        return None
    rest = up(abs(1 - Fraction(float(finite(step.argument("alpha"))))))
    constant = multiply_up(max(1.0, rest), step.constants[x.index])
    return StepBound(constant, "less its mean: a projection", ancestor=x.index)


@register_rule("aten.add.Scalar", "aten.sub.Scalar", "aten.rsub.Scalar", "aten.subtract.Scalar")
def add_number(step: Step) -> StepBound:
    """a + alpha c; rsub is c - alpha a."""
    alpha = largest(step.argument("alpha")) if step.call.op == "aten.rsub.Scalar" else 1.0
    return _shift(step, _reference(step.argument("self")), alpha)


def _reference(operand: Any) -> Ref:
    if not isinstance(operand, Ref):
        raise Refusal("a factor or setting of the operation depends on the input")
    return operand


def _moving(operands: Sequence[Any], factors: Sequence[float]) -> tuple[Ref, float]:
    """The one operand that depends on the input, with its factor."""
    ((operand, factor),) = [pair for pair in zip(operands, factors, strict=True) if isinstance(pair[0], Ref)]
    return operand, factor


def _shift(step: Step, operand: Ref, factor: float) -> StepBound:
    return _scaled(step, operand, factor, "adds a constant")


def _scaled(step: Step, operand: Ref, factor: float, why: str) -> StepBound:
    """The operand, perhaps copied, times numbers of at most `factor`."""
    copies = _copies(step, operand)
    why = why if copies == 1.0 else f"{why}; copied {round(copies**2)} times"
    factor = multiply_up(factor, copies)
    return StepBound(multiply_up(factor, step.constants[operand.index]), why, factor)


@register_rule("aten.mul.Tensor", "aten.mul.Scalar", "aten.multiply.Tensor", "aten.multiply.Scalar")
def multiply(step: Step) -> StepBound:
    """Entry by entry times a constant: max |c|."""
    operands = [step.argument("self"), step.argument("other")]
    if all(isinstance(operand, Ref) for operand in operands):
        if operands[0] == operands[1]:
            return square(step)
        raise Refusal("multiplies two things that both depend on the input: the slope grows with them")
    (constant,) = [operand for operand in operands if not isinstance(operand, Ref)]
    (operand,) = [operand for operand in operands if isinstance(operand, Ref)]
    check_alike(step, constant)
    return _scaled(step, operand, largest(constant), "times a constant")


@register_rule("aten.div.Tensor", "aten.div.Scalar", "aten.divide.Tensor", "aten.divide.Scalar",
               "aten.true_divide.Tensor", "aten.true_divide.Scalar")  # fmt: skip
def divide(step: Step) -> StepBound:
    """Entry by entry divided by a constant: 1 / min |c|."""
    divisor = step.argument("other")
    if isinstance(divisor, Ref):
        raise Refusal("divides by something that depends on the input and may be next to zero")
    check_alike(step, divisor)
    smallest = float(finite(divisor).abs().min())
    if not smallest > 0:
        raise Refusal("divides by zero")
    return _scaled(step, _reference(step.argument("self")), inverse_up(smallest), "divided by a constant")


@register_rule("aten.lerp.Scalar", "aten.lerp.Tensor")
def interpolate(step: Step) -> StepBound:
    """(1 - w) a + w b with a constant w."""
    weight = step.argument("weight")
    if isinstance(weight, Ref):
        raise Refusal("its weight depends on the input")
    check_alike(step, weight)
    w = finite(weight).flatten().tolist()
    first = max(abs(1 - Fraction(number)) for number in w)  # as a float, 1 - w would round
    factors = [up_root(first**2), max(abs(number) for number in w)]
    return step.gives(add_up(*_terms(step, [step.argument("self"), step.argument("end")], factors)), "weighted sum")


@register_rule(
    *(f"aten.{name}" for name in ("maximum.default", "max.other", "fmax.default")),
    *(f"aten.{name}" for name in ("minimum.default", "min.other", "fmin.default")),
    *(f"aten.{name}.default" for name in ("hypot", "logaddexp", "logaddexp2")),
)
def of_two(step: Step) -> StepBound:
    """1-Lipschitz in the pair (a, b), whose change is the root of the squares of both.

    The gradient of the maximum is one of the unit vectors, that of hypot a unit vector, those of the others are
    probabilities.
    """
    operands = [step.argument("self"), step.argument("other")]
    return step.gives(hypotenuse_up(*_terms(step, operands, [1.0, 1.0])), "root of the squares of both")


def number(low: Lowering, value: Any) -> float | None:
    """A number of the code, also as a tensor of one entry; None for anything else, and for numbers too large."""
    if isinstance(value, Tensor):
        if value.numel() != 1 or value.dim() > len(low.call.shape):
            return None
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < LIMIT:
        return None
    return float(value) if float(value) == value else None


def times(low: Lowering, operand: int, factor: float) -> int:
    """A node of the same shape, times a number."""
    return low.emit(kinds.Scale, operand, shape=low.nodes[operand].shape, factor=factor)


def _times(low: Lowering, operand: Any, factor: Any) -> int:
    value = number(low, factor)
    return low.refuse() if value is None else low.emit(kinds.Scale, low.node(operand), factor=value)


def _standardised(low: Lowering, operand: int, mean: float, std: float) -> int:
    """(x - mean) / std with numbers that are in no weight file."""
    ones = torch.ones(low.shape[0], dtype=torch.float64)
    return low.emit(kinds.Normalize, operand, mean=kinds.Stored(mean * ones), std=kinds.Stored(std * ones))


def _sum(low: Lowering, one: Any, other: Any, alpha: Any) -> int:
    """one + alpha other, where one or both depend on the input."""
    factor = number(low, alpha)
    if factor is None:
        return low.refuse()
    if isinstance(one, Ref) and isinstance(other, Ref):
        first, second = low.node(one), low.node(other)
        if low.nodes[first].shape != low.nodes[second].shape:  # broadcasting repeats numbers
            return low.refuse()
        return low.emit(kinds.Add, first, second if factor == 1 else times(low, second, factor))
    operand, constant = (one, other) if isinstance(one, Ref) else (other, one)
    shift, at = number(low, constant), low.node(operand)
    if shift is None or low.nodes[at].shape != low.shape:
        return low.refuse()
    if operand is one:
        if abs(factor) != 1:
            return low.refuse()
        shift *= factor
    elif factor != 1:
        at = times(low, at, factor)
    return _standardised(low, at, -shift, 1.0)


@lowers("aten.add.Tensor", "aten.add.Scalar")
def lower_add(low: Lowering) -> int:
    return _sum(low, low.argument("self"), low.argument("other"), low.argument("alpha"))


@lowers("aten.sub.Tensor", "aten.sub.Scalar")
def lower_subtract(low: Lowering) -> int:
    alpha = low.argument("alpha")
    return _sum(low, low.argument("self"), low.argument("other"), -alpha if isinstance(alpha, int | float) else None)


@lowers("aten.rsub.Tensor", "aten.rsub.Scalar")
def lower_subtract_from(low: Lowering) -> int:
    if low.argument("alpha") != 1:
        return low.refuse()
    return _sum(low, low.argument("other"), low.argument("self"), -1)


@lowers("aten.mul.Tensor", "aten.mul.Scalar")
def lower_multiply(low: Lowering) -> int:
    one, other = low.argument("self"), low.argument("other")
    return _times(low, one, other) if isinstance(one, Ref) else _times(low, other, one)


@lowers("aten.div.Tensor", "aten.div.Scalar")
def lower_divide(low: Lowering) -> int:
    divisor, operand = number(low, low.argument("other")), low.argument("self")
    if divisor is None or not abs(divisor) >= 2.0**-500:
        return low.refuse()
    # A quotient is a product only where the reciprocal is a float: for powers of two.
    if abs(math.frexp(divisor)[0]) == 0.5:
        return _times(low, operand, 1.0 / divisor)
    at = low.node(operand)
    if divisor < 0:
        at = times(low, at, -1.0)
    return _standardised(low, at, 0.0, abs(divisor))


@lowers("aten.neg.default")
def lower_negate(low: Lowering) -> int:
    return _times(low, low.argument("self"), -1.0)


# ---- Sums along axes, whose norms have closed forms
#
# Sum over n entries: the rows of the matrix have n ones each and share no column, so A A^T = n I and ||A|| = sqrt(n).
# Mean: divided by n, so 1 / sqrt(n).
#
# Fold (col2im): every entry is added to one pixel or dropped, so the rows are again apart, and ||A||^2 is the largest
# number of entries that are added to one pixel: the largest value of A 1.
#
# Cumulative sum: the matrix L of ones on and below the diagonal has the inverse D with 1 on the diagonal and -1 below
# it. D D^T = tridiag(-1, 2, -1), but for 1 in its first corner, has the eigenvalues 4 sin^2((2k - 1) pi / (2 (2n +
# 1))), k = 1 .. n, so
#
#     ||L|| = 1 / (2 sin(pi / (2 (2n + 1)))).
#
# Difference of neighbours: D D^T = tridiag(-1, 2, -1) of n - 1 rows has the eigenvalues 4 sin^2(k pi / (2n)), the
# largest of which is 4 cos^2(pi / (2n)).


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
