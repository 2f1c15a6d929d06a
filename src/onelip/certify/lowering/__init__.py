"""From a traced network to a program with rounding rules: every step is one of few operations, or is refused by name.

Real-arithmetic rules (`onelip.bounds`) know many more functions than this list. Here each operation also needs a bound
on what the running program does to it, and a place in the certificate file.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from onelip.bounds.graph import Node, Ref, trace
from onelip.certify.exact import as_float64
from onelip.certify.lowering._context import Context, no_rule, spoken
from onelip.certify.lowering.calls import CALLS
from onelip.certify.lowering.layers import LAYERS
from onelip.certify.lowering.linear import FUNCTIONAL_LAYERS, linear_settings, module_of_call
from onelip.certify.program import Operation, Program
from onelip.certify.rounding import ProofError
from onelip.export import bake
from onelip.geometry import LINEAR_LAYERS, UnsupportedLayer, geometry_of


def lower(model: nn.Module, input_shape: Sequence[int]) -> Program:
    """The program of a model in float64 for images of the shape (channels, height, width).

    Raises:
        ProofError: naming the operation without a rule and its place.
        CannotTrace: if the model has no fixed graph.

    Example:
        >>> model = nn.Sequential(nn.Flatten(), nn.Linear(4, 2)).double()
        >>> [node.op for node in lower(model, (1, 2, 2)).nodes]
        ['input', 'flatten', 'linear']
    """
    graph = trace(model, torch.zeros(2, *input_shape, dtype=torch.float64))
    # Names for the certificate are those of the baked network, as in the trace.
    stored = {name: t.detach() for name, t in bake(model).state_dict().items() if t.is_floating_point()}
    low = Context(graph, stored)
    for node in graph.nodes:
        _check(low, node)
        found = _lower(low, node)
        if isinstance(found, int):  # the same values again
            low.where[node.index] = found
        else:
            low.where[node.index] = len(low.nodes)
            low.nodes.append(found)
    program = Program(tuple(low.nodes[: low.where[graph.output] + 1]))
    if len(program.nodes[-1].shape) != 1 or program.classes < 2:
        raise ProofError(
            f"expected one logit for each of two or more classes, got outputs of shape {program.nodes[-1].shape}; "
            "end the model with as many outputs as classes, flattened"
        )
    return program


def _check(low: Context, node: Node) -> None:
    if not node.shape:  # several results at once, or one number for the whole batch
        no_rule(node)
    if node.dtype != torch.float64:
        raise ProofError(f"{spoken(node)}: expected float64 throughout, got {node.dtype}; use model.double()")
    if node.shape[0] != low.graph.batch:
        raise ProofError(f"{spoken(node)}: expected the batch to stay axis 0, got the shape {node.shape}")


def _lower(low: Context, node: Node) -> Operation | int:
    """A new node, or the number of one that holds the same values."""
    if node.op == "input":
        return Operation("input", (), node.shape[1:])
    if node.module is not None:
        if isinstance(node.module, LINEAR_LAYERS):
            return _linear(low, node, node.module, node.arguments[0], node.module.weight, node.module.bias)
        rule = LAYERS.get(type(node.module))
        return no_rule(node) if rule is None else rule(low, node, node.module)
    if node.op in FUNCTIONAL_LAYERS:
        call = _bound(node)
        operands = call["input"], call["weight"], call["bias"]
        if [isinstance(operand, Ref) for operand in operands] != [True, False, False]:
            return no_rule(node)
        return _linear(low, node, module_of_call(node.op, call), *operands)
    rule = CALLS.get(node.op)
    return no_rule(node) if rule is None else rule(low, node, _bound(node))


def _linear(low: Context, node: Node, module: nn.Module, operand: Ref, weight: Tensor, bias: Any) -> Operation:
    before = low.shape(operand)
    axes = 1 + len(getattr(module, "kernel_size", ()))
    if len(before) != axes:
        raise ProofError(
            f"{spoken(node)}: expected samples of {axes} axes, got {before}; flatten them before a Linear layer"
        )
    try:
        geometry = geometry_of(module, before[1:] or None)
    except UnsupportedLayer as error:
        raise ProofError(f"{spoken(node)}: {error}") from error
    names = {"weight": low.name(weight, node.place, "weight"), "bias": low.name(bias, node.place, "bias")}
    tensors = {"weight": as_float64(weight), "bias": as_float64(bias)}
    kept = {role: tensor for role, tensor in tensors.items() if tensor is not None}
    op = "linear" if isinstance(module, nn.Linear) else "conv"
    settings = {**names, **linear_settings(module)}
    return Operation(op, (low.where[operand.index],), node.shape[1:], node.place, settings, kept, names, geometry)


def _bound(node: Node) -> dict[str, Any]:
    """All arguments of a call by name, with the defaults of its schema."""
    overload: Any = functools.reduce(getattr, node.op.split("."), torch.ops)
    arguments = overload._schema.arguments
    values = {argument.name: argument.default_value for argument in arguments}
    values.update(zip((argument.name for argument in arguments), node.arguments, strict=False))
    return values | node.keywords
