"""AOL-ALT: the channels quadruple where the size halves (paper, appendix, table "Convolutional architecture").

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

So the number of activations stays the same until there are 1024 channels, and the strided convolutions after the first
have as many inputs per window as outputs: they start as identities. Larger images end with an average, as in std.py.
"""

from collections.abc import Mapping
from typing import Any

from torch import nn

from onelip.models._chain import Chain
from onelip.models._registry import register_model
from onelip.models._sizes import ImageSize, check_count, check_even, check_multiple, height_and_width
from onelip.models.std import HALVINGS, OTHERWISE, WHY


@register_model
def aol_alt(
    *,
    num_classes: int = 10,
    image_size: ImageSize = 32,
    in_channels: int = 3,
    method: str | None = "aol",
    width: int = 16,
    depth: int = 4,
    method_options: Mapping[str, Any] | None = None,
) -> nn.Sequential:
    """Channels quadruple where the size halves (AOL-ALT).

    It works in both memory formats, faster in channels_last.
    It refuses images of another size than `image_size`: with larger ones it would give several logits per class.

    Args:
        num_classes: number of logits, at most 64 * width.
        image_size: multiple of 32.
        in_channels: channels of the image.
        method: name of the method of all layers; None for plain ones.
        width: channels of the first stage; even.
        depth: number of convolutions with an activation between two halvings.
        method_options: keyword options of the method.
    """
    size = height_and_width(image_size)
    check_multiple(size, 2**HALVINGS, WHY, OTHERWISE)
    check_even("width", width)
    check_count("depth", depth, 0)
    net = Chain(in_channels, size, method, method_options)
    # The stages as (channels, kernel size). The halving at their head is a true stride: for AOL the same as
    # concatenation pooling followed by a 1x1 convolution, see `LayerFactory.downsample`.
    for channels, kernel_size in ((width, 3), (4 * width, 3), (16 * width, 3), (64 * width, 1)):
        _stage(net, channels, kernel_size, depth)
    net.conv(64 * width, 1, activation=False)
    # Four windows of 16 w channels make 64 w again, so that the last halving too has a square matrix.
    net.first_channels("narrow", 16 * width)
    _stage(net, 64 * width, 1, depth)
    net.conv(64 * width, 1, activation=False)
    net.average()
    net.logits(num_classes)
    net.flatten()
    return net.build()


def _stage(net: Chain, channels: int, kernel_size: int, depth: int) -> None:
    net.downsample(channels, 2)
    for _ in range(depth):
        net.conv(channels, kernel_size)
