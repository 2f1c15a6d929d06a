"""State dicts of parametrized layers: settings are saved with the parameters, and plain weights can be assigned.

A parameter P gives another weight under another method, side or constant, and nothing in its name or shape shows that.
So each parametrization saves its class and settings beside its parameters, under torch's key `_extra_state`. They are
JSON in a uint8 tensor, because weight files contain tensors only.

Plain weights are accepted too: `layer.weight = other.weight`, and state dicts of plain networks. torch's property
accepts tensors, but `nn.Module` rejects an `nn.Parameter` under a name that is a property, and `load_state_dict` knows
only the parameter of the parametrization. Both methods are overridden in the class that torch creates for each
parametrized layer, not by hooks of the layer, so `remove_parametrizations` removes them too.
"""

import inspect
import json
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

# The layer defines these, and torch compares the shapes itself; is_unscaled is set within steps of training only.
_NOT_SETTINGS = ("training", "geometry", "weight_shape", "is_unscaled")


class SavedSettings(nn.Module):
    """Base class of parametrizations whose state dict contains their class and settings.

    The settings are the public attributes, also of submodules, that are numbers, text, None, or sequences of these. An
    attribute that changes in training must have a name that starts with an underscore.

    Examples:
        >>> class Scaled(SavedSettings):
        ...     def __init__(self, factor):
        ...         super().__init__()
        ...         self.factor = factor
        >>> try:
        ...     Scaled(2.0).load_state_dict(Scaled(3.0).state_dict())
        ... except RuntimeError as error:
        ...     print(str(error).splitlines()[1].strip().partition(":")[0])
        the state dict is of Scaled with factor=3.0, and this is Scaled with factor=2.0
    """

    def get_extra_state(self) -> Tensor:
        """Return class and settings, for `state_dict`."""
        return torch.tensor(list(json.dumps(_settings(self), sort_keys=True).encode()), dtype=torch.uint8)

    def extra_repr(self) -> str:
        return settings_shown(self)

    def set_extra_state(self, state: Any) -> None:
        """Do nothing: `_load_from_state_dict` has compared the settings."""

    def _load_from_state_dict(
        self,
        state_dict: dict[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        saved = state_dict.get(f"{prefix}_extra_state")
        if isinstance(saved, Tensor) and (difference := _difference(saved, _settings(self))) is not None:
            where = prefix.partition("parametrizations.")[0].rstrip(".")
            error_msgs.append(f"{f'{where}: ' if where else ''}{difference}")
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )


def settings_shown(module: nn.Module) -> str:
    """Return the arguments of the constructor that are settings of the module, for `extra_repr`.

    Examples:
        >>> settings_shown(nn.Softplus(beta=2.0))
        'beta=2.0, threshold=20.0'
    """
    values = vars(module)
    names = [name for name in inspect.signature(type(module).__init__).parameters if name not in _NOT_SETTINGS]
    shown = {name: values[name] for name in names if name in values and _is_simple(values[name])}
    rounded = {name: float(f"{value:.6g}") if isinstance(value, float) else value for name, value in shown.items()}
    return ", ".join(f"{name}={value!r}" for name, value in rounded.items())


def _settings(map: nn.Module) -> dict[str, Any]:
    found = {
        f"{path}.{name}" if path else name: value
        for path, module in map.named_modules()
        for name, value in vars(module).items()
        if not name.startswith("_") and name not in _NOT_SETTINGS and _is_simple(value)
    }
    # Through JSON, so that tuples are lists here too.
    return json.loads(json.dumps({"class": type(map).__name__, **found}))


def _is_simple(value: object) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_simple, value))
    return value is None or isinstance(value, bool | int | float | str)


def settings_difference(saved: Tensor, own: Tensor) -> str | None:
    """Return how two values of `_extra_state` differ, the first one from a file; None if they are the same."""
    return _difference(saved, json.loads(bytes(own.tolist())))


