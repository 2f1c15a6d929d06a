"""Build a network row by row, like the tables of the paper, with linear layers by the name of a method.

If a method does not support a layer, it is replaced by supported layers and maps of constant 1:
    zero padding        circular padding, for methods in the Fourier domain
    outputs != inputs   zero channels before, or the first channels after, a square layer
    stride              concatenation pooling, then a 1x1 convolution
"""

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from math import prod
from typing import Any

from torch import nn

from onelip.core.errors import UnsupportedLayer, check_integer
from onelip.core.geometry import LINEAR_LAYERS, geometry_of
from onelip.core.lipschitz_module import guard_image_shape
from onelip.core.parametrization import find_parametrization, original_of
from onelip.methods.last_layer import lln
from onelip.methods.registry import get_method
from onelip.nn import (
    AOLConv2d,
    AOLLinear,
    BatchCentering,
    ConcatenationPool2d,
    FirstChannels,
    LipschitzAvgPool2d,
    MaxMin,
    PadChannels,
    lapped_patches,
)
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


# ---- Build a sequential network row by row, like the tables of the paper: each row states only its output


ImageSize = int | Sequence[int]


class Chain:
    """Builder that collects named layers and tracks the shape of a sample; `build` returns the `nn.Sequential`.

    Args:
        num_classes: number of logits.
        image_size: one number, or (height, width).
        in_channels: channels of the image.
        method: name of the method of all layers; None for plain layers.
        method_options: keyword arguments of the method.

    Attributes:
        shape: shape of a sample after the last layer.
        is_centred: whether each activation comes after a batch centring.

    Examples:
        >>> net = Chain(num_classes=10)
        >>> net.downsample(16, 2)
        >>> net.shape, list(net.build()._modules)
        ((16, 16, 16), ['conv1', 'conv1_act'])
    """

    def __init__(
        self,
        *,
        num_classes: int = 10,
        image_size: ImageSize = 32,
        in_channels: int = 3,
        method: str | None = "aol",
        method_options: Mapping[str, Any] | None = None,
    ) -> None:
        self.num_classes = check_integer("num_classes", num_classes)
        self.shape: tuple[int, ...] = (check_integer("in_channels", in_channels), *height_and_width(image_size))
        self._image = self.shape
        self._make = LayerFactory(method, method_options)
        self.is_centred = False
        self._layers: OrderedDict[str, nn.Module] = OrderedDict()
        self._counts: Counter[str] = Counter()
        self._changes: defaultdict[str, list[str]] = defaultdict(list)  # change -> names of the changed layers

    @property
    def channels(self) -> int:
        return self.shape[0]

    @property
    def size(self) -> tuple[int, ...]:
        return self.shape[1:]

    def check_multiple(self, unit: int, why: str, otherwise: str) -> None:
        """Raise a ValueError if the image size is not a multiple of `unit`; the message suggests sizes."""
        if not any(n % unit for n in self.size):
            return
        below = [max(n // unit, 1) * unit for n in self.size]
        above = [-(-n // unit) * unit for n in self.size]
        nearest = " or ".join(dict.fromkeys(f"{h}x{w}" for h, w in (below, above)))
        raise ValueError(
            f"expected an image size that is a multiple of {unit} ({why}), got {self.size[0]}x{self.size[1]}; "
            f"resize, crop or zero-pad the images to {nearest} (the last two are 1-Lipschitz), or {otherwise}"
        )

    def centre(self, name: str) -> None:
        """Subtract the mean of each channel: that of the batch in training, a stored one in evaluation."""
        self._layers[name] = BatchCentering(self.channels)

    def concatenate(self, factor: int) -> None:
        """Add concatenation pooling: windows of factor x factor pixels become channels."""
        self._layers["patches"] = ConcatenationPool2d(factor)
        self.shape = (self.channels * factor**2, *(n // factor for n in self.size))

    def lapped_patches(self, patch: int, overlap: int) -> None:
        """Add overlapping windows of (patch + overlap)^2 pixels, as channels; see `onelip.nn.lapped_patches`."""
        missing = tuple(-(-((-n) % patch) // 2) for n in self.size)
        self._layers["patches"] = lapped_patches(self.channels, patch, overlap, extra_padding=missing)
        self.shape = (self.channels * (patch + overlap) ** 2, *(-(-n // patch) for n in self.size))

    def conv(self, channels: int, kernel_size: int, *, activation: bool = True) -> None:
        """Add a convolution of odd kernel size, zero-padded to keep the size."""
        layer = self._make.conv2d(self.channels, channels, kernel_size, input_size=self.size, padding=kernel_size // 2)
        self._linear("conv", layer, (channels, *self.size), activation)

    def dilated_conv(self, channels: int, kernel_size: int, dilation: tuple[int, ...]) -> None:
        """Add a dilated convolution of odd kernel size, with circular padding to keep the size."""
        padding = tuple(d * (kernel_size // 2) for d in dilation)
        settings: dict[str, Any] = {"padding": padding, "dilation": dilation, "padding_mode": "circular"}
        layer = self._make.conv2d(self.channels, channels, kernel_size, input_size=self.size, **settings)
        self._linear("conv", layer, (channels, *self.size), True)

    def downsample(self, channels: int, factor: int, *, activation: bool = True) -> None:
        """Add a convolution with kernel size and stride `factor`, zero-padded if the size is not a multiple of it."""
        # Not larger than the image: taps that only see padding get a gradient of uninitialised memory from oneDNN.
        window = min(factor, self.size[0]), min(factor, self.size[1])
        # As many zeros on both sides as half of the missing pixels, rounded up: all pixels are in one window each.
        padding = tuple(-(-((-n) % k) // 2) for n, k in zip(self.size, window, strict=True))
        settings = {"padding": padding} if any(padding) else {}
        side = window[0] if window[0] == window[1] else window
        layer = self._make.downsample(self.channels, channels, side, input_size=self.size, **settings)
        size = (-(-n // k) for n, k in zip(self.size, window, strict=True))
        self._linear("conv", layer, (channels, *size), activation)

    def linear(self, features: int, *, activation: bool = True) -> None:
        """Add a fully connected layer."""
        self._linear("fc", self._make.linear(self.channels, features), (features,), activation)

    def flatten(self) -> None:
        """Add a layer that flattens all axes of a sample."""
        self._layers["flatten"] = nn.Flatten()
        self.shape = (prod(self.shape),)

    def first_channels(self, name: str, channels: int) -> None:
        """Keep the first channels and drop the rest."""
        self._layers[name] = FirstChannels(channels)
        self.shape = (channels, *self.size)

    def head(self) -> None:
        """Add a fully connected layer with one output per class."""
        self.linear(self.num_classes, activation=False)
        self._replace_head()

    def logits(self) -> None:
        """Keep one channel per class."""
        if self.num_classes > self.channels:
            raise ValueError(
                f"expected num_classes to be at most the width of the last layer, {self.channels}, got "
                f"{self.num_classes}; choose a larger width"
            )
        self._replace_head()
        self.first_channels("logits", self.num_classes)

    def average(self) -> None:
        """Add the mean over the remaining pixels times the square root of their number, which has constant 1."""
        if any(n > 1 for n in self.size):  # for a single pixel it is the identity
            self._layers["average"] = LipschitzAvgPool2d(None)
            self.shape = (self.channels, *(1 for _ in self.size))

    def build(self) -> nn.Sequential:
        """Return the network. It raises for images of other shapes, and lists its changed layers in `adaptations`."""
        network = nn.Sequential(self._layers)
        adaptations = tuple(f"{change}: {', '.join(names)}" for change, names in self._changes.items())
        setattr(network, "adaptations", adaptations)  # noqa: B010  nn.Module annotates its attributes as modules
        if adaptations:  # on the instance: for a subclass of nn.Sequential, `onelip.summary` cannot assume its forward
            network.extra_repr = partial("\n".join, adaptations)
        guard_image_shape(network, self._image)
        return network

    def _linear(self, kind: str, layer: nn.Module, shape: tuple[int, ...], activation: bool) -> None:
        self._counts[kind] += 1
        name = f"{kind}{self._counts[kind]}"
        self._layers[name] = layer
        for change in self._make.changes:
            self._changes[change].append(name)
        self._last = (name, self.channels)
        self.shape = shape
        if activation and self.is_centred:
            self.centre(f"{name}_centre")
        if activation:
            check_even(f"the number of channels of {name}", shape[0])
            self._layers[f"{name}_act"] = self._make.activation(shape[0])

    def _replace_head(self) -> None:
        """Replace the last layer by that of the method, with one output per class, if it has its own."""
        if not self._make.has_own_head:
            return
        name, inputs = self._last
        dense = name.startswith("fc")
        plain = nn.Linear(inputs, self.num_classes) if dense else nn.Conv2d(inputs, self.num_classes, 1)
        head = self._make.head(plain)
        if head is not None:
            self._layers[name] = head
            self.shape = (self.num_classes, *self.size)


def height_and_width(image_size: ImageSize) -> tuple[int, int]:
    """Return (height, width) from one number for square images, or from (height, width).

    Raises:
        ValueError: unless the numbers are positive integers.

    Examples:
        >>> height_and_width(32), height_and_width((28, 32))
        ((32, 32), (28, 32))
    """
    sizes = tuple(image_size) if isinstance(image_size, Sequence) else (image_size, image_size)
    if len(sizes) != 2 or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in sizes):
        raise ValueError(f"expected image_size to be a positive integer or (height, width), got {image_size!r}")
    return sizes[0], sizes[1]


def check_even(name: str, value: object) -> int:
    """Return `value` if it is an even integer of at least 2: MaxMin sorts channels in pairs.

    Raises:
        ValueError: for anything else.
    """
    number = check_integer(name, value, 2)
    if number % 2:
        raise ValueError(
            f"expected {name} to be even, because MaxMin sorts channels in pairs, got {number}; "
            f"choose {number - 1} or {number + 1}"
        )
    return number
