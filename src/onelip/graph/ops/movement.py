"""Operations that only move, copy, drop or insert entries: views, slices, concatenations, padding, nearest upsampling.

If entry i of operand k is found m_ki times in the result, then

    ||result - result'||^2 = sum_k sum_i m_ki (x_ki - x'_ki)^2 <= sum_k (max_i m_ki) L_k^2 ||input - input'||^2.

To count the copies, the operation is run on the numbers 1, 2, 3, ... in place of the entries, and the result shows
where each went. The same numbers show whether every sample contains only entries of its own, and whether the same
entries are kept in all samples: `x.tril()` does not mix samples, but the kept entries depend on the place in the batch.
"""

import itertools
import math
import re
from collections.abc import Sequence
from fractions import Fraction
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from onelip.core.batch_norm import Folded
from onelip.core.rounding import up_root
from onelip.graph import kinds
from onelip.graph._reader import is_whole
from onelip.graph.lowering import Lowering, lowers
from onelip.graph.step import Ref, Refusal, Step, StepBound, aten, check_not_batch, register_rule

_MOVES = """
    view.default reshape.default _unsafe_view.default flatten.using_ints unflatten.int ravel.default
    permute.default transpose.int t.default mT.default numpy_T.default movedim.int movedim.intlist moveaxis.int
    moveaxis.intlist swapaxes.default swapdims.default adjoint.default mH.default view_as.default
    squeeze.default squeeze.dim squeeze.dims unsqueeze.default
    slice.Tensor select.int narrow.default diagonal.default tril.default triu.default
    split.Tensor split_with_sizes.default chunk.default unbind.int
    unsafe_split.Tensor unsafe_split_with_sizes.default unsafe_chunk.default
    tensor_split.sections tensor_split.indices hsplit.int hsplit.array dsplit.int dsplit.array vsplit.int vsplit.array
    index_select.default index.Tensor _unsafe_index.Tensor gather.default take.default take_along_dim.default
    expand.default expand_as.default broadcast_to.default repeat.default tile.default
    repeat_interleave.self_int repeat_interleave.self_Tensor unfold.default im2col.default
    flip.default fliplr.default flipud.default roll.default rot90.default
    pixel_shuffle.default pixel_unshuffle.default channel_shuffle.default native_channel_shuffle.default
    cat.default concat.default concatenate.default stack.default hstack.default vstack.default dstack.default
    column_stack.default diag_embed.default
    copy.default slice_scatter.default select_scatter.default diagonal_scatter.default
    scatter.src scatter.value index_put.default _unsafe_index_put.default index_copy.default
    index_fill.int_Scalar index_fill.int_Tensor masked_scatter.default
    where.self where.ScalarOther where.ScalarSelf masked_fill.Scalar masked_fill.Tensor
    pad.default constant_pad_nd.default
    reflection_pad1d.default reflection_pad2d.default reflection_pad3d.default
    replication_pad1d.default replication_pad2d.default replication_pad3d.default
    upsample_nearest1d.vec upsample_nearest2d.vec upsample_nearest3d.vec
    upsample_nearest1d.default upsample_nearest2d.default upsample_nearest3d.default
    _upsample_nearest_exact1d.vec _upsample_nearest_exact2d.vec _upsample_nearest_exact3d.vec
    _upsample_nearest_exact1d.default _upsample_nearest_exact2d.default _upsample_nearest_exact3d.default
"""
MOVES = frozenset(f"aten.{name}" for name in _MOVES.split())
SPLITS = frozenset(name for name in MOVES if re.search("split|chunk|unbind", name))  # every result is a part
# Writes at given places: where a place is written twice, torch promises nothing about which entry stays. On ones in
# place of the source, the operation that adds shows how often each place is written.
_WRITES = {
    "aten.scatter.src": "aten.scatter_add.default",
    "aten.index_copy.default": "aten.index_add.default",
    "aten.index_put.default": "aten.index_put.default",
    "aten._unsafe_index_put.default": "aten.index_put.default",
}
_WRITE_ALONG = {  # an axis, at places that are given
    "aten.slice_scatter.default", "aten.select_scatter.default", "aten.scatter.src", "aten.scatter.value",
    "aten.index_copy.default", "aten.index_fill.int_Scalar", "aten.index_fill.int_Tensor",
}  # fmt: skip


