"""Layers and functional calls with stored weights, ||W|| by `bound_layer`; and layers that state a constant.

A functional call is turned into the layer that would make it, so one place knows about padding and stride.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from onelip.bounds.linear import untested_bound
from onelip.core.batch_norm import ChannelAffine
from onelip.core.errors import ProofError, UnsupportedLayer
from onelip.core.geometry import LINEAR_LAYERS, geometry_of
from onelip.core.rounding import multiply_up
from onelip.graph.kinds import Affine, Join
from onelip.graph.lowering import Lowering, lowers
from onelip.graph.modules import bound_module
from onelip.graph.step import Ref, Refusal, Step, StepBound, check_alike, largest, per_axis, register_rule

_CONVOLUTIONS = {
    (1, False): nn.Conv1d,
    (2, False): nn.Conv2d,
    (3, False): nn.Conv3d,
    (1, True): nn.ConvTranspose1d,
    (2, True): nn.ConvTranspose2d,
    (3, True): nn.ConvTranspose3d,
}


@register_rule("module")
def bound_leaf(step: Step) -> StepBound:
    """A layer that stayed a single call."""
    module = step.call.module
    assert module is not None
    if isinstance(module, LINEAR_LAYERS):
        return bound_linear(step, module)
    known = bound_module(module, len(step.source.shape))
    if known.constant is None:
        raise Refusal(known.why)
    return step.times(known.constant, known.why)


def bound_linear(step: Step, module: nn.Module) -> StepBound:
    """A linear layer, by its stored weights at the size of its input."""
    shape = step.source.shape
    axes = len(shape) - 2
    size = None
    if isinstance(module, nn.modules.conv._ConvNd):
        if axes != len(module.kernel_size):  # torch would take the batch for the channels
            raise Refusal(f"expected an input with a batch axis, got {shape}; keep samples on axis 0")
        size = shape[2:]
    elif axes < 0:
        raise Refusal(f"expected an input with a batch axis, got {shape}; keep samples on axis 0")
    try:
        bound = untested_bound(module, size, effort=step.effort)
    except UnsupportedLayer as error:
        raise Refusal(str(error)) from error
    best = min(bound.candidates, key=bound.candidates.__getitem__, default="zero")
    return step.times(bound.value, best, details=dict(bound.candidates))


def constant_weight(weight: Any) -> Tensor:
    """A weight that does not depend on the input."""
    if isinstance(weight, Ref):
        raise Refusal("its weight depends on the input")
    return weight


def dense(matrix: Tensor) -> nn.Linear:
    """The layer x -> matrix x."""
    layer = nn.Linear(matrix.shape[1], matrix.shape[0], bias=False, device="meta")
    layer.weight = nn.Parameter(matrix.detach(), requires_grad=False)
    return layer


@register_rule("aten.linear.default")
def linear(step: Step) -> StepBound:
    """x W^T + b."""
    return bound_linear(step, dense(constant_weight(step.argument("weight"))))


@register_rule("aten.addmm.default")
def addmm(step: Step) -> StepBound:
    """beta b + alpha x W."""
    if isinstance(step.argument("self"), Ref) or not isinstance(step.argument("mat1"), Ref):
        raise Refusal("only its first matrix may depend on the input")
    return _from_the_right(step, step.argument("mat1"), step.argument("mat2"), largest(step.argument("alpha")))


@register_rule(
    "aten.matmul.default", "aten.linalg_matmul.default", "aten.mm.default", "aten.bmm.default", "aten.mv.default"
)
def matmul(step: Step) -> StepBound:
    """x W or W x with a constant W: the largest norm of the matrices that W holds."""
    left, right = step.call.arguments[:2]
    if isinstance(left, Ref) and isinstance(right, Ref):
        raise Refusal("multiplies two things that both depend on the input: the slope grows with them")
    return _from_the_right(step, left, right) if isinstance(left, Ref) else _from_the_left(step, left, right)


def _from_the_right(step: Step, x: Ref, weight: Any, factor: float = 1.0) -> StepBound:
    shape = step.graph.calls[x.index].shape
    weight = constant_weight(weight)
    matrix = weight[:, None] if weight.dim() == 1 else weight
    if len(shape) < 2 or shape[0] != step.call.shape[0] or len(shape) != len(step.call.shape) + (weight.dim() == 1):
        raise Refusal("does not keep the batch as its first axis")
    if matrix.dim() > 2 and shape[:-1] != step.call.shape[:-1]:
        raise Refusal("copies its input to meet several matrices")
    check_alike(step, matrix if matrix.dim() > 2 else None)
    return _largest_of(step, x, matrix.mT, factor)


def _from_the_left(step: Step, weight: Tensor, x: Any, factor: float = 1.0) -> StepBound:
    shape, result = step.graph.calls[x.index].shape, step.call.shape
    if len(shape) < 3 or len(result) != len(shape) or result[:-2] != shape[:-2]:
        raise Refusal("does not keep the batch as its first axis")
    check_alike(step, weight)
    return _largest_of(step, x, weight, factor)


def _largest_of(step: Step, x: Ref, matrices: Tensor, factor: float) -> StepBound:
    flat = matrices.reshape(-1, *matrices.shape[-2:])
    if len(flat) > 64:
        raise Refusal(f"a product with {len(flat)} constant matrices at once")
    norm = max((untested_bound(dense(matrix), None, effort=step.effort).value for matrix in flat), default=0.0)
    norm = multiply_up(norm, factor)
    return StepBound(multiply_up(norm, step.constants[x.index]), "norm of the matrix", norm)


@register_rule("aten.inner.default")
def inner(step: Step) -> StepBound:
    """x W^T for a matrix, x w for a vector."""
    x, weight = step.call.arguments
    if not isinstance(x, Ref) or isinstance(weight, Ref) or weight.dim() > 2:
        raise Refusal("only products of the input with one constant matrix have a rule")
    return _from_the_right(step, x, weight if weight.dim() == 1 else weight.T)


@register_rule("aten.baddbmm.default")
def baddbmm(step: Step) -> StepBound:
    """beta c + alpha x W."""
    x, weight = step.argument("batch1"), step.argument("batch2")
    if isinstance(step.argument("self"), Ref) or isinstance(x, Ref) == isinstance(weight, Ref):
        raise Refusal("only one of its matrices may depend on the input")
    check_alike(step, step.argument("self"))
    alpha = largest(step.argument("alpha"))
    return _from_the_right(step, x, weight, alpha) if isinstance(x, Ref) else _from_the_left(step, x, weight, alpha)


@register_rule("aten.tensordot.default")
def tensordot(step: Step) -> StepBound:
    """A sum over axes of a constant tensor, which is a matrix from these axes to its other axes."""
    x, weight = step.argument("self"), step.argument("other")
    if not isinstance(x, Ref) or isinstance(weight, Ref):
        raise Refusal("only a sum over axes of the input, then of one constant, has a rule")
    dims = len(step.graph.calls[x.index].shape)
    if any(axis % dims == 0 for axis in step.argument("dims_self")):
        raise Refusal("works along the batch axis, so samples depend on each other")
    summed = [axis % weight.dim() for axis in step.argument("dims_other")]
    sizes = [step.graph.calls[x.index].shape[axis] for axis in step.argument("dims_self")]
    if sizes != [weight.shape[axis] for axis in summed]:  # torch sums over an axis whose partner has length 1
        raise Refusal("sums over axes of different lengths")
    kept = [axis for axis in range(weight.dim()) if axis not in summed]
    columns = math.prod(weight.shape[axis] for axis in summed)
    return _largest_of(step, x, weight.permute(*kept, *summed).reshape(-1, columns), 1.0)


@register_rule("aten.einsum.default")
def einsum(step: Step) -> StepBound:
    """One constant operand: a matrix from the letters that are summed to the letters that are new."""
    equation, operands = step.argument("equation").replace(" ", ""), step.argument("tensors")
    left, _, result = equation.partition("->")
    terms = left.split(",")
    moving = [i for i, operand in enumerate(operands) if isinstance(operand, Ref)]
    if len(operands) != 2 or len(moving) != 1 or "->" not in equation or "." in equation:
        raise Refusal("only a sum over one constant and one operand, written with ->, has a rule")
    (i,) = moving
    x, w = terms[i], terms[1 - i]
    summed = [letter for letter in x if letter not in result]
    new = [letter for letter in result if letter not in x]
    repeated = any(len(set(term)) != len(term) for term in (x, w, result))
    if repeated or set(w) != set(summed) | set(new) or x[0] != result[0]:
        raise Refusal("shares letters between its operands that it does not sum over, or moves the batch")
    shapes = [step.graph.calls[operands[i].index].shape, tuple(operands[1 - i].shape)]
    lengths = {*zip(x, shapes[0], strict=True), *zip(w, shapes[1], strict=True)}
    if len(lengths) != len({letter for letter, _ in lengths}):
        raise Refusal("stretches an axis of length 1 to meet a longer one of the same letter")
    matrix = operands[1 - i].permute([w.index(letter) for letter in (*new, *summed)])
    rows = math.prod(matrix.shape[: len(new)])
    return _largest_of(step, operands[i], matrix.reshape(rows, -1), 1.0)


def convolution_layer(
    weight: Tensor, transposed: bool, stride: Any, padding: Any, dilation: Any, groups: int
) -> nn.Module:
    """A layer without a bias that computes the same as a functional call."""
    settings = {"stride": stride, "padding": padding, "dilation": dilation}
    layer = _convolution_without_numbers(weight.shape, transposed, groups, False, settings)
    layer.weight = nn.Parameter(weight.detach(), requires_grad=False)
    return layer


def _convolution_without_numbers(
    shape: Sequence[int], transposed: bool, groups: int, bias: bool, settings: Mapping[str, Any]
) -> nn.Module:
    """A convolution with a weight of this shape, on the meta device."""
    axes = len(shape) - 2
    channels = (shape[0], shape[1] * groups)
    inputs, outputs = channels if transposed else channels[::-1]
    given = {name: per_axis(value, axes) for name, value in settings.items()}
    kind = _CONVOLUTIONS[axes, transposed]
    return kind(inputs, outputs, tuple(shape[2:]), groups=groups, bias=bias, device="meta", **given)


_FUNCTIONAL = (
    *(f"aten.conv{d}d.{overload}" for d in (1, 2, 3) for overload in ("default", "padding")),
    *(f"aten.conv_transpose{d}d.{overload}" for d, overload in ((1, "default"), (2, "input"), (3, "input"))),
)


@register_rule(*_FUNCTIONAL, "aten.convolution.default")
def convolution(step: Step) -> StepBound:
    """With constant weights and any amount of zero padding (Note [Borders] of geometry.py)."""
    transposed = "transpose" in step.call.op
    if step.call.op == "aten.convolution.default":
        transposed = step.argument("transposed")
    stride, padding, dilation, groups = map(step.argument, ("stride", "padding", "dilation", "groups"))
    weight = constant_weight(step.argument("weight"))
    return bound_linear(step, convolution_layer(weight, transposed, stride, padding, dilation, groups))


@lowers(*LINEAR_LAYERS)
def lower_layer(low: Lowering) -> int:
    """A torch layer; subclasses with a forward of their own are no single call."""
    return affine(low, low.module, low.source, low.module.weight, low.module.bias)


@lowers("aten.linear.default", *_FUNCTIONAL)
def lower_functional(low: Lowering) -> int:
    """A functional call with constant weights."""
    weight, bias, op = low.argument("weight"), low.argument("bias"), low.call.op
    if not isinstance(weight, Tensor) or not (bias is None or isinstance(bias, Tensor)):
        low.refuse()
    if op == "aten.linear.default":
        layer = nn.Linear(weight.shape[1], weight.shape[0], device="meta")
    else:
        transposed = "transpose" in op
        names = ("stride", "padding", "dilation", *(["output_padding"] if transposed else []))
        settings = {name: low.argument(name) for name in names}
        layer = _convolution_without_numbers(
            weight.shape, transposed, low.argument("groups"), bias is not None, settings
        )
    return affine(low, layer, low.node(low.argument("input")), weight, bias)


@lowers(ChannelAffine)
def lower_channel_affine(low: Lowering) -> int:
    """A convolution with one tap and a group for each channel; samples without pixels are images of one."""
    shape, operand, module = low.shape, low.source, low.module
    sizes = shape[1:] or (1,)
    kind: Any = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[len(sizes) - 1]
    layer = kind(shape[0], shape[0], 1, groups=shape[0], device="meta")
    if len(shape) == 1:
        operand = low.emit(Join, operand, shape=(*shape, 1))
    found = affine(low, layer, operand, module.factors, module.offsets, shape=(shape[0], *sizes))
    return found if len(shape) > 1 else low.emit(Join, found)


def affine(
    low: Lowering,
    module: nn.Module,
    operand: int,
    weight: Tensor,
    bias: Tensor | None,
    *,
    kind: type[Affine] = Affine,
    shape: tuple[int, ...] | None = None,
    **settings: Any,
) -> int:
    """A node for a layer with these numbers; `settings` are those that its kind has beyond an affine node."""
    before = low.nodes[operand].shape
    axes = 1 + len(getattr(module, "kernel_size", ()))
    if len(before) != axes:
        raise ProofError(
            f"{low.title}: expected samples of {axes} axes, got {before}; flatten them before a Linear layer"
        )
    try:
        geometry_of(module, before[1:] or None)
    except UnsupportedLayer as error:
        raise ProofError(f"{low.title}: {error}") from error
    numbers = {"weight": low.tensor(weight, "weight"), "bias": None if bias is None else low.tensor(bias, "bias")}
    return low.emit(kind, operand, shape=shape, layer=module, pixels=before[1:], **numbers, **settings)
