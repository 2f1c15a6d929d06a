"""Constrain the linear layers of a whole model."""

import copy
import fnmatch
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from onelip.core.bake import check_module
from onelip.core.errors import UnsupportedLayer
from onelip.core.geometry import LINEAR_LAYERS
from onelip.core.lipschitz_module import LipschitzModule
from onelip.core.parametrization import find_parametrization, parametrization_list
from onelip.methods.registry import Method, get_method

Model = TypeVar("Model", bound=nn.Module)


def constrain(
    model: Model,
    method: str | Method | Callable[..., nn.Module] = "aol",
    *,
    skip: Iterable[str] = (),
    strict: bool = False,
    example: Tensor | None = None,
    **options: Any,
) -> Model:
    """Constrain every linear layer of a model in place, and return the model.

    Layers that the method does not support, that share their weight, or that have another parametrization (such as
    `weight_norm` of torch) are left unchanged and reported with a `UserWarning`, and so are other modules with weight
    matrices (LSTM, attention, Embedding, Bilinear). Layers that are constrained already are unchanged.
    `onelip.summary(model)` lists what is known of each module.

    Methods whose mechanism is "projection", "penalty" or "loss" leave the weights free; in training they use
    `onelip.project` or a loss of `onelip.losses`. Methods that replace layers put new modules into the model. If the
    model itself is a layer, the new module is returned.

    Args:
        model: any module.
        method: a name from `onelip.list_methods()`, a `Method`, or a function `(module, **options)` such as
            `onelip.aol` that returns the layer and raises `onelip.UnsupportedLayer` for layers that it does not
            support.
        skip: names of modules to leave unchanged, as in `model.named_modules()`; `*` matches any characters.
        strict: raise an error if the method does not support a layer, before anything is changed.
        example: an input of the model. It is run once to find the input size of each convolution, for methods that are
            made for one size (Cayley, LOT, BRO, ECO, Sandwich).
        **options: passed to the method for each layer, as in `onelip.aol(module, **options)`.

    Returns:
        The same model, or the new module if the model itself is a layer that the method replaces.

    Raises:
        UnsupportedLayer: with `strict`, if a layer is not supported.
        ValueError: for an unknown method, invalid options, or a pattern of `skip` that matches no module.

    Warns:
        UserWarning: with the layers that are left unconstrained, and the reasons.

    Examples:
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.LazyLinear(10))
        >>> _ = model(torch.zeros(1, 3, 8, 8))
        >>> import onelip
        >>> onelip.summary(constrain(model, "aol")).constant
        1.0
    """
    check_module(model)
    chosen = _as_method(method)
    patterns = [skip] if isinstance(skip, str) else list(skip)
    layers, constrained, refused = _candidates(model, patterns)
    _check_patterns(model, patterns)
    sizes = _input_sizes(model, example) if example is not None and chosen.needs_input_size else {}
    settings = {name: options | ({"input_size": sizes[name]} if sizes.get(name) else {}) for name, _ in layers}
    owners = Counter(id(p) for module in model.modules() for p in module._parameters.values() if p is not None)
    for name, layer in layers:
        if owners[id(layer._parameters.get("weight"))] > 1:
            refused[name] = "its weight is shared with another module, which would change as well; untie them first"
        elif reason := _refusal(layer, chosen, settings[name]):
            refused[name] = reason
    if strict and refused:
        raise UnsupportedLayer(
            f"{chosen.name} does not support {len(refused)} layers; nothing was changed:\n{_listed(refused)}"
        )
    for name, layer in layers:
        if name not in refused:
            mode = layer.training
            made = chosen.apply(layer, **settings[name]).train(mode)  # new modules are in training mode
            if made is not layer:
                model = _put(model, layer, made)
    # Layers that are constrained already do not get the options of this call.
    unchanged = refused | (constrained if options else {})
    if unchanged:
        count = "1 layer is" if len(unchanged) == 1 else f"{len(unchanged)} layers are"
        warnings.warn(f"{count} left unchanged:\n{_listed(unchanged)}", stacklevel=2)
    return model


def _as_method(method: str | Method | Callable[..., nn.Module]) -> Method:
    if isinstance(method, str):
        return get_method(method)
    if isinstance(method, Method):
        return method
    if not callable(method):
        raise ValueError(f"expected a method by name, a Method or a function of a layer, got {method!r}")
    name = getattr(method, "__name__", type(method).__name__)
    return Method(name=name, title=name, apply=method)


