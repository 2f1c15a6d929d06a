"""Settings of parametrizations in state dicts: parameters are never loaded into a different map.

A parameter P gives another weight under another method, side or constant, and nothing in its name or shape shows that.
So each parametrization saves its class and settings beside its parameters, under torch's key `_extra_state`. They are
JSON in a uint8 tensor, because weight files contain tensors only.
"""

import json
from typing import Any

import torch
from torch import Tensor, nn

# The layer defines these, and torch compares the shapes itself.
_NOT_SETTINGS = ("training", "geometry", "weight_shape")


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


def _difference(saved: Tensor, own: dict[str, Any]) -> str | None:
    """What to tell the user if the saved settings are not the own ones; None if they are."""
    try:
        theirs = json.loads(bytes(saved.tolist()))
        if theirs == own:
            return None
        names = [name for name in {**theirs, **own} if name != "class" and theirs.get(name) != own.get(name)]
        both = [_shown(settings, names) for settings in (theirs, own)]
    except (ValueError, TypeError, KeyError):
        return "the settings of the parametrization in the state dict are damaged"
    return (
        f"the state dict is of {both[0]}, and this is {both[1]}: the same parameters are another function; build the "
        "layer with the settings of the saved one, or load the plain weights, onelip.bake(saved).state_dict()"
    )


def _shown(settings: dict[str, Any], names: list[str]) -> str:
    listed = ", ".join(f"{name}={settings[name]!r}" for name in names if name in settings)
    return settings["class"] + (f" with {listed}" if listed else "")
