"""What every method that acts on a weight shares: a map P -> W, and what is proved of the layer that has W.

A parametrization states a constant L with ||W x|| <= L ||x|| for every P, or None if it proves none; then the bound of
the stored weight (`onelip.bounds`) is what evaluation and export go by. It was made for one geometry, and what it
states is true only as long as the layer keeps it.
"""

from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from onelip.core.bound import Bound
from onelip.core.errors import UnsupportedLayer
from onelip.core.geometry import Geometry, geometry_of
from onelip.core.guards import InputSizeGuard, guard_input_size
from onelip.core.plain_weights import accept_plain_weights

Layer = TypeVar("Layer", bound=nn.Module)


class LipschitzParametrization(nn.Module):
    """Base of maps from a free weight to one whose layer has a known constant: override `forward` and `describe`.

    Args:
        geometry: how the weight acts, from `onelip.core.geometry.geometry_of`.
        weight_shape: shape of the weight.
        lipschitz: the constant that is aimed at.

    Examples:
        >>> class Halved(LipschitzParametrization):
        ...     def forward(self, P):
        ...         return P / 2
        >>> layer = nn.Linear(2, 2)
        >>> _ = attach(layer, Halved(geometry_of(layer), layer.weight.shape))
        >>> find_parametrization(layer).constant_in(torch.float32) is None  # nobody has proved one
        True
    """

    def __init__(self, geometry: Geometry, weight_shape: Sequence[int], *, lipschitz: float = 1.0) -> None:
        super().__init__()
        self.geometry = geometry
        self.weight_shape = tuple(weight_shape)
        self.lipschitz = check_lipschitz(lipschitz)

    def forward(self, P: Tensor) -> Tensor:
        """The weight W of the layer, of the shape and type of P."""
        raise NotImplementedError

    def right_inverse(self, W: Tensor) -> Tensor:
        """A parameter for which the weight is W, or near it; by default W itself."""
        return W

    def constant_in(self, dtype: torch.dtype) -> float | None:
        """The constant proved for the layer in eval mode, with its weight stored in this type; None if none is."""
        return None

    def estimated_constant(self, P: Tensor) -> Tensor:
        """The constant of the layer as training may use it, differentiable in P; never what a certificate rests on."""
        proved = self.constant_in(P.dtype)
        if proved is None:
            raise NotImplementedError(f"{type(self).__name__} has neither a proved constant nor an estimate")
        return P.new_tensor(proved)

    def describe(self) -> str:
        """A few words for `onelip.summary`."""
        return type(self).__name__

    def advice(self) -> str | None:
        """A hint where other settings would serve better, else None."""
        return None

    def outgrown(self, module: nn.Module) -> str | None:
        """Why what was proved does not fit the layer any more, or None: settings of a layer can be changed later."""
        promised = self.geometry.needs_size_divisible_by
        try:
            fits = geometry_of(module, promised) == self.geometry
        except UnsupportedLayer as error:
            return str(error)
        if not fits:
            return f"its settings were changed after {type(self).__name__} was applied"
        if promised and not any(isinstance(hook, InputSizeGuard) for hook in module._forward_pre_hooks.values()):
            return "the guard of its promised input size was removed"
        return None


def check_lipschitz(lipschitz: object, dtype: torch.dtype | None = None) -> float:
    """A positive number that the type can hold, or an error."""
    largest = torch.finfo(dtype or torch.float64).max
    if isinstance(lipschitz, bool) or not isinstance(lipschitz, (int, float)) or not 0 < lipschitz <= largest:
        raise ValueError(f"expected lipschitz to be a positive number of at most {largest:.3g}, got {lipschitz!r}")
    return float(lipschitz)


def working_type(dtype: torch.dtype) -> torch.dtype:
    """The type to compute a weight in: lower precisions are widened, since a Gram matrix in bfloat16 proves nothing."""
    if dtype in (torch.bfloat16, torch.float16):
        return torch.float32
    if dtype not in (torch.float32, torch.float64):
        raise TypeError(
            f"expected a weight of a real floating-point type, got {dtype}; cast the layer to torch.float32"
        )
    return dtype