class Moved(NamedTuple):
    """Where the entries of one sample of a result come from.

    Attributes:
        owners: each use of a call in the arguments, in order.
        lengths: entries that a sample of each has.
        pieces: for each result a tensor of its shape without the batch: 0 for constants, else 1 + the position in the
            samples of all owners, laid one behind the other.
    """

    owners: list[Ref]
    lengths: list[int]
    pieces: list[Tensor]


@register_rule(*MOVES)
def move(step: Step) -> StepBound:
    """See the head of the file."""
    moved = trace_entries(step)
    found = torch.cat([piece.flatten() for piece in moved.pieces])
    counts = torch.bincount(found, minlength=1 + sum(moved.lengths))
    ends = itertools.accumulate(moved.lengths, initial=1)
    most = [int(counts[a:b].max()) if b > a else 0 for a, b in itertools.pairwise(ends)]
    constants = [step.constants[owner.index] for owner in moved.owners]
    if not all(constant < math.inf for constant in constants):
        raise Refusal("its bound is beyond the range of float64")
    constant = up_root(sum((m * Fraction(c) ** 2 for m, c in zip(most, constants, strict=True)), Fraction(0)))
    holes = _holes(step, moved)
    if len(moved.owners) == 1:
        why = "moves entries, or drops some" if most[0] <= 1 else f"copies entries up to {most[0]} times"
        return StepBound(constant, why, up_root(Fraction(most[0])), holes=holes)
    return StepBound(constant, "side by side: root of the squares", holes=holes)


@register_rule(Folded, nn.Identity, nn.Flatten, nn.Unflatten, nn.PixelShuffle, nn.PixelUnshuffle, nn.ChannelShuffle)
def move_in_layer(step: Step) -> StepBound:
    """A layer that moves entries, for inputs of any size."""
    layer = step.call.module
    if isinstance(layer, nn.Flatten | nn.Unflatten):
        check_not_batch(step, layer.start_dim if isinstance(layer, nn.Flatten) else layer.dim)
    return step.times(1.0, "moves entries, or drops some")


@register_rule(nn.ZeroPad1d, nn.ZeroPad2d, nn.ZeroPad3d, nn.ConstantPad1d, nn.ConstantPad2d, nn.ConstantPad3d)
def pad_in_layer(step: Step) -> StepBound:
    """Constants around an input of any size."""
    return step.times(1.0, "adds constants")


@register_rule(
    nn.ReflectionPad1d, nn.ReflectionPad2d, nn.ReflectionPad3d, nn.ReplicationPad1d, nn.ReplicationPad2d,
    nn.ReplicationPad3d, nn.CircularPad1d, nn.CircularPad2d, nn.CircularPad3d,
)  # fmt: skip
def copy_in_layer(step: Step) -> StepBound:
    """How often an entry is copied depends on the size of the input."""
    raise Refusal("copies pixels, so it stretches; use zero padding")


@register_rule("getitem")
def result(step: Step) -> StepBound:
    """One of several results: any part of a tensor, else the first one, which alone has a bound."""
    producer, index = step.source, step.call.arguments[1]
    if index != 0 and producer.op not in SPLITS | {"aten.aminmax.default"}:
        raise Refusal(f"result {index} of {producer.op} has no rule")
    return step.times(1.0, f"result {index} of {producer.op}")


