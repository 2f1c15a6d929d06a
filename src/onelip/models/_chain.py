"""A network written down as the paper's tables are: row by row, each row knowing only what it puts out."""

from collections import Counter, OrderedDict
from collections.abc import Mapping
from typing import Any

from torch import nn

from onelip.methods._guards import guard_image_shape
from onelip.models._layers import LayerFactory
from onelip.models._sizes import ImageSize, check_count, check_even, height_and_width
from onelip.nn import ConcatenationPool2d, FirstChannels, LipschitzAvgPool2d


class Chain:
    """Collects named layers and follows the shape of one sample through them; `build` makes the `nn.Sequential`.

    Example:
        >>> net = Chain(3, 32, "aol")
        >>> net.downsample(16, 2)
        >>> net.shape, list(net.build()._modules)
        ((16, 16, 16), ['conv1', 'conv1_act'])
    """

    def __init__(
        self,
        in_channels: int,
        image_size: ImageSize,
        method: str | None,
        method_options: Mapping[str, Any] | None = None,
    ) -> None:
        self.shape: tuple[int, ...] = (check_count("in_channels", in_channels), *height_and_width(image_size))
        self._image = self.shape
        self._make = LayerFactory(method, method_options)
        self._layers: OrderedDict[str, nn.Module] = OrderedDict()
        self._counts: Counter[str] = Counter()

    @property
    def channels(self) -> int:
        return self.shape[0]

    @property
    def size(self) -> tuple[int, ...]:
        return self.shape[1:]

    def concatenate(self, factor: int) -> None:
        """Concatenation pooling: windows of factor x factor pixels become channels."""
        self._layers["patches"] = ConcatenationPool2d(factor)
        self.shape = (self.channels * factor**2, *(n // factor for n in self.size))

    def conv(self, channels: int, kernel_size: int, *, activation: bool = True) -> None:
        """A convolution of odd kernel size, zero-padded to keep the size."""
        layer = self._make.conv2d(self.channels, channels, kernel_size, input_size=self.size, padding=kernel_size // 2)
        self._linear("conv", layer, (channels, *self.size), activation)

    def dilated_conv(self, channels: int, kernel_size: int, dilation: tuple[int, ...]) -> None:
        """A dilated convolution of odd kernel size, circular, so that the size is kept."""
        padding = tuple(d * (kernel_size // 2) for d in dilation)
        layer = self._make.conv2d(
            self.channels,
            channels,
            kernel_size,
            input_size=self.size,
            padding=padding,
            dilation=dilation,
            padding_mode="circular",
        )
        self._linear("conv", layer, (channels, *self.size), True)

    def downsample(self, channels: int, factor: int, *, activation: bool = True) -> None:
        """A convolution with kernel and stride `factor`."""
        layer = self._make.downsample(self.channels, channels, factor, input_size=self.size)
        self._linear("conv", layer, (channels, *(n // factor for n in self.size)), activation)

    def linear(self, features: int, *, activation: bool = True) -> None:
        """A fully connected layer."""
        self._linear("fc", self._make.linear(self.channels, features), (features,), activation)

    def flatten(self) -> None:
        """All axes of a sample into one."""
        self._layers["flatten"] = nn.Flatten()
        features = self.channels
        for n in self.size:
            features *= n
        self.shape = (features,)

    def first_channels(self, name: str, channels: int) -> None:
        """Keep the first channels and ignore the rest."""
        self._layers[name] = FirstChannels(channels)
        self.shape = (channels, *self.size)

    def logits(self, num_classes: int) -> None:
        """Keep one channel for each class."""
        if check_count("num_classes", num_classes) > self.channels:
            raise ValueError(
                f"expected num_classes to be at most the width of the last layer, {self.channels}, got {num_classes}; "
                "take a larger width"
            )
        self._replace_head(num_classes)
        self.first_channels("logits", num_classes)

    def average(self) -> None:
        """Average over what is left of the image, times the root of the number of pixels: constant 1."""
        if any(n > 1 for n in self.size):  # on a single pixel it would be the identity
            self._layers["average"] = LipschitzAvgPool2d(None)
            self.shape = (self.channels, *(1 for _ in self.size))

    def build(self) -> nn.Sequential:
        """The network; it refuses images of another shape."""
        network = nn.Sequential(self._layers)
        guard_image_shape(network, self._image)
        return network

    def _linear(self, kind: str, layer: nn.Module, shape: tuple[int, ...], activation: bool) -> None:
        self._counts[kind] += 1
        name = f"{kind}{self._counts[kind]}"
        self._layers[name] = layer
        self._last = (name, self.channels)
        self.shape = shape
        if activation:
            check_even(f"the number of channels of {name}", shape[0])
            self._layers[f"{name}_act"] = self._make.activation(shape[0])

    def _replace_head(self, num_classes: int) -> None:
        """Methods that treat the last layer apart get a plain one with an output per class."""
        if not self._make.has_own_head:
            return
        name, inputs = self._last
        plain = nn.Linear(inputs, num_classes) if name.startswith("fc") else nn.Conv2d(inputs, num_classes, 1)
        head = self._make.head(plain)
        if head is not None:
            self._layers[name] = head
            self.shape = (num_classes, *self.size)