def weight_of(module: nn.Module, geometry: Geometry, name: str = "weight") -> Tensor:
    """The weight that a method is to act on, checked."""
    weight = getattr(module, name, None)
    if not isinstance(weight, Tensor) or weight.dim() != 2 + len(geometry.kernel_size):
        shape = tuple(weight.shape) if isinstance(weight, Tensor) else weight
        raise ValueError(f"expected {name!r} to be a weight of {type(module).__name__}, (out, in, ...), got {shape}")
    working_type(weight.dtype)
    return weight


def attach(module: Layer, parametrization: LipschitzParametrization, name: str = "weight") -> Layer:
    """Put a parametrization on a layer's weight, in place, with the guard of the input size that its bound needs."""
    found = parametrization_list(module, name)
    if found is not None and any(isinstance(map, LipschitzParametrization) for map in found):
        taken = next(type(map).__name__ for map in found if isinstance(map, LipschitzParametrization))
        raise ValueError(
            f"expected {name!r} without {taken}, got one that has it already; "
            f"use torch.nn.utils.parametrize.remove_parametrizations(module, {name!r}) to begin anew"
        )
    if found is not None and not found.is_tensor:  # projection, reset and losses need the one parameter
        taken = ", ".join(type(map).__name__.lstrip("_") for map in found)
        raise UnsupportedLayer(
            f"expected {name!r} with one parameter behind it, got one that {taken} makes of {found.ntensors}; "
            f"use torch.nn.utils.parametrize.remove_parametrizations(module, {name!r}) first"
        )
    # unsafe=True only spares torch's own trial run of a map that keeps shape and type.
    parametrize.register_parametrization(module, name, parametrization, unsafe=True)
    accept_plain_weights(module)
    if parametrization.geometry.needs_size_divisible_by is not None:
        guard_input_size(module, parametrization.geometry.needs_size_divisible_by)
    return module


def find_parametrization(module: nn.Module, name: str = "weight") -> LipschitzParametrization | None:
    """The parametrization of a layer that is one of onelip's, or None."""
    found = parametrization_list(module, name)
    if found is None:
        return None
    last = list(found)[-1]  # only the last map decides what the weight is
    return last if isinstance(last, LipschitzParametrization) else None


def original_of(module: nn.Module, name: str = "weight") -> Tensor:
    """The parameter P behind a parametrized weight."""
    found = parametrization_list(module, name)
    assert found is not None
    original = found.original
    assert isinstance(original, Tensor)
    return original


def parametrization_list(module: nn.Module, name: str = "weight") -> parametrize.ParametrizationList | None:
    """torch's own record of what is registered on a tensor of a module, or None."""
    if not parametrize.is_parametrized(module, name):
        return None
    lists = module.parametrizations
    assert isinstance(lists, nn.ModuleDict)
    found = lists[name]
    assert isinstance(found, parametrize.ParametrizationList)
    return found


def bound_by_construction(module: nn.Module) -> Bound | None:
    """What the parametrization of a linear layer proves of it (eval mode); None if there is none of onelip's.

    Examples:
        >>> import onelip
        >>> bound_by_construction(onelip.aol(nn.Linear(3, 3)))
        Bound(constant=1.0, why='AOL on the inputs')
    """
    found = find_parametrization(module)
    if found is None:
        return None
    if (reason := found.outgrown(module)) is not None:
        return Bound(None, reason)
    dtype = original_of(module).dtype
    constant = found.constant_in(dtype)
    if constant is None:
        return Bound(None, f"{found.describe()}: not bounded by construction")
    rounded = "" if dtype in (torch.float32, torch.float64) else f", rounded to {str(dtype).removeprefix('torch.')}"
    return Bound(constant, found.describe() + rounded)
