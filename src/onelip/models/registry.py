"""Registry of models, as in timm: `create_model`, `list_models`, `register_model`."""

import fnmatch
import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import nn

from onelip.core.docstrings import arguments_in, first_line
from onelip.core.errors import check_name_free, did_you_mean
from onelip.core.imports import load_entry_points
from onelip.models.chain import ImageSize, height_and_width

_MODELS: dict[str, Callable[..., nn.Module]] = {}
_BASES: dict[Callable[..., Any], Callable[..., Any]] = {}  # builder -> builder that it passes its **kwargs to

Builder = TypeVar("Builder", bound=Callable[..., Any])


def register_model(builder: Builder) -> Builder:
    """Register a function that builds a model under its own name; use it as a decorator.

    Underscores in the name become dashes. The function takes num_classes, image_size (height, width), in_channels and
    method as keyword arguments with defaults, and any other options.

        @onelip.register_model
        def one_layer(*, num_classes=10, image_size=(32, 32), in_channels=3, method="aol"):
            layer = nn.Linear(in_channels * math.prod(image_size), num_classes)
            return nn.Sequential(nn.Flatten(), layer if method is None else onelip.constrain(layer, method))

        model = onelip.create_model("one-layer", image_size=8)

    Args:
        builder: the function.

    Returns:
        The function, unchanged.

    Raises:
        ValueError: if another function is registered under this name, or a name is given instead of a function.
    """
    if not callable(builder):
        raise ValueError(
            f"expected a function, got {builder!r}: write @onelip.register_model without a name; the model has that of "
            "the function"
        )
    name = _spelled(builder.__name__)
    check_name_free(name, builder, _MODELS)
    _MODELS[name] = builder
    return builder


def create_model(
    name: str,
    *,
    num_classes: int = 10,
    image_size: ImageSize = 32,
    in_channels: int = 3,
    **kwargs: Any,
) -> nn.Module:
    """Create a model by name, on torch's default device and in its default dtype.

    Layers that the method does not support are replaced: circular for zero padding, square layers with zero or ignored
    channels, concatenation pooling and a 1x1 convolution for a stride. The models of this package list such changes in
    `model.adaptations`, a tuple of lines, and `print(model)` shows them.

    Both memory formats work; `model.to(memory_format=torch.channels_last)`, with images in the same format, is faster.

    Args:
        name: one of `list_models()`; dashes and underscores are equivalent.
        num_classes: number of logits.
        image_size: one number, or (height, width). The model raises an error for images of other sizes.
        in_channels: 3 for colour, 1 for greyscale.
        **kwargs: options of the model. All models but cnn-teacher have `method`, a name of `onelip.list_methods()` or
            None for plain torch layers (by default "aol", and None for standard-cnn), and `method_options`, a
            dictionary of keyword arguments of the method, with `normalise_last_layer=True` for a last layer with rows
            of norm 1. For widths and depths see `onelip models NAME`.

    Shape:
        - Input: (N, in_channels, height, width).
        - Output: (N, num_classes).

    Returns:
        The model, an `nn.Sequential` for all models of this package.

    Raises:
        ValueError: if the name is unknown, or the model does not support this size, width or method.

    Examples:
        >>> import torch
        >>> model = create_model("patchwise-tiny", image_size=8, in_channels=1)
        >>> model(torch.zeros(2, 1, 8, 8)).shape
        torch.Size([2, 10])
        >>> print(*create_model("patchwise-tiny", method="cayley").adaptations, sep="\\n")
        circular instead of zero padding: conv2, conv3, conv4
    """
    builder = model_builder(name)
    if builder is None:
        hint = did_you_mean(_spelled(name), _MODELS)
        raise ValueError(f"unknown model {name!r}; known: {', '.join(list_models())}{hint}")
    size = height_and_width(image_size)
    return builder(num_classes=num_classes, image_size=size, in_channels=in_channels, **kwargs)