def _difference(saved: Tensor, own: dict[str, Any]) -> str | None:
    """The message for a layer whose settings differ from the saved ones; None if they agree."""
    try:
        theirs = json.loads(bytes(saved.tolist()))
        if all(theirs.get(name) == own.get(name) for name in {**theirs, **own}):  # None is the same as absent
            return None
        names = [name for name in {**theirs, **own} if name != "class" and theirs.get(name) != own.get(name)]
        both = [_shown(settings, names) for settings in (theirs, own)]
    except (ValueError, TypeError, KeyError, AttributeError):
        return "the settings of the parametrization in the state dict are damaged"
    return (
        f"the state dict is of {both[0]}, and this is {both[1]}: the same parameters are another function; build the "
        "layer with the settings of the saved one, or load the plain weights, onelip.bake(saved).state_dict()"
    )


def _shown(settings: dict[str, Any], names: list[str]) -> str:
    listed = ", ".join(f"{name}={settings[name]!r}" for name in names if name in settings)
    return settings["class"] + (f" with {listed}" if listed else "")


def accept_plain_weights(module: nn.Module) -> None:
    """Let a parametrized layer accept Parameters by assignment and plain weights from a state dict.

    Pickling such a layer as a whole raises an error that names the alternative.
    """
    kind: Any = type(module)  # the class that torch created for this layer and its copies

    def register_parameter(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and parametrize.is_parametrized(self, name) and _plain_shape(self, name):
            setattr(self, name, param.detach())
        else:
            super(kind, self).register_parameter(name, param)

    def _load_from_state_dict(self: nn.Module, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        _, _, _, _, error_msgs = rest
        lists = self.parametrizations
        assert isinstance(lists, nn.ModuleDict)
        for name in lists:
            if reason := _translate(self, name, state_dict, prefix):
                error_msgs.append(reason)
        super(kind, self)._load_from_state_dict(state_dict, prefix, *rest)

    def __getstate__(self: nn.Module) -> Any:
        raise RuntimeError(
            "a parametrized layer cannot be pickled: save model.state_dict() and load it into a model that is built "
            "the same way, or save the plain network, torch.save(onelip.bake(model), path)"
        )

    kind.__getstate__ = __getstate__
    kind.register_parameter = register_parameter
    kind._load_from_state_dict = _load_from_state_dict


def _plain_shape(module: nn.Module, name: str) -> tuple[int, ...] | None:
    """Shape of the plain weight, if the last map is a parametrization of onelip; else None."""
    return getattr(_maps(module, name)[-1], "weight_shape", None)


def _maps(module: nn.Module, name: str) -> Any:
    lists = module.parametrizations
    assert isinstance(lists, nn.ModuleDict)
    return lists[name]


@torch.no_grad()
def _translate(module: nn.Module, name: str, state_dict: dict[str, Any], prefix: str) -> str | None:
    """Replace a plain weight in a state dict by the parameter that yields it; return an error message if impossible.

    All other state of the parametrization (learned channel weights, vectors of a power iteration) is unchanged: the
    right inverse depends on it.
    """
    maps = _maps(module, name)
    own = f"{prefix}parametrizations.{name}."
    W = state_dict.get(prefix + name)
    expected = _plain_shape(module, name)
    if expected is None or not isinstance(W, Tensor) or any(key.startswith(own) for key in state_dict):
        return None
    kept = maps.state_dict()
    original = kept["original"]
    if any(tensor.is_meta for key, tensor in kept.items() if key != "original" and isinstance(tensor, Tensor)):
        return None  # the right inverse needs their values; torch reports the missing keys
    del state_dict[prefix + name]
    state_dict.update({own + key: value for key, value in kept.items()})
    if W.shape != expected:
        return f"size mismatch for {prefix}{name}: expected a weight of shape {expected}, got {tuple(W.shape)}"
    P = W.to(original.dtype) if original.is_meta else W.to(original)  # meta with assign=True: W decides the device
    try:
        for map in reversed(maps):
            P = map.right_inverse(P)
    except (ValueError, RuntimeError, AttributeError, NotImplementedError) as error:
        return f"{prefix}{name}: {type(maps[-1]).__name__} cannot represent this weight: {error}"
    state_dict[own + "original"] = P
    return None