def _listed(reasons: dict[str, str]) -> str:
    return "\n".join(f"  {name or '(model)'}: {reason}" for name, reason in reasons.items())


def _put(model: Model, old: nn.Module, new: nn.Module) -> Model:
    """Replace a module everywhere in the model."""
    if model is old:
        return new  # pyright: ignore[reportReturnType]  a layer for a layer
    for parent in list(model.modules()):
        for name, child in parent._modules.items():
            if child is old:
                parent._modules[name] = new
    return model


@torch.no_grad()
def _input_sizes(model: nn.Module, example: Tensor) -> dict[str, tuple[int, ...] | None]:
    """Return the spatial size of the input of each convolution; None if it has inputs of several sizes."""
    seen: dict[str, tuple[int, ...] | None] = {}

    def remember(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            size = tuple(args[0].shape[2:])
            seen[name] = size if seen.get(name, size) == size else None

        return hook

    handles = [
        module.register_forward_pre_hook(remember(name))
        for name, module in model.named_modules()
        if isinstance(module, nn.modules.conv._ConvNd)
    ]
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()(example)
    finally:
        for module, mode in modes:
            module.training = mode
        for handle in handles:
            handle.remove()
    return seen


def _candidates(
    model: nn.Module, skip: list[str]
) -> tuple[list[tuple[str, nn.Module]], dict[str, str], dict[str, str]]:
    """Return the linear layers, those that are constrained already, and other modules with weights, with the reason."""
    layers: list[tuple[str, nn.Module]] = []
    constrained: dict[str, str] = {}
    others: dict[str, str] = {}
    for name, module in model.named_modules():
        if any(fnmatch.fnmatchcase(name, pattern) for pattern in skip) or "parametrizations" in name.split("."):
            continue
        if taken := _constrained_by(module):
            constrained[name] = f"constrained already ({taken})"
        elif isinstance(module, LINEAR_LAYERS):
            layers.append((name, module))
        elif not isinstance(module, LipschitzModule) and (weights := _matrices(module)):
            listed = ", ".join(weights)
            others[name] = f"no method constrains {listed} of {type(module).__name__}; use other layers, or skip it"
    return layers, constrained, others


def _matrices(module: nn.Module) -> list[str]:
    """Return the names of the trained weights of the module itself that have at least two axes."""
    return [name for name, p in module._parameters.items() if p is not None and p.requires_grad and p.dim() >= 2]


def _constrained_by(module: nn.Module) -> str | None:
    if (found := find_parametrization(module)) is not None:
        return found.describe()
    if isinstance(module, LipschitzModule) and parametrize.is_parametrized(module, "weight"):
        return parametrize.type_before_parametrizations(module).__name__  # the module of a method, such as SOC
    return None


def _check_patterns(model: nn.Module, skip: list[str]) -> None:
    names = [name for name, _ in model.named_modules()]
    for pattern in skip:
        if not fnmatch.filter(names, pattern):
            raise ValueError(
                f"expected skip to name modules of the model, got {pattern!r}, which matches none; "
                "see the names in model.named_modules()"
            )


def _refusal(layer: nn.Module, method: Method, options: dict[str, Any]) -> str | None:
    """Return why the method does not support this layer, from a trial on a meta copy; raise for invalid options."""
    if not isinstance(layer, method.layers):
        return f"{method.name} does not support {type(layer).__name__}"
    if (maps := parametrization_list(layer)) is not None:
        names = ", ".join(type(map).__name__.lstrip("_") for map in maps)
        command = 'torch.nn.utils.parametrize.remove_parametrizations(layer, "weight")'
        return f"its weight is parametrized by {names}; use {command} first"
    if layer._parameters.get("weight") is None:
        return "its weight is computed by a hook (such as torch.nn.utils.weight_norm); remove the hook first"
    weightless: dict[int, Any] = {
        id(p): nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad)
        for p in layer.parameters()
        if not isinstance(p, nn.UninitializedParameter)
    }
    try:
        method.apply(copy.deepcopy(layer, weightless), **options)
    except UnsupportedLayer as error:
        return str(error)
    return None
