"""Activations: entry by entry |f(a) - f(b)| <= c |a - b|, so the same c holds for whole samples.

Softmax and its relatives act on the entries of one axis together; their Jacobians are bounded at each rule.

Note [Leaky]
    LeakyReLU of slope a in [0, 1] is lowered as a x + (1 - a) relu(x), with the constant a + (1 - a) = 1. Torch
    computes x where x > 0, and a x elsewhere. This is within the error of the four nodes: from the same x^ it is off
    by U a |x^| at most where x^ <= 0, and by |1 - a - fl(1 - a)| x^ <= U (1 - a) x^ elsewhere, and the nodes count
    U a |x^|, U fl(1 - a) |x^| and their sum's rounding.
"""

from fractions import Fraction

from torch import nn

from onelip.core.rounding import multiply_up, up, up_root
from onelip.graph import kinds
from onelip.graph._opaque import keep_whole
from onelip.graph.lowering import Lowering, lowers
from onelip.graph.ops.arithmetic import number, times
from onelip.graph.ops.squares import square
from onelip.graph.step import (
    Refusal,
    Step,
    StepBound,
    check_alike,
    check_axes,
    check_not_batch,
    finite,
    largest,
    register_rule,
)


def _slope(factor: float, why: str, names: str, *layers: type[nn.Module]) -> None:
    """Register a function of single entries with this steepest slope, rounded up in the last digit given."""
    register_rule(*(f"aten.{name}.default" for name in names.split()), *layers)(lambda step: step.times(factor, why))


_slope(1.0, "slope at most 1", "relu", nn.ReLU)
_slope(1.0, "slope at most 1", "relu6 hardtanh", nn.ReLU6, nn.Hardtanh)
_slope(1.0, "slope at most 1", "tanh log_sigmoid softshrink", nn.Tanh, nn.LogSigmoid, nn.Softshrink)
_slope(1.0, "slope at most 1", "abs absolute neg negative sin cos atan arctan asinh arcsinh")
_slope(1.0, "slope at most 1", "clamp clamp_min clamp_max clip")
_slope(0.25, "slope at most 1/4", "sigmoid special_expit", nn.Sigmoid)  # s (1 - s)
# Where the largest slope has no closed form, it was enclosed by values on a grid of step h together with |f''| <= b,
# which lets the slope rise by at most b h / 2 between two points (tests/graph/test_rules.py repeats it).
# GELU, exact form: f'' = (2 - x^2) phi(x), so f'(sqrt 2) = 1.12890...; tanh form: 1.12905... by grid.
_slope(1.13, "steepest slope", "gelu", nn.GELU)
_slope(1.1, "steepest slope", "silu", nn.SiLU)  # 1.09984... by grid, |f''| <= 1/2
_slope(1.09, "steepest slope", "mish", nn.Mish)  # 1.08850... by grid, |f''| <= 1
# x (x + 3) / 6 has slope (2 x + 3) / 6, steepest at its end x = 3. torch multiplies by 1/6 as a float32 in every type,
# which is 3e-8 too much.
_slope(1.5000001, "steepest slope", "hardswish", nn.Hardswish)
_slope(0.1666667, "slope at most 1/6", "hardsigmoid", nn.Hardsigmoid)
_slope(1.7581, "slope at zero from below", "selu", nn.SELU)  # scale * alpha = 1.0507... * 1.6732...
_slope(1.1283791670955128, "slope at most 2 / sqrt(pi)", "erf erfc special_erf")


def _without_bound(why: str, names: str) -> None:
    """Register functions without a bound."""

    def refuse(step: Step) -> StepBound:
        raise Refusal(why)

    register_rule(*(f"aten.{name}.default" for name in names.split()))(refuse)


_without_bound("jumps", "sign round floor hardshrink")
_without_bound("grows without bound", "exp")
_without_bound("its slope at zero has no bound", "sqrt rsqrt reciprocal log")
_without_bound("attention multiplies things that all depend on the input", "scaled_dot_product_attention")

# A quotient and a difference of two things that both depend on the input: as ATen operations they have no bound, or a
# loose one.
keep_whole(nn.Softsign, nn.Tanhshrink)
_slope(1.0, "slope at most 1", "", nn.Softsign, nn.Tanhshrink)


