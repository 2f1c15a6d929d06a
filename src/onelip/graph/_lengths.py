"""Refuse programs that compute with the number of samples, or with the place of a sample in the batch.

A bound is about one sample. So torch.export traces a model for an unknown number of samples s, and records each
condition on s that the program asks for (`if x.shape[0] > 8`). It fails if the program needs s itself (`len(x)`). This
module checks the numbers and tensors that are computed from s:

    x.view(x.shape[0], -1)                      s as a size: allowed
    x * (1 + x.shape[0] // 8)                   s as a value: refused
    x + torch.ones_like(x).cumsum(0)            a constant that differs from sample to sample: refused
    x + torch.ones_like(x) * self.offset        a constant that is the same for every sample: allowed

A *uniform* constant has the shape (s, fixed sizes ...) and is the same for every sample and every s. It is made by
filling or expanding, and kept uniform by the operations that are listed here. All others are refused.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.fx import Node as FxNode
from torch.utils._sympy.numbers import int_oo

from onelip.graph.calls import argument_of

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
