"""Operations that only move, copy, drop or insert entries: views, slices, concatenations, padding, nearest upsampling.

If entry i of operand k is found m_ki times in the result, then

    ||result - result'||^2 = sum_k sum_i m_ki (x_ki - x'_ki)^2 <= sum_k (max_i m_ki) L_k^2 ||input - input'||^2.

How often is not argued case by case: the operation is run on the numbers 1, 2, 3, ... in place of the entries, and the
result tells where each went. The same numbers tell whether every sample kept to itself.
"""

import itertools
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from onelip.bounds._rational import up_root
from onelip.bounds.graph import Ref
from onelip.bounds.rules._step import Refusal, Step, Verdict, operation, register_rule

_MOVES = """
    view.default reshape.default _unsafe_view.default flatten.using_ints unflatten.int permute.default transpose.int
    squeeze.default squeeze.dim squeeze.dims unsqueeze.default movedim.int swapaxes.default t.default
    slice.Tensor select.int narrow.default split.Tensor split_with_sizes.default chunk.default unbind.int
    index_select.default index.Tensor diagonal.default tril.default triu.default gather.default
    expand.default repeat.default tile.default unfold.default im2col.default
    flip.default roll.default rot90.default pixel_shuffle.default pixel_unshuffle.default channel_shuffle.default
    cat.default stack.default copy.default slice_scatter.default select_scatter.default where.self
    masked_fill.Scalar pad.default constant_pad_nd.default
    reflection_pad1d.default reflection_pad2d.default reflection_pad3d.default
    replication_pad1d.default replication_pad2d.default replication_pad3d.default
    upsample_nearest1d.vec upsample_nearest2d.vec upsample_nearest3d.vec
    upsample_nearest1d.default upsample_nearest2d.default upsample_nearest3d.default
    _upsample_nearest_exact1d.vec _upsample_nearest_exact2d.vec _upsample_nearest_exact3d.vec
"""


@register_rule(*(f"aten.{name}" for name in _MOVES.split()))
def move(step: Step) -> Verdict:
    """See the head of the file."""
    owners: list[Ref] = []  # the node of each use, in the order of their numbers
    first = [1]  # the first number of each use; 0 stands for constants
    batch = step.graph.batch

    def numbers(argument: Any) -> Any:
        if isinstance(argument, Ref):
            shape = step.graph.nodes[argument.index].shape
            owners.append(argument)
            first.append(first[-1] + math.prod(shape))
            return torch.arange(first[-2], first[-1], dtype=torch.float64).reshape(shape)
        if isinstance(argument, Tensor):
            # Floats are entries to be inserted, integers and booleans say where.
            return torch.zeros_like(argument, dtype=torch.float64) if argument.is_floating_point() else argument
        return argument

    arguments = list(step.node.arguments)
    keywords = dict(step.node.keywords)
    for place, argument in enumerate(operation(step.node.op)._schema.arguments):
        if argument.name == "value":  # what is inserted must not look like an entry
            if place < len(arguments):
                arguments[place] = 0
            elif "value" in keywords:
                keywords["value"] = 0
    keywords = tree_map(numbers, keywords)
    result = operation(step.node.op)(*tree_map(numbers, tuple(arguments)), **keywords)
    pieces: Sequence[Tensor] = [result] if isinstance(result, Tensor) else result
    found = [_in_order(piece, owners, first, batch, step) for piece in pieces]
    counts = torch.bincount(torch.cat(found).flatten().long(), minlength=first[-1])
    most = [int(counts[a:b].max()) if b > a else 0 for a, b in itertools.pairwise(first)]
    if len(owners) == 1:
        why = "moves entries, or drops some" if most[0] <= 1 else f"copies entries up to {most[0]} times"
        factor = up_root(Fraction(most[0]))
        return Verdict(_constant(step, owners, most), factor, why)
    return step.gives(_constant(step, owners, most), "side by side: root of the squares")


def _constant(step: Step, owners: list[Ref], most: list[int]) -> float:
    constants = [step.constants[owner.index] for owner in owners]
    if not all(constant < math.inf for constant in constants):
        return math.inf
    return up_root(sum((m * Fraction(c) ** 2 for m, c in zip(most, constants, strict=True)), Fraction(0)))


def _in_order(piece: Tensor, owners: list[Ref], first: list[int], batch: int, step: Step) -> Tensor:
    """The numbers of a result, flat; refused if a sample holds an entry of another one."""
    if piece.dim() == 0 or piece.shape[0] != batch:
        raise Refusal(f"its result {tuple(piece.shape)} does not have the batch as its first axis")
    rows = piece.reshape(batch, -1)
    for sample in range(batch):
        row = rows[sample]
        allowed = row == 0
        for owner, start, end in zip(owners, first, first[1:], strict=False):
            if step.graph.nodes[owner.index].shape[:1] != (batch,):
                raise Refusal("an operand of it does not have the batch as its first axis")
            length = (end - start) // batch
            allowed |= (row >= start + sample * length) & (row < start + (sample + 1) * length)
        if not bool(allowed.all()):
            raise Refusal("moves entries from one sample to another")
    return rows.flatten()


@register_rule(
    "aten._to_copy.default", "aten.to.dtype", "aten.to.device", "aten.clone.default", "aten.detach.default",
    "aten.alias.default", "aten.contiguous.default", "aten.lift_fresh_copy.default",
)  # fmt: skip
def copy(step: Step) -> Verdict:
    """The same numbers; which types are fit for a proof is decided for every node alike."""
    return step.times(1.0, "the same numbers")
