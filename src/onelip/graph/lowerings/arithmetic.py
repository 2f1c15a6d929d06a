"""Sums, differences, and numbers of the code, in the few kinds that have a rule for their rounding.

    a - b         the sum of a and -1 b: signs are exact
    a + t b       the sum of a and t times b; a fused multiply-add rounds once less
    x + c, x - c  (x - mean) / std with std 1: a quotient by 1 is exact
    x / c         the same with mean 0, where 1 / c is no float

Numbers of the code are not in a weight file, so a network with the last two has radii, but no certificate file; see
docs/certificates.md. `onelip.nn.Normalize` holds its numbers as tensors.
"""

import math
from typing import Any

import torch
from torch import Tensor

from onelip.bounds.graph import Ref
from onelip.core.rounding import LIMIT
from onelip.graph import kinds
from onelip.graph.lowering import Lowering, lowers
from onelip.nn.normalize import Normalize


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
def add(low: Lowering) -> int:
    return _sum(low, low.argument("self"), low.argument("other"), low.argument("alpha"))


@lowers("aten.sub.Tensor", "aten.sub.Scalar")
def subtract(low: Lowering) -> int:
    alpha = low.argument("alpha")
    return _sum(low, low.argument("self"), low.argument("other"), -alpha if isinstance(alpha, int | float) else None)


@lowers("aten.rsub.Tensor", "aten.rsub.Scalar")
def subtract_from(low: Lowering) -> int:
    if low.argument("alpha") != 1:
        return low.refuse()
    return _sum(low, low.argument("other"), low.argument("self"), -1)


@lowers("aten.mul.Tensor", "aten.mul.Scalar")
def multiply(low: Lowering) -> int:
    one, other = low.argument("self"), low.argument("other")
    return _times(low, one, other) if isinstance(one, Ref) else _times(low, other, one)


@lowers("aten.div.Tensor", "aten.div.Scalar")
def divide(low: Lowering) -> int:
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
def negate(low: Lowering) -> int:
    return _times(low, low.argument("self"), -1.0)


@lowers(Normalize)
def normalize(low: Lowering) -> int:
    mean, std = (low.tensor(getattr(low.module, role), role) for role in ("mean", "std"))
    return low.emit(kinds.Normalize, low.source, mean=mean, std=std)
