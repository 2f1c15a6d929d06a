"""AOL-DIL: AOL-STD with dilated convolutions, as ECO has them (paper, appendix, "AOL-DIL").

The paper says that each 3x3 convolution is replaced by a "strided" one. A stride would shrink the image; ECO, which the
architecture is modelled on, uses a dilation, so that is what is meant. ECO dilates a 3x3 kernel until its taps lie a
third of the image apart and wraps around, so that the convolution mixes few pixels far apart. Here too:

    dilation d = size // 3 (at least 1) on each axis of each stage: 10, 5, 2, 1, 1 for 32x32 images
    circular padding p = d, which keeps the size; AOL's bound holds for 2 p <= d (k - 1) = 2 d

All else is the table in std.py.
"""

from typing import Any

from torch import nn

from onelip.models._chain import Chain
from onelip.models._registry import arguments_of, register_model
from onelip.models.std import standard


def dilated_conv3(net: Chain, channels: int) -> None:
    """A 3x3 convolution whose taps lie a third of the image apart."""
    net.dilated_conv(channels, 3, tuple(max(1, n // 3) for n in net.size))


@register_model
@arguments_of(standard)
def aol_dil(**kwargs: Any) -> nn.Sequential:
    """The layers of aol-std, dilated and circular (AOL-DIL).

    Arguments of `onelip.models.std.standard`.
    """
    return standard(conv3=dilated_conv3, **kwargs)
