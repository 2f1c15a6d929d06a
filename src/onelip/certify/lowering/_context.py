"""What all rules of the lowering share: where a node stands, its name in the state dict, and the refusal."""

from typing import Any

import torch
from torch import Tensor, nn

from onelip.bounds.graph import Graph, Node, Ref
from onelip.certify.program import Operation
from onelip.certify.rounding import ProofError


class Context:
    """A graph that is being read, and the program so far."""

    def __init__(self, graph: Graph, names: dict[str, Tensor]) -> None:
        self.graph = graph
        self.names = names  # the state dict
        self.where: dict[int, int] = {}  # node of the graph -> node of the program
        self.nodes: list[Operation] = []

    def shape(self, operand: Ref) -> tuple[int, ...]:
        """Of one sample."""
        return self.graph.nodes[operand.index].shape[1:]

    def operation(self, op: str, node: Node, *operands: Ref, **settings: Any) -> Operation:
        """A node without numbers of its own."""
        return Operation(op, tuple(self.where[o.index] for o in operands), node.shape[1:], node.place, settings)

    def put(self, operation: Operation) -> int:
        """A node that a step of the graph needs before its own; its number."""
        self.nodes.append(operation)
        return len(self.nodes) - 1

    def name(self, tensor: Tensor | None, place: str, role: str) -> str | None:
        """What the state dict calls these numbers; None if they are not in it."""
        if tensor is None:
            return None
        own = f"{place}.{role}" if place else role
        for name in (own, *self.names):
            stored = self.names.get(name)
            if stored is not None and stored.shape == tensor.shape and torch.equal(stored, tensor.double()):
                return name
        return None


def spoken(node: Node) -> str:
    """What a node is and where, for messages."""
    what = type(node.module).__name__ if node.module is not None else node.op
    return f"{what} at {node.place!r}" if node.place else what


def no_rule(node: Node) -> Operation:
    """Refuse an operation by name."""
    if isinstance(node.module, nn.modules.batchnorm._BatchNorm) or "batch_norm" in node.op:
        raise ProofError(
            f"{spoken(node)}: expected an operation with a rule for its rounding, got batch normalisation, whose "
            "factor is computed as it runs; fold it into the layer before (torch.nn.utils.fusion.fuse_conv_bn_eval), "
            "which is then the network; or ask for mode='real-arithmetic'"
        )
    raise ProofError(
        f"{spoken(node)}: expected an operation with a rule for its rounding, got none for it with these settings; use "
        "linear and convolutional layers, MaxMin, GroupSort, Abs, ReLU, LeakyReLU, max and average pooling, Normalize, "
        "sums, differences and concatenations; give it a rule in onelip/certify/lowering and recursion.py; or ask for "
        "mode='real-arithmetic'"
    )
