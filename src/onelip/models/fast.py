"""Networks that learn most per second: a hierarchy of space-to-depth and dense layers.

A convolution whose kernel is as large as its stride is space-to-depth followed by a 1x1 convolution. The bound of AOL
is then that of a matrix, so it is tight where the matrix is orthogonal, and `onelip.optim.LipschitzMuon` keeps it so.
The patches of the image overlap: a window with fixed weights in front of a 1x1 convolution.
Not in the paper; docs/training.md has what was measured.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from onelip.core.errors import check_integer
from onelip.models.chain import Chain, check_even
from onelip.models.registry import register_model, takes_arguments_of
from onelip.nn import MirrorAverage


@takes_arguments_of(Chain)
def fast(
    *,
    widths: Sequence[int],
    depths: Sequence[int],
    patch: int | None = None,
    overlap: int | None = None,
    centred: bool = True,
    mirror: bool = False,
    method: str | None = "aol",
    method_options: Mapping[str, Any] | None = None,
    **common: Any,
) -> nn.Module:
    """A hierarchy of patches.

    For 32 x 32 images, widths 96, 192, 256, 256 and depths 2, 2, 1, 1:

        Batch centring                    32 x 32 x 3     1x
        Overlapping patches of 6x6        8 x 8 x 108     1x
        Conv 1x1, MaxMin                   8 x 8 x 96     2x
        Conv 2x2, stride 2, MaxMin        4 x 4 x 192     1x
        Conv 1x1, MaxMin                  4 x 4 x 192     1x
        Conv 2x2, stride 2, MaxMin        2 x 2 x 256     1x
        Flatten                           1024
        FC, MaxMin                        256             1x
        FC                                classes

    Each MaxMin comes after a batch centring, which bake adds to the bias. Images of any size: the size is halved until
    it is at most 2, and zeros are added where it is odd. With more stages than widths the one before the last repeats.

    Args:
        widths: channels of each stage, even; the last is that of the fully connected layers.
        depths: layers of each stage.
        patch: side of a patch. Default: 2 for images below 16 x 16, 4 below 128 x 128, else the power of two with 16 to
            31 patches along the shorter side (8 for 224 x 224).
        overlap: rows and columns that neighbouring patches share (`onelip.nn.lapped_patches`): even, at most `patch`; 0
            for patches that tile the image. Default: 2, or 0 for patches of one pixel and images smaller than a patch.
        centred: centre the channels before each activation.
        mirror: in evaluation mode, average the logits of the image and of its mirror image
            (`onelip.nn.MirrorAverage`). Training costs the same, prediction twice as much.
        method: name of the method of all layers; None for plain ones.
        method_options: keyword arguments of the method; `side` is "auto" for AOL.
        **common: see `onelip.create_model`.
    """
    if len(widths) != len(depths) or len(widths) < 2:
        raise ValueError(f"expected two or more widths and as many depths, got {list(widths)} and {list(depths)}")
    options = {"side": "auto", **(method_options or {})} if method == "aol" else method_options
    net = Chain(method=method, method_options=options, **common)
    patch = check_integer("patch", _patch(min(net.size)) if patch is None else patch)
    if overlap is None:
        overlap = 2 if 1 < patch <= min(net.size) else 0
    check_integer("overlap", overlap, 0, patch)
    net.centre("centre")
    net.is_centred = centred
    stages = [
        (check_even("width", width), check_integer("depth", depth)) for width, depth in zip(widths, depths, strict=True)
    ]
    stage, factor = 0, patch
    while stage == 0 or max(net.size) > 2:
        width, depth = stages[min(stage, len(stages) - 2)]
        if stage == 0 and overlap:
            net.lapped_patches(factor, overlap)
            net.conv(width, 1)
        else:
            net.downsample(width, factor)
        for _ in range(depth - 1):
            net.conv(width, 1)
        stage, factor = stage + 1, 2
    net.flatten()
    for _ in range(stages[-1][1]):
        net.linear(stages[-1][0])
    net.head()
    network = net.build()
    return MirrorAverage(network) if mirror else network


def _patch(size: int) -> int:
    """The default side of a patch. Larger images have larger patches, so that a step costs about the same."""
    if size < 16:
        return 2
    return max(4, 1 << (size // 16).bit_length() - 1)


@register_model
@takes_arguments_of(fast)
def aol_fast_small(
    *, widths: Sequence[int] = (64, 128, 256, 256), depths: Sequence[int] = (1, 1, 1, 1), **options: Any
) -> nn.Module:
    """A hierarchy of patches for seconds of training; 0.44 M parameters."""
    return fast(widths=widths, depths=depths, **options)


@register_model
@takes_arguments_of(fast)
def aol_fast_medium(
    *, widths: Sequence[int] = (96, 192, 256, 256), depths: Sequence[int] = (2, 2, 1, 1), **options: Any
) -> nn.Module:
    """A hierarchy of patches for minutes of training; 0.59 M parameters."""
    return fast(widths=widths, depths=depths, **options)


@register_model
@takes_arguments_of(fast)
def aol_fast_large(
    *, widths: Sequence[int] = (128, 256, 256, 256), depths: Sequence[int] = (2, 2, 1, 1), **options: Any
) -> nn.Module:
    """A hierarchy of patches for more than twenty minutes of training; 0.75 M parameters."""
    return fast(widths=widths, depths=depths, **options)


@register_model
@takes_arguments_of(fast)
def aol_fast_huge(
    *, widths: Sequence[int] = (192, 384, 512, 512), depths: Sequence[int] = (2, 2, 2, 1), **options: Any
) -> nn.Module:
    """A hierarchy of patches for an hour of training; 2.61 M parameters."""
    return fast(widths=widths, depths=depths, **options)
