"""Rules for the layers of `onelip.nn` and for residual blocks, by exact class."""

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from onelip.bounds.graph import Node
from onelip.certify.lowering._context import Context, no_rule, spoken
from onelip.certify.lowering.blocks import potential
from onelip.certify.lowering.calls import average
from onelip.certify.program import Operation
from onelip.certify.rounding import ProofError
from onelip.methods._potential import ConvexPotential
from onelip.nn.absolute import Abs
from onelip.nn.channels import FirstChannels, PadChannels
from onelip.nn.groupsort import GroupSort
from onelip.nn.maxmin import MaxMin
from onelip.nn.normalize import Normalize
from onelip.nn.pooling import (
    ConcatenationPool1d,
    ConcatenationPool2d,
    ConcatenationPool3d,
    LipschitzAvgPool1d,
    LipschitzAvgPool2d,
    LipschitzAvgPool3d,
    root_below,
)


def _sample_axis(dim: int, node: Node) -> int:
    axis = dim % len(node.shape) - 1
    if axis < 0:
        raise ProofError(f"{spoken(node)}: expected an axis of one sample, got the batch axis")
    return axis


def _maxmin(low: Context, node: Node, module: Any) -> Operation:
    return low.operation("maxmin", node, node.arguments[0], axis=_sample_axis(module.dim, node))


def _groupsort(low: Context, node: Node, module: Any) -> Operation:
    axis = _sample_axis(module.dim, node)
    size = module.group_size or node.shape[axis + 1]
    return low.operation("groupsort", node, node.arguments[0], group_size=size, axis=axis)


def _abs_layer(low: Context, node: Node, module: Any) -> Operation:
    return low.operation("abs", node, node.arguments[0]) if module.fraction == 1.0 else no_rule(node)


def _channels(op: str) -> Callable[..., Operation]:
    def rule(low: Context, node: Node, module: Any) -> Operation:
        if _sample_axis(module.dim, node) != 0:
            return no_rule(node)
        return low.operation(op, node, node.arguments[0], count=module.n)

    return rule


def _concatenation(low: Context, node: Node, module: Any) -> Operation:
    return low.operation("concatenate", node, node.arguments[0], kernel=list(module.kernel_size))


def _lipschitz_average(low: Context, node: Node, module: Any) -> Operation:
    sizes = low.shape(node.arguments[0])[1:]
    kernel = module.kernel_size or sizes
    scale = module.scale if module.kernel_size else root_below(Fraction(math.prod(kernel)))
    if any(module.padding) or len(sizes) != module.axes:
        return no_rule(node)
    return average(low, node, node.arguments[0], kernel, module.stride or kernel, scale)


def _normalize(low: Context, node: Node, module: Any) -> Operation:
    names = {role: low.name(getattr(module, role), node.place, role) for role in ("mean", "std")}
    tensors = {role: getattr(module, role).detach().double() for role in names}
    where = (low.where[node.arguments[0].index],)
    return Operation("normalize", where, node.shape[1:], node.place, names, tensors, names)


LAYERS: dict[type, Callable[[Context, Node, Any], Operation]] = {
    MaxMin: _maxmin,
    GroupSort: _groupsort,
    Abs: _abs_layer,
    FirstChannels: _channels("first_channels"),
    PadChannels: _channels("pad_channels"),
    Normalize: _normalize,
    ConvexPotential: potential,
    **dict.fromkeys((ConcatenationPool1d, ConcatenationPool2d, ConcatenationPool3d), _concatenation),
    **dict.fromkeys((LipschitzAvgPool1d, LipschitzAvgPool2d, LipschitzAvgPool3d), _lipschitz_average),
}
