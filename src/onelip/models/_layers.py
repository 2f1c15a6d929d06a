"""Linear layers by the name of a method: the same architecture can be had with any of them, or with none."""

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

from torch import nn

from onelip.geometry import UnsupportedLayer
from onelip.methods._registry import get_method
from onelip.nn import AOLConv2d, AOLLinear, ConcatenationPool2d


class LayerFactory:
    """Makes Conv2d and Linear layers.

    Args:
        method: "aol" for onelip's own layers with the paper's initialisation; None or "none" for plain torch layers;
            any other name of `onelip.list_methods()` for plain layers, as torch starts them, with that method applied.
        options: keyword options of the method, given to each layer, e.g. {"side": "auto"}.

    Example:
        >>> LayerFactory("aol").linear(8, 4).weight.shape
        torch.Size([4, 8])
    """

    def __init__(self, method: str | None = "aol", options: Mapping[str, Any] | None = None) -> None:
        self.method = None if method is None or method == "none" else get_method(method)
        self.options = dict(options or {})
        if self.method is None and self.options:
            raise ValueError(
                f"expected no method_options where there is no method, got {self.options!r}; name the method"
            )

    def linear(self, in_features: int, out_features: int) -> nn.Module:
        """A fully connected layer with a bias."""
        if self._is_aol:
            return AOLLinear(in_features, out_features, **self.options)
        return self._apply(nn.Linear(in_features, out_features))

    def conv2d(self, in_channels: int, out_channels: int, kernel_size: int, **settings: Any) -> nn.Module:
        """A convolution with a bias; `settings` are those of `torch.nn.Conv2d`: stride, padding, dilation, ..."""
        if self._is_aol:
            return AOLConv2d(in_channels, out_channels, kernel_size, **settings, **self.options)
        return self._apply(nn.Conv2d(in_channels, out_channels, kernel_size, **settings))

    def downsample(self, in_channels: int, out_channels: int, factor: int) -> nn.Module:
        """A convolution whose kernel is as large as its stride, so that its windows tile the image.

        That is concatenation pooling followed by a 1x1 convolution, in one step. AOL knows: its bound treats the taps
        of a window as separate input channels, so both are rescaled the same and the strided one can be tight. Methods
        that refuse strides get the two steps.
        """
        try:
            return self.conv2d(in_channels, out_channels, factor, stride=factor)
        except UnsupportedLayer:
            if factor == 1:
                raise
            pointwise = self.conv2d(in_channels * factor**2, out_channels, 1)
            return nn.Sequential(OrderedDict(pool=ConcatenationPool2d(factor), conv=pointwise))

    @property
    def _is_aol(self) -> bool:
        return self.method is not None and self.method.name == "aol"

    def _apply(self, layer: nn.Module) -> nn.Module:
        if self.method is None:
            return layer
        if not isinstance(layer, self.method.layers):
            served = ", ".join(kind.__name__ for kind in self.method.layers)
            raise UnsupportedLayer(
                f"expected a method that serves {type(layer).__name__}, got {self.method.name!r}, which serves "
                f"{served}; take another method or, for a method of dense layers only, the model 'aol-fc'"
            )
        return self.method.apply(layer, **self.options)
