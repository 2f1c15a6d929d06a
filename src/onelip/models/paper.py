"""The architectures of the paper, and `patchwise-tiny`.

Every function takes the arguments of `onelip.create_model` and its own options.
"""

import math
from collections.abc import Callable
from typing import Any

from torch import nn

from onelip.core.errors import check_integer
from onelip.models.chain import Chain, ImageSize, check_even, height_and_width
from onelip.models.registry import register_model, takes_arguments_of

_HALVINGS = 5
_WHY = f"it is halved {_HALVINGS} times"
_OTHERWISE = "choose 'patchwise-tiny' or 'aol-fc'"


# Patchwise.


@takes_arguments_of(Chain)
def patchwise(
    *, width: int, channels: int = 192, patch: int = 4, convs: int = 12, linears: int = 13, **common: Any
) -> nn.Sequential:
    """The patchwise architecture.

    Paper, table "Patchwise architecture", with w = 16, 32, 48 for AOL-Small, AOL-Medium, AOL-Large:

        Concatenation pooling 4x4   8 x 8 x 48      1x
        AOL conv 1x1, MaxMin        8 x 8 x 192     1x
        AOL conv 3x3, MaxMin        8 x 8 x 192    12x
        AOL conv 1x1                8 x 8 x 192     1x
        First channels              8 x 8 x w
        Flatten                     64 w
        AOL FC, MaxMin              64 w           13x
        AOL FC                      64 w            1x
        First channels              classes

    Each fully connected layer has width * (number of patches) features, which grows with the image: choose a larger
    patch for large images. The image size must be a multiple of the patch size.

    Args:
        width: w in the table, the number of channels passed to the fully connected part; even.
        channels: channels of the convolutional part; even, at least w.
        patch: side of a patch.
        convs: number of 3x3 convolutions.
        linears: number of fully connected layers with an activation; one without activation follows.
        **common: see `onelip.create_model`.
    """
    check_integer("patch", patch)
    check_even("channels", channels)
    if check_even("width", width) > channels:
        raise ValueError(f"expected width to be at most channels = {channels}, got {width}; choose more channels")
    net = Chain(**common)
    net.check_multiple(patch, "the patch size", "choose a `patch` that divides it")
    net.concatenate(patch)
    net.conv(channels, 1)
    for _ in range(check_integer("convs", convs, 0)):
        net.conv(channels, 3)
    net.conv(channels, 1, activation=False)
    net.first_channels("narrow", width)
    net.flatten()
    for _ in range(check_integer("linears", linears, 0)):
        net.linear(net.channels)
    net.linear(net.channels, activation=False)
    net.logits()
    return net.build()


@register_model
@takes_arguments_of(patchwise)
def aol_small(*, width: int = 16, **options: Any) -> nn.Sequential:
    """Patches, convolutions, dense; 18.7 M parameters (AOL-Small)."""
    return patchwise(width=width, **options)


@register_model
@takes_arguments_of(patchwise)
def aol_medium(*, width: int = 32, **options: Any) -> nn.Sequential:
    """Patches, convolutions, dense; 62.8 M parameters (AOL-Medium)."""
    return patchwise(width=width, **options)


@register_model
@takes_arguments_of(patchwise)
def aol_large(*, width: int = 48, **options: Any) -> nn.Sequential:
    """Patches, convolutions, dense; 136 M parameters (AOL-Large)."""
    return patchwise(width=width, **options)


@register_model
@takes_arguments_of(patchwise)
def patchwise_tiny(
    *,
    image_size: ImageSize = 32,
    width: int = 8,
    channels: int = 32,
    patch: int | None = None,
    convs: int = 3,
    linears: int = 3,
    **options: Any,
) -> nn.Sequential:
    """A small patchwise network; trains in a minute on a CPU.

    For images of 8x8 to 32x32. It is not in the paper.

    Args:
        patch: side of a patch. Default: chosen to divide the image, 2 for 8x8, 4 for 28x28.
    """
    patch = tiny_patch(image_size) if patch is None else patch
    return patchwise(
        image_size=image_size, width=width, channels=channels, patch=patch, convs=convs, linears=linears, **options
    )


def tiny_patch(image_size: ImageSize) -> int:
    """Return the largest patch size up to 4 that divides the image into at least 4 patches per side, else 1.

    Examples:
        >>> tiny_patch(8), tiny_patch(28), tiny_patch(32)
        (2, 4, 4)
    """
    size = height_and_width(image_size)
    return max(p for p in (1, 2, 3, 4) if p == 1 or (math.gcd(*size) % p == 0 and min(size) >= 4 * p))


# Convolutional.


@takes_arguments_of(Chain)
def standard(
    conv3: Callable[[Chain, int], None], /, *, width: int = 32, depth: int = 4, **common: Any
) -> nn.Sequential:
    """The standard convolutional architecture.

    Paper, appendix, table of the standard convolutional architecture:

        Conv 3x3, MaxMin            32 x 32 x 32     4x
        Conv 2x2, stride 2          16 x 16 x 64     1x
        Conv 3x3, MaxMin            16 x 16 x 64     4x
        Conv 2x2, stride 2           8 x 8 x 128     1x
        Conv 3x3, MaxMin             8 x 8 x 128     4x
        Conv 2x2, stride 2           4 x 4 x 256     1x
        Conv 3x3, MaxMin             4 x 4 x 256     4x
        Conv 2x2, stride 2           2 x 2 x 512     1x
        Conv 3x3, MaxMin             2 x 2 x 512     4x
        Conv 2x2, stride 2          1 x 1 x 1024     1x
        Conv 1x1                    1 x 1 x 1024     1x
        First channels, Flatten     classes

    The channels double where the size halves. The image size must be a multiple of 32. For images larger than 32, the
    last step averages over the remaining pixels, scaled to constant 1.

    Args:
        conv3: function that adds a 3x3 convolution and its activation.
        width: channels of the first stage; even.
        depth: number of 3x3 convolutions in each stage.
        **common: see `onelip.create_model`.
    """
    check_even("width", width)
    check_integer("depth", depth, 0)
    net = Chain(**common)
    net.check_multiple(2**_HALVINGS, _WHY, _OTHERWISE)
    for stage in range(_HALVINGS):
        for _ in range(depth):
            conv3(net, width * 2**stage)
        # A real stride: the bound of AOL treats the four taps of a window as separate channels, like concatenation
        # pooling followed by a 1x1 convolution. No activation, as in the table.
        net.downsample(width * 2 ** (stage + 1), 2, activation=False)
    net.conv(net.channels, 1, activation=False)
    net.average()
    net.logits()
    net.flatten()
    return net.build()


