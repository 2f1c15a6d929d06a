"""Activations: entry by entry |f(a) - f(b)| <= c |a - b|, so the same c holds for whole samples.

Softmax and its relatives act on the entries of one axis together; their Jacobians are bounded at each rule.
"""

import math
from fractions import Fraction

from onelip.bounds import slopes
from onelip.bounds._rational import up_root
from onelip.bounds.rules._step import Refusal, Rule, Step, Verdict, finite, largest, register_rule
from onelip.nn._base import multiply_up


def _always(factor: float, why: str) -> Rule:
    return lambda step: step.times(factor, why)


def _give(names: str, factor: float, why: str) -> None:
    register_rule(*(f"aten.{name}.default" for name in names.split()))(_always(factor, why))


_give("relu relu6 hardtanh tanh log_sigmoid softshrink", 1.0, "slope at most 1")
_give("abs neg sin cos atan asinh clamp clamp_min clamp_max", 1.0, "slope at most 1")
_give("sigmoid", slopes.SIGMOID, "slope at most 1/4")
_give("gelu", slopes.GELU, "steepest slope")
_give("silu", slopes.SILU, "steepest slope")
_give("mish", slopes.MISH, "steepest slope")
_give("hardswish", slopes.HARDSWISH, "steepest slope")
_give("hardsigmoid", slopes.HARDSIGMOID, "slope at most 1/6")
_give("selu", slopes.SELU, "slope at zero from below")
_give("erf", slopes.ERF, "slope at most 2 / sqrt(pi)")


@register_rule("aten.clamp.Tensor", "aten.clamp_min.Tensor", "aten.clamp_max.Tensor")
def clamp(step: Step) -> Verdict:
    """Between constant tensors."""
    if step.source.shape != step.node.shape:
        raise Refusal("its bounds have more entries than its operand, which is copied to meet them")
    return step.times(1.0, "slope at most 1")


@register_rule("aten.leaky_relu.default")
def leaky_relu(step: Step) -> Verdict:
    """Slopes 1 and s."""
    slope = largest(step.argument("negative_slope"))
    return step.times(max(1.0, slope), f"slopes 1 and {slope:g}")


@register_rule("aten.prelu.default")
def prelu(step: Step) -> Verdict:
    """Slopes 1 and the stored ones."""
    return step.times(max(1.0, largest(step.argument("weight"))), "largest slope, as stored")


@register_rule("aten.elu.default")
def elu(step: Step) -> Verdict:
    """scale x above zero, scale alpha (exp(input_scale x) - 1) below, which is steepest at zero."""
    alpha, scale, rate = (float(finite(step.argument(name))) for name in ("alpha", "scale", "input_scale"))
    if not rate >= 0:
        raise Refusal("grows without bound for a negative input_scale")
    steepest = max(abs(scale), multiply_up(abs(scale), abs(alpha), rate))
    return step.times(steepest, f"alpha = {alpha:g}")


@register_rule("aten.celu.default")
def celu(step: Step) -> Verdict:
    """exp(x / alpha) below zero: slope at most 1 for alpha > 0."""
    if not float(finite(step.argument("alpha"))) > 0:
        raise Refusal("grows without bound for alpha <= 0")
    return step.times(1.0, "slope at most 1")


@register_rule("aten.softplus.default")
def softplus(step: Step) -> Verdict:
    """torch returns x itself above its threshold, where log(1 + exp(x)) is still a little larger."""
    raise Refusal("torch's version jumps at its threshold")


@register_rule("aten.softmax.int", "aten._softmax.default")
def softmax(step: Step) -> Verdict:
    """See slopes.SOFTMAX."""
    _one_axis(step)
    return step.times(slopes.SOFTMAX, "Gershgorin: 2 p (1 - p) at most")


@register_rule("aten.log_softmax.int", "aten._log_softmax.default")
def log_softmax(step: Step) -> Verdict:
    """J = I - 1 p^T is a projection, and ||I - P|| = ||P|| = ||1|| ||p|| <= sqrt(n) for one that is not 0 or I."""
    length = _one_axis(step)
    return step.times(up_root(Fraction(length)), f"root of {length} entries")


@register_rule("aten.logsumexp.default")
def logsumexp(step: Step) -> Verdict:
    """The gradient is a vector of probabilities, whose norm is at most 1."""
    check_axes(step, step.argument("dim"))
    return step.times(1.0, "its gradient adds up to 1")


@register_rule("aten.linalg_vector_norm.default", "aten.norm.ScalarOpt_dim")
def vector_norm(step: Step) -> Verdict:
    """| ||u|| - ||v|| | <= ||u - v||."""
    order = step.argument("ord" if "linalg" in step.node.op else "p")
    check_axes(step, step.argument("dim"))
    if order not in (2, 2.0, math.inf):
        raise Refusal(f"the norm of order {order} has no rule, those of order 2 and infinity have")
    return step.times(1.0, "triangle inequality")


@register_rule("aten.std.correction", "aten.std.dim")
def deviation(step: Step) -> Verdict:
    """||x - mean|| / sqrt(n - correction): a projection, a norm, a factor."""
    count = check_axes(step, step.argument("dim"))
    if step.node.op == "aten.std.dim":
        correction = Fraction(int(step.argument("unbiased")))
    else:
        given = step.argument("correction")
        correction = Fraction(1 if given is None else given)
    if not count > correction:
        raise Refusal("divides by a number that is not positive")
    return step.times(up_root(1 / (count - correction)), "norm of the deviations")


@register_rule("aten.amax.default", "aten.amin.default", "aten.max.dim", "aten.min.dim")
def extreme(step: Step) -> Verdict:
    """|max u - max v| <= max |u - v| <= ||u - v||."""
    check_axes(step, step.argument("dim"))
    return step.times(1.0, "one of the entries")


@register_rule("aten.sort.default", "aten.sort.stable", "aten.topk.default")
def sort(step: Step) -> Verdict:
    """Sorting never moves two vectors apart (rearrangement); the largest k are a part of it."""
    check_axes(step, step.argument("dim"))
    if step.node.op == "aten.topk.default" and not step.argument("sorted"):
        raise Refusal("gives the largest entries in no order, so they change places; leave sorted=True")
    return step.times(1.0, "rearrangement")


def check_axes(step: Step, dim: int | list[int] | tuple[int, ...] | None) -> int:
    """The number of entries along axes of the operand, none of which may be the batch."""
    shape = step.source.shape
    axes = range(len(shape)) if dim is None or dim == [] else [dim] if isinstance(dim, int) else dim
    if any(axis % len(shape) == 0 for axis in axes):
        raise Refusal("works along the batch axis, so samples depend on each other")
    return math.prod(shape[axis] for axis in axes)


def _one_axis(step: Step) -> int:
    return check_axes(step, step.argument("dim"))
