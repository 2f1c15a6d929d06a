"""Activations: entry by entry |f(a) - f(b)| <= c |a - b|, so the same c holds for whole samples.

Softmax and its relatives act on the entries of one axis together; their Jacobians are bounded at each rule.

Note [Leaky]
    LeakyReLU of slope a in [0, 1] is a x + (1 - a) relu(x), read so with a constant of a + (1 - a): 1. Torch computes
    it otherwise: x where x > 0, a x elsewhere. That is within the error of the four nodes: from the same x^ it is off
    by U a |x^| at most where x^ <= 0, and by |1 - a - fl(1 - a)| x^ <= U (1 - a) x^ elsewhere, and the nodes count
    U a |x^|, U fl(1 - a) |x^| and their sum's rounding.
"""

from fractions import Fraction

from onelip.bounds import slopes
from onelip.core.rounding import multiply_up, up, up_root
from onelip.graph import kinds
from onelip.graph.lowering import Lowering, lowers
from onelip.graph.ops.arithmetic import number, times
from onelip.graph.step import (
    Refusal,
    Rule,
    Step,
    Verdict,
    check_alike,
    check_axes,
    finite,
    largest,
    register_rule,
)


def _always(factor: float, why: str) -> Rule:
    return lambda step: step.times(factor, why)


def _give(names: str, factor: float, why: str) -> None:
    register_rule(*(f"aten.{name}.default" for name in names.split()))(_always(factor, why))


_give("relu relu6 hardtanh tanh log_sigmoid softshrink", 1.0, "slope at most 1")
_give("abs absolute neg negative sin cos atan arctan asinh arcsinh", 1.0, "slope at most 1")
_give("clamp clamp_min clamp_max clip", 1.0, "slope at most 1")
_give("sigmoid special_expit", slopes.SIGMOID, "slope at most 1/4")
_give("gelu", slopes.GELU, "steepest slope")
_give("silu", slopes.SILU, "steepest slope")
_give("mish", slopes.MISH, "steepest slope")
_give("hardswish", slopes.HARDSWISH, "steepest slope")
_give("hardsigmoid", slopes.HARDSIGMOID, "slope at most 1/6")
_give("selu", slopes.SELU, "slope at zero from below")
_give("erf erfc special_erf", slopes.ERF, "slope at most 2 / sqrt(pi)")


@lowers("aten.relu.default")
def lower_relu(low: Lowering) -> int:
    return low.emit(kinds.Relu, low.source)


@lowers("aten.abs.default")
def lower_abs(low: Lowering) -> int:
    return low.emit(kinds.Abs, low.source)


@register_rule("aten.clamp.Tensor", "aten.clamp_min.Tensor", "aten.clamp_max.Tensor", "aten.clip.Tensor")
def clamp(step: Step) -> Verdict:
    """Between constant tensors."""
    if step.source.shape != step.node.shape:
        raise Refusal("its bounds have more entries than its operand, which is copied to meet them")
    check_alike(step, *step.node.arguments[1:], *step.node.keywords.values())
    return step.times(1.0, "slope at most 1")


@register_rule("aten.leaky_relu.default")
def leaky_relu(step: Step) -> Verdict:
    """Slopes 1 and s."""
    slope = largest(step.argument("negative_slope"))
    return step.times(max(1.0, slope), f"slopes 1 and {slope:g}")


@lowers("aten.leaky_relu.default")
def lower_leaky_relu(low: Lowering) -> int:
    """Note [Leaky]."""
    x, slope = low.source, number(low, low.argument("negative_slope"))
    if slope is None or not 0 <= slope <= 1:
        return low.refuse()
    part = times(low, x, slope)
    rest = times(low, low.emit(kinds.Relu, x), 1.0 - slope)
    return low.emit(kinds.Add, part, rest)


@register_rule("aten.prelu.default")
def prelu(step: Step) -> Verdict:
    """Slopes 1 and the stored ones."""
    return step.times(max(1.0, largest(step.argument("weight"))), "largest slope, as stored")


@register_rule("aten.rrelu.default")
def rrelu(step: Step) -> Verdict:
    """In eval mode slopes 1 and the mean of `lower` and `upper`."""
    if step.argument("training"):
        raise Refusal("random, so there is no one function")
    ends = [Fraction(float(finite(step.argument(name)))) for name in ("lower", "upper")]
    slope = up(abs(sum(ends, Fraction(0))) / 2)
    return step.times(max(1.0, slope), f"in eval mode slopes 1 and {slope:g}")