@lowers("aten.relu.default")
def lower_relu(low: Lowering) -> int:
    return low.emit(kinds.Relu, low.source)


@lowers("aten.abs.default")
def lower_abs(low: Lowering) -> int:
    return low.emit(kinds.Abs, low.source)


@register_rule("aten.clamp.Tensor", "aten.clamp_min.Tensor", "aten.clamp_max.Tensor", "aten.clip.Tensor")
def clamp(step: Step) -> StepBound:
    """Between constant tensors."""
    if step.source.shape != step.call.shape:
        raise Refusal("its bounds have more entries than its operand, which is copied to meet them")
    check_alike(step, *step.call.arguments[1:], *step.call.keywords.values())
    return step.times(1.0, "slope at most 1")


@register_rule("aten.leaky_relu.default", nn.LeakyReLU)
def leaky_relu(step: Step) -> StepBound:
    """The slopes are 1 and `negative_slope`."""
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


@register_rule("aten.prelu.default", nn.PReLU)
def prelu(step: Step) -> StepBound:
    """The slopes are 1 and the stored ones."""
    return step.times(max(1.0, largest(step.argument("weight"))), "largest slope, as stored")


@register_rule("aten.rrelu.default", nn.RReLU)
def rrelu(step: Step) -> StepBound:
    """In eval mode the slopes are 1 and the mean of `lower` and `upper`."""
    if step.argument("training"):
        raise Refusal("random, so there is no one function")
    ends = [Fraction(float(finite(step.argument(name)))) for name in ("lower", "upper")]
    slope = up(abs(sum(ends, Fraction(0))) / 2)
    return step.times(max(1.0, slope), f"in eval mode slopes 1 and {slope:g}")


@register_rule("aten.dropout.default", "aten.alpha_dropout.default", "aten.feature_dropout.default",
               "aten.feature_alpha_dropout.default", "aten.native_dropout.default", nn.Dropout, nn.Dropout1d,
               nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)  # fmt: skip
def dropout(step: Step) -> StepBound:
    """In eval mode the same numbers."""
    if step.argument("train") is not False:
        raise Refusal("random, so there is no one function")
    return step.times(1.0, "in eval mode the same numbers")


@lowers("aten.dropout.default")
def lower_dropout(low: Lowering) -> int:
    return low.refuse() if low.argument("train") else low.source


@register_rule("aten.threshold.default", nn.Threshold)
def threshold(step: Step) -> StepBound:
    """x above the threshold, and a value below it: max(x, threshold) if both are the same, else a jump."""
    if step.argument("threshold") != step.argument("value"):
        raise Refusal("jumps at its threshold")
    return step.times(1.0, "slope at most 1")


@register_rule("aten.pow.Tensor_Scalar")
def power(step: Step) -> StepBound:
    """x^1 and x^0; for x^2 see squares.py."""
    exponent = step.argument("exponent")
    if exponent == 2:
        return square(step)
    if exponent not in (0, 1):
        raise Refusal("its slope has no bound")
    return step.times(float(exponent), f"power {exponent:g}")


@register_rule("aten.elu.default", nn.ELU)
def elu(step: Step) -> StepBound:
    """scale x above zero, scale alpha (exp(input_scale x) - 1) below, which is steepest at zero."""
    alpha, scale, rate = (float(finite(step.argument(name))) for name in ("alpha", "scale", "input_scale"))
    if not rate >= 0:
        raise Refusal("grows without bound for a negative input_scale")
    steepest = max(abs(scale), multiply_up(abs(scale), abs(alpha), rate))
    return step.times(steepest, f"alpha = {alpha:g}")


@register_rule("aten.celu.default", nn.CELU)
def celu(step: Step) -> StepBound:
    """exp(x / alpha) below zero: slope at most 1 for alpha > 0."""
    if not float(finite(step.argument("alpha"))) > 0:
        raise Refusal("grows without bound for alpha <= 0")
    return step.times(1.0, "slope at most 1")


@register_rule("aten.softplus.default", nn.Softplus)
def softplus(step: Step) -> StepBound:
    """torch returns x itself above its threshold, where log(1 + exp(x)) is still a little larger."""
    raise Refusal("torch's version jumps at its threshold")


