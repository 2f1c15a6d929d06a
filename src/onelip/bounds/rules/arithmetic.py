"""Sums, differences and products with constants.

||(x + y) - (x' + y')|| <= ||x - x'|| + ||y - y'||, so the constants of the terms add up. An operand that is broadcast
is copied n times, which costs the factor sqrt(n). A product of two things that depend on the input has no constant.
"""

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from onelip.bounds.graph import Ref
from onelip.bounds.rules._step import Refusal, Step, Verdict, check_alike, finite, largest, register_rule
from onelip.bounds.rules.potential import gradient_step
from onelip.core.rounding import add_up, hypotenuse_up, inverse_up, multiply_up, up, up_root


def _copies(step: Step, operand: Ref) -> float:
    """sqrt(n) for an operand that is copied n times to the shape of the result."""
    shape, result = step.graph.nodes[operand.index].shape, step.node.shape
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
def add(step: Step) -> Verdict:
    """a ± alpha b; rsub is b - alpha a."""
    operands = [step.argument("self"), step.argument("other")]
    alpha = largest(step.argument("alpha"))
    factors = [alpha, 1.0] if step.node.op == "aten.rsub.Tensor" else [1.0, alpha]
    if sum(isinstance(operand, Ref) for operand in operands) == 2:
        if (found := _centred(step) or gradient_step(step)) is not None:
            return found
        return step.gives(add_up(*_terms(step, operands, factors)), "sum of both")
    check_alike(step, *operands)
    return _shift(step, *_moving(operands, factors))


def _centred(step: Step) -> Verdict | None:
    """x - c mean(x): the mean, copied, is an orthogonal projection, so the eigenvalues are 1 and 1 - c."""
    if step.node.op not in ("aten.sub.Tensor", "aten.subtract.Tensor"):
        return None
    x, mean = step.argument("self"), step.graph.nodes[step.argument("other").index]
    is_mean = mean.op == "aten.mean.dim" and mean.arguments[0] == x and mean.shape[:1] == step.node.shape[:1]
    if not is_mean or len(mean.shape) != len(step.node.shape) or mean.dtype != step.node.dtype:
        return None
    if Step(mean, step.graph, step.constants).argument("dim") in (None, []):
        return None
    rest = up(abs(1 - Fraction(float(finite(step.argument("alpha"))))))
    constant = multiply_up(max(1.0, rest), step.constants[x.index])
    return Verdict(constant, None, "less its mean: a projection", ancestor=x.index)


@register_rule("aten.add.Scalar", "aten.sub.Scalar", "aten.rsub.Scalar", "aten.subtract.Scalar")
def add_number(step: Step) -> Verdict:
    """a + alpha c; rsub is c - alpha a."""
    alpha = largest(step.argument("alpha")) if step.node.op == "aten.rsub.Scalar" else 1.0
    return _shift(step, _reference(step.argument("self")), alpha)


def _reference(operand: Any) -> Ref:
    if not isinstance(operand, Ref):
        raise Refusal("a number of its own depends on the input")
    return operand


def _moving(operands: Sequence[Any], factors: Sequence[float]) -> tuple[Ref, float]:
    """The one operand that depends on the input, with its factor."""
    ((operand, factor),) = [pair for pair in zip(operands, factors, strict=True) if isinstance(pair[0], Ref)]
    return operand, factor


def _shift(step: Step, operand: Ref, factor: float) -> Verdict:
    return _scaled(step, operand, factor, "adds a constant")


def _scaled(step: Step, operand: Ref, factor: float, why: str) -> Verdict:
    """The operand, perhaps copied, times numbers of at most `factor`."""
    copies = _copies(step, operand)
    why = why if copies == 1.0 else f"{why}; copied {round(copies**2)} times"
    factor = multiply_up(factor, copies)
    return Verdict(multiply_up(factor, step.constants[operand.index]), factor, why)


@register_rule("aten.mul.Tensor", "aten.mul.Scalar", "aten.multiply.Tensor", "aten.multiply.Scalar")
def multiply(step: Step) -> Verdict:
    """Entry by entry times a constant: max |c|."""
    operands = [step.argument("self"), step.argument("other")]
    if all(isinstance(operand, Ref) for operand in operands):
        raise Refusal("multiplies two things that both depend on the input: the slope grows with them")
    (constant,) = [operand for operand in operands if not isinstance(operand, Ref)]
    (operand,) = [operand for operand in operands if isinstance(operand, Ref)]
    check_alike(step, constant)
    return _scaled(step, operand, largest(constant), "times a constant")


@register_rule("aten.div.Tensor", "aten.div.Scalar", "aten.divide.Tensor", "aten.divide.Scalar",
               "aten.true_divide.Tensor", "aten.true_divide.Scalar")  # fmt: skip
def divide(step: Step) -> Verdict:
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
def interpolate(step: Step) -> Verdict:
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
def of_two(step: Step) -> Verdict:
    """1-Lipschitz in the pair (a, b), whose change is the root of the squares of both.

    The gradient of the maximum is one of the unit vectors, that of hypot a unit vector, those of the others are
    probabilities.
    """
    operands = [step.argument("self"), step.argument("other")]
    return step.gives(hypotenuse_up(*_terms(step, operands, [1.0, 1.0])), "root of the squares of both")
