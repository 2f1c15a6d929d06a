"""AOL-Small, AOL-Medium, AOL-Large: the patchwise architecture (paper, table "Patchwise architecture").

    Concatenation pooling 4x4   8 x 8 x 48      1x
    AOL conv 1x1, MaxMin        8 x 8 x 192     1x
    AOL conv 3x3, MaxMin        8 x 8 x 192    12x
    AOL conv 1x1                8 x 8 x 192     1x
    First channels              8 x 8 x w
    Flatten                     64 w
    AOL FC, MaxMin              64 w           13x
    AOL FC                      64 w            1x
    First channels              classes

with w = 16, 32, 48. patchwise-tiny is ours: the same in small, for a first look on a CPU.
"""

import math
from collections.abc import Mapping
from typing import Any

from torch import nn

from onelip.models._chain import Chain
from onelip.models._registry import arguments_of, register_model
from onelip.models._sizes import ImageSize, check_count, check_even, check_multiple, height_and_width


def patchwise(
    *,
    num_classes: int = 10,
    image_size: ImageSize = 32,
    in_channels: int = 3,
    method: str | None = "aol",
    width: int,
    channels: int = 192,
    patch: int = 4,
    convs: int = 12,
    linears: int = 13,
    method_options: Mapping[str, Any] | None = None,
) -> nn.Sequential:
    """Build the patchwise network; works in both memory formats, faster in channels_last.

    The fully connected layers have width * (number of patches) features each, which grows with the image: for large
    images take a larger patch.

    Args:
        num_classes: number of logits, at most width * (number of patches).
        image_size: multiple of `patch`.
        in_channels: channels of the image.
        method: name of the method of all layers; None for plain ones.
        width: w of the table, the channels that go to the fully connected part; even.
        channels: channels of the convolutional part; even, at least w.
        patch: side of a patch.
        convs: number of 3x3 convolutions.
        linears: number of fully connected layers with an activation; one without follows.
        method_options: keyword options of the method.
    """
    size = height_and_width(image_size)
    check_count("patch", patch)
    check_multiple(size, patch, "the patch size", "choose a `patch` that divides it")
    check_even("channels", channels)
    if check_even("width", width) > channels:
        raise ValueError(f"expected width to be at most channels = {channels}, got {width}; take more channels")
    net = Chain(in_channels, size, method, method_options)
    net.concatenate(patch)
    net.conv(channels, 1)
    for _ in range(check_count("convs", convs, 0)):
        net.conv(channels, 3)
    net.conv(channels, 1, activation=False)
    net.first_channels("narrow", width)
    net.flatten()
    for _ in range(check_count("linears", linears, 0)):
        net.linear(net.channels)
    net.linear(net.channels, activation=False)
    net.logits(num_classes)
    return net.build()


@register_model
@arguments_of(patchwise)
def aol_small(*, width: int = 16, **kwargs: Any) -> nn.Sequential:
    """Patches, convolutions, dense; 18.7 M parameters (AOL-Small).

    Arguments of `patchwise`.
    """
    return patchwise(width=width, **kwargs)


@register_model
@arguments_of(patchwise)
def aol_medium(*, width: int = 32, **kwargs: Any) -> nn.Sequential:
    """Patches, convolutions, dense; 62.8 M parameters (AOL-Medium).

    Arguments of `patchwise`.
    """
    return patchwise(width=width, **kwargs)


@register_model
@arguments_of(patchwise)
def aol_large(*, width: int = 48, **kwargs: Any) -> nn.Sequential:
    """Patches, convolutions, dense; 136 M parameters (AOL-Large).

    Arguments of `patchwise`.
    """
    return patchwise(width=width, **kwargs)


def tiny_patch(image_size: ImageSize) -> int:
    """The largest patch size up to 4 that divides the image into at least 4 patches a side, else 1.

    Example:
        >>> tiny_patch(8), tiny_patch(28), tiny_patch(32)
        (2, 4, 4)
    """
    size = height_and_width(image_size)
    return max(p for p in (1, 2, 3, 4) if p == 1 or (math.gcd(*size) % p == 0 and min(size) >= 4 * p))


@register_model
@arguments_of(patchwise)
def patchwise_tiny(
    *,
    image_size: ImageSize = 32,
    width: int = 8,
    channels: int = 32,
    patch: int | None = None,
    convs: int = 3,
    linears: int = 3,
    **kwargs: Any,
) -> nn.Sequential:
    """Patches, convolutions, dense, in small: a minute on a CPU.

    For images of 8x8 to 32x32. Takes the arguments of `patchwise`; the patch size is chosen to divide the image: 2 for
    8x8, 4 for 28x28.
    """
    patch = tiny_patch(image_size) if patch is None else patch
    return patchwise(
        image_size=image_size, width=width, channels=channels, patch=patch, convs=convs, linears=linears, **kwargs
    )