@register_rule("aten.dropout.default", "aten.alpha_dropout.default", "aten.feature_dropout.default",
               "aten.feature_alpha_dropout.default", "aten.native_dropout.default")  # fmt: skip
def dropout(step: Step) -> Verdict:
    """In eval mode the same numbers."""
    if step.argument("train") is not False:
        raise Refusal("random, so there is no one function")
    return step.times(1.0, "in eval mode the same numbers")


@lowers("aten.dropout.default")
def lower_dropout(low: Lowering) -> int:
    return low.refuse() if low.argument("train") else low.source


@register_rule("aten.threshold.default")
def threshold(step: Step) -> Verdict:
    """x above the threshold, and a value below it: max(x, threshold) if both are the same, else a jump."""
    if step.argument("threshold") != step.argument("value"):
        raise Refusal("jumps at its threshold")
    return step.times(1.0, "slope at most 1")


@register_rule("aten.pow.Tensor_Scalar")
def power(step: Step) -> Verdict:
    """x^1 and x^0; for squares see squares.py."""
    exponent = step.argument("exponent")
    if exponent not in (0, 1):
        raise Refusal("its slope has no bound")
    return step.times(float(exponent), f"power {exponent:g}")


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


@register_rule("aten.logsumexp.default", "aten.special_logsumexp.default")
def logsumexp(step: Step) -> Verdict:
    """The gradient is a vector of probabilities, whose norm is at most 1."""
    check_axes(step, step.argument("dim"))
    return step.times(1.0, "its gradient adds up to 1")


@register_rule("aten.linalg_vector_norm.default", "aten.norm.ScalarOpt_dim", "aten.frobenius_norm.dim")
def vector_norm(step: Step) -> Verdict:
    """| ||u||_p - ||v||_p | <= ||u - v||_p, which is at most ||u - v||_2 for p >= 2; for p = 1 sqrt(n) times that."""
    order = {"linalg_vector_norm": "ord", "norm": "p"}.get(step.node.op.split(".")[1])
    p = 2 if order is None else step.argument(order)
    p = 2 if p is None else p
    count = check_axes(step, step.argument("dim"))
    if p == 1:
        return step.times(up_root(Fraction(count)), f"sum of {count} magnitudes")
    if not p >= 2:
        raise Refusal(f"the norm of order {p} has no rule, those of order 1 and from 2 on have")
    return step.times(1.0, "triangle inequality")


@register_rule("aten.std.correction", "aten.std.dim", "aten.std_mean.correction", "aten.std_mean.dim")
def deviation(step: Step) -> Verdict:
    """||x - mean|| / sqrt(n - correction): a projection, a norm, a factor."""
    count = check_axes(step, step.argument("dim"))
    if step.node.op.endswith(".dim"):
        correction = Fraction(int(step.argument("unbiased")))
    else:
        given = step.argument("correction")
        correction = Fraction(1 if given is None else given)
    if not count > correction:
        raise Refusal("divides by a number that is not positive")
    return step.times(up_root(1 / (count - correction)), "norm of the deviations")


@register_rule("aten.amax.default", "aten.amin.default", "aten.max.dim", "aten.min.dim", "aten.median.dim",
               "aten.kthvalue.default", "aten.aminmax.default")  # fmt: skip
def extreme(step: Step) -> Verdict:
    """Entries of each group by their rank: a part of the sorted group. Of aminmax, which gives two, both."""
    count = check_axes(step, step.argument("dim"))
    if count == 1 and "aminmax" in step.node.op:
        return step.times(up_root(Fraction(2)), "the only entry, twice")
    return step.times(1.0, "one of the entries")


@register_rule("aten.cummax.default", "aten.cummin.default", "aten.logcumsumexp.default")
def running(step: Step) -> Verdict:
    """Each of n results is a maximum, or the like, of the entries so far: |change| <= max |change of an entry|."""
    count = check_axes(step, step.argument("dim"))
    return step.times(up_root(Fraction(count)), f"of up to {count} entries each")


@register_rule("aten.sort.default", "aten.sort.stable", "aten.topk.default")
def sort(step: Step) -> Verdict:
    """Sorting never moves two vectors apart (rearrangement); the largest k are a part of it."""
    check_axes(step, step.argument("dim"))
    if step.node.op == "aten.topk.default" and not step.argument("sorted"):
        raise Refusal("gives the largest entries in no order, so they change places; leave sorted=True")
    return step.times(1.0, "rearrangement")


def _one_axis(step: Step) -> int:
    return check_axes(step, step.argument("dim"))