def _zero_padded(net: Chain, channels: int) -> None:
    net.conv(channels, 3)


def _dilated(net: Chain, channels: int) -> None:
    net.dilated_conv(channels, 3, tuple(max(1, n // 3) for n in net.size))


@register_model
@takes_arguments_of(standard)
def aol_std(**options: Any) -> nn.Sequential:
    """Convolutions that halve the image five times (AOL-STD)."""
    return standard(_zero_padded, **options)


@register_model
@takes_arguments_of(standard)
def standard_cnn(*, method: str | None = None, **options: Any) -> nn.Sequential:
    """The layers of aol-std with unconstrained weights, as a baseline."""
    return standard(_zero_padded, method=method, **options)


@register_model
@takes_arguments_of(standard)
def aol_dil(**options: Any) -> nn.Sequential:
    """The layers of aol-std, dilated and circular (AOL-DIL).

    The paper replaces each 3x3 convolution by a "strided" one. A stride would shrink the image, and ECO, on which the
    architecture is modelled, uses a dilation, so this implementation does too: the taps of a 3x3 kernel are a third of
    the image apart and wrap around.

        dilation d = size // 3 (at least 1) on each axis of each stage: 10, 5, 2, 1, 1 for 32x32 images
        circular padding p = d, which keeps the size; AOL's bound holds for 2 p <= d (k - 1) = 2 d

    The other layers are those of aol-std.
    """
    return standard(_dilated, **options)


@register_model
@takes_arguments_of(Chain)
def aol_alt(*, width: int = 16, depth: int = 4, **common: Any) -> nn.Sequential:
    """Channels quadruple where the size halves (AOL-ALT).

    Paper, appendix, table "Convolutional architecture":

        AOL conv 2x2, stride 2, MaxMin     16 x 16 x 16      1x
        AOL conv 3x3, MaxMin               16 x 16 x 16      4x
        AOL conv 2x2, stride 2, MaxMin      8 x 8 x 64       1x
        AOL conv 3x3, MaxMin                8 x 8 x 64       4x
        AOL conv 2x2, stride 2, MaxMin      4 x 4 x 256      1x
        AOL conv 3x3, MaxMin                4 x 4 x 256      4x
        AOL conv 2x2, stride 2, MaxMin      2 x 2 x 1024     1x
        AOL conv 1x1, MaxMin                2 x 2 x 1024     4x
        AOL conv 1x1                        2 x 2 x 1024     1x
        First channels                      2 x 2 x 256
        AOL conv 2x2, stride 2, MaxMin      1 x 1 x 1024     1x
        AOL conv 1x1, MaxMin                1 x 1 x 1024     4x
        AOL conv 1x1                        1 x 1 x 1024     1x
        First channels, Flatten             classes

    The number of activations is constant until there are 1024 channels, and the strided convolutions after the first
    have as many inputs per window as outputs: they are initialised as identities. The image size must be a multiple of
    32. For larger images, the last step is an average, as in aol-std.

    Args:
        width: channels of the first stage; even.
        depth: number of convolutions with an activation between two halvings.
        **common: see `onelip.create_model`.
    """
    check_even("width", width)
    check_integer("depth", depth, 0)
    net = Chain(**common)
    net.check_multiple(2**_HALVINGS, _WHY, _OTHERWISE)

    def stage(channels: int, kernel_size: int) -> None:
        net.downsample(channels, 2)
        for _ in range(depth):
            net.conv(channels, kernel_size)

    for channels, kernel_size in ((width, 3), (4 * width, 3), (16 * width, 3), (64 * width, 1)):
        stage(channels, kernel_size)
    net.conv(64 * width, 1, activation=False)
    # A window of four pixels with 16 w channels has 64 w inputs, so the last halving has a square matrix too.
    net.first_channels("narrow", 16 * width)
    stage(64 * width, 1)
    net.conv(64 * width, 1, activation=False)
    net.average()
    net.logits()
    net.flatten()
    return net.build()


# Fully connected.


@register_model
@takes_arguments_of(Chain)
def aol_fc(*, width: int = 4096, depth: int = 9, **common: Any) -> nn.Sequential:
    """Nine fully connected layers (AOL-FC).

    Paper, appendix, table "Fully Connected Architecture":

        Flatten             3072
        AOL FC, MaxMin      4096     8x
        AOL FC              4096     1x
        First channels      classes

    Args:
        width: features of every layer; even.
        depth: number of layers; the last one has no activation.
        **common: see `onelip.create_model`.
    """
    check_even("width", width)
    check_integer("depth", depth)
    net = Chain(**common)
    net.flatten()
    for _ in range(depth - 1):
        net.linear(width)
    net.linear(width, activation=False)
    net.logits()
    return net.build()
