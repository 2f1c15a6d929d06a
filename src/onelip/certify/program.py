"""The program of a proof: a network as a list of operations, each of which has a rule for its rounding.

Node 0 is the input, the last node holds the logits. What a node may be and what its settings mean is written in
docs/certificates.md; the settings here are, to the letter, those of a certificate file. Shapes are those of one sample.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from onelip.geometry import Geometry

# Operations that move, compare or select numbers: 1-Lipschitz, zero to zero, and without any rounding.
_MOVES = ("flatten", "reshape", "concatenate", "first_channels", "pad_channels", "identity")
EXACT = frozenset(("relu", "abs", "maxmin", "groupsort", *_MOVES))

# Operations with a weight W whose norm is proved; "potential" is x - 2 W^T relu(W x + b) for a convolution W.
WEIGHTED = ("linear", "conv", "potential")


@dataclass(frozen=True)
class Operation:
    """One node.

    Attributes:
        op: its kind.
        inputs: the nodes it reads.
        shape: of its output, without the batch.
        place: where in the model it happens, for people.
        settings: as in a certificate file.
        tensors: the numbers it uses, in float64, by role (weight, bias, mean, std).
        names: their names in the model's state dict; None for a constant that is not in it.
        geometry: of those with a weight.
    """

    op: str
    inputs: tuple[int, ...]
    shape: tuple[int, ...]
    place: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    names: Mapping[str, str | None] = field(default_factory=dict)
    geometry: Geometry | None = None

    @property
    def title(self) -> str:
        """Kind and place, for messages."""
        return f"{self.op} at {self.place!r}" if self.place else self.op

    @property
    def weight(self) -> Tensor:
        """The weight of a linear node."""
        return self.tensors["weight"]

    @property
    def bias(self) -> Tensor | None:
        """The bias of a linear node, if it has one."""
        return self.tensors.get("bias")


def halves(node: Operation) -> tuple[Operation, Operation]:
    """The convolution V x + b of a potential, and its adjoint V^T, as nodes of their own.

    The adjoint of a circular convolution is one around the same circle: transposed and circular, as no node of a file
    may be. Both have stride 1, and images keep their size.
    """
    settings, weight = dict(node.settings), node.weight
    forth = replace(node, op="conv", shape=(weight.shape[0], *node.shape[1:]))
    back = replace(node, op="conv", settings=settings | {"transposed": True}, tensors={"weight": weight}, geometry=None)
    return forth, back


@dataclass(frozen=True)
class Program:
    """A network that can be certified."""

    nodes: tuple[Operation, ...]

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Of one image."""
        return self.nodes[0].shape

    @property
    def classes(self) -> int:
        """Number of logits."""
        return self.nodes[-1].shape[0]

    @property
    def linear_nodes(self) -> list[int]:
        """Indices of the nodes with weights to be bounded."""
        return [i for i, node in enumerate(self.nodes) if node.op in WEIGHTED]
