"""Residual convolutions x - 2 V* relu(V x + b) (SLL, CPL), step by step: sound, but with the constant of a sum.

    ||x - 2 V* relu(V x + b)||: constant 1 + 2 ||V||^2, 3 for each layer, where 1 is true.

The nodes of a certificate have no rule that sees both V. Dense layers and 1x1 convolutions are baked to a form for
which products of norms suffice (`onelip.methods._plain_relu`), so this is for larger kernels.
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
    """A `ConvexPotential` of a convolution with zero padding; the adjoint of a circular one is no single node."""
    axes = len(module.dilation)
    if axes == 0 or module.circular:
        return no_rule(node)
    at, sizes = low.where[node.arguments[0].index], node.shape[2:]
    place: dict[str, Any] = {"groups": module.geometry.groups, "dilation": module.dilation, "device": "meta"}
    place |= {"padding": module._padding}
    kernel = module.geometry.kernel_size
    kind: Any = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[axes - 1]
    back: Any = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[axes - 1]
    layers = (
        (kind(module.channels, module.hidden, kernel, **place), module.bias),
        (back(module.hidden, module.channels, kernel, **place), None),
    )
    shape = node.shape[1:]
    inside = at
    for layer, bias in layers:
        names = {"weight": low.name(module.weight, node.place, "weight"), "bias": low.name(bias, node.place, "bias")}
        tensors = {"weight": as_float64(module.weight), "bias": as_float64(bias)}
        kept = {role: tensor for role, tensor in tensors.items() if tensor is not None}
        settings = {**names, **linear_settings(layer)}
        made = (layer.out_channels, *sizes)
        inside = low.put(
            Operation("conv", (inside,), made, node.place, settings, kept, names, geometry_of(layer, tuple(sizes)))
        )
        if not layer.transposed:
            inside = low.put(Operation("relu", (inside,), made, node.place))
    inside = low.put(Operation("scale", (inside,), shape, node.place, {"factor": (-2.0).hex()}))
    total = Operation("add", (at, inside), shape, node.place)
    if module.lipschitz == 1:
        return total
    return Operation("scale", (low.put(total),), shape, node.place, {"factor": float(module.lipschitz).hex()})
