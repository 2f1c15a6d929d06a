"""Residual convolutions x - 2 V^T relu(V x + b) (SLL, CPL) as one node, whose rule knows that both V are the same.

Dense layers and 1x1 convolutions are baked to two linear layers (`onelip.methods._plain_relu`), so this is for larger
kernels, and for groups.
"""

from typing import Any

from torch import nn

from onelip.bounds.graph import Node
from onelip.certify.exact import as_float64
from onelip.certify.lowering._context import Context, no_rule
from onelip.certify.lowering.linear import linear_settings
from onelip.certify.program import Operation
from onelip.geometry import geometry_of


def potential(low: Context, node: Node, module: Any) -> Operation:
    """A `ConvexPotential` of a convolution; its constant, if it is not 1, is a node after it."""
    hidden, second, *kernel = module.weight.shape
    if not kernel:
        return no_rule(node)
    kind: Any = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[len(kernel) - 1]
    layer = kind(
        second * module.geometry.groups,
        hidden,
        tuple(kernel),
        padding=tuple(module._padding),
        dilation=module.dilation,
        groups=module.geometry.groups,
        padding_mode="circular" if module.circular else "zeros",
        device="meta",
    )
    at, shape = (low.where[node.arguments[0].index],), node.shape[1:]
    names = {role: low.name(getattr(module, role), node.place, role) for role in ("weight", "bias")}
    tensors = {role: as_float64(getattr(module, role)) for role in names}
    kept = {role: tensor for role, tensor in tensors.items() if tensor is not None}
    settings, geometry = {**names, **linear_settings(layer)}, geometry_of(layer, shape[1:])
    found = Operation("potential", at, shape, node.place, settings, kept, names, geometry)
    if module.lipschitz == 1:
        return found
    return Operation("scale", (low.put(found),), shape, node.place, {"factor": float(module.lipschitz).hex()})
