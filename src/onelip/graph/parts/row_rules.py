"""Calls as rows: the piecewise affine form of one call from the rows of its operands (rows.py).

Slices, copies and permutations pick rows; sums, and products with constants, combine them; relu, abs, comparisons and
signs split them into pieces; other activations have slopes between two numbers. All other calls have no rows.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from onelip.graph.calls import Call, Ref
from onelip.graph.ops.movement import COPIES, MOVES, inserted, trace_entries
from onelip.graph.parts import rows
from onelip.graph.parts.rows import Decisions, NoRows, Rows
from onelip.graph.step import Step, check_alike

_TYPES = (torch.float32, torch.float64, torch.bool)
_SIGNS = {  # of a negative number, of zero, of a positive one
    "sign": (-1.0, 0.0, 1.0), "sgn": (-1.0, 0.0, 1.0),
    "gt": (0.0, 0.0, 1.0), "ge": (0.0, 1.0, 1.0), "lt": (1.0, 0.0, 0.0), "le": (1.0, 1.0, 0.0),
}  # fmt: skip
_SLOPES = {"relu": (0.0, 1.0), "abs": (-1.0, 1.0)}  # below zero and above
# Increasing functions have slopes from 0 to their constant, others from minus to plus it.
_INCREASING = {
    "tanh", "sigmoid", "atan", "asinh", "erf", "selu", "celu", "log_sigmoid", "hardtanh", "relu6", "hardsigmoid",
    "clamp", "clamp_min", "clamp_max", "softshrink",
}  # fmt: skip
_SMOOTH = _INCREASING | {"gelu", "silu", "mish", "hardswish", "elu", "sin", "cos", "prelu"}
_NOT = {"logical_not", "bitwise_not"}
_NAMES = {"add", "sub", "rsub", "mul", "div", "neg", "leaky_relu", *_SMOOTH, *_SIGNS, *_SLOPES, *_NOT}
OPERATIONS = {f"aten.{name}.{overload}" for name in _NAMES for overload in ("default", "Tensor", "Scalar")}
# Operations that choose by a mask, and the places of the mask, of what is chosen by it, and of the rest.
_CHOICES = {
    **dict.fromkeys(("aten.where.self", "aten.where.ScalarOther", "aten.where.ScalarSelf"), (0, 1, 2)),
    **dict.fromkeys(("aten.masked_fill.Scalar", "aten.masked_fill.Tensor"), (1, 2, 0)),
}
OPERATIONS |= set(_CHOICES)

Read = Callable[[int], Rows]  # the rows of a call, by its index; raises NoRows


def may_have_rows(call: Call, batch: int) -> bool:
    """Whether `rows_of_call` knows the operation of a call."""
    is_known = call.op in OPERATIONS or call.op in MOVES or call.op in COPIES
    return is_known and call.dtype in _TYPES and call.keeps_batch and call.shape[:1] == (batch,)


def rows_of_call(step: Step, factor: float | None, read: Read, decisions: Decisions) -> Rows:
    """The rows of a call.

    Args:
        step: the call.
        factor: its Lipschitz constant in its one operand, if it is known.
        read: gives the rows of its operands.
        decisions: the signs on which the pieces depend, common to all calls of a region.

    Raises:
        NoRows: if it has none.
    """
    call = step.call
    if call.op in COPIES:
        if not (call.dtype.is_floating_point or step.graph.calls[call.inputs[0]].dtype == call.dtype):
            raise NoRows
        return _operand(step, call.arguments[0], read)
    if call.op in _CHOICES and isinstance(call.arguments[_CHOICES[call.op][0]], Ref):
        return _chosen(step, read)
    if call.op in MOVES:
        return _moved(step, read)
    name = call.op.split(".")[1]
    if name in _SMOOTH:
        if factor is None:
            raise NoRows
        least = 0.0 if name in _INCREASING else -factor
        return decisions.smooth(_operand(step, call.arguments[0], read), least, factor)
    return _entry_by_entry(step, name, read, decisions)


def _operand(step: Step, argument: Any, read: Read) -> Rows:
    """An argument of a step entry by entry, broadcast."""
    shape = step.call.shape
    if isinstance(argument, Ref):
        found = read(argument.index)
        if len(found.shape) != len(shape) - 1:
            raise NoRows
        return rows.expand(found, shape[1:])
    check_alike(step, argument)
    return rows.constant(torch.as_tensor(argument, dtype=torch.float64).expand(shape)[0])


def _moved(step: Step, read: Read) -> Rows:
    moved = trace_entries(step)
    (piece,) = moved.pieces
    fixed = rows.constant(inserted(step) if bool((piece == 0).any()) else torch.zeros(1))
    everything = rows.concatenate([*(read(owner.index) for owner in moved.owners), fixed])
    places = torch.arange(piece.numel()).reshape(piece.shape)
    return rows.pick(everything, torch.where(piece == 0, sum(moved.lengths) + places, piece - 1))


def _chosen(step: Step, read: Read) -> Rows:
    mask, one, other = (_operand(step, step.call.arguments[place], read) for place in _CHOICES[step.call.op])
    return rows.add(rows.multiply(one, mask), rows.multiply(other, _not(mask)))


def _entry_by_entry(step: Step, name: str, read: Read, decisions: Decisions) -> Rows:
    arguments = step.call.arguments
    if not (step.call.dtype.is_floating_point or name in _SIGNS or name in _NOT):
        raise NoRows  # sums of booleans are no sums

    def operand(place: int) -> Rows:
        return _operand(step, arguments[place], read)

    first = operand(0)
    if name in ("add", "sub", "rsub"):
        second, alpha = operand(1), float(step.argument("alpha"))
        if name == "rsub":
            first, second = second, first
        return rows.add(first, rows.scale(second, alpha if name == "add" else -alpha))
    if name == "mul":
        return rows.multiply(first, operand(1))
    if name == "div":
        if isinstance(arguments[1], Ref):
            raise NoRows
        divisor = operand(1)
        return rows.multiply(first, replace(divisor, shift=1 / divisor.shift, is_exact=False))
    if name == "neg":
        return rows.scale(first, -1.0)
    if name in _NOT:
        if step.graph.calls[arguments[0].index].dtype != torch.bool:  # `logical_not` of a number v is [v == 0]
            raise NoRows
        return _not(first)
    if name in _SIGNS:
        if len(arguments) == 2:
            first = rows.add(first, rows.scale(operand(1), -1.0))
        return decisions.sign(first, _SIGNS[name])
    return decisions.apply(first, _SLOPES.get(name) or (float(step.argument("negative_slope")), 1.0))


def _not(mask: Rows) -> Rows:
    """1 - mask, for a mask that is constant in each state."""
    if len(mask.index):
        raise NoRows
    return replace(mask, shift=1 - mask.shift)
