"""x - c A^T t s(A x + b): a step down the gradient of a convex function, as in SLL and CPL layers.

s works entry by entry with slopes between 0 and 1 and t >= 0 is one number for each entry (each channel), so the
derivative is I - c A^T D A with a diagonal matrix 0 <= D <= T. For c >= 0 its eigenvalues lie between 1 - c ||A^T T A||
and 1:

    at most max(1, c ||T^(1/2) A||^2 - 1),        which is 1 for ||T^(1/2) A||^2 <= 2 / c.

A transposed convolution with the same weight and settings is the adjoint of a convolution with zero padding, by its
definition, if it gives back the size that the convolution has read.
"""

import math
from fractions import Fraction
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from onelip.bounds.linear import bound_layer
from onelip.core.rounding import multiply_up, up
from onelip.graph.ops.linear import convolution_layer, dense
from onelip.graph.step import Call, Ref, Step, StepBound, check_alike, finite, per_axis

_SLOPES = {f"aten.{name}.default" for name in ("relu", "tanh", "sigmoid", "atan", "asinh", "hardtanh", "relu6")}
_PRODUCTS = ("aten.mul.Tensor", "aten.mul.Scalar")
_SETTINGS = ("stride", "padding", "dilation")


class _Map(NamedTuple):
    """A linear map: its weight, the settings of a convolution or None, and the call that it reads."""

    weight: Tensor
    settings: tuple[Any, ...] | None
    source: int


def gradient_step(step: Step) -> StepBound | None:
    """The bound on a difference of this kind, or None."""
    if step.call.op != "aten.sub.Tensor" or finite(step.argument("alpha")) != 1:
        return None
    x, call = step.argument("self"), _call(step, step.argument("other"))
    if not _call(step, x).shape == call.shape == step.call.shape:
        return None
    factor = Fraction(1)
    while call.op in _PRODUCTS and (found := _by_constant(step, call)) is not None and found[0].numel() == 1:
        factor *= Fraction(float(found[0]))
        call = found[1]
    if not factor >= 0 or (back := _read(step, call, is_back=True)) is None:
        return None
    scales, call = [], step.graph.calls[back.source]
    while call.op in _PRODUCTS and (found := _by_constant(step, call)) is not None:
        scales.append(found[0])
        call = found[1]
    if call.op not in _SLOPES:
        return None
    call = _call(step, call.arguments[0])
    if call.op == "aten.add.Tensor" and not all(isinstance(argument, Ref) for argument in call.arguments[:2]):
        inner = Step(call, step.graph, ())
        check_alike(inner, *call.arguments[:2])
        if finite(inner.argument("alpha")) != 1 and isinstance(call.arguments[1], Ref):
            return None  # alpha is a factor of A x
        call = step.graph.calls[call.inputs[0]]
    forth = _read(step, call, is_back=False)
    if forth is None or forth.source != x.index or not _are_adjoint(step, forth, back, call):
        return None
    square = _square(step, forth, scales, call)
    if square is None:
        return None
    constant = multiply_up(max(1.0, up(max(factor * square - 1, Fraction(0)))), step.constants[x.index])
    return StepBound(constant, "less the gradient of a convex function", ancestor=x.index)


def _call(step: Step, operand: Any) -> Call:
    return step.graph.calls[operand.index]


def _by_constant(step: Step, call: Call) -> tuple[Tensor, Call] | None:
    """The constant and the operand of a product."""
    constants = [argument for argument in call.arguments[:2] if not isinstance(argument, Ref)]
    check_alike(Step(call, step.graph, ()), *constants)
    if len(constants) != 1 or step.graph.calls[call.inputs[0]].shape != call.shape:
        return None
    return finite(constants[0]), step.graph.calls[call.inputs[0]]


def _read(step: Step, call: Call, is_back: bool) -> _Map | None:
    if call.module is not None:
        return None if is_back else _read_layer(call)
    if len(call.inputs) != 1 or not isinstance(call.arguments[0], Ref):
        return None
    if call.op == "aten.linear.default":
        return _Map(call.arguments[1], None, call.inputs[0])
    name = "conv_transpose" if is_back else "conv"
    names = [f"aten.{name}{d}d.{'default' if d == 1 or not is_back else 'input'}" for d in (1, 2, 3)]
    if call.op not in names:
        return None
    inner = Step(call, step.graph, ())
    axes = len(call.shape) - 2
    settings = (*(per_axis(inner.argument(name), axes) for name in _SETTINGS), inner.argument("groups"))
    return _Map(inner.argument("weight"), settings, call.inputs[0])


def _read_layer(call: Call) -> _Map | None:
    layer = call.module
    if type(layer) is nn.Linear:
        return _Map(layer.weight, None, call.inputs[0])
    if not isinstance(layer, nn.Conv1d | nn.Conv2d | nn.Conv3d) or layer.padding_mode != "zeros":
        return None
    settings = (*(per_axis(getattr(layer, name), len(layer.kernel_size)) for name in _SETTINGS), layer.groups)
    return _Map(layer.weight, settings, call.inputs[0])


def _are_adjoint(step: Step, forth: _Map, back: _Map, call: Call) -> bool:
    if forth.settings is None or back.settings is None:
        return forth.settings is back.settings and torch.equal(forth.weight.T, back.weight)
    is_same = forth.settings == back.settings and not isinstance(forth.settings[1], str)
    return is_same and torch.equal(forth.weight, back.weight) and _axes(step, forth) == len(call.shape) - 2


def _axes(step: Step, forth: _Map) -> int:
    return len(step.graph.calls[forth.source].shape) - 2


def _square(step: Step, forth: _Map, scales: list[Tensor], call: Call) -> Fraction | None:
    """Not below ||T^(1/2) A||^2."""
    channel = len(call.shape) - 1 if forth.settings is None else 1
    outputs = call.shape[channel]
    roots = torch.ones(outputs, dtype=torch.float64)
    for scale in scales:
        along = scale.reshape((1,) * (len(call.shape) - scale.dim()) + tuple(scale.shape))
        if not bool((along >= 0).all()) or along.numel() not in (1, along.shape[channel]):
            return None  # other numbers for one place than for another
        # Squared and compared exactly: roots that are not below the true ones.
        numbers = along.flatten().expand(outputs).tolist()
        roots *= torch.tensor([_root_up(number) for number in numbers], dtype=torch.float64)
        roots = torch.where(roots == 1, 1.0, roots * (1 + 2.0**-50))
    weight = forth.weight.detach().double() * roots.view(-1, *(1,) * (forth.weight.dim() - 1))
    slack = 1 if bool((roots == 1).all()) else 1 + Fraction(1, 2**48)
    layer = dense(weight) if forth.settings is None else convolution_layer(weight, False, *forth.settings)
    size = None if forth.settings is None else step.graph.calls[forth.source].shape[2:]
    return Fraction(bound_layer(layer, size, effort=step.effort).value) ** 2 * slack


def _root_up(number: float) -> float:
    root = math.sqrt(number)
    return root if Fraction(root) ** 2 >= Fraction(number) else math.nextafter(root, math.inf)
