"""||J|| <= value for a whole layer of torch: its stored weights, its geometry, and what its padding copies."""

from collections.abc import Sequence
from fractions import Fraction

from torch import Tensor, nn
from torch.nn.utils import parametrize

from onelip.bounds.exact import exact_bound
from onelip.bounds.falsify import falsify_layer
from onelip.bounds.fast import Effort, bound_weight
from onelip.bounds.padding import geometry_without_copies, padding_factor
from onelip.bounds.witness import ExactBound, WeightBound
from onelip.core.bake import tensor_in_eval_mode
from onelip.core.errors import UnsupportedLayer
from onelip.core.rounding import up_root


def bound_layer(
    module: nn.Module, input_size: int | Sequence[int] | None = None, *, effort: Effort = "normal"
) -> WeightBound:
    """A proved bound on the norm of a Linear, ConvNd or ConvTransposeNd, whatever its weights are.

    The weight is that of eval mode (of a parametrized layer: the result of the parametrization). Hooks and
    overridden `forward` methods are not seen; `onelip.audit` looks at those.

    Args:
        module: the layer.
        input_size: the spatial size of its input, if it is fixed. Strided circular layers, and layers that pad with
            copies of pixels, have a better bound then, and the bound holds for this size only.
        effort: see `bound_weight`.

    Raises:
        UnsupportedLayer: for other layers.
        UnsoundBound: if a measurement contradicts the bound: a mistake in the library.

    Examples:
        >>> layer = nn.Conv2d(1, 1, 3, padding=1, padding_mode="replicate", bias=False)
        >>> _ = nn.init.dirac_(layer.weight)
        >>> round(bound_layer(layer, 8).value, 12)  # the corner pixels are written four times
        2.0
    """
    bound = untested_bound(module, input_size, effort=effort)
    falsify_layer(module, bound.value, input_size)
    return bound


def untested_bound(module: nn.Module, input_size: int | Sequence[int] | None, *, effort: Effort) -> WeightBound:
    """`bound_layer` for those who test the whole of which the layer is a part."""
    factor = padding_factor(module, input_size)
    bound = bound_weight(_weight(module), geometry_without_copies(module, input_size), effort=effort)
    if factor == 1:
        return bound
    values = {name: up_root(factor * Fraction(value) ** 2) for name, value in bound.candidates.items()}
    return WeightBound(up_root(factor * Fraction(bound.value) ** 2), bound.witness, values)


def exact_bound_layer(module: nn.Module, input_size: int | Sequence[int] | None = None) -> ExactBound:
    """The same in rational arithmetic; needs python-flint.

    Examples:
        >>> layer = nn.Linear(2, 1, bias=False)
        >>> _ = nn.init.constant_(layer.weight, 0.5)
        >>> exact_bound_layer(layer).value >= 0.5**0.5
        True
    """
    factor = padding_factor(module, input_size)
    bound = exact_bound(_weight(module), geometry_without_copies(module, input_size))
    square = factor * bound.square
    falsify_layer(module, up_root(square), input_size)
    return ExactBound(square, up_root(square), bound.witness)


def _weight(module: nn.Module) -> Tensor:
    is_parametrized = parametrize.is_parametrized(module, "weight")
    # In training mode some parametrizations compute another weight, and change their state.
    weight = tensor_in_eval_mode(module, "weight") if is_parametrized else getattr(module, "weight", None)
    if not isinstance(weight, Tensor):
        raise TypeError(f"expected a layer with a weight, got {type(module).__name__}")
    if isinstance(module, nn.modules.conv._ConvNd) and tuple(weight.shape[2:]) != tuple(module.kernel_size):
        raise UnsupportedLayer(
            f"expected a weight of kernel_size {tuple(module.kernel_size)}, got {tuple(weight.shape[2:])}: torch goes "
            "by the weight, and what is said of padding by the setting; set kernel_size to what the weight has"
        )
    return weight
