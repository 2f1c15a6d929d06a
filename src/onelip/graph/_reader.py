"""Read the graph of torch.export: constants are computed, and operations that depend on the input become calls.

Example: for `x * torch.cos(self.angle)`, torch.export has the nodes angle, x, cos and mul. Our graph has two calls: the
input, and its product with a number.

Constants are those of real arithmetic: a model in float32 that computes cos(angle) and sin(angle) has rounded ones,
whose squares do not add up to 1. The audit is about real arithmetic, so such constants are computed in float64. Only
smooth operations are: comparisons, rounding and conversions to float32 stay as they are.
"""

import functools
import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Node as FxNode
from torch.utils._pytree import tree_map
from torch.utils._sympy.numbers import int_oo

from onelip.core.errors import CannotTrace
from onelip.graph._opaque import PLACES, tensors_of
from onelip.graph.step import Call, Graph, Ref, argument_of, references

_NAMES = """
    add sub rsub mul div neg reciprocal sin cos tan exp sqrt rsqrt sigmoid tanh
    view reshape unsqueeze squeeze expand permute transpose slice select clone alias
"""
_SMOOTH = frozenset(_NAMES.split())


class Reader:
    """From torch's graph to ours: constants are computed, and operations on the input become calls."""

    def __init__(
        self,
        program: torch.export.ExportedProgram,
        leaves: list[nn.Module],
        paths: list[str],
        shape: tuple[int, ...],
    ) -> None:
        self.program, self.leaves, self.paths, self.shape = program, leaves, paths, shape
        self.values: dict[FxNode, Any] = {}  # a Ref, or a constant
        self.real: dict[FxNode, Tensor] = {}  # constants that float32 has rounded, see the head of the file
        self.garbage: set[FxNode] = set()  # constants with uninitialised memory
        self.calls: list[Call] = []
        self.length: Any = None  # the number of samples, as torch.export writes it

    def read(self) -> Graph:
        signature = self.program.graph_signature
        stored = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
        stored |= getattr(signature, "inputs_to_lifted_tensor_constants", {})
        held = {**self.program.state_dict, **self.program.constants}
        nodes = list(_used(self.program.graph))
        input = next(node for node in nodes if node.name in signature.user_inputs)
        self.length = input.meta["val"].shape[0]
        if (node := find_use_of_length(nodes, input)) is not None:
            raise CannotTrace(
                "expected samples that are treated alike for every number of samples, got "
                f"{_place(node) or 'the model'!r} ({node.target}), which computes with that number or with the place "
                "of a sample in the batch; leave it out"
            )
        for node in nodes:
            if node.op == "placeholder" and node.name in stored:
                self.values[node] = held[stored[node.name]]
            elif node.op == "placeholder":
                self._add(node, "", "input", None, (), {})
            elif node.op == "get_attr":
                self.values[node] = functools.reduce(getattr, str(node.target).split("."), self.program.graph_module)
            elif node.op == "call_function":
                self._call(node)
            else:
                results: Any = node.args[0]
                return self._finish(results[0])
        raise CannotTrace("expected a graph with an output, got none")

    def _call(self, node: FxNode) -> None:
        if isinstance(node.meta.get("val"), NUMBERS):
            (self.values[node],) = self._for_two_samples(node, [node.meta["val"]])
            return
        arguments = tree_map(self._value, tuple(node.args))
        keywords = tree_map(self._value, dict(node.kwargs))
        target: Any = node.target
        if reads_shape_only(target):
            arguments, keywords = tree_map(self._blank, (arguments, keywords))
        if str(target) == "onelip.leaf.default":
            self._check_weights(arguments[1], arguments[2])
        if str(target) == PLACES and isinstance(arguments[0], Ref):
            raise CannotTrace(
                f"expected masks that are constants, got {_place(node) or 'the model'!r}, which picks entries by a "
                "mask that depends on the input; use torch.where"
            )
        if not references((arguments, keywords)) and is_known_function(target):
            self.values[node] = self._without_garbage(node, target, target(*arguments, **keywords))
            real = in_real_arithmetic(target, self.values[node], *tree_map(self._real_value, (node.args, node.kwargs)))
            if real is not None:
                self.real[node] = real
        elif str(target) == "onelip.leaf.default":
            number = arguments[2]
            self._add(node, self.paths[number], "module", self.leaves[number], arguments[:1], {})
        else:
            op = "getitem" if target is operator.getitem else str(target)
            self._add(node, _place(node), op, None, *tree_map(self._real_value, (tuple(node.args), dict(node.kwargs))))

    def _without_garbage(self, node: FxNode, target: Any, value: Any) -> Any:
        """Uninitialised memory is NaN, so that entries that are never filled show in the end; nothing may read it."""
        name = str(target).removeprefix("aten.").partition(".")[0]
        is_new = name.removeprefix("new_").startswith("empty")
        if not (is_new or any(source in self.garbage for source in node.all_input_nodes)) or name in _FILLS:
            return value
        if is_new and value.is_floating_point():
            value = torch.full_like(value, torch.nan)
        elif is_new or name not in _MOVES_GARBAGE:
            raise CannotTrace(
                f"expected filled memory, got {_place(node) or 'the model'!r} ({target}), which uses uninitialised "
                "memory (torch.empty); fill it first, or use torch.zeros"
            )
        if bool(value.isnan().any()):
            self.garbage.add(node)
        return value

    def _check_weights(self, tensors: Sequence[Any], number: int) -> None:
        """A forward may call a layer with other weights than the stored ones (torch.func.functional_call)."""
        stored = tensors_of(self.leaves[number])
        if any(isinstance(now, Ref) or not torch.equal(now, own) for now, own in zip(tensors, stored, strict=True)):
            raise CannotTrace(
                f"expected {self.paths[number] or 'the model'!r} to be called with its stored weights, got others; "
                "to use other weights, call torch.nn.functional in the forward"
            )

    def _blank(self, argument: Any) -> Any:
        """Zeros in place of the result of a call."""
        if not isinstance(argument, Ref):
            return argument
        call = self.calls[argument.index]
        return torch.zeros(call.shape, dtype=call.dtype)

    def _for_two_samples(self, node: FxNode, numbers: Sequence[Any]) -> tuple[Any, ...]:
        """Numbers that may depend on the number of samples, as they are for two."""
        found = tuple(number.node.hint if isinstance(number, NUMBERS) else number for number in numbers)
        if None not in found:
            return found
        raise CannotTrace(
            f"expected results of one shape for all inputs, got {_place(node) or 'the model'!r} ({node.target}), whose "
            "shape depends on values; use torch.where instead of masked_select, unique and the like"
        )

    def _value(self, argument: Any) -> Any:
        return self.values[argument] if isinstance(argument, FxNode) else argument

    def _real_value(self, argument: Any) -> Any:
        return self.real[argument] if isinstance(argument, FxNode) and argument in self.real else self._value(argument)

    def _add(self, node: FxNode, place: str, op: str, module: nn.Module | None, arguments: Any, keywords: Any) -> None:
        value = node.meta.get("val")
        shape, dtype = (), torch.get_default_dtype()
        if isinstance(value, Tensor):
            shape, dtype = self._for_two_samples(node, value.shape), value.dtype
        elif isinstance(value, tuple | list) and value and isinstance(value[0], Tensor):
            dtype = value[0].dtype
        inputs = tuple(dict.fromkeys(ref.index for ref in references((arguments, keywords))))
        index = len(self.calls)
        is_kept = not isinstance(value, Tensor) or keeps_batch(value, self.length)
        self.calls.append(Call(index, place, op, module, arguments, keywords, inputs, shape, dtype, is_kept))
        self.values[node] = Ref(index)

    def _finish(self, result: FxNode) -> Graph:
        if not isinstance(result, FxNode):
            raise CannotTrace(f"expected a model that returns a tensor, got {type(result).__name__}; return a tensor")
        value = self.values[result]
        if not isinstance(value, Ref):  # the output does not depend on the input
            shape, dtype = tuple(value.shape), value.dtype
            self.calls.append(Call(len(self.calls), "", "constant", None, (value,), {}, (), shape, dtype))
            value = Ref(len(self.calls) - 1)
        return Graph(tuple(self.calls), value.index, self.shape)


