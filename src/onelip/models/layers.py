"""Create linear layers by the name of a method, so that every architecture can use every method.

If a method does not support a layer, it is replaced by supported layers and maps of constant 1:
    zero padding        circular padding, for methods in the Fourier domain
    outputs != inputs   zero channels before, or the first channels after, a square layer
    stride              concatenation pooling, then a 1x1 convolution
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from onelip.core.errors import UnsupportedLayer
from onelip.core.geometry import LINEAR_LAYERS, geometry_of
from onelip.core.parametrization import find_parametrization, original_of
from onelip.methods.last_layer import lln
from onelip.methods.registry import get_method
from onelip.nn import AOLConv2d, AOLLinear, ConcatenationPool2d, FirstChannels, MaxMin, PadChannels
from onelip.nn.init import tight_weight


class LayerFactory:
    """Creates Conv2d and Linear layers with a method.

    Args:
        method: "aol" for the layers of `onelip.nn` with the initialisation of the paper; None for plain torch layers;
            another name of `onelip.list_methods()` for torch layers with that method, initialised as by its authors,
            or orthogonally if the method does not constrain the weights.
        options: keyword arguments of the method for each layer, e.g. {"side": "auto"}. {"normalise_last_layer": True}
            works with every method and gives a dense last layer rows of norm 1 (LLN); such networks are certified per
            pair of classes.

    Attributes:
        changes: how the layer that was created last differs from the requested one.

    Raises:
        ValueError: if the method is unknown, or an option is invalid.

    Examples:
        >>> make = LayerFactory("cayley")
        >>> layer = make.conv2d(4, 8, 3, padding=1, input_size=(6, 6))
        >>> make.changes
        ['circular instead of zero padding']
    """

    def __init__(self, method: str | None = "aol", options: Mapping[str, Any] | None = None) -> None:
        self.method = None if method is None else get_method(method)
        self.options = dict(options or {})
        self.changes: list[str] = []
        self.normalise_last_layer = self.options.pop("normalise_last_layer", False)
        if not isinstance(self.normalise_last_layer, bool):
            raise ValueError(f"expected normalise_last_layer to be True or False, got {self.normalise_last_layer!r}")
        if self.method is None and self.options:
            raise ValueError(f"expected no method_options without a method, got {self.options!r}; name the method")

    def linear(self, in_features: int, out_features: int) -> nn.Module:
        """Return a fully connected layer with a bias."""
        self.changes = []
        if self._is_aol:
            return AOLLinear(in_features, out_features, **self.options)
        return self._first_supported(
            in_features, out_features, [lambda inputs, outputs: self._apply(nn.Linear(inputs, outputs))]
        )

    def conv2d(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int],
        *,
        input_size: tuple[int, ...] | None = None,
        **settings: Any,
    ) -> nn.Module:
        """Return a convolution with a bias.

        Args:
            in_channels: number of input channels.
            out_channels: number of output channels.
            kernel_size: side of the kernel.
            input_size: spatial size of the input, for methods that need it.
            **settings: other arguments of `torch.nn.Conv2d`: stride, padding, dilation, padding_mode.

        Raises:
            UnsupportedLayer: if the method supports neither this layer nor a replacement.
        """
        self.changes = []
        if self._is_aol:
            return AOLConv2d(in_channels, out_channels, kernel_size, **settings, **self.options)

        def orthogonal(chosen: dict[str, Any]) -> Callable[[int, int], nn.Module]:
            return lambda inputs, outputs: self._apply(nn.Conv2d(inputs, outputs, kernel_size, **chosen), input_size)

        circular = settings | {"padding_mode": "circular"}
        choices = [settings] if settings == circular else [settings, circular]
        return self._first_supported(in_channels, out_channels, [orthogonal(chosen) for chosen in choices])

    def downsample(
        self,
        in_channels: int,
        out_channels: int,
        factor: int | tuple[int, int],
        *,
        input_size: tuple[int, ...] | None = None,
        **settings: Any,
    ) -> nn.Module:
        """Return a convolution whose kernel is as large as its stride, so that its windows tile the image.

        It is equivalent to concatenation pooling followed by a 1x1 convolution. The bound of AOL treats the taps of a
        window as separate input channels, so both forms are rescaled alike and the strided one can be tight. Methods
        that do not support strides use the two steps.
        """
        try:
            return self.conv2d(in_channels, out_channels, factor, input_size=input_size, stride=factor, **settings)
        except UnsupportedLayer:
            if not isinstance(factor, int) or factor == 1 or settings:
                raise
            smaller = None if input_size is None else tuple(n // factor for n in input_size)
            pointwise = self.conv2d(in_channels * factor**2, out_channels, 1, input_size=smaller)
            self.changes.append("concatenation pooling and a 1x1 convolution instead of a stride")
            return nn.Sequential(OrderedDict(pool=ConcatenationPool2d(factor), conv=pointwise))

    def activation(self, channels: int) -> nn.Module:
        """Return the activation of the method, or MaxMin if it has none."""
        if self.method is None or self.method.activation is None:
            return MaxMin()
        return self.method.activation(channels)

    @property
    def has_own_head(self) -> bool:
        """Whether the last layer differs from the others."""
        return self.normalise_last_layer or (self.method is not None and self.method.head is not None)

    def head(self, layer: nn.Module) -> nn.Module | None:
        """Convert a plain layer to the last layer of the method; None if the default last layer is kept."""
        make = None if self.method is None else self.method.head
        if self.normalise_last_layer:
            make = lln
        try:
            return None if make is None else make(layer)
        except UnsupportedLayer:
            return None

    def _first_supported(self, inputs: int, outputs: int, builders: list[Callable[[int, int], nn.Module]]) -> nn.Module:
        """The first supported layer: as requested, circular, square, or both; raises the first error if none is."""
        width = max(inputs, outputs)
        first_error = None
        # Circular padding first: it changes less than additional channels do.
        for sizes in dict.fromkeys([(inputs, outputs), (width, width)]):
            for number, make in enumerate(builders):
                try:
                    layer = make(*sizes)
                except UnsupportedLayer as error:
                    first_error = first_error or error
                    continue
                if number:
                    self.changes.append("circular instead of zero padding")
                return layer if sizes == (inputs, outputs) else self._squared(layer, inputs, outputs)
        assert first_error is not None
        raise first_error

    def _squared(self, layer: nn.Module, inputs: int, outputs: int) -> nn.Sequential:
        """Extend a layer with max(inputs, outputs) channels on both sides to one from `inputs` to `outputs`."""
        if inputs < outputs:
            self.changes.append("zero channels before a square layer")
            return nn.Sequential(OrderedDict(widen=PadChannels(outputs), layer=layer))
        self.changes.append("the first channels of a square layer")
        return nn.Sequential(OrderedDict(layer=layer, narrow=FirstChannels(outputs)))

    @property
    def _is_aol(self) -> bool:
        return self.method is not None and self.method.name == "aol"

    def _apply(self, layer: nn.Module, input_size: tuple[int, ...] | None = None) -> nn.Module:
        if self.method is None:
            # As in the paper's framework. The default of torch halves the norm in each layer, and the networks of the
            # paper are deep and have no normalisation: they would not learn.
            nn.init.xavier_uniform_(layer.weight)  # pyright: ignore[reportArgumentType]  a linear layer
            return layer
        if not isinstance(layer, self.method.layers):
            supported = ", ".join(kind.__name__ for kind in self.method.layers)
            raise UnsupportedLayer(
                f"the method {self.method.name!r} supports {supported}, not {type(layer).__name__}; choose another "
                "method, or the model 'aol-fc' for a method that supports only dense layers"
            )
        options = dict(self.options)
        if self.method.needs_input_size and input_size is not None:
            options.setdefault("input_size", input_size)
        made = self.method.apply(layer, **options)
        found = find_parametrization(made)
        reset = getattr(found, "reset", None)
        if callable(reset):  # the initialisation of the method's authors
            reset(original_of(made))
        elif found is None and isinstance(made, LINEAR_LAYERS) and not made.weight.is_meta:
            # The method changes only the loss: as for AOL, for the reason above.
            made.weight.data.copy_(tight_weight(geometry_of(made), tuple(made.weight.shape), "inputs"))
        return made
