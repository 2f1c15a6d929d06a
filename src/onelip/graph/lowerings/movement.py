"""Operations that only move, drop or insert entries: joins, and windows of one pixel."""

from typing import Any

from onelip.graph import kinds
from onelip.graph.lowering import Lowering, lowers
from onelip.graph.lowerings.activations import sample_axis
from onelip.nn.channels import FirstChannels, PadChannels
from onelip.nn.pooling import ConcatenationPool1d, ConcatenationPool2d, ConcatenationPool3d


@lowers("aten.clone.default", "aten.alias.default", "aten.contiguous.default", "aten.detach.default")
def same(low: Lowering) -> int:
    return low.source


@lowers("aten.dropout.default")
def dropout(low: Lowering) -> int:
    return low.refuse() if low.argument("train") else low.source


@lowers(
    "aten.view.default", "aten.reshape.default", "aten.flatten.using_ints", "aten._unsafe_view.default",
    "aten.unsqueeze.default", "aten.unflatten.int", "aten.squeeze.default", "aten.squeeze.dim", "aten.squeeze.dims",
)  # fmt: skip
def reshape(low: Lowering) -> int:
    """Row-major, and axis 0 keeps its length (checked for every call), so each sample is reshaped by itself."""
    return low.source if low.source_shape == low.shape else low.emit(kinds.Join, low.source)


@lowers("aten.permute.default")
def permute(low: Lowering) -> int:
    axes = len(low.call.shape)
    return low.source if [axis % axes for axis in low.argument("dims")] == list(range(axes)) else low.refuse()


@lowers("aten.slice.Tensor")
def take_slice(low: Lowering) -> int:
    """The first channels."""
    start, end, step = (low.argument(name) for name in ("start", "end", "step"))
    axis = low.argument("dim") % len(low.call.shape)
    everything = (start or 0) == 0 and (end is None or end >= 2**62) and step == 1
    if axis == 0 and not everything:
        return low.refuse()  # some of the images: another function for each size of the batch
    if low.source_shape == low.shape:
        return low.source
    return low.emit(kinds.Join, low.source) if axis == 1 and (start or 0) == 0 and step == 1 else low.refuse()


@lowers("aten.cat.default")
def concatenate(low: Lowering) -> int:
    if low.argument("dim") % len(low.call.shape) != 1:
        return low.refuse()
    return low.emit(kinds.Join, *(low.node(part) for part in low.argument("tensors")))


@lowers(FirstChannels, PadChannels)
def channels(low: Lowering) -> int:
    return low.emit(kinds.Join, low.source) if sample_axis(low) == 0 else low.refuse()


@lowers("aten.pixel_unshuffle.default")
def pixel_unshuffle(low: Lowering) -> int:
    return space_to_depth(low, [low.argument("downscale_factor")] * 2)


@lowers(ConcatenationPool1d, ConcatenationPool2d, ConcatenationPool3d)
def concatenation_pool(low: Lowering) -> int:
    return space_to_depth(low, list(low.module.kernel_size))


def space_to_depth(low: Lowering, kernel: list[int]) -> int:
    """Each place of a window becomes a channel."""
    channels, *sizes = low.source_shape
    out = [n // k for n, k in zip(sizes, kernel, strict=True)]
    places = kinds.windows_of(sizes, out, kernel, kernel)
    take: Any = (tuple(pixel for place in places for pixel in place),)
    return low.emit(kinds.Max, low.source, shape=(channels * len(places), *out), take=take)