def _used(graph: torch.fx.Graph) -> Iterator[FxNode]:
    """Yield the inputs and the nodes that the output depends on, in order."""
    live: set[FxNode] = set()
    for node in reversed(graph.nodes):
        if node.op in ("placeholder", "output") or node in live:
            live.add(node)
            live.update(node.all_input_nodes)
    return (node for node in graph.nodes if node in live)


# Operations that move entries of uninitialised memory, and operations that overwrite all entries.
_MOVES_GARBAGE = {
    "alias", "as_strided", "cat", "clone", "contiguous", "copy", "detach", "expand", "index_copy", "index_put",
    "lift_fresh_copy", "permute", "reshape", "scatter", "select", "select_scatter", "slice", "slice_scatter", "squeeze",
    "t", "to", "_to_copy", "transpose", "unsqueeze", "_unsafe_view", "view",
}  # fmt: skip
_FILLS = {"fill", "full_like", "new_full", "new_ones", "new_zeros", "ones_like", "zero", "zeros_like"}


def _place(node: FxNode) -> str:
    stack = node.meta.get("nn_module_stack") or {}
    paths = [path for path, _ in stack.values()]
    return paths[-1].split("@")[0] if paths else ""  # torch marks the second call of a module by @1


def in_real_arithmetic(target: Any, value: Any, arguments: Any, keywords: Any) -> Tensor | None:
    """The result in float64 of an operation whose result in float32 is `value`; None if it is not known.

    Args:
        target: the operation.
        value: its result in the types of the program.
        arguments: constants, in float64 where these are known.
        keywords: likewise.

    Examples:
        >>> angle = torch.tensor(1.0)
        >>> in_real_arithmetic(torch.ops.aten.cos.default, angle.cos(), (angle,), {}).dtype
        torch.float64
    """
    parts = str(target).split(".")
    if not isinstance(value, Tensor) or value.dtype != torch.float32 or parts[0] != "aten" or parts[1] not in _SMOOTH:
        return None
    wide = target(*tree_map(_wide, arguments), **tree_map(_wide, keywords))
    return wide if wide.dtype == torch.float64 else None


