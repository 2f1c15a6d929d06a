"""Rules for sums, differences, and numbers of the code, in the few operations that have a rule for their rounding.

    a - b         the sum of a and -1 b: signs are exact
    a + t b       the sum of a and t times b; a fused multiply-add rounds once less
    x + c, x - c  (x - mean) / std with std 1: a quotient by 1 is exact
    x / c         the same with mean 0, where 1 / c is no float

Numbers of the code are not in a weight file, so a network with the last two has radii, but no certificate file; see
docs/certificates.md. `onelip.nn.Normalize` holds its numbers as tensors.

Note [Leaky]
    LeakyReLU of slope a in [0, 1] is a x + (1 - a) relu(x), read so with a constant of a + (1 - a): 1. Torch computes
    it otherwise: x where x > 0, a x elsewhere. That is within the error of the four nodes: from the same x^ it is off
    by U a |x^| at most where x^ <= 0, and by |1 - a - fl(1 - a)| x^ <= U (1 - a) x^ elsewhere, and the nodes count
    U a |x^|, U fl(1 - a) |x^| and their sum's rounding.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from onelip.bounds.graph import Node, Ref
from onelip.certify.lowering._context import Context, no_rule
from onelip.certify.program import Operation

_Rule = Callable[[Context, Node, Mapping[str, Any]], Operation | int]

_LARGEST = 2.0**500


def _number(value: Any, node: Node) -> float | None:
    """A number of the code, also as a tensor of one entry; None for what is none, or is too large."""
    if isinstance(value, Tensor):
        if value.numel() != 1 or value.dim() > len(node.shape):
            return None
        value = value.item()
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < _LARGEST:
        return None
    return float(value) if float(value) == value else None


def _scaled(low: Context, node: Node, operand: int, factor: float) -> int:
    """A new node: another one of the same shape, times a number."""
    shape = low.nodes[operand].shape
    return low.put(Operation("scale", (operand,), shape, node.place, {"factor": factor.hex()}))


def _times(low: Context, node: Node, operand: Any, factor: Any) -> Operation:
    number = _number(factor, node)
    if not isinstance(operand, Ref) or number is None:
        return no_rule(node)
    return low.operation("scale", node, operand, factor=number.hex())


def _standardised(low: Context, node: Node, operand: int, mean: float, std: float) -> Operation:
    """(x - mean) / std with numbers that are in no weight file."""
    names = {"mean": None, "std": None}
    ones = torch.ones(node.shape[1], dtype=torch.float64)
    tensors = {"mean": mean * ones, "std": std * ones}
    return Operation("normalize", (operand,), node.shape[1:], node.place, names, tensors, names)


def _sum(low: Context, node: Node, one: Any, other: Any, alpha: Any) -> Operation:
    """one + alpha other, where one or both depend on the input."""
    factor = _number(alpha, node)
    if factor is None:
        return no_rule(node)
    if isinstance(one, Ref) and isinstance(other, Ref):
        if low.shape(one) != low.shape(other):  # broadcasting repeats numbers
            return no_rule(node)
        second = low.where[other.index]
        second = second if factor == 1 else _scaled(low, node, second, factor)
        return Operation("add", (low.where[one.index], second), node.shape[1:], node.place)
    operand, constant = (one, other) if isinstance(one, Ref) else (other, one)
    shift = _number(constant, node)
    if not isinstance(operand, Ref) or shift is None or low.shape(operand) != node.shape[1:]:
        return no_rule(node)
    at = low.where[operand.index]
    if operand is one:
        if abs(factor) != 1:
            return no_rule(node)
        shift *= factor
    elif factor != 1:
        at = _scaled(low, node, at, factor)
    return _standardised(low, node, at, -shift, 1.0)


def _add(low: Context, node: Node, call: Mapping[str, Any]) -> Operation:
    return _sum(low, node, call["self"], call["other"], call["alpha"])


def _sub(low: Context, node: Node, call: Mapping[str, Any]) -> Operation:
    alpha = call["alpha"]
    return _sum(low, node, call["self"], call["other"], -alpha if isinstance(alpha, int | float) else None)


def _rsub(low: Context, node: Node, call: Mapping[str, Any]) -> Operation:
    if call["alpha"] != 1:
        return no_rule(node)
    return _sum(low, node, call["other"], call["self"], -1)


def _mul(low: Context, node: Node, call: Mapping[str, Any]) -> Operation:
    one, other = call["self"], call["other"]
    return _times(low, node, one, other) if isinstance(one, Ref) else _times(low, node, other, one)


def _div(low: Context, node: Node, call: Mapping[str, Any]) -> Operation:
    divisor, operand = _number(call["other"], node), call["self"]
    if divisor is None or not isinstance(operand, Ref) or not abs(divisor) >= 2.0**-500:
        return no_rule(node)
    # A quotient is a product only where the reciprocal is a float: for powers of two.
    if abs(math.frexp(divisor)[0]) == 0.5:
        return _times(low, node, operand, 1.0 / divisor)
    at = low.where[operand.index]
    if divisor < 0:
        at = _scaled(low, node, at, -1.0)
    return _standardised(low, node, at, 0.0, abs(divisor))


def _neg(low: Context, node: Node, call: Mapping[str, Any]) -> Operation:
    return _times(low, node, call["self"], -1.0)


def _leaky_relu(low: Context, node: Node, call: Mapping[str, Any]) -> Operation:
    """Note [Leaky]."""
    operand, slope = call["self"], _number(call["negative_slope"], node)
    if not isinstance(operand, Ref) or slope is None or not 0 <= slope <= 1:
        return no_rule(node)
    at = low.where[operand.index]
    part = _scaled(low, node, at, slope)
    positive = low.put(Operation("relu", (at,), node.shape[1:], node.place))
    rest = _scaled(low, node, positive, 1.0 - slope)
    return Operation("add", (part, rest), node.shape[1:], node.place)


ARITHMETIC: dict[str, _Rule] = {
    **dict.fromkeys(("aten.add.Tensor", "aten.add.Scalar"), _add),
    **dict.fromkeys(("aten.sub.Tensor", "aten.sub.Scalar"), _sub),
    **dict.fromkeys(("aten.rsub.Tensor", "aten.rsub.Scalar"), _rsub),
    **dict.fromkeys(("aten.mul.Tensor", "aten.mul.Scalar"), _mul),
    **dict.fromkeys(("aten.div.Tensor", "aten.div.Scalar"), _div),
    "aten.neg.default": _neg,
    "aten.leaky_relu.default": _leaky_relu,
}
