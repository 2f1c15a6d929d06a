"""What a rule is: from the constants of a node's operands to the constant of the node.

A rule is a function of a `Step`. It returns `step.times(c, why)` for a node that is c-Lipschitz in its one operand, or
`step.gives(L, why)` if it has worked out the constant from the model's input by itself, and raises `Refusal` with the
reason where it can vouch for nothing. It must hold for every input: the step shows shapes, settings and constants,
never values of the input. Numbers are rounded up.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, TypeVar

import torch
from torch.utils._pytree import tree_map

from onelip.bounds._rational import up_root
from onelip.bounds.graph import Graph, Node, Ref
from onelip.nn._base import multiply_up


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
    is_refused: bool = False  # nobody vouches for the node itself, rather than for what it rests on


@dataclass(frozen=True)
class Step:
    """A node, and what is known of the nodes before it."""

    node: Node
    graph: Graph
    constants: Sequence[float]  # of the nodes before, as functions of the model's input
    effort: Any = "normal"

    def argument(self, name: str) -> Any:
        """An argument of the ATen operation by its name, with torch's default where it was left out."""
        schema = operation(self.node.op)._schema
        for place, argument in enumerate(schema.arguments):
            if argument.name == name:
                if place < len(self.node.arguments):
                    return self.node.arguments[place]
                return self.node.keywords.get(name, argument.default_value)
        raise KeyError(f"{self.node.op} has no argument {name!r}")

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

    Example:
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

    Example:
        >>> operation("aten.add.Tensor")
        <OpOverload(op='aten.add', overload='Tensor')>
    """
    try:
        namespace, op, overload = name.split(".")
        return getattr(getattr(getattr(torch.ops, namespace), op), overload)
    except (ValueError, AttributeError):
        raise ValueError(f"expected the name of an operation such as 'aten.add.Tensor', got {name!r}") from None


def references(arguments: Any) -> list[Ref]:
    """All uses of nodes in arguments, each as often as it occurs."""
    found: list[Ref] = []
    tree_map(lambda leaf: found.append(leaf) if isinstance(leaf, Ref) else None, arguments)
    return found


def add_up(*terms: float) -> float:
    """The smallest float not below the real sum of numbers that are not negative.

    Example:
        >>> add_up(1.0, 2.0), add_up(1.0, 2.0**-60) > 1
        (3.0, True)
    """
    if not all(term < math.inf for term in terms):
        return math.inf
    return up_root(sum((Fraction(term) for term in terms), Fraction(0)) ** 2)


def hypotenuse_up(*legs: float) -> float:
    """A float not below the root of the sum of the squares.

    Example:
        >>> hypotenuse_up(3.0, 4.0)
        5.0
    """
    if not all(leg < math.inf for leg in legs):
        return math.inf
    return up_root(sum((Fraction(leg) ** 2 for leg in legs), Fraction(0)))


def inverse_up(number: float) -> float:
    """A float not below 1 / number, for a number above 0.

    Example:
        >>> inverse_up(0.25), inverse_up(3.0) * 3 >= 1
        (4.0, True)
    """
    inverse = 1 / number
    return inverse if Fraction(inverse) * Fraction(number) >= 1 else math.nextafter(inverse, math.inf)


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