def _wide(argument: Any) -> Any:
    return argument.double() if isinstance(argument, Tensor) and argument.dtype == torch.float32 else argument


# ---- Refusals of programs that compute with the number of samples, or with the place of a sample in the batch
#
# A bound is about one sample. So torch.export traces a model for an unknown number of samples s, and records each
# condition on s that the program asks for (`if x.shape[0] > 8`). It fails if the program needs s itself (`len(x)`).
# The functions below check the numbers and tensors that are computed from s:
#
#     x.view(x.shape[0], -1)                      s as a size: allowed
#     x * (1 + x.shape[0] // 8)                   s as a value: refused
#     x + torch.ones_like(x).cumsum(0)            a constant that differs from sample to sample: refused
#     x + torch.ones_like(x) * self.offset        a constant that is the same for every sample: allowed
#
# A *uniform* constant has the shape (s, fixed sizes ...) and is the same for every sample and every s. It is made by
# filling or expanding, and kept uniform by the operations that are listed here. All others are refused.


NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool)

# Operations that may have s among their sizes, and nowhere else.
_SIZED = """
    view reshape _unsafe_view unflatten expand broadcast_to zeros ones full empty new_zeros new_ones new_full new_empty
"""
_SIZES = ("size", "sizes", "shape")
# Operations that keep a constant uniform if the result has the shape (s, fixed sizes ...); so do those entry by entry.
_KEEP = """
    view reshape _unsafe_view view_as unflatten flatten expand expand_as broadcast_to unsqueeze squeeze permute
    transpose clone contiguous _to_copy to type_as alias detach lift_fresh_copy slice select narrow cat concat stack
    split split_with_sizes chunk unbind constant_pad_nd pad copy fill masked_fill rsub slice_scatter select_scatter
    max min multiply divide subtract true_divide square zeros ones full empty getitem
"""
# Operations on the input and a uniform constant that are allowed, besides: it selects entries, or is a factor for each
# sample. A contraction is not allowed: einsum("bc,kc->b", x, torch.ones_like(x)) is s times a sum.
_PAIR = """
    gather take_along_dim index index_put scatter where masked_scatter index_copy hstack dstack column_stack concatenate
    bmm baddbmm matmul
"""
_SIZED, _KEEP, _PAIR = (frozenset(names.split()) for names in (_SIZED, _KEEP, _PAIR))


def conditions_on_length(program: torch.export.ExportedProgram) -> list[str]:
    """The conditions of a program on the number of samples, as torch writes them."""
    ranges = [f"{name} is in {found}" for name, found in program.range_constraints.items() if found.upper != int_oo]
    return [*program._guards_code, *ranges]


