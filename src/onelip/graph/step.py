"""What a rule is: from the constants of a call's operands to the constant of the call.

A rule is a function of a `Step`. It returns `step.times(c, why)` for a call that is c-Lipschitz in its one operand, or
`step.gives(L, why)` if it has computed the constant from the model's input by itself, and raises `Refusal` with the
reason where no bound is known. It must hold for every input: the step shows shapes, settings and constants, never
values of the input. Numbers are rounded up.

A rule is registered for ATen operations by name, and for layers of torch that hold the same settings by class. A layer
by itself has no input, so a rule that reads a shape refuses it.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import signature
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils._pytree import tree_map

from onelip.core.lipschitz_module import Bound
from onelip.core.rounding import float_up, multiply_up
from onelip.graph.calls import Call, Graph, Ref


class Refusal(Exception):
    """Why no bound of a call is known."""


@dataclass(frozen=True)
class StepBound(Bound):
    """The bound of a call as a function of the model's input.

    Attributes:
        factor: the bound of the call by itself, if it has one operand.
        remark: what a user should know although there is a proof.
        details: several bounds of one layer.
        is_refused: whether no bound is known of the call itself, rather than of what it rests on.
        ancestor: a call before it that the bound rests on, rather than on the operands.
        root: the constant of its root, entry by entry: see squares.py.
        root_factor: of its root in that of its one operand.
        by_roots: whether it rests on the roots of its operands.
        holes: where a sample of it is memory that is not filled.
    """

    factor: float | None = None
    remark: str | None = None
    details: dict[str, float] | None = None
    is_refused: bool = False
    ancestor: int | None = None
    root: float | None = None
    root_factor: float | None = None
    by_roots: bool = False
    holes: torch.Tensor | None = None


@dataclass(frozen=True)
class Step:
    """A call, and the bounds of the calls before it."""

    call: Call
    graph: Graph
    constants: Sequence[float]  # of the calls before, as functions of the model's input
    effort: Any = "normal"
    holes: Mapping[int, torch.Tensor] = field(default_factory=dict)  # of the calls before, by their index

    def argument(self, name: str) -> Any:
        """An argument of the ATen operation by its name, with torch's default where it was left out."""
        return argument_of(self.call, name)

    @property
    def source(self) -> Call:
        """The operand, for calls whose first argument alone depends on the input; others are refused."""
        first = self.call.arguments[0] if self.call.arguments else None
        if not isinstance(first, Ref) or len(references((self.call.arguments, self.call.keywords))) != 1:
            raise Refusal("several of its operands depend on the input, and no bound holds for all of them")
        return self.graph.calls[first.index]

    @property
    def operand_shape(self) -> tuple[int, ...] | None:
        """Shape of the operand; None for a layer by itself."""
        return self.source.shape

    def times(self, factor: float, why: str, **more: Any) -> StepBound:
        """The call is `factor`-Lipschitz in its one operand."""
        factor = float_up(factor)
        constant = multiply_up(factor, self.constants[self.source.index])
        return StepBound(constant, why, factor, **more)

    def gives(self, constant: float, why: str) -> StepBound:
        """The call is `constant`-Lipschitz in the input of the model."""
        return StepBound(float_up(constant), why)


class ModuleStep(Step):
    """A layer of torch by itself, in eval mode: its attributes are the settings, and the shape of its input is unknown.

    Args:
        module: the layer.
        op: the ATen operation that it calls, for torch's defaults; "" where the rule needs none.
    """

    def __init__(self, module: nn.Module, op: str) -> None:
        call = Call(0, "", op, module, (), {}, (), (), torch.get_default_dtype())
        super().__init__(call, Graph((call,), 0, ()), ())

    def argument(self, name: str) -> Any:
        if name in ("train", "training"):
            return False
        # What its class knows; other attributes may have the name of an argument that the layer leaves at its default.
        is_setting = name in ("weight", "running_var") or name in signature(type(self.call.module)).parameters
        return getattr(self.call.module, name) if is_setting else super().argument(name)

    @property
    def source(self) -> Call:
        raise Refusal("its constant depends on the size of its input")

    @property
    def operand_shape(self) -> None:
        return None

    def times(self, factor: float, why: str, **more: Any) -> StepBound:
        factor = float_up(factor)
        return StepBound(factor, why, factor, **more)


Rule = Callable[[Step], StepBound]
AnyRule = TypeVar("AnyRule", bound=Rule)

_RULES: dict[str | type[nn.Module], Rule] = {}
_CALLS: dict[type[nn.Module], str] = {}  # the operation that a layer calls
_OF_GRAPHS = ("getitem", "module")  # operations of `Call` that are not of ATen


