"""From the traced calls of a network to a program of certified kinds: every call has a rule, or is refused by name.

Rules of real arithmetic know many more operations. Here the rounding of the running program must be bounded too, and
the call must have a place in the certificate file: a rule lowers it to nodes of `onelip.graph.kinds`.

A lowering rule is a function of a `Lowering` that is registered for ATen operations or layer classes:

    @lowers("aten.relu.default")
    def relu(low):
        return low.emit(kinds.Relu, low.source)

It returns the number of the node that holds the values of the call. What torch computes for the call must be within the
error that the nodes state, for every input; the module docstrings of the rules give the argument where it is not plain.
Rules of your own are registered in the same way, from outside of the package.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from onelip.core.errors import ProofError
from onelip.graph.kinds import Input, Node, Stored
from onelip.graph.step import Graph, Ref, argument_of, aten, check_operations
from onelip.graph.trace import trace

LoweringRule = Callable[["Lowering"], int]
AnyRule = TypeVar("AnyRule", bound=LoweringRule)

_RULES: dict[str | type[nn.Module], LoweringRule] = {}


def lowers(*operations: str | type[nn.Module]) -> Callable[[AnyRule], AnyRule]:
    """Register the lowering of ATen operations, by full name, or of layers, by exact class; use it as a decorator."""
    check_operations(operations)

    def register(rule: AnyRule) -> AnyRule:
        _RULES.update(dict.fromkeys(operations, rule))
        return rule

    return register


@dataclass(frozen=True)
class Program:
    """A network that can be certified: node 0 is the input, the last node holds the logits."""

    nodes: tuple[Node, ...]

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Of one image."""
        return self.nodes[0].shape

    @property
    def classes(self) -> int:
        """Number of logits."""
        return self.nodes[-1].shape[0]

    @torch.no_grad()
    def run(self, images: Tensor) -> list[Tensor]:
        """The values of all nodes for float64 images (N, *shape); the last are the logits.

        Examples:
            >>> from onelip.graph import kinds
            >>> Program((Input((), (2,)), kinds.Relu((0,), (2,)))).run(torch.tensor([[-1.0, 2.0]]))[-1]
            tensor([[0., 2.]])
        """
        values = [images]
        for node in self.nodes[1:]:
            value = node.run(*(values[i] for i in node.inputs))
            if value.shape[1:] != node.shape:
                raise RuntimeError(f"{node.title}: expected the shape {node.shape}, got {tuple(value.shape[1:])}")
            values.append(value)
        return values