@register_rule("aten.softmax.int", "aten._softmax.default", nn.Softmax)
def softmax(step: Step) -> StepBound:
    """The Jacobian diag(p) - p p^T is symmetric; row i of it has absolute values that add up to
    p_i (1 - p_i) + p_i (1 - p_i) <= 1/2, so by Gershgorin its norm is at most 1/2. Reached at p = (1/2, 1/2, 0, ...).
    """
    check_not_batch(step, step.argument("dim"))
    return step.times(0.5, "Gershgorin: 2 p (1 - p) at most")


@register_rule("aten.log_softmax.int", "aten._log_softmax.default")
def log_softmax(step: Step) -> StepBound:
    """J = I - 1 p^T is a projection, and ||I - P|| = ||P|| = ||1|| ||p|| <= sqrt(n) for one that is not 0 or I."""
    length = check_axes(step, step.argument("dim"))
    return step.times(up_root(Fraction(length)), f"root of {length} entries")


@register_rule("aten.logsumexp.default", "aten.special_logsumexp.default")
def logsumexp(step: Step) -> StepBound:
    """The gradient is a vector of probabilities, whose norm is at most 1."""
    check_axes(step, step.argument("dim"))
    return step.times(1.0, "its gradient adds up to 1")


@register_rule("aten.linalg_vector_norm.default", "aten.linalg_norm.default", "aten.norm.ScalarOpt_dim",
               "aten.frobenius_norm.dim")  # fmt: skip
def vector_norm(step: Step) -> StepBound:
    """| ||u||_p - ||v||_p | <= ||u - v||_p, which is at most ||u - v||_2 for p >= 2; for p = 1 sqrt(n) times that."""
    order = {"linalg_vector_norm": "ord", "linalg_norm": "ord", "norm": "p"}.get(step.call.op.split(".")[1])
    p, dim = None if order is None else step.argument(order), step.argument("dim")
    if step.call.op == "aten.linalg_norm.default" and p is not None and dim is not None and len(dim) > 1:
        raise Refusal("norms of matrices have no rule, except the Frobenius norm: use torch.linalg.vector_norm")
    p = 2 if p is None else p
    count = check_axes(step, dim)
    if p == 1:
        return step.times(up_root(Fraction(count)), f"sum of {count} magnitudes")
    if not p >= 2:
        raise Refusal(f"the norm of order {p} has no rule, those of order 1 and from 2 on have")
    return step.times(1.0, "triangle inequality")


@register_rule("aten.std.correction", "aten.std.dim", "aten.std_mean.correction", "aten.std_mean.dim")
def deviation(step: Step) -> StepBound:
    """||x - mean|| / sqrt(n - correction): a projection, a norm, a factor."""
    count = check_axes(step, step.argument("dim"))
    if step.call.op.endswith(".dim"):
        correction = Fraction(int(step.argument("unbiased")))
    else:
        given = step.argument("correction")
        correction = Fraction(1 if given is None else given)
    if not count > correction:
        raise Refusal("divides by a number that is not positive")
    return step.times(up_root(1 / (count - correction)), "norm of the deviations")


@register_rule("aten.amax.default", "aten.amin.default", "aten.max.dim", "aten.min.dim", "aten.median.dim",
               "aten.kthvalue.default", "aten.aminmax.default")  # fmt: skip
def extreme(step: Step) -> StepBound:
    """Select entries of each group by rank, which is a part of the sorted group; aminmax selects two."""
    count = check_axes(step, step.argument("dim"))
    if count == 1 and "aminmax" in step.call.op:
        return step.times(up_root(Fraction(2)), "the only entry, twice")
    return step.times(1.0, "one of the entries")


@register_rule("aten.cummax.default", "aten.cummin.default", "aten.logcumsumexp.default")
def running(step: Step) -> StepBound:
    """Each of n results is a maximum, or the like, of the entries so far: |change| <= max |change of an entry|."""
    count = check_axes(step, step.argument("dim"))
    return step.times(up_root(Fraction(count)), f"of up to {count} entries each")


@register_rule("aten.sort.default", "aten.sort.stable", "aten.topk.default")
def sort(step: Step) -> StepBound:
    """Sorting never moves two vectors apart (rearrangement); the largest k are a part of it."""
    check_axes(step, step.argument("dim"))
    if step.call.op == "aten.topk.default" and not step.argument("sorted"):
        raise Refusal("gives the largest entries in no order, so they change places; leave sorted=True")
    return step.times(1.0, "rearrangement")
