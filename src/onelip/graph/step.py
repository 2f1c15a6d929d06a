"""Calls of a traced network, and rules: the constant of a call from the constants of its operands."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import signature
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from onelip.core.lipschitz_module import Bound
from onelip.core.rounding import float_up, multiply_up


@dataclass(frozen=True)
class Ref:
    """In the arguments of a call: the result of another call."""

    index: int


@dataclass(frozen=True)
class Call:
    """One operation or layer that runs, with a result that depends on the input.

    Attributes:
        index: position in `Graph.calls`; operands come before.
        place: path of the module that runs it, such as "blocks.0.conv1"; "" for the model itself.
        op: "input", "module", "constant" (an output that does not depend on the input), "getitem" (an entry of an
            operation with several results), or the ATen name, such as "aten.add.Tensor".
        module: for op "module" the layer itself, baked and in eval mode.
        arguments: positional arguments of an ATen operation: a `Ref` for the result of a call, else a constant.
        keywords: keyword arguments, likewise.
        inputs: indices of the operands that depend on the input.
        shape: shape of the result, with the batch axis first; () for an operation with several results.
        dtype: dtype of the result.
        keeps_batch: whether the first axis of the result is the batch, and no other size depends on its length.
    """

    index: int
    place: str
    op: str
    module: nn.Module | None
    arguments: tuple[Any, ...]
    keywords: dict[str, Any]
    inputs: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    keeps_batch: bool = True


@dataclass(frozen=True)
class Graph:
    """All calls in order; call 0 is the input."""

    calls: tuple[Call, ...]
    output: int
    input_shape: tuple[int, ...]  # with the batch axis, see Note [Batch] in trace.py

    @property
    def batch(self) -> int:
        """Length of the batch axis during the trace."""
        return self.input_shape[0]


def argument_of(target: Any, arguments: Sequence[Any], keywords: Mapping[str, Any], name: str) -> Any:
    """An argument of an ATen operation by its name, with torch's default where it was left out."""
    for place, argument in enumerate(target._schema.arguments):
        if argument.name == name:
            return arguments[place] if place < len(arguments) else keywords.get(name, argument.default_value)
    raise KeyError(f"{target} has no argument {name!r}")


def references(arguments: Any) -> list[Ref]:
    """All uses of calls in arguments, each as often as it occurs."""
    return [leaf for leaf in tree_leaves(arguments) if isinstance(leaf, Ref)]


def first_different_call(one: Graph, other: Graph) -> Call | None:
    """The first call that differs between two traces of one model; None if none does."""
    for a, b in zip(one.calls, other.calls, strict=False):
        if (a.op, a.module, a.inputs, a.shape, a.dtype) != (b.op, b.module, b.inputs, b.shape, b.dtype):
            return a
        if not _equal((a.arguments, a.keywords), (b.arguments, b.keywords)):
            return a
    is_same = len(one.calls) == len(other.calls) and one.output == other.output
    return None if is_same else one.calls[-1]


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        is_alike = a.dtype == b.dtype and a.shape == b.shape
        return is_alike and torch.allclose(a, b, rtol=0.0, atol=0.0, equal_nan=True)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_equal(a[name], b[name]) for name in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(_equal(x, y) for x, y in zip(a, b, strict=True))
    return type(a) is type(b) and a == b


# ---- Rules
#
# A rule is a function of a `Step`, which is a call with the constants of the calls before it:
#
#     @register_rule("aten.leaky_relu.default", nn.LeakyReLU)
#     def leaky_relu(step):
#         return step.times(max(1.0, abs(step.argument("negative_slope"))), "largest slope")
#
# It returns `step.times(c, why)` for a call that is c-Lipschitz in its one operand, or `step.gives(L, why)` with the
# constant in terms of the input of the model. It raises `Refusal` with the reason if no bound is known. A rule must
# hold for every input: the step has shapes, settings and constants, but no values of the input. Numbers are rounded up.
#
# A rule is registered for ATen operations by name, and for layers of torch with the same settings by class. A layer by
# itself has no input, so a rule that reads a shape refuses it (`ModuleStep`).


class Refusal(Exception):
    """Why no bound of a call is known."""


@dataclass(frozen=True)
class StepBound(Bound):
    """The bound of a call as a function of the model's input.

    Attributes:
        factor: the bound of the call alone, if it has one operand.
        remark: a warning to the user about a bound that is proved, such as one that is too large to be useful.
        details: several bounds of one layer.
        is_refused: whether the call itself has no bound; False if only an operand has none.
        ancestor: an earlier call from whose constant the bound is computed, instead of from the operands.
        root: the constant of its root, entry by entry: see ops/squares.py.
        root_factor: the constant of its root in terms of the root of its one operand.
        by_roots: whether the bound is computed from the roots of its operands.
        holes: which entries of a sample are uninitialised memory.
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
        return argument_of(aten(self.call.op), self.call.arguments, self.call.keywords, name)

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
        # Arguments of its class are settings. Other attributes may have the name of an argument that was left out.
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


ConstantRule = Callable[[Step], StepBound]
AnyRule = TypeVar("AnyRule", bound=ConstantRule)

_RULES: dict[str | type[nn.Module], ConstantRule] = {}
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


def _checking(rule: ConstantRule) -> ConstantRule:
    """The rule with a check of its result: only a bound proves anything."""

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


def find_rule(op: str) -> ConstantRule | None:
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


def per_axis(value: Any, axes: int, default: Sequence[int] = ()) -> Any:
    """A setting for each axis, where torch takes one number for all; strings such as padding="same" are kept.

    Examples:
        >>> per_axis(3, 2), per_axis([1], 2), per_axis([], 2, default=(4, 5))
        ((3, 3), (1, 1), (4, 5))
    """
    if isinstance(value, str):
        return value
    numbers = (value,) if isinstance(value, int) else tuple(value)
    return numbers * axes if len(numbers) == 1 else numbers or tuple(default)


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
    """Refuse an elementwise operation whose constants differ between samples."""
    for constant in operands:
        if not isinstance(constant, torch.Tensor) or constant.dim() != len(step.call.shape):
            continue
        if not bool((constant == constant[:1]).all()):
            raise Refusal("has constants that differ between samples")