def _holes(step: Step, moved: Moved) -> Tensor | None:
    """The entries of the result that are uninitialised memory, for which the graph has NaN."""
    is_filled = not any(isinstance(leaf, Tensor) and _has_nan(leaf) for leaf in tree_leaves(_given(step)))
    if is_filled and not any(owner.index in step.holes for owner in moved.owners):
        return None
    if len(moved.pieces) != 1:
        raise Refusal("reads uninitialised memory")
    (piece,) = moved.pieces
    before = [
        step.holes.get(owner.index, torch.zeros(length, dtype=torch.bool)).flatten()
        for owner, length in zip(moved.owners, moved.lengths, strict=True)
    ]
    holes = torch.cat([torch.zeros(1, dtype=torch.bool), *before])[piece] | (inserted(step).isnan() & (piece == 0))
    return holes if bool(holes.any()) else None


def _given(step: Step) -> tuple[Any, ...]:
    return step.call.arguments, step.call.keywords


def _has_nan(constant: Tensor) -> bool:
    return constant.is_floating_point() and bool(constant.isnan().any())


def _check_batch_axis(step: Step) -> None:
    """Refuse operations along the batch axis, also if they change no traced sample, such as `x.triu(-9)`."""
    first = next(leaf for leaf in tree_leaves(_given(step)) if isinstance(leaf, Ref))
    rank, op = len(step.graph.calls[first.index].shape), step.call.op
    if op in ("aten.tril.default", "aten.triu.default"):
        axes = [rank - 2]
    elif op in ("aten.roll.default", "aten.flip.default", "aten.rot90.default"):
        axes = [axis % rank for axis in step.argument("dims") or [0]]  # without axes roll treats all entries as a row
    elif op == "aten.slice_scatter.default" and is_whole(*map(step.argument, ("start", "end", "step"))):
        axes = []
    elif op in _WRITE_ALONG:
        axes = [step.argument("dim") % len(step.call.shape)]
    elif "index_put" in op:
        axes = [axis for axis, index in enumerate(step.argument("indices")) if index is not None]
    else:
        axes = [0] if op == "aten.flipud.default" else []
    if 0 in axes:
        raise Refusal(
            "moves entries from one sample to another, or treats samples differently: acts along the batch axis"
        )


