"""Linear layers by the name of a method: the same architecture can be had with any of them, or with none.

Where a method cannot serve a layer as it stands, the nearest one is made from what it can serve and maps of constant 1:
    outputs != inputs   zero channels before, or the first channels after, a square layer
    stride              concatenation pooling, then a 1x1 convolution
    zero padding        circular padding, for methods of the Fourier domain
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import nn

from onelip.geometry import LINEAR_LAYERS, UnsupportedLayer, geometry_of
from onelip.methods._parametrization import find_parametrization, original_of
from onelip.methods._registry import get_method
from onelip.methods._tight import tight_weight
from onelip.methods.last_layer import lln
from onelip.nn import AOLConv2d, AOLLinear, ConcatenationPool2d, FirstChannels, MaxMin, PadChannels


class LayerFactory:
    """Makes Conv2d and Linear layers.

    Args:
        method: "aol" for onelip's own layers with the paper's initialisation; None or "none" for plain torch layers;
            any other name of `onelip.list_methods()` for torch's layers with that method applied, begun as it
            wants it: see its `reset`, and orthogonal where it leaves weights free.
        options: keyword options of the method, given to each layer, e.g. {"side": "auto"}. With any method
            {"last_layer": "normalised"} gives the last layer rows of length 1 instead (last-layer normalisation), where
            it is a dense layer; such networks are certified per pair of classes.

    Example:
        >>> LayerFactory("aol").linear(8, 4).weight.shape
        torch.Size([4, 8])
    """

    def __init__(self, method: str | None = "aol", options: Mapping[str, Any] | None = None) -> None:
        self.method = None if method is None or method == "none" else get_method(method)
        self.options = dict(options or {})
        self.last_layer = self.options.pop("last_layer", None)
        if self.last_layer not in (None, "normalised"):
            raise ValueError(f"expected last_layer to be 'normalised', or not given, got {self.last_layer!r}")
        if self.method is None and self.options:
            raise ValueError(
                f"expected no method_options where there is no method, got {self.options!r}; name the method"
            )
        if self.method is not None:  # what belongs to the loss is not for the layers
            for name in self.method.term_options:
                self.options.pop(name, None)

    def linear(self, in_features: int, out_features: int) -> nn.Module:
        """A fully connected layer with a bias."""
        if self._is_aol:
            return AOLLinear(in_features, out_features, **self.options)
        width = max(in_features, out_features)
        return self._first_served(
            in_features,
            out_features,
            direct=[lambda: self._apply(nn.Linear(in_features, out_features))],
            square=[lambda: self._apply(nn.Linear(width, width))],
        )

    def conv2d(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int,
        *,
        input_size: tuple[int, ...] | None = None,
        **settings: Any,
    ) -> nn.Module:
        """A convolution with a bias.

        Args:
            in_channels: channels of its input.
            out_channels: channels of its output.
            kernel_size: one number.
            input_size: spatial size of its input, for methods that need it.
            **settings: those of `torch.nn.Conv2d`: stride, padding, dilation, ...
        """
        if self._is_aol:
            return AOLConv2d(in_channels, out_channels, kernel_size, **settings, **self.options)
        circular = settings | {"padding_mode": "circular"}
        width = max(in_channels, out_channels)

        def make(inputs: int, outputs: int, chosen: dict[str, Any]) -> Callable[[], nn.Module]:
            return lambda: self._apply(nn.Conv2d(inputs, outputs, kernel_size, **chosen), input_size)

        # Another padding changes less than more channels do.
        return self._first_served(
            in_channels,
            out_channels,
            direct=[make(in_channels, out_channels, chosen) for chosen in (settings, circular)],
            square=[make(width, width, chosen) for chosen in (settings, circular)],
        )

    def downsample(
        self, in_channels: int, out_channels: int, factor: int, *, input_size: tuple[int, ...] | None = None
    ) -> nn.Module:
        """A convolution whose kernel is as large as its stride, so that its windows tile the image.

        That is concatenation pooling followed by a 1x1 convolution, in one step. AOL knows: its bound treats the taps
        of a window as separate input channels, so both are rescaled the same and the strided one can be tight. Methods
        that refuse strides get the two steps.
        """
        try:
            return self.conv2d(in_channels, out_channels, factor, input_size=input_size, stride=factor)
        except UnsupportedLayer:
            if factor == 1:
                raise
            smaller = None if input_size is None else tuple(n // factor for n in input_size)
            pointwise = self.conv2d(in_channels * factor**2, out_channels, 1, input_size=smaller)
            return nn.Sequential(OrderedDict(pool=ConcatenationPool2d(factor), conv=pointwise))

    def activation(self, channels: int) -> nn.Module:
        """The activation that goes with the method: MaxMin unless it has one of its own."""
        if self.method is None or self.method.activation is None:
            return MaxMin()
        return self.method.activation(channels)

    @property
    def has_own_head(self) -> bool:
        """Whether the last layer is to be another than the rest."""
        return self.last_layer is not None or (self.method is not None and self.method.head is not None)

    def head(self, layer: nn.Module) -> nn.Module | None:
        """A plain last layer as the method wants it; None if it wants, or can have, only the one that there is."""
        verb = None if self.method is None else self.method.head
        if self.last_layer is not None:
            verb = lln
        try:
            return None if verb is None else verb(layer)
        except UnsupportedLayer:
            return None

    def _first_served(
        self,
        inputs: int,
        outputs: int,
        *,
        direct: list[Callable[[], nn.Module]],
        square: list[Callable[[], nn.Module]],
    ) -> nn.Module:
        """The first of the layers that the method serves; the error of the first if it serves none."""
        refusals: list[UnsupportedLayer] = []
        for make in direct:
            try:
                return make()
            except UnsupportedLayer as error:
                refusals.append(error)
        if inputs != outputs:
            for make in square:
                try:
                    layer = make()
                except UnsupportedLayer:
                    continue
                return nn.Sequential(OrderedDict(_around(layer, inputs, outputs)))
        raise refusals[0]

    @property
    def _is_aol(self) -> bool:
        return self.method is not None and self.method.name == "aol"

    def _apply(self, layer: nn.Module, input_size: tuple[int, ...] | None = None) -> nn.Module:
        if self.method is None:
            return layer
        if not isinstance(layer, self.method.layers):
            served = ", ".join(kind.__name__ for kind in self.method.layers)
            raise UnsupportedLayer(
                f"expected a method that serves {type(layer).__name__}, got {self.method.name!r}, which serves "
                f"{served}; take another method or, for a method of dense layers only, the model 'aol-fc'"
            )
        options = dict(self.options)
        if self.method.needs_input_size and input_size is not None:
            options.setdefault("input_size", input_size)
        made = self.method.apply(layer, **options)
        found = find_parametrization(made)
        reset = getattr(found, "reset", None)
        if callable(reset):  # as the method's authors begin
            reset(original_of(made))
        elif found is None and isinstance(made, LINEAR_LAYERS) and not made.weight.is_meta:
            # Free weights, of a method that acts on the loss alone. Those that torch begins with take half of the norm
            # in each layer, and the paper's networks are deep, without normalisation.
            made.weight.data.copy_(tight_weight(geometry_of(made), tuple(made.weight.shape), "inputs"))
        return made


def _around(layer: nn.Module, inputs: int, outputs: int) -> Iterator[tuple[str, nn.Module]]:
    """A square layer of max(inputs, outputs) channels between other numbers of them."""
    if inputs < outputs:
        yield "widen", PadChannels(outputs)
    yield "layer", layer
    if outputs < inputs:
        yield "narrow", FirstChannels(outputs)
