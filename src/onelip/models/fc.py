"""AOL-FC: nine fully connected layers (paper, appendix, table "Fully Connected Architecture").

Flatten             3072
AOL FC, MaxMin      4096     8x
AOL FC              4096     1x
First channels      classes
"""

from collections.abc import Mapping
from typing import Any

from torch import nn

from onelip.models._chain import Chain
from onelip.models._registry import register_model
from onelip.models._sizes import ImageSize, check_count, check_even


@register_model
def aol_fc(
    *,
    num_classes: int = 10,
    image_size: ImageSize = 32,
    in_channels: int = 3,
    method: str | None = "aol",
    width: int = 4096,
    depth: int = 9,
    method_options: Mapping[str, Any] | None = None,
) -> nn.Sequential:
    """Nine fully connected layers (AOL-FC).

    It works with images of any size, in both memory formats.

    Args:
        num_classes: number of logits, at most `width`.
        image_size: any.
        in_channels: channels of the image.
        method: name of the method of all layers; None for plain ones.
        width: features of every layer; even.
        depth: number of layers, the last one without an activation.
        method_options: keyword options of the method.
    """
    check_even("width", width)
    net = Chain(in_channels, image_size, method, method_options)
    net.flatten()
    for _ in range(check_count("depth", depth) - 1):
        net.linear(width)
    net.linear(width, activation=False)
    net.logits(num_classes)
    return net.build()
