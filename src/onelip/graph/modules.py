"""What is known of a single module's Lipschitz constant (L2, real arithmetic) without a look at its input.

One rule per exact type: a subclass may have changed `forward`. Where no rule is known the answer is "nobody vouches",
never a guess. Constants of smooth activations are rounded up in the last digit given.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

from torch import nn
from torch.nn.utils import parametrize

from onelip.bounds import slopes
from onelip.core.errors import UnknownLipschitzConstant
from onelip.core.geometry import LINEAR_LAYERS
from onelip.core.lipschitz_module import LipschitzModule, is_changed
from onelip.core.parametrization import claim_of
from onelip.core.rounding import multiply_up, up_root


@dataclass(frozen=True)
class Vouch:
    """A proved constant, or None, and in a few words why."""

    constant: float | None
    why: str


_Rule = Callable[..., Vouch]


def vouch(module: nn.Module) -> Vouch:
    """What can be said of this module by itself.

    Examples:
        >>> vouch(nn.LeakyReLU(3.0))
        Vouch(constant=3.0, why='slopes 1 and 3')
    """
    if changed := is_changed(module):
        return Vouch(None, changed)
    if isinstance(module, LINEAR_LAYERS):
        return _linear(module)
    if isinstance(module, LipschitzModule):
        dim = getattr(module, "dim", None)
        if dim == 0 or (isinstance(dim, tuple) and 0 in dim):
            return Vouch(None, "works along the batch axis, so samples depend on each other")
        try:
            return Vouch(module.lipschitz_constant, "onelip layer")
        except UnknownLipschitzConstant as error:
            return Vouch(None, str(error))
    rule = _RULES.get(type(module))
    return rule(module) if rule is not None else Vouch(None, "no rule for this module")


def _linear(module: nn.Module) -> Vouch:
    claim = claim_of(module)
    if claim is not None:
        return Vouch(claim.constant, claim.why)
    kind = "parametrized by something else" if parametrize.is_parametrized(module) else "free weights"
    return Vouch(None, f"{kind}: not bounded by construction")


def constant_of(module: nn.Module) -> float:
    """The constant of a module, or of a chain (`nn.Sequential`) of them.

    Raises:
        UnknownLipschitzConstant: naming the module that nobody vouches for.

    Examples:
        >>> constant_of(nn.Sequential(nn.Flatten(), nn.LeakyReLU(2.0)))
        2.0
    """
    if type(module) is nn.Sequential:
        return multiply_up(*(constant_of(child) for child in module))
    known = vouch(module)
    if known.constant is None:
        raise UnknownLipschitzConstant(
            f"expected modules with a known Lipschitz constant, got {type(module).__name__}: {known.why}; use the "
            "layers of onelip, or a LipschitzModule of your own that states what you can prove"
        )
    return known.constant


def _always(constant: float, why: str) -> _Rule:
    return lambda module: Vouch(constant, why)


def _steepest(why: str, *slopes: float) -> Vouch:
    """The largest slope in magnitude, or nothing if one is not a number."""
    largest = max(abs(slope) for slope in slopes)
    return Vouch(float(largest), why) if all(abs(slope) <= largest for slope in slopes) else _NAN


def _leaky(module: nn.LeakyReLU) -> Vouch:
    return _steepest(f"slopes 1 and {module.negative_slope:g}", module.negative_slope, 1.0)


def _prelu(module: nn.PReLU) -> Vouch:
    return _steepest("largest slope, as stored; training moves it", *module.weight.detach().double().tolist(), 1.0)


def _elu(module: nn.ELU) -> Vouch:
    return _steepest(f"alpha = {module.alpha:g}", module.alpha, 1.0)


def _celu(module: nn.CELU) -> Vouch:
    return Vouch(1.0, _SLOPE) if module.alpha > 0 else Vouch(None, "grows without bound for alpha <= 0")


def _softplus(module: nn.Softplus) -> Vouch:
    return Vouch(None, "torch's version jumps at its threshold")


def _dropout(module: nn.Module) -> Vouch:
    return Vouch(1.0, "in eval mode; in training it stretches")


def _batch_norm(module: nn.BatchNorm2d) -> Vouch:
    if module.running_var is None:
        return Vouch(None, "divides by the batch's own deviation")
    gain = (module.running_var.double() + module.eps).rsqrt()
    if module.weight is not None:
        gain = gain * module.weight.detach().double().abs()
    largest = float(gain.max()) * (1 + 1e-12)
    if not math.isfinite(largest):
        return _NAN
    return Vouch(largest, "in eval mode, as stored; in training it has no bound")


def _own_deviation(module: nn.Module) -> Vouch:
    return Vouch(None, "divides by the input's own deviation, which may be next to zero")


def _copies(module: nn.Module) -> Vouch:
    return Vouch(None, "copies pixels, so it stretches; use zero padding")


def _per_axis(value: int | tuple[int, ...], dims: int) -> tuple[int, ...]:
    return (value,) * dims if isinstance(value, int) else tuple(value)


def _overlap(kernel: tuple[int, ...], stride: tuple[int, ...], dilation: tuple[int, ...]) -> int:
    """The most windows that one pixel can lie in."""
    return math.prod(-(-k // (s // math.gcd(s, d))) for k, s, d in zip(kernel, stride, dilation, strict=True))


def _max_pool(dims: int) -> _Rule:
    def rule(module: nn.MaxPool2d) -> Vouch:
        if module.return_indices:
            return Vouch(None, "returns indices, too")
        kernel, dilation = _per_axis(module.kernel_size, dims), _per_axis(module.dilation, dims)
        windows = _overlap(kernel, _per_axis(module.stride, dims), dilation)
        why = "windows apart" if windows == 1 else f"a pixel lies in up to {windows} windows"
        return Vouch(up_root(Fraction(windows)), why)

    return rule


def _avg_pool(dims: int) -> _Rule:
    def rule(module: nn.AvgPool2d) -> Vouch:
        kernel, stride = _per_axis(module.kernel_size, dims), _per_axis(module.stride, dims)
        padded = any(_per_axis(module.padding, dims))
        if module.ceil_mode or getattr(module, "divisor_override", None) or (padded and not module.count_include_pad):
            return Vouch(None, "windows at the border are divided by less; use count_include_pad, no ceil_mode")
        # Schur test: rows sum to 1, columns to at most (windows per pixel) / (window size).
        return Vouch(up_root(Fraction(_overlap(kernel, stride, (1,) * dims), math.prod(kernel))), "Schur test")

    return rule


def _adaptive(module: nn.AdaptiveAvgPool2d) -> Vouch:
    if getattr(module, "return_indices", False):
        return Vouch(None, "returns indices, too")
    sizes = module.output_size if isinstance(module.output_size, tuple) else (module.output_size,)
    if all(size == 1 for size in sizes):
        return Vouch(1.0, "one window over all")
    return Vouch(None, "its windows depend on the input size")


_NAN = Vouch(None, "its parameters are not finite")
_MOVES = "moves entries, or drops some"
_SLOPE = "slope at most 1"

# Written in torch as a quotient or a difference of two things that both depend on the input: as ATen operations they
# have no bound, or a loose one.
RULE_LOST_IN_ATEN = (nn.Softsign, nn.Tanhshrink, nn.Softshrink)

_RULES: dict[type[nn.Module], _Rule] = {
    **dict.fromkeys(
        (nn.Identity, nn.Flatten, nn.Unflatten, nn.PixelShuffle, nn.PixelUnshuffle, nn.ChannelShuffle),
        _always(1.0, _MOVES),
    ),
    **dict.fromkeys(
        (nn.ZeroPad1d, nn.ZeroPad2d, nn.ZeroPad3d, nn.ConstantPad1d, nn.ConstantPad2d, nn.ConstantPad3d),
        _always(1.0, "adds constants"),
    ),
    **dict.fromkeys((nn.ReflectionPad1d, nn.ReflectionPad2d, nn.ReflectionPad3d), _copies),
    **dict.fromkeys((nn.ReplicationPad1d, nn.ReplicationPad2d, nn.ReplicationPad3d), _copies),
    **dict.fromkeys((nn.CircularPad1d, nn.CircularPad2d, nn.CircularPad3d), _copies),
    **dict.fromkeys((nn.ReLU, nn.ReLU6, nn.Hardtanh, nn.Tanh, nn.Softsign, nn.Tanhshrink), _always(1.0, _SLOPE)),
    **dict.fromkeys((nn.LogSigmoid, nn.Softshrink), _always(1.0, _SLOPE)),
    nn.CELU: _celu,
    nn.Softplus: _softplus,
    nn.Sigmoid: _always(slopes.SIGMOID, "slope at most 1/4"),
    nn.GELU: _always(slopes.GELU, "steepest slope"),
    nn.SiLU: _always(slopes.SILU, "steepest slope"),
    nn.Mish: _always(slopes.MISH, "steepest slope"),
    nn.Hardswish: _always(slopes.HARDSWISH, "steepest slope"),
    nn.SELU: _always(slopes.SELU, "slope at zero from below"),
    nn.Softmax: _always(slopes.SOFTMAX, "Gershgorin: 2 p (1 - p) at most"),
    nn.LeakyReLU: _leaky,
    nn.PReLU: _prelu,
    nn.ELU: _elu,
    **dict.fromkeys((nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d), _dropout),
    **dict.fromkeys((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d), _batch_norm),
    **dict.fromkeys((nn.LayerNorm, nn.GroupNorm, nn.RMSNorm), _own_deviation),
    **dict.fromkeys((nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d), _own_deviation),
    nn.MaxPool1d: _max_pool(1),
    nn.MaxPool2d: _max_pool(2),
    nn.MaxPool3d: _max_pool(3),
    nn.AvgPool1d: _avg_pool(1),
    nn.AvgPool2d: _avg_pool(2),
    nn.AvgPool3d: _avg_pool(3),
    **dict.fromkeys((nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d), _adaptive),
    **dict.fromkeys((nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d), _adaptive),
}
