"""||J|| <= value for a whole layer of torch: its stored weights, its geometry, and the copies that its padding makes.

Padding by copies of pixels: ||J||^2 <= multiplicity * ||T||^2, where T is the convolution itself. Reflect and replicate
padding write pixels several times: the padding map P has one 1 in each row, so P^T P is diagonal with the number of
copies of each pixel, and ||P||^2 is the largest. Circular padding wider than dilation * (kernel_size - 1) computes some
outputs several times: the layer is the periodic operator with rows repeated, and the same argument holds on the output
side. Each axis has its own map, so multiplicities multiply.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import parametrize

from onelip.bounds.exact import exact_bound
from onelip.bounds.falsify import falsify_layer
from onelip.bounds.fast import Effort, ExactBound, WeightBound, bound_weight
from onelip.core.bake import tensor_in_eval_mode
from onelip.core.errors import UnsupportedLayer
from onelip.core.geometry import Geometry, geometry_of, padding_of, sizes_per_axis
from onelip.core.lipschitz_module import why_other_mode
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
        UnsupportedLayer: for other layers, and for a layer in eval mode whose parametrization is in training mode.
        NonFiniteWeight: if the weight or the bias contains NaN or infinity.
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
    """`bound_layer` without the comparison with measurements, for callers that test the whole network."""
    factor = padding_factor(module, input_size)
    bound = bound_weight(_weight(module), geometry_without_copies(module, input_size), effort=effort)
    if factor == 1:
        return bound
    values = {name: up_root(factor * Fraction(value) ** 2) for name, value in bound.candidates.items()}
    return WeightBound(up_root(factor * Fraction(bound.value) ** 2), bound.witness, values)


def exact_bound_layer(module: nn.Module, input_size: int | Sequence[int] | None = None) -> ExactBound:
    """`bound_layer` in rational arithmetic; needs python-flint.

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
    if is_parametrized and (reason := why_other_mode(module)):
        raise UnsupportedLayer(f"no bound is known: {reason}")
    # In training mode some parametrizations compute another weight, and change their state.
    weight = tensor_in_eval_mode(module, "weight") if is_parametrized else getattr(module, "weight", None)
    if not isinstance(weight, Tensor):
        raise TypeError(
            f"expected a layer with a weight, got {type(module).__name__}; use onelip.audit for other modules"
        )
    if isinstance(module, nn.modules.conv._ConvNd) and tuple(weight.shape[2:]) != tuple(module.kernel_size):
        raise UnsupportedLayer(
            f"expected a weight of kernel_size {tuple(module.kernel_size)}, got {tuple(weight.shape[2:])}: torch uses "
            "the size of the weight, but the bound would use kernel_size; set kernel_size to the size of the weight"
        )
    return weight


_COPYING = ("reflect", "replicate")


def padding_factor(module: nn.Module, input_size: int | Sequence[int] | None = None) -> Fraction:
    """The factor that a layer's padding puts on the square of its norm; 1 for zero padding and for all that is linear.

    Args:
        module: one of the linear layers of torch.
        input_size: the spatial size of the input; without it the worst size counts.

    Examples:
        >>> padding_factor(nn.Conv1d(1, 1, 3, padding=1, padding_mode="replicate"), 8)
        Fraction(2, 1)
    """
    if not isinstance(module, nn.modules.conv._ConvNd) or module.padding_mode == "zeros":
        return Fraction(1)
    dims = len(module.kernel_size)
    factor = 1
    for i, (size, (left, right)) in enumerate(zip(sizes_per_axis(input_size, dims), padding_of(module), strict=True)):
        reach = module.dilation[i] * (module.kernel_size[i] - 1)
        if left == right == 0:
            continue
        if module.padding_mode == "circular":
            factor *= _repeated_outputs(size, left + right - reach, max(left, right), module.stride[i])
        elif module.padding_mode in _COPYING:
            factor *= _copies(module.padding_mode, size, left, right)
        else:
            raise UnsupportedLayer(
                f"expected padding_mode zeros, circular, reflect or replicate, got {module.padding_mode!r}"
            )
    return Fraction(factor)


def _repeated_outputs(size: int | None, excess: int, least: int, stride: int) -> int:
    """The number of times an output is computed: of size + excess outputs, every stride-th is kept."""
    if excess <= 0:
        return 1
    if size is None:
        size, stride = least, 1  # torch pads no more than the image is wide, and the smallest image is the worst
    return _most_common(position % size for position in range(0, size + excess, stride))


def _copies(mode: str, size: int | None, left: int, right: int) -> int:
    if size is None:
        # Reflected, a pixel may appear beyond either border; replicated, the only pixel of an image appears everywhere.
        return 1 + (left > 0) + (right > 0) if mode == "reflect" else 1 + left + right
    if mode == "replicate":
        return _most_common(min(max(i, 0), size - 1) for i in range(-left, size + right))
    if not max(left, right) < size:
        raise UnsupportedLayer(
            f"expected reflect padding below the input size, got {max(left, right)} for a size of {size}; "
            "torch does not run this layer either"
        )
    return _most_common(size - 1 - abs(size - 1 - abs(i)) for i in range(-left, size + right))


def _most_common(indices: Iterable[int]) -> int:
    return max(Counter(indices).values())


def _geometry_with_zeros(module: nn.modules.conv._ConvNd) -> Geometry:
    """The geometry that the layer would have with zero padding; the layer itself may be parametrized."""
    kinds: Any = ((nn.Conv1d, nn.Conv2d, nn.Conv3d), (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d))
    kind = kinds[module.transposed][len(module.kernel_size) - 1]
    settings = {name: getattr(module, name) for name in ("kernel_size", "stride", "padding", "dilation", "groups")}
    return geometry_of(kind(module.in_channels, module.out_channels, bias=False, device="meta", **settings))


def geometry_without_copies(module: nn.Module, input_size: int | Sequence[int] | None = None) -> Geometry:
    """The geometry of the operator without copies, whose bound `padding_factor` multiplies."""
    if not isinstance(module, nn.modules.conv._ConvNd) or module.padding_mode == "zeros":
        return geometry_of(module, input_size)
    geometry = _geometry_with_zeros(module)
    if module.padding_mode in _COPYING:
        return geometry
    # The phases of a periodic operator close up only if the stride divides the size.
    sizes = sizes_per_axis(input_size, len(module.kernel_size))
    closes = [
        sum(p) == 0 or (size is not None and size % stride == 0)
        for p, size, stride in zip(padding_of(module), sizes, module.stride, strict=True)
    ]
    phases = tuple(phase if closed else 1 for phase, closed in zip(geometry.phases, closes, strict=True))
    return dataclasses.replace(geometry, phases=phases)
