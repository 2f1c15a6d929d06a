"""What a rule is: from the constants of a node's operands to the constant of the node.

A rule is a function of a `Step`. It returns `step.times(c, why)` for a node that is c-Lipschitz in its one operand, or
`step.gives(L, why)` if it has worked out the constant from the model's input by itself, and raises `Refusal` with the
reason where it can vouch for nothing. It must hold for every input: the step shows shapes, settings and constants,
never values of the input. Numbers are rounded up.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch.utils._pytree import tree_map

from onelip.core.rounding import multiply_up
from onelip.graph.trace import Graph, Node, Ref


class Refusal(Exception):
    """Why nobody vouches for a node."""


@dataclass(frozen=True)
class Verdict:
    """The constant of a node as a function of the model's input, or None; its factor, if it has one operand; why."""

    constant: float | None
    factor: float | None
    why: str
    remark: str | None = None  # what a user should know although there is a proof
    details: dict[str, float] | None = None  # several bounds of one layer
    is_refused: bool = False  # no bound is known of the node itself, rather than of what it rests on
    ancestor: int | None = None  # a node before it that the bound rests on, rather than on the operands
    root: float | None = None  # the constant of its root, entry by entry: see squares.py
    root_factor: float | None = None  # of its root in that of its one operand
    by_roots: bool = False  # whether it rests on the roots of its operands
    holes: torch.Tensor | None = None  # where a sample of it is memory that is not filled


@dataclass(frozen=True)
class Step:
    """A node, and what is known of the nodes before it."""

    node: Node
    graph: Graph
    constants: Sequence[float]  # of the nodes before, as functions of the model's input
    effort: Any = "normal"
    holes: Mapping[int, torch.Tensor] = field(default_factory=dict)  # of the nodes before, by their index

    def argument(self, name: str) -> Any:
        """An argument of the ATen operation by its name, with torch's default where it was left out."""
        return argument_of(self.node, name)

    @property
    def source(self) -> Node:
        """The operand, for nodes whose first argument alone depends on the input; others are refused."""
        first = self.node.arguments[0] if self.node.arguments else None
        if not isinstance(first, Ref) or len(references((self.node.arguments, self.node.keywords))) != 1:
            raise Refusal("several of its operands depend on the input, and no bound holds for all of them")
        return self.graph.nodes[first.index]

    def times(self, factor: float, why: str, **more: Any) -> Verdict:
        """The node is `factor`-Lipschitz in its one operand."""
        constant = multiply_up(factor, self.constants[self.source.index])
        return Verdict(constant, factor, why, **more)

    def gives(self, constant: float, why: str) -> Verdict:
        """The node is `constant`-Lipschitz in the input of the model."""
        return Verdict(constant, None, why)


Rule = Callable[[Step], Verdict]
AnyRule = TypeVar("AnyRule", bound=Rule)

_RULES: dict[str, Rule] = {}


def register_rule(*operations: str) -> Callable[[AnyRule], AnyRule]:
    """Give a rule for ATen operations, named as the audit names them; use it as a decorator.

    The rule must hold for all inputs of the shapes it is shown. Not run as a test, since it would stay registered:

        @register_rule("aten.sinc.default")
        def sinc(step):
            return step.times(1.4, "|sin(pi x) / (pi x)|' <= 1.37")

    Examples:
        >>> "aten.relu.default" in known_operations()
        True
    """
    for name in operations:
        operation(name)  # a misspelt name would never be asked for

    def register(rule: AnyRule) -> AnyRule:
        _RULES.update(dict.fromkeys(operations, rule))
        return rule

    return register


def find_rule(op: str) -> Rule | None:
    """The rule for an operation, or None."""
    return _RULES.get(op)


def known_operations() -> list[str]:
    """Names of all operations with a rule."""
    return sorted(_RULES)


def operation(name: str) -> Any:
    """The ATen operation by its full name.

    Examples:
        >>> operation("aten.add.Tensor")
        <OpOverload(op='aten.add', overload='Tensor')>
    """
    try:
        namespace, op, overload = name.split(".")
        return getattr(getattr(getattr(torch.ops, namespace), op), overload)
    except (ValueError, AttributeError):
        raise ValueError(f"expected the name of an operation such as 'aten.add.Tensor', got {name!r}") from None


def argument_of(node: Node, name: str) -> Any:
    """An argument of an ATen operation by its name, with torch's default where it was left out."""
    for place, argument in enumerate(operation(node.op)._schema.arguments):
        if argument.name == name:
            if place < len(node.arguments):
                return node.arguments[place]
            return node.keywords.get(name, argument.default_value)
    raise KeyError(f"{node.op} has no argument {name!r}")


def references(arguments: Any) -> list[Ref]:
    """All uses of nodes in arguments, each as often as it occurs."""
    found: list[Ref] = []
    tree_map(lambda leaf: found.append(leaf) if isinstance(leaf, Ref) else None, arguments)
    return found


def finite(tensor: Any) -> Any:
    """A constant tensor or number in float64, refused if it is complex or not finite."""
    if isinstance(tensor, complex) or (isinstance(tensor, torch.Tensor) and tensor.is_complex()):
        raise Refusal("its constant is complex")
    # The type is named: torch would make a float32 of a Python number, and round it either way.
    value = torch.as_tensor(tensor, dtype=torch.float64).detach().cpu()
    if not bool(torch.isfinite(value).all()):
        raise Refusal("its constant is not finite")
    return value


def largest(tensor: Any) -> float:
    """The largest magnitude of a constant; 0 for an empty one."""
    value = finite(tensor)
    return float(value.abs().max()) if value.numel() else 0.0


def check_axes(step: Step, dim: int | list[int] | tuple[int, ...] | None) -> int:
    """The number of entries along axes of the operand, none of which may be the batch."""
    shape = step.source.shape
    axes = range(len(shape)) if dim is None or dim == [] else [dim] if isinstance(dim, int) else dim
    if any(axis % len(shape) == 0 for axis in axes):
        raise Refusal("works along the batch axis, so samples depend on each other")
    return math.prod(shape[axis] for axis in axes)


def check_alike(step: Step, *operands: Any) -> None:
    """Refuse constants, of operations entry by entry, that are not the same for every sample."""
    for constant in operands:
        if not isinstance(constant, torch.Tensor) or constant.dim() != len(step.node.shape):
            continue
        if not bool((constant == constant[:1]).all()):
            raise Refusal("has other constants for one sample than for another")
