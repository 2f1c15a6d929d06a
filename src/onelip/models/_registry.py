"""Models by name, in the manner of timm: `create_model`, `list_models`, `register_model`."""

import difflib
import fnmatch
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from torch import nn

from onelip.models._sizes import ImageSize

_MODELS: dict[str, Callable[..., nn.Module]] = {}
_BASES: dict[Callable[..., nn.Module], Callable[..., nn.Module]] = {}  # whose arguments a builder takes

Builder = TypeVar("Builder", bound=Callable[..., nn.Module])


def _spelled(name: str) -> str:
    return name.lower().replace("_", "-")


def register_model(builder: Builder) -> Builder:
    """Make a function known to `create_model` by its name; use it as a decorator.

    The function takes num_classes, image_size, in_channels and method as keywords, all with defaults, and others of its
    own. Not run as a test, since it would stay registered:

        @register_model
        def one_layer(*, num_classes=10, image_size=32, in_channels=3, method="aol"):
            return nn.Sequential(nn.Flatten(), nn.Linear(in_channels * image_size**2, num_classes))

        model = create_model("one-layer", image_size=8)
    """
    name = _spelled(builder.__name__)
    known = _MODELS.get(name)
    # The same function again is a cell of a notebook run twice, or a module reloaded.
    if known is not None and (known.__module__, known.__qualname__) != (builder.__module__, builder.__qualname__):
        raise ValueError(
            f"expected a name that is not taken, got {name!r}, which is {known.__module__}.{known.__qualname__}; "
            "rename the function"
        )
    _MODELS[name] = builder
    return builder


def arguments_of(base: Callable[..., nn.Module]) -> Callable[[Builder], Builder]:
    """Show the arguments of `base` in place of a builder's **kwargs: for help(), and for `options_of`."""

    def show(builder: Builder) -> Builder:
        _BASES[builder] = base
        own = inspect.signature(builder)
        named = {name: p for name, p in own.parameters.items() if p.kind is not p.VAR_KEYWORD}
        parameters = {**inspect.signature(base).parameters, **named}
        # The documented way to tell inspect; not an attribute that annotations know of.
        builder.__signature__ = own.replace(parameters=list(parameters.values()))  # pyright: ignore[reportFunctionMemberAccess]
        return builder

    return show


def builder_of(name: str) -> tuple[Callable[..., nn.Module], Callable[..., nn.Module] | None]:
    """The function that builds a model, and the one whose arguments it takes besides its own, if there is one."""
    builder = _MODELS[_spelled(name)]
    return builder, _BASES.get(builder)


def options_of(name: str) -> dict[str, Any]:
    """What a model takes besides the arguments of `create_model`, with the defaults.

    Example:
        >>> sorted(options_of("aol-small"))
        ['channels', 'convs', 'linears', 'method', 'method_options', 'patch', 'width']
    """
    parameters = inspect.signature(_MODELS[_spelled(name)]).parameters
    return {
        key: parameter.default
        for key, parameter in parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY and key not in ("num_classes", "image_size", "in_channels", "conv3")
    }


def list_models(filter: str = "*") -> list[str]:
    """Names of all models that match a pattern with wildcards.

    Example:
        >>> list_models("aol-[sml]*")
        ['aol-large', 'aol-medium', 'aol-small', 'aol-std']
    """
    return sorted(fnmatch.filter(_MODELS, _spelled(filter)))


def create_model(
    name: str,
    *,
    num_classes: int = 10,
    image_size: ImageSize = 32,
    in_channels: int = 3,
    method: str | None = "default",
    **kwargs: Any,
) -> nn.Module:
    """Build a model, on the CPU and in float32 unless torch's defaults say otherwise.

    It takes images (batch, in_channels, height, width) and gives logits (batch, num_classes). Both memory formats work;
    `model.to(memory_format=torch.channels_last)`, with the images likewise, is the faster one.

    Args:
        name: one of `list_models()`; dashes and underscores are the same.
        num_classes: number of logits.
        image_size: one number, or (height, width).
        in_channels: 3 for colour, 1 for grayscale.
        method: a name of `onelip.list_methods()`; None or "none" for plain torch layers; "default" for the model's own,
            which is "aol" for all but standard-cnn.
        **kwargs: what else the model knows (widths, depths, method_options); see its own docstring.

    Example:
        >>> import torch
        >>> model = create_model("patchwise-tiny", image_size=8, in_channels=1)
        >>> model(torch.zeros(2, 1, 8, 8)).shape
        torch.Size([2, 10])
    """
    builder = _MODELS.get(_spelled(name))
    if builder is None:
        near = difflib.get_close_matches(_spelled(name), _MODELS, n=1, cutoff=0.4)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"expected one of the models {', '.join(list_models())}, got {name!r}{hint}")
    if method != "default":
        kwargs["method"] = method
    return builder(num_classes=num_classes, image_size=image_size, in_channels=in_channels, **kwargs)