def model_builder(name: str) -> Callable[..., nn.Module] | None:
    """Return the function that builds a model; None if the name is unknown. Entry points are searched too."""
    if _spelled(name) not in _MODELS:
        load_entry_points("onelip.models")
    return _MODELS.get(_spelled(name))


def list_models(filter: str = "*") -> list[str]:
    """Return the names of all models that match a pattern with wildcards.

    Args:
        filter: pattern, such as "aol-*".

    Returns:
        The names in alphabetical order.

    Examples:
        >>> list_models("aol-[sml]*")
        ['aol-large', 'aol-medium', 'aol-small', 'aol-std']
    """
    load_entry_points("onelip.models")
    return sorted(fnmatch.filter(_MODELS, _spelled(filter)))


def model_options(name: str) -> dict[str, Any]:
    """Return the arguments of a model besides num_classes, image_size and in_channels, with their defaults.

    Args:
        name: one of `list_models()`.

    Returns:
        The defaults by the name of the argument.

    Examples:
        >>> sorted(model_options("aol-small"))
        ['channels', 'convs', 'linears', 'method', 'method_options', 'patch', 'width']
    """
    parameters = inspect.signature(_MODELS[_spelled(name)]).parameters
    return {
        key: parameter.default
        for key, parameter in parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY and key not in ("num_classes", "image_size", "in_channels")
    }


def takes_arguments_of(base: Callable[..., Any]) -> Callable[[Builder], Builder]:
    """Replace the **kwargs in the signature of a builder by the arguments of `base`; a decorator."""

    def show(builder: Builder) -> Builder:
        _BASES[builder] = base
        own = inspect.signature(builder)
        named = {name: p for name, p in own.parameters.items() if p.kind is not p.VAR_KEYWORD}
        parameters = {**inspect.signature(base).parameters, **named}
        ordered = sorted(parameters.values(), key=lambda p: p.kind)
        # inspect documents this attribute, but type checkers do not know it.
        builder.__signature__ = own.replace(parameters=ordered)  # pyright: ignore[reportFunctionMemberAccess]
        return builder

    return show


@dataclass(frozen=True)
class ModelDescription:
    """Description of a model, as `onelip models NAME` prints it.

    Attributes:
        name: name of the model.
        title: one line.
        method: the default method of its layers; None for plain layers.
        options: other arguments, with their defaults.
        texts: descriptions of the arguments.
        layers: the table of its layers.
    """

    name: str
    title: str
    method: str | None
    options: dict[str, Any]
    texts: dict[str, str]
    layers: str


def describe_model(name: str) -> ModelDescription:
    """Return the description of a model, from the signature and the docstring of its builder.

    Args:
        name: one of `list_models()`.

    Returns:
        Title, method, options and layers.

    Examples:
        >>> found = describe_model("aol-fc")
        >>> found.title, found.options, found.texts["width"]
        ('Nine fully connected layers (AOL-FC).', {'width': 4096, 'depth': 9}, 'features of every layer; even.')
    """
    builder = _MODELS[_spelled(name)]
    sources = [builder]
    while sources[-1] in _BASES:
        sources.append(_BASES[sources[-1]])
    options = model_options(name)
    method = options.pop("method", None)
    options.pop("method_options", None)
    texts = {key: text for source in reversed(sources) for key, text in arguments_in(source).items()}
    layers = "\n\n".join(filter(None, (_body(source) for source in sources if inspect.isfunction(source))))
    return ModelDescription(name, first_line(builder), method, options, texts, layers)


def _body(thing: object) -> str:
    """A docstring without its first line and its sections."""
    text = (inspect.getdoc(thing) or "").partition("\n\n")[2]
    return re.split(r"^\w+:\n    ", text, maxsplit=1, flags=re.MULTILINE)[0].strip("\n")


def _spelled(name: str) -> str:
    return name.lower().replace("_", "-")