class Lowering:
    """A network that is being lowered: the nodes so far, and the call whose turn it is.

    Attributes:
        call: the traced call.
        nodes: the program so far.
    """

    def __init__(self, graph: Graph, stored: dict[str, Tensor]) -> None:
        self.graph = graph
        self.stored = stored  # the state dict
        self.nodes: list[Node] = []
        self.call = graph.calls[0]
        self._where: dict[int, int] = {}  # traced call -> node that holds its values

    def program(self) -> Program:
        """All calls in order."""
        for call in self.graph.calls:
            self.call = call
            self._check()
            self._where[call.index] = self._number()
        return Program(tuple(self.nodes[: self._where[self.graph.output] + 1]))

    def _number(self) -> int:
        if self.call.op == "input":
            return self.emit(Input)
        rule = _RULES.get(self.call.op if self.call.module is None else type(self.call.module))
        found: Any = self.refuse() if rule is None else rule(self)
        if not isinstance(found, int) or not 0 <= found < len(self.nodes):
            raise ProofError(f"{self.title}: expected its rule to return the number of a node, as low.emit does")
        return found

    def _check(self) -> None:
        call = self.call
        if not call.shape:  # several results at once, or one number for the whole batch
            self.refuse()
        if call.dtype != torch.float64:
            raise ProofError(f"{self.title}: expected float64 throughout, got {call.dtype}; use model.double()")
        if not call.keeps_batch or call.shape[0] != self.graph.batch:
            raise ProofError(
                f"{self.title}: expected the batch to stay axis 0, got the shape {call.shape}; keep samples on axis 0"
            )

    @property
    def title(self) -> str:
        """Operation and place of the call, for messages."""
        what = self.call.op if self.call.module is None else type(self.call.module).__name__
        return f"{what} at {self.call.place!r}" if self.call.place else what

    @property
    def module(self) -> Any:
        """The layer that is called."""
        return self.call.module

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one sample of the result."""
        return self.call.shape[1:]

    @property
    def source(self) -> int:
        """The node of the first operand."""
        return self.node(self.call.arguments[0])

    @property
    def source_shape(self) -> tuple[int, ...]:
        """Of one sample of the first operand."""
        return self.nodes[self.source].shape

    @property
    def sample_axis(self) -> int:
        """The axis that the layer works along (its `dim`), counted within one sample."""
        axis = self.module.dim % len(self.call.shape) - 1
        if axis < 0:
            raise ProofError(f"{self.title}: expected an axis of one sample, got the batch axis; use another `dim`")
        return axis

    def argument(self, name: str) -> Any:
        """An argument of an ATen operation by its name, with torch's default where it was left out."""
        return argument_of(aten(self.call.op), self.call.arguments, self.call.keywords, name)

    def node(self, operand: Any) -> int:
        """The node of an operand; one that does not depend on the input is refused."""
        if not isinstance(operand, Ref):
            self.refuse()
        return self._where[operand.index]

    def emit(self, kind: type[Node], *inputs: int, shape: Sequence[int] | None = None, **settings: Any) -> int:
        """Append a node; its shape is that of the call unless stated. Returns its number."""
        self.nodes.append(kind(inputs, self.shape if shape is None else tuple(shape), self.call.place, **settings))
        return len(self.nodes) - 1

    def tensor(self, values: Tensor, role: str) -> Stored:
        """Numbers that a node uses, in float64, with the name that the state dict has for them."""
        own = f"{self.call.place}.{role}" if self.call.place else role
        # Its own memory: a global tensor that the forward reads is not copied with the model, and may change later.
        exact = values.detach().to("cpu", torch.float64).clone(memory_format=torch.contiguous_format)
        for name in (own, *self.stored):
            stored = self.stored.get(name)
            if stored is not None and stored.shape == values.shape and torch.equal(stored, exact):
                return Stored(exact, name)
        return Stored(exact)

    def refuse(self) -> Any:
        """Refuse the call by name."""
        if isinstance(self.module, nn.modules.batchnorm._BatchNorm) or "batch_norm" in self.call.op:
            raise ProofError(
                f"{self.title}: expected batch normalisation that onelip.bake can fold, a BatchNorm1d, 2d or 3d with "
                "finite running statistics, got one that computes its factor as it runs; give it running statistics, "
                "or ask for mode='real-arithmetic'"
            )
        raise ProofError(
            f"{self.title}: no rule bounds its rounding with these settings. Supported are linear and convolutional "
            "layers, MaxMin, GroupSort, Abs, ReLU, LeakyReLU, max and average pooling, Normalize, batch normalisation "
            "with stored statistics, sums, differences and concatenations. Register a lowering with "
            "onelip.graph.lowers, or ask for mode='real-arithmetic'"
        )


def lower(model: nn.Module, input_shape: Sequence[int]) -> Program:
    """The program of a plain model in float64, for images of one shape.

    Args:
        model: a baked model in eval mode that is not used elsewhere; the program has its own tensors.
        input_shape: (channels, height, width).

    Raises:
        ProofError: naming the operation without a rule and its place.
        CannotTrace: if the model has no fixed graph.

    Examples:
        >>> model = nn.Sequential(nn.Flatten(), nn.Linear(4, 2)).double()
        >>> [node.kind for node in lower(model, (1, 2, 2)).nodes]
        ['input', 'join', 'affine']
    """
    graph = trace(model, torch.zeros(2, *input_shape, dtype=torch.float64), is_own=True)
    stored = {name: tensor.detach() for name, tensor in model.state_dict().items() if tensor.is_floating_point()}
    program = Lowering(graph, stored).program()
    if len(program.nodes[-1].shape) != 1 or program.classes < 2:
        raise ProofError(
            f"expected one logit for each of two or more classes, got outputs of shape {program.nodes[-1].shape}; "
            "end the model with as many outputs as classes, flattened"
        )
    return program
