"""Base class of all parametrizations: a map P -> W, and the constant proved for the layer with weight W.

A parametrization states a constant L with ||W x|| <= L ||x|| for every P, or None if it proves none; evaluation and
export then use the bound of the stored weight (`onelip.bounds`). The statement holds for the geometry that the
parametrization was created for, and only while the layer keeps that geometry.
"""

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
from onelip.core.state_dicts import SavedSettings, accept_plain_weights

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
