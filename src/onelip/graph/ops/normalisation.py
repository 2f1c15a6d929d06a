"""Normalisation. With stored statistics it is affine; with the input's own it is bounded by 1 / sqrt(eps) only.

Note [Own deviation]
    f(x) = z / s with z = x - mean(x) and s^2 = ||z||^2 / n + eps has the Jacobian (I - z z^T / (n s^2)) P / s with the
    projection P, whose largest eigenvalue is 1 / s <= 1 / sqrt(eps): reached where the input is constant. So the bound
    is proved, it is the true constant, and it is of no use: about 316 for torch's eps = 1e-5. RMSNorm is the same
    without P.
"""

import math
from fractions import Fraction
from typing import Any

import torch
from torch import nn

from onelip.core.rounding import inverse_up, multiply_up, up_root
from onelip.graph.step import Refusal, Step, StepBound, finite, largest, register_rule

_OF_NO_USE = "divides by the input's own deviation: its bound 1 / sqrt(eps) is of no use"


@register_rule(
    "aten.batch_norm.default", "aten._native_batch_norm_legit_no_training.default",
    nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d,
)  # fmt: skip
def batch_norm(step: Step) -> StepBound:
    """weight / sqrt(var + eps) per channel, as stored."""
    if step.call.op == "aten.batch_norm.default" and step.argument("training"):
        raise Refusal("divides by the batch's own deviation")
    return _stored(step)


def _stored(step: Step) -> StepBound:
    if step.operand_shape is not None and len(step.operand_shape) < 2:
        raise Refusal("expected a batch axis before the channels")
    gains = gain_up(step.argument("weight"), step.argument("running_var"), step.argument("eps"))
    return step.times(gains, "stored statistics, in eval mode")


def gain_up(weight: Any, variance: Any, eps: float) -> float:
    """A float not below max |weight| / sqrt(variance + eps)."""
    if variance is None:
        raise Refusal("divides by the batch's own deviation")
    variances = finite(variance).flatten().tolist()
    weights = [1.0] * len(variances) if weight is None else finite(weight).abs().flatten().tolist()
    squares = [Fraction(v) + Fraction(eps) for v in variances]
    if not all(square > 0 for square in squares):
        raise Refusal("divides by the root of a number that is not positive")
    return max((up_root(Fraction(w) ** 2 / square) for w, square in zip(weights, squares, strict=True)), default=0.0)


@register_rule("aten.layer_norm.default", "aten.native_layer_norm.default")
def layer_norm(step: Step) -> StepBound:
    """Note [Own deviation]."""
    if len(step.argument("normalized_shape")) >= len(step.source.shape):
        raise Refusal("normalises over the batch axis, so samples depend on each other")
    return _own(step, step.argument("weight"), step.argument("eps"))


@register_rule("aten.rms_norm.default")
def rms_norm(step: Step) -> StepBound:
    """Note [Own deviation]."""
    if len(step.argument("normalized_shape")) >= len(step.source.shape):
        raise Refusal("normalises over the batch axis, so samples depend on each other")
    eps = step.argument("eps")
    # torch takes the eps of the type it runs in; the certified program is that in float64, whose eps is the smallest.
    return _own(step, step.argument("weight"), torch.finfo(torch.float64).eps if eps is None else eps)


@register_rule("aten.group_norm.default")
def group_norm(step: Step) -> StepBound:
    """Note [Own deviation]."""
    return _own(step, step.argument("weight"), step.argument("eps"))


@register_rule("aten.instance_norm.default")
def instance_norm(step: Step) -> StepBound:
    """Stored statistics, or Note [Own deviation]."""
    if not step.argument("use_input_stats"):
        return _stored(step)
    return _own(step, step.argument("weight"), step.argument("eps"))


@register_rule(
    nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d
)  # fmt: skip
def norm_in_layer(step: Step) -> StepBound:
    """Refused: the axes of the normalisation depend on the shape of the input, which is unknown here."""
    raise Refusal("divides by the input's own deviation, which may be next to zero")


def _own(step: Step, weight: Any, eps: float) -> StepBound:
    if not 0 < eps < math.inf:
        raise Refusal("divides by the input's own deviation, and eps is not positive: unbounded")
    gain = 1.0 if weight is None else largest(weight)
    root = inverse_up(math.nextafter(math.sqrt(eps), 0.0))
    return step.times(multiply_up(gain, root), "1 / sqrt(eps)", remark=_OF_NO_USE)