def trace_entries(step: Step) -> Moved:
    """Run the operation on numbers in place of entries, see the head of the file.

    Raises:
        Refusal: if samples mix or are treated differently, or if the places of the entries depend on the input.
    """
    _check_batch_axis(step)
    owners: list[Ref] = []
    first = [1]  # the first number of each use; 0 stands for constants
    batch = step.graph.batch

    def numbers(argument: Any) -> Any:
        if isinstance(argument, Ref):
            operand = step.graph.calls[argument.index]
            if not operand.keeps_batch or operand.shape[:1] != (batch,):
                raise Refusal("an operand of it does not have the batch as its first axis")
            owners.append(argument)
            first.append(first[-1] + math.prod(operand.shape))
            return torch.arange(first[-2], first[-1], dtype=torch.float64).reshape(operand.shape)
        if isinstance(argument, Tensor):
            # Floats are entries to be inserted, integers and booleans say where.
            return torch.zeros_like(argument, dtype=torch.float64) if argument.is_floating_point() else argument
        return argument

    for leaf in tree_leaves(_given(step)):
        if isinstance(leaf, Ref) and not step.graph.calls[leaf.index].dtype.is_floating_point:
            raise Refusal("where its entries go depends on the input")
    _check_writes(step)
    op = aten(step.call.op)
    arguments, keywords = _without_numbers(step)
    result = op(*tree_map(numbers, arguments), **tree_map(numbers, keywords))
    pieces: Sequence[Tensor] = [result] if isinstance(result, Tensor) else result
    lengths = [(b - a) // batch for a, b in itertools.pairwise(first)]
    _check_constants(step)
    return Moved(owners, lengths, [_of_one_sample(piece, first, lengths, batch) for piece in pieces])


def _without_numbers(step: Step) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with 0 for numbers that are inserted: they must not look like entries."""
    arguments, keywords = list(step.call.arguments), dict(step.call.keywords)
    for place, argument in enumerate(aten(step.call.op)._schema.arguments):
        if argument.name == "value" or str(argument.type) == "number":
            if place < len(arguments) and isinstance(arguments[place], bool | int | float):
                arguments[place] = 0
            elif isinstance(keywords.get(argument.name), bool | int | float):
                keywords[argument.name] = 0
    return tuple(arguments), keywords


def _of_one_sample(piece: Tensor, first: list[int], lengths: list[int], batch: int) -> Tensor:
    """The numbers of the first sample, counted as `Moved` does; refused unless the others hold the same entries."""
    if piece.dim() == 0 or piece.shape[0] != batch:
        raise Refusal(f"its result {tuple(piece.shape)} does not have the batch as its first axis")
    rows = piece.reshape(batch, -1).long().contiguous()
    owner = torch.bucketize(rows[0], torch.tensor(first[1:]), right=True).clamp(max=len(lengths) - 1)
    length = torch.tensor(lengths)[owner]
    position = rows[0] - torch.tensor(first)[owner]
    is_entry = rows[0] > 0
    for sample, row in enumerate(rows):
        if not bool((row == torch.where(is_entry, rows[0] + sample * length, 0)).all()):
            raise Refusal("moves entries from one sample to another, or treats samples differently")
    if not bool((position < length)[is_entry].all()):
        raise Refusal("moves entries from one sample to another")
    starts = torch.tensor(list(itertools.accumulate(lengths, initial=1)))
    return torch.where(is_entry, starts[owner] + position, 0).reshape(piece.shape[1:])


def inserted(step: Step) -> Tensor:
    """The constants in the first result, with zeros where entries are. One sample."""
    return inserted_everywhere(step)[0][0]


def inserted_everywhere(step: Step) -> Sequence[Tensor]:
    """All results of the operation on zeros: its constants, with zeros where entries are."""

    def zeros(argument: Any) -> Any:
        if isinstance(argument, Ref):
            return torch.zeros(step.graph.calls[argument.index].shape, dtype=torch.float64)
        return argument.double() if isinstance(argument, Tensor) and argument.is_floating_point() else argument

    result = aten(step.call.op)(*tree_map(zeros, step.call.arguments), **tree_map(zeros, step.call.keywords))
    return [result] if isinstance(result, Tensor) else result


def _check_constants(step: Step) -> None:
    """Refuse to insert other constants into one sample than into another."""
    if not any(isinstance(leaf, Tensor) and leaf.is_floating_point() for leaf in tree_leaves(_given(step))):
        return
    for piece in inserted_everywhere(step):
        if not bool(((piece == piece[:1]) | (piece.isnan() & piece[:1].isnan())).all()):
            raise Refusal("inserts other constants into one sample than into another")


def _check_writes(step: Step) -> None:
    adds = _WRITES.get(step.call.op)
    if adds is None:
        return
    if "index_put" in step.call.op and step.argument("accumulate"):
        raise Refusal("adds at given places, which has no rule")

    def ones(argument: Any) -> Any:
        if isinstance(argument, Ref):
            return torch.ones(step.graph.calls[argument.index].shape, dtype=torch.float64)
        is_float = isinstance(argument, Tensor) and argument.is_floating_point()
        return torch.ones_like(argument, dtype=torch.float64) if is_float else argument

    target, *others = tree_map(ones, step.call.arguments)
    if "index_put" in adds:
        others = [*others[:2], True]
    written = aten(adds)(torch.zeros_like(target), *others)
    if not bool((written <= 1).all()):
        raise Refusal("writes several entries to one place, and which of them stays is not defined")


_COPIES = """
    _to_copy.default to.dtype to.device to.other to.dtype_layout type_as.default clone.default detach.default
    alias.default contiguous.default lift_fresh_copy.default positive.default nan_to_num.default
"""
COPIES = frozenset(f"aten.{name}" for name in _COPIES.split())


@register_rule(*COPIES)
def copy(step: Step) -> StepBound:
    """The same numbers; which types are fit for a proof is decided for every call alike."""
    return step.times(1.0, "the same numbers")


@lowers("aten.clone.default", "aten.alias.default", "aten.contiguous.default", "aten.detach.default")
def lower_copy(low: Lowering) -> int:
    return low.source


@lowers(
    "aten.view.default", "aten.reshape.default", "aten.flatten.using_ints", "aten._unsafe_view.default",
    "aten.unsqueeze.default", "aten.unflatten.int", "aten.squeeze.default", "aten.squeeze.dim", "aten.squeeze.dims",
)  # fmt: skip
def lower_reshape(low: Lowering) -> int:
    """Row-major, and axis 0 keeps its length (checked for every call), so each sample is reshaped by itself."""
    return low.source if low.source_shape == low.shape else low.emit(kinds.Join, low.source)


@lowers("aten.permute.default")
def lower_permute(low: Lowering) -> int:
    axes = len(low.call.shape)
    return low.source if [axis % axes for axis in low.argument("dims")] == list(range(axes)) else low.refuse()


@lowers("aten.slice.Tensor")
def lower_slice(low: Lowering) -> int:
    """The first channels."""
    start, end, step = (low.argument(name) for name in ("start", "end", "step"))
    axis = low.argument("dim") % len(low.call.shape)
    if axis == 0 and not is_whole(start, end, step):
        return low.refuse()  # some of the images: another function for each size of the batch
    if low.source_shape == low.shape:
        return low.source
    return low.emit(kinds.Join, low.source) if axis == 1 and (start or 0) == 0 and step == 1 else low.refuse()


@lowers("aten.cat.default")
def lower_concatenation(low: Lowering) -> int:
    if low.argument("dim") % len(low.call.shape) != 1:
        return low.refuse()
    return low.emit(kinds.Join, *(low.node(part) for part in low.argument("tensors")))


@lowers("aten.flip.default")
def lower_flip(low: Lowering) -> int:
    """Pixels in another order, the same one in each channel."""
    axes = [axis % len(low.call.shape) - 2 for axis in low.argument("dims")]
    if min(axes, default=0) < 0:  # the batch, or channels
        return low.refuse()
    sizes = low.source_shape[1:]
    pixels = torch.arange(math.prod(sizes)).reshape(sizes).flip(axes)
    return low.emit(kinds.Max, low.source, take=(tuple(pixels.flatten().tolist()),))


@lowers("aten.pixel_unshuffle.default")
def lower_pixel_unshuffle(low: Lowering) -> int:
    return space_to_depth(low, [low.argument("downscale_factor")] * 2)


def space_to_depth(low: Lowering, kernel: list[int]) -> int:
    """Each place of a window becomes a channel."""
    channels, *sizes = low.source_shape
    out = [n // k for n, k in zip(sizes, kernel, strict=True)]
    places = windows_of(sizes, out, kernel, kernel)
    take: Any = (tuple(pixel for place in places for pixel in place),)
    return low.emit(kinds.Max, low.source, shape=(channels * len(places), *out), take=take)


def windows_of(
    sizes: Sequence[int],
    out: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int] | None = None,
    dilation: Sequence[int] | None = None,
) -> tuple[tuple[int, ...], ...]:
    """By place in the window: the pixel of each window, row-major; -1 beyond the border.

    Examples:
        >>> windows_of((4,), (2,), (2,), (2,))
        ((0, 2), (1, 3))
    """
    padding, dilation = padding or [0] * len(kernel), dilation or [1] * len(kernel)
    steps = [math.prod(sizes[axis + 1 :]) for axis in range(len(sizes))]  # from a pixel to the next one along an axis
    beyond = -math.prod(sizes)  # plus any pixel, this is negative
    found = []
    for tap in itertools.product(*map(range, kernel)):
        axes = [
            [step * i if 0 <= i < n else beyond for i in range(d * t - p, d * t - p + s * count, s)]
            for step, t, n, s, p, d, count in zip(steps, tap, sizes, stride, padding, dilation, out, strict=True)
        ]
        found.append(tuple(max(-1, sum(place)) for place in itertools.product(*axes)))
    return tuple(found)
