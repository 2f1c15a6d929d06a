"""Base class of all parametrizations: a map P -> W, and the constant proved for the layer with weight W.

A parametrization states a constant L with ||W x|| <= L ||x|| for every P, or None if it proves none; evaluation and
export then use the bound of the stored weight (`onelip.bounds`). The statement holds for the geometry that the
parametrization was created for, and only while the layer keeps that geometry.
"""

import inspect
import json
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from onelip.core.errors import UnsupportedLayer
from onelip.core.geometry import Geometry, geometry_of
from onelip.core.lipschitz_module import (
    Bound,
    InputSizeGuard,
    guard_input_size,
    why_other_map,
    why_other_mode,
)

# ---- State dicts of parametrized layers: settings are saved with the parameters, and plain weights can be assigned
#
# A parameter P gives another weight under another method, side or constant, and nothing in its name or shape shows
# that. So each parametrization saves its class and settings beside its parameters, under torch's key `_extra_state`.
# They are JSON in a uint8 tensor, because weight files contain tensors only.
#
# Plain weights are accepted too: `layer.weight = other.weight`, and state dicts of plain networks. torch's property
# accepts tensors, but `nn.Module` rejects an `nn.Parameter` under a name that is a property, and `load_state_dict`
# knows only the parameter of the parametrization. Both methods are overridden in the class that torch creates for each
# parametrized layer, not by hooks of the layer, so `remove_parametrizations` removes them too.


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


# ---- The base class, and its use on layers

Layer = TypeVar("Layer", bound=nn.Module)


class LipschitzParametrization(SavedSettings):
    """Base class of maps from a free parameter to a weight whose layer has a known constant.

    Subclasses override `forward` and `describe`, and `constant_in` if they prove a constant. State dicts contain the
    class and the settings, and are loaded only into a parametrization that has the same: see `SavedSettings`.

    Args:
        geometry: geometry of the layer, from `onelip.core.geometry.geometry_of`.
        weight_shape: shape of the weight.
        lipschitz: target Lipschitz constant.

    Examples:
        >>> class Halved(LipschitzParametrization):
        ...     def forward(self, P):
        ...         return P / 2
        >>> layer = nn.Linear(2, 2)
        >>> _ = attach(layer, Halved(geometry_of(layer), layer.weight.shape))
        >>> find_parametrization(layer).constant_in(torch.float32) is None  # no constant is proved
        True
    """

    def __init__(self, geometry: Geometry, weight_shape: Sequence[int], *, lipschitz: float = 1.0) -> None:
        super().__init__()
        self.geometry = geometry
        self.weight_shape = tuple(weight_shape)
        self.lipschitz = check_lipschitz(lipschitz)

    @property
    def orthogonal_side(self) -> str | None:
        """The side ("inputs" or "outputs") whose channels P should keep orthonormal, for `onelip.optim`.

        None if P is not an operator like W, or gains nothing by being orthogonal.
        """
        return None

    def forward(self, P: Tensor) -> Tensor:
        """Return the weight W of the layer, with the shape and dtype of P."""
        raise NotImplementedError

    def right_inverse(self, W: Tensor) -> Tensor:
        """Return a parameter whose weight is W or close to it; by default W itself. Overrides call this one first.

        Raises:
            ValueError: if W does not have the shape of the weight.
        """
        if tuple(W.shape) != self.weight_shape:
            raise ValueError(f"expected a weight of shape {self.weight_shape}, got {tuple(W.shape)}")
        return W

    def constant_in(self, dtype: torch.dtype) -> float | None:
        """Return the constant proved for the layer in eval mode with its weight stored in `dtype`; None if unproved."""
        return None

    def estimated_constant(self, P: Tensor) -> Tensor:
        """Return an estimate of the constant for training losses, differentiable in P; never used in certificates."""
        proved = self.constant_in(P.dtype)
        if proved is None:
            raise NotImplementedError(f"{type(self).__name__} has neither a proved constant nor an estimate")
        return P.new_tensor(proved)

    def describe(self) -> str:
        """Return a short description for `onelip.summary`."""
        return type(self).__name__

    def advice(self) -> str | None:
        """Return a hint if other settings would work better, else None."""
        return None

    def mismatch(self, module: nn.Module) -> str | None:
        """Return why the proved constant no longer applies to the layer, or None if it does.

        The settings of a layer can be changed after a parametrization was attached to it.
        """
        promised = self.geometry.needs_size_divisible_by
        try:
            fits = geometry_of(module, promised) == self.geometry
        except UnsupportedLayer as error:
            return str(error)
        if not fits:
            return f"its settings were changed after {type(self).__name__} was applied"
        if promised and not any(isinstance(hook, InputSizeGuard) for hook in module._forward_pre_hooks.values()):
            return "the hook that checks its input size was removed"
        return None


def check_lipschitz(lipschitz: object, dtype: torch.dtype | None = None) -> float:
    """Return a Lipschitz constant as a float.

    Raises:
        ValueError: unless it is a positive number that `dtype` can represent.
    """
    largest = torch.finfo(dtype or torch.float64).max
    if isinstance(lipschitz, bool) or not isinstance(lipschitz, (int, float)) or not 0 < lipschitz <= largest:
        raise ValueError(f"expected lipschitz to be a positive number of at most {largest:.3g}, got {lipschitz!r}")
    return float(lipschitz)