def reads_shape_only(target: Any) -> bool:
    """Whether an operation reads only the shape of a tensor, not its values, such as zeros_like."""
    name = _name(target)
    return (name.endswith("_like") or name.startswith("new_")) and not is_random(target)


def is_random(target: Any) -> bool:
    """Whether an operation draws random numbers."""
    return torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())


def is_known_function(target: Any) -> bool:
    """Whether an operation always gives the same result for the same operands.

    Random numbers, and operations that others have defined, are no constants: they stay calls, which have no rule.
    """
    is_own = not isinstance(target, torch._ops.OpOverload) or target.namespace in ("aten", "prims", "onelip")
    return is_own and not is_random(target)


def keeps_batch(value: Any, length: torch.SymInt) -> bool:
    """Whether a tensor has the batch as its first axis, and no other size that depends on its length."""
    if isinstance(value, tuple | list):
        return all(keeps_batch(part, length) for part in value)
    if not isinstance(value, Tensor) or not value.dim():
        return False
    first: Any = value.shape[0]
    is_length = isinstance(first, torch.SymInt) and first.node.expr == length.node.expr
    return is_length and all(type(size) is int for size in value.shape[1:])


def find_use_of_length(nodes: Iterable[FxNode], input: FxNode) -> FxNode | None:
    """The first node that works with the number of samples, or with the place in the batch; None if none does.

    Args:
        nodes: of a program that torch.export has traced for an unknown number of samples, in order.
        input: the placeholder of the input.
    """
    length = input.meta["val"].shape[0]
    depends, uniform = {input}, set[FxNode]()  # on values of the input; uniform constants
    for node in nodes:
        value = node.meta.get("val")
        if node.op != "call_function" or isinstance(value, NUMBERS):
            continue
        operands = node.all_input_nodes
        if any(isinstance(operand.meta.get("val"), NUMBERS) for operand in operands) and not _only_in_sizes(node):
            return node
        with_uniform = any(operand in uniform for operand in operands)
        by_value = not is_known_function(node.target) or any(operand in depends for operand in operands)
        if by_value and not reads_shape_only(node.target):
            depends.add(node)
            if with_uniform and not (_keeps_uniform(node) or _name(node.target) in _PAIR):
                return node
        elif with_uniform or _has_length(value):
            if not (_keeps_uniform(node) and keeps_batch(value, length)):
                return node
            uniform.add(node)
    return None


def _name(target: Any) -> str:
    """The name of an operation of ATen without its overload, or of a Python function; "" for others."""
    if isinstance(target, torch._ops.OpOverload):
        return target._opname if target.namespace == "aten" else ""
    return getattr(target, "__name__", "")


def _has_length(value: Any) -> bool:
    parts = value if isinstance(value, tuple | list) else [value]
    return any(isinstance(part, Tensor) and any(type(size) is not int for size in part.shape) for part in parts)


def _only_in_sizes(node: FxNode) -> bool:
    """Whether an operation has numbers that depend on the length among its sizes only."""
    target: Any = node.target
    if _name(target) not in _SIZED:
        return False
    given = dict(zip((argument.name for argument in target._schema.arguments), node.args, strict=False))
    others = [value for name, value in {**given, **node.kwargs}.items() if name not in _SIZES]
    found: list[FxNode] = []
    torch.fx.map_arg(others, found.append)
    return not any(isinstance(operand.meta.get("val"), NUMBERS) for operand in found)


def _keeps_uniform(node: FxNode) -> bool:
    target: Any = node.target
    name = _name(target)

    def argument(part: str) -> Any:
        return argument_of(target, node.args, node.kwargs, part)

    if "scatter" in name and argument("dim") % node.meta["val"].dim() == 0:
        return name == "slice_scatter" and is_whole(*map(argument, ("start", "end", "step")))
    is_pointwise = torch.Tag.pointwise in getattr(target, "tags", ())
    return is_pointwise or name in _KEEP or reads_shape_only(target)


def is_whole(start: Any, end: Any, step: Any) -> bool:
    """Whether a slice is everything, however long the axis is."""
    return start in (None, 0) and (end is None or (isinstance(end, int) and end >= 2**62)) and step == 1
