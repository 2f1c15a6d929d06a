"""Calls as rows: the piecewise affine form of one call from the rows of its operands (_rows.py).

Slices, copies and permutations pick rows; sums, and products with constants, combine them; relu, abs, comparisons and
signs split them into pieces; other activations have slopes between two numbers. All other calls have no rows.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from onelip.graph import _rows
from onelip.graph._rows import Decisions, NoRows, Rows
from onelip.graph.calls import Call, Ref
from onelip.graph.ops.movement import COPIES, MOVES, inserted, trace_entries
from onelip.graph.step import Step, check_alike

_TYPES = (torch.float32, torch.float64, torch.bool)
_SIGNS = {  # of a negative number, of zero, of a positive one
    "sign": (-1.0, 0.0, 1.0), "sgn": (-1.0, 0.0, 1.0),
    "gt": (0.0, 0.0, 1.0), "ge": (0.0, 1.0, 1.0), "lt": (1.0, 0.0, 0.0), "le": (1.0, 1.0, 0.0),
}  # fmt: skip
_SLOPES = {"relu": (0.0, 1.0), "abs": (-1.0, 1.0)}
# Increasing functions have slopes from 0 to their constant, others from minus to plus it.
_INCREASING = {
    "tanh", "sigmoid", "atan", "asinh", "erf", "selu", "celu", "log_sigmoid", "hardtanh", "relu6", "hardsigmoid",
    "clamp", "clamp_min", "clamp_max", "softshrink",
}  # fmt: skip
_SMOOTH = _INCREASING | {"gelu", "silu", "mish", "hardswish", "elu", "sin", "cos", "prelu"}
_ENTRY_BY_ENTRY = {
    *_SMOOTH,
    *_SIGNS, *_SLOPES, "add", "sub", "rsub", "mul", "div", "neg", "leaky_relu", "logical_not", "bitwise_not"
}  # fmt: skip
OPERATIONS = {f"aten.{name}.{overload}" for name in _ENTRY_BY_ENTRY for overload in ("default", "Tensor", "Scalar")} | {
    "aten.where.self"
}

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
    if call.op in MOVES and not (call.op == "aten.where.self" and isinstance(call.arguments[0], Ref)):
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
        rows = read(argument.index)
        if len(rows.shape) != len(shape) - 1:
            raise NoRows
        return _rows.expand(rows, shape[1:])
    check_alike(step, argument)
    return _rows.constant(torch.as_tensor(argument, dtype=torch.float64).expand(shape)[0])


def _moved(step: Step, read: Read) -> Rows:
    moved = trace_entries(step)
    (piece,) = moved.pieces
    fixed = _rows.constant(inserted(step) if bool((piece == 0).any()) else torch.zeros(1))
    everything = _rows.concatenate([*(read(owner.index) for owner in moved.owners), fixed])
    places = torch.arange(piece.numel()).reshape(piece.shape)
    return _rows.pick(everything, torch.where(piece == 0, sum(moved.lengths) + places, piece - 1))


def _entry_by_entry(step: Step, name: str, read: Read, decisions: Decisions) -> Rows:
    arguments = step.call.arguments
    if not (step.call.dtype.is_floating_point or name in _SIGNS or "not" in name):
        raise NoRows  # sums of booleans are no sums
    first = _operand(step, arguments[0], read)
    if name in ("add", "sub", "rsub"):
        alpha = float(step.argument("alpha"))
        second = _operand(step, arguments[1], read)
        if name == "rsub":
            first, second = second, first
        return _rows.add(first, second if name == "add" and alpha == 1 else _rows.scale(second, alpha * (
            1.0 if name == "add" else -1.0)))  # fmt: skip
    if name == "mul":
        return _rows.multiply(first, _operand(step, arguments[1], read))
    if name == "div":
        if isinstance(arguments[1], Ref):
            raise NoRows
        divisor = _operand(step, arguments[1], read)
        return _rows.multiply(first, replace(divisor, shift=1 / divisor.shift, is_exact=False))
    if name == "neg":
        return _rows.scale(first, -1.0)
    if name in ("logical_not", "bitwise_not"):
        if len(first.index) or step.call.dtype != torch.bool:
            raise NoRows
        return replace(first, shift=1 - first.shift)
    if name == "where":
        chosen, other = (_operand(step, argument, read) for argument in arguments[1:])
        if len(first.index):
            raise NoRows
        return _rows.add(_rows.multiply(chosen, first), _rows.multiply(other, replace(first, shift=1 - first.shift)))
    if name in _SIGNS:
        if len(arguments) == 2:
            first = _rows.add(first, _rows.scale(_operand(step, arguments[1], read), -1.0))
        return decisions.sign(first, _SIGNS[name])
    slopes = _SLOPES.get(name) or (float(step.argument("negative_slope")), 1.0)
    return decisions.apply(first, slopes)
