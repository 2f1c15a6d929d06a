"""Linear layers and convolutions, as modules and as functional calls."""

from typing import Any

from torch import Tensor, nn

from onelip.core.channel_affine import ChannelAffine
from onelip.core.errors import ProofError, UnsupportedLayer
from onelip.core.geometry import LINEAR_LAYERS, geometry_of
from onelip.graph.kinds import Affine, Join
from onelip.graph.lowering import Lowering, lowers

_FUNCTIONAL: dict[str, type[nn.Module]] = {
    "aten.linear.default": nn.Linear,
    **dict.fromkeys(("aten.conv1d.default", "aten.conv1d.padding"), nn.Conv1d),
    **dict.fromkeys(("aten.conv2d.default", "aten.conv2d.padding"), nn.Conv2d),
    **dict.fromkeys(("aten.conv3d.default", "aten.conv3d.padding"), nn.Conv3d),
    "aten.conv_transpose1d.default": nn.ConvTranspose1d,
    "aten.conv_transpose2d.input": nn.ConvTranspose2d,
    "aten.conv_transpose3d.input": nn.ConvTranspose3d,
}


@lowers(*LINEAR_LAYERS)
def layer(low: Lowering) -> int:
    """A torch layer; subclasses with a forward of their own are no single call."""
    return affine(low, low.module, low.source, low.module.weight, low.module.bias)


@lowers(*_FUNCTIONAL)
def functional(low: Lowering) -> int:
    """A functional call with constant weights."""
    weight, bias = low.argument("weight"), low.argument("bias")
    if not isinstance(weight, Tensor) or not (bias is None or isinstance(bias, Tensor)):
        low.refuse()
    return affine(low, _as_layer(low, weight, bias), low.node(low.argument("input")), weight, bias)


@lowers(ChannelAffine)
def channel_affine(low: Lowering) -> int:
    """A convolution with one tap and a group for each channel; samples without pixels are images of one."""
    shape, operand, module = low.shape, low.source, low.module
    sizes = shape[1:] or (1,)
    kind: Any = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[len(sizes) - 1]
    layer = kind(shape[0], shape[0], 1, groups=shape[0], device="meta")
    if len(shape) == 1:
        operand = low.emit(Join, operand, shape=(*shape, 1))
    found = affine(low, layer, operand, module.weight, module.bias, shape=(shape[0], *sizes))
    return found if len(shape) > 1 else low.emit(Join, found)


def affine(
    low: Lowering,
    module: nn.Module,
    operand: int,
    weight: Tensor,
    bias: Tensor | None,
    *,
    kind: type[Affine] = Affine,
    shape: tuple[int, ...] | None = None,
    **settings: Any,
) -> int:
    """A node for a layer with these numbers; `settings` are those that its kind has beyond an affine node."""
    before = low.nodes[operand].shape
    axes = 1 + len(getattr(module, "kernel_size", ()))
    if len(before) != axes:
        raise ProofError(
            f"{low.title}: expected samples of {axes} axes, got {before}; flatten them before a Linear layer"
        )
    try:
        geometry_of(module, before[1:] or None)
    except UnsupportedLayer as error:
        raise ProofError(f"{low.title}: {error}") from error
    numbers = {"weight": low.tensor(weight, "weight"), "bias": None if bias is None else low.tensor(bias, "bias")}
    return low.emit(kind, operand, shape=shape, layer=module, pixels=before[1:], **numbers, **settings)


def _as_layer(low: Lowering, weight: Tensor, bias: Tensor | None) -> nn.Module:
    """A layer without numbers that has the settings of a functional call."""
    kind: Any = _FUNCTIONAL[low.call.op]
    first, second, *taps = weight.shape
    if kind is nn.Linear:
        return nn.Linear(second, first, device="meta")

    def each(name: str) -> Any:
        value = low.argument(name)
        values = [value] if isinstance(value, int) else value
        return value if isinstance(value, str) else tuple(values) * (len(taps) if len(values) == 1 else 1)

    groups = low.argument("groups")
    settings = {name: each(name) for name in ("stride", "dilation", "padding")}
    channels = second * groups, first
    if "transpose" in low.call.op:
        settings["output_padding"] = each("output_padding")
        channels = first, second * groups
    return kind(*channels, tuple(taps), groups=groups, bias=bias is not None, device="meta", **settings)
