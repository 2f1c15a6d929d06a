"""Standard CNN and AOL-STD (paper, appendix, table of the standard convolutional architecture).

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

The channels double where the size halves. AOL-STD is the same with AOL convolutions; AOL-DIL (dil.py) exchanges the 3x3
ones. There are always these five halvings; where a larger image leaves more than one pixel, its average (scaled to
constant 1) is taken before the channels are chosen.
"""

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from onelip.models._chain import Chain
from onelip.models._registry import arguments_of, register_model
from onelip.models._sizes import ImageSize, check_count, check_even, check_multiple, height_and_width

HALVINGS = 5
WHY = f"it is halved {HALVINGS} times"
OTHERWISE = "take 'patchwise-tiny' or 'aol-fc'"


def plain_conv3(net: Chain, channels: int) -> None:
    """The 3x3 convolution of the table."""
    net.conv(channels, 3)


def standard(
    *,
    num_classes: int = 10,
    image_size: ImageSize = 32,
    in_channels: int = 3,
    method: str | None = "aol",
    width: int = 32,
    depth: int = 4,
    method_options: Mapping[str, Any] | None = None,
    conv3: Callable[[Chain, int], None] = plain_conv3,
) -> nn.Sequential:
    """Build the network of the table; works in both memory formats, faster in channels_last.

    It refuses images of another size than `image_size`: with larger ones it would give several logits per class.

    Args:
        num_classes: number of logits, at most 32 * width.
        image_size: multiple of 32.
        in_channels: channels of the image.
        method: name of the method of all layers; None for plain ones.
        width: channels of the first stage; even.
        depth: number of 3x3 convolutions in each stage.
        method_options: keyword options of the method.
        conv3: what puts a 3x3 convolution and its activation into the network.
    """
    size = height_and_width(image_size)
    check_multiple(size, 2**HALVINGS, WHY, OTHERWISE)
    check_even("width", width)
    check_count("depth", depth, 0)
    net = Chain(in_channels, size, method, method_options)
    for stage in range(HALVINGS):
        for _ in range(depth):
            conv3(net, width * 2**stage)
        # A true stride: AOL's bound sees the four taps of a window as separate channels, which is concatenation
        # pooling followed by a 1x1 convolution. No activation, as in the table.
        net.downsample(width * 2 ** (stage + 1), 2, activation=False)
    net.conv(net.channels, 1, activation=False)
    net.average()
    net.logits(num_classes)
    net.flatten()
    return net.build()


@register_model
@arguments_of(standard)
def aol_std(**kwargs: Any) -> nn.Sequential:
    """Convolutions that halve the image five times (AOL-STD).

    Arguments of `standard`.
    """
    return standard(**kwargs)


@register_model
@arguments_of(standard)
def standard_cnn(*, method: str | None = None, **kwargs: Any) -> nn.Sequential:
    """The layers of aol-std with free weights, to compare with.

    Arguments of `standard`.
    """
    return standard(method=method, **kwargs)