def working_type(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype to compute a weight in: float32 for half precision, since a bfloat16 Gram matrix proves nothing.

    Raises:
        TypeError: for types other than float16, bfloat16, float32 and float64.
    """
    if dtype in (torch.bfloat16, torch.float16):
        return torch.float32
    if dtype not in (torch.float32, torch.float64):
        raise TypeError(
            f"expected a weight of a real floating-point type, got {dtype}; cast the layer to torch.float32"
        )
    return dtype


def weight_of(module: nn.Module, geometry: Geometry, name: str = "weight") -> Tensor:
    """Return the weight that a method is applied to, after checking its shape and dtype."""
    weight = getattr(module, name, None)
    if not isinstance(weight, Tensor) or weight.dim() != 2 + len(geometry.kernel_size):
        shape = tuple(weight.shape) if isinstance(weight, Tensor) else weight
        raise ValueError(
            f"expected {name!r} to be a weight of {type(module).__name__}, (out, in, ...), got {shape}; "
            "pass the name of the weight as `name`"
        )
    working_type(weight.dtype)
    return weight


def attach(module: Layer, parametrization: LipschitzParametrization, name: str = "weight") -> Layer:
    """Register a parametrization on the weight of a layer in place, with the input size check that its bound needs.

    Args:
        module: the layer.
        parametrization: the map from the parameter to the weight.
        name: name of the weight.

    Returns:
        The layer.

    Raises:
        ValueError: if the weight has a parametrization of onelip already.
        UnsupportedLayer: if the weight is computed from several parameters.
    """
    found = parametrization_list(module, name)
    if found is not None and any(isinstance(map, LipschitzParametrization) for map in found):
        taken = next(type(map).__name__ for map in found if isinstance(map, LipschitzParametrization))
        raise ValueError(
            f"{name!r} is already parametrized by {taken}; "
            f"call torch.nn.utils.parametrize.remove_parametrizations(module, {name!r}) first"
        )
    if found is not None and not found.is_tensor:  # projection, reset and losses need the one parameter
        taken = ", ".join(type(map).__name__.lstrip("_") for map in found)
        raise UnsupportedLayer(
            f"expected {name!r} to be computed from one parameter, got {found.ntensors} parameters of {taken}; "
            f"call torch.nn.utils.parametrize.remove_parametrizations(module, {name!r}) first"
        )
    register(module, parametrization, name)
    accept_plain_weights(module)
    if parametrization.geometry.needs_size_divisible_by is not None:
        guard_input_size(module, parametrization.geometry.needs_size_divisible_by)
    return module


def register(module: nn.Module, map: nn.Module, name: str = "weight") -> None:
    """Register a map by torch, in the mode of the layer, and record the shape of its parameter for `why_other_map`."""
    # unsafe=True only skips torch's check that the map keeps shape and dtype, which runs the map.
    parametrize.register_parametrization(module, name, map, unsafe=True)
    lists = module.parametrizations
    assert isinstance(lists, nn.ModuleDict)
    lists.train(module.training)
    maps: Any = lists[name]
    maps.expected_shape = tuple(maps.original.shape)


def find_parametrization(module: nn.Module, name: str = "weight") -> LipschitzParametrization | None:
    """Return the onelip parametrization that determines the weight of a layer, or None."""
    found = parametrization_list(module, name)
    if found is None:
        return None
    last = list(found)[-1]  # the last map determines the weight
    return last if isinstance(last, LipschitzParametrization) else None


def original_of(module: nn.Module, name: str = "weight") -> Tensor:
    """Return the parameter P of a parametrized weight."""
    found = parametrization_list(module, name)
    assert found is not None
    original = found.original
    assert isinstance(original, Tensor)
    return original


def parametrization_list(module: nn.Module, name: str = "weight") -> parametrize.ParametrizationList | None:
    """Return torch's list of the parametrizations of a tensor, or None."""
    if not parametrize.is_parametrized(module, name):
        return None
    lists = module.parametrizations
    assert isinstance(lists, nn.ModuleDict)
    found = lists[name]
    assert isinstance(found, parametrize.ParametrizationList)
    return found


def bound_by_construction(module: nn.Module) -> Bound | None:
    """Return the constant that the onelip parametrization of a layer proves in eval mode; None without one.

    Examples:
        >>> import onelip
        >>> bound_by_construction(onelip.aol(nn.Linear(3, 3)))
        Bound(constant=1.0, why='AOL on the inputs')
    """
    found = find_parametrization(module)
    if found is None:
        return None
    reason = found.mismatch(module) or why_other_map(module) or why_other_mode(module)
    if reason is not None:
        return Bound(None, reason)
    dtype = original_of(module).dtype
    constant = found.constant_in(dtype)
    if constant is None:
        return Bound(None, f"{found.describe()}: not bounded by construction")
    rounded = "" if dtype in (torch.float32, torch.float64) else f", rounded to {str(dtype).removeprefix('torch.')}"
    return Bound(constant, found.describe() + rounded)