def register_rule(*operations: str | type[nn.Module]) -> Callable[[AnyRule], AnyRule]:
    """Register the rule of operations; use it as a decorator.

    The rule must hold for all inputs of the shapes it is shown. Not run as a test, since it would stay registered:

        @register_rule("aten.sinc.default")
        def sinc(step):
            return step.times(1.4, "|sin(pi x) / (pi x)|' <= 1.37")

    Args:
        operations: full names of ATen operations, as the audit prints them, and classes of layers with the same
            settings (`nn.LeakyReLU` has the `negative_slope` of `aten.leaky_relu.default`). Only the exact class
            counts: a subclass may have another forward.

    Examples:
        >>> "aten.relu.default" in known_operations()
        True
    """
    names = [name for name in operations if isinstance(name, str)]
    check_operations(operations)

    def register(rule: AnyRule) -> AnyRule:
        _RULES.update(dict.fromkeys(operations, _checking(rule)))
        _CALLS.update({layer: names[0] for layer in operations if isinstance(layer, type) and names})
        return rule

    return register


def check_operations(operations: Sequence[Any]) -> None:
    """Raise an error unless all are names of ATen operations or classes of layers: other rules would never be used."""
    for operation in operations:
        if operation in _OF_GRAPHS:
            continue
        if isinstance(operation, str):
            aten(operation)
        elif not (isinstance(operation, type) and issubclass(operation, nn.Module)):
            raise TypeError(f"expected names of ATen operations and classes of layers, got {operation!r}")


def _checking(rule: Rule) -> Rule:
    """The rule; an answer that is no bound proves nothing."""

    @functools.wraps(rule)
    def checked(step: Step) -> StepBound:
        found: Any = rule(step)
        if not isinstance(found, StepBound) or not isinstance(found.why, str):
            raise Refusal(f"its rule failed: expected step.times(constant, why) or step.gives(...), got {found!r}")
        for number in (found.constant, found.factor):
            if number is not None and type(number) not in (int, float):
                raise Refusal(f"its rule failed: expected a float, got {number!r}")
        return found

    return checked


def find_rule(op: str) -> Rule | None:
    """The rule of an ATen operation, or None."""
    return _RULES.get(op)


def bound_by_rule(module: nn.Module) -> StepBound:
    """The bound of a layer of torch by itself.

    Raises:
        Refusal: if no bound is known.

    Examples:
        >>> bound_by_rule(nn.LeakyReLU(3.0)).constant
        3.0
    """
    rule = _RULES.get(type(module))
    if rule is None:
        raise Refusal("no rule for this module")
    if getattr(module, "return_indices", False):
        raise Refusal("returns indices, too")
    return rule(ModuleStep(module, _CALLS.get(type(module), "")))


def known_operations() -> list[str]:
    """Names of all ATen operations with a rule."""
    return sorted(name for name in _RULES if isinstance(name, str) and name not in _OF_GRAPHS)


def aten(name: str) -> Any:
    """The ATen operation by its full name.

    Examples:
        >>> aten("aten.add.Tensor")
        <OpOverload(op='aten.add', overload='Tensor')>
    """
    try:
        namespace, op, overload = name.split(".")
        return getattr(getattr(getattr(torch.ops, namespace), op), overload)
    except (ValueError, AttributeError):
        raise ValueError(f"expected the name of an operation such as 'aten.add.Tensor', got {name!r}") from None


def argument_of(call: Call, name: str) -> Any:
    """An argument of an ATen operation by its name, with torch's default where it was left out."""
    for place, argument in enumerate(aten(call.op)._schema.arguments):
        if argument.name == name:
            if place < len(call.arguments):
                return call.arguments[place]
            return call.keywords.get(name, argument.default_value)
    raise KeyError(f"{call.op} has no argument {name!r}")


def references(arguments: Any) -> list[Ref]:
    """All uses of calls in arguments, each as often as it occurs."""
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


Axes = int | list[int] | tuple[int, ...] | None


def check_not_batch(step: Step, dim: Axes) -> None:
    """Refuse axes that include the batch; None and [] are all of them."""
    axes = [0] if dim is None or dim == [] else [dim] if isinstance(dim, int) else dim
    why = why_batch(axes, None if step.operand_shape is None else len(step.operand_shape))
    if why is not None:
        raise Refusal(why)


def why_batch(axes: Sequence[int], rank: int | None) -> str | None:
    """Why one of these axes is the batch, or may be where the number of axes of the input is not known; else None.

    Examples:
        >>> why_batch([-2], 3), why_batch([1, -1], None)
        (None, None)
        >>> why_batch([-2], None)
        'counts an axis from the end, which may be the batch'
    """
    if any((axis if rank is None else axis % rank) == 0 for axis in axes):
        return "works along the batch axis, so samples depend on each other"
    if rank is None and any(axis < -1 for axis in axes):
        return "counts an axis from the end, which may be the batch"
    return None


def check_axes(step: Step, dim: Axes) -> int:
    """The number of entries along axes of the operand, none of which may be the batch."""
    check_not_batch(step, dim)
    axes = [dim] if isinstance(dim, int) else dim or ()
    return math.prod(step.source.shape[axis] for axis in axes)


def check_alike(step: Step, *operands: Any) -> None:
    """Refuse constants, of operations entry by entry, that are not the same for every sample."""
    for constant in operands:
        if not isinstance(constant, torch.Tensor) or constant.dim() != len(step.call.shape):
            continue
        if not bool((constant == constant[:1]).all()):
            raise Refusal("has other constants for one sample than for another")
