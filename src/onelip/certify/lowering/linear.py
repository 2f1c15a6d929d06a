"""Linear layers of a program: their settings as the certificate has them, from modules and from functional calls."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from onelip.geometry import _padding

FUNCTIONAL_LAYERS: dict[str, type[nn.Module]] = {
    "aten.linear.default": nn.Linear,
    "aten.conv1d.default": nn.Conv1d,
    "aten.conv2d.default": nn.Conv2d,
    "aten.conv3d.default": nn.Conv3d,
    "aten.conv1d.padding": nn.Conv1d,
    "aten.conv2d.padding": nn.Conv2d,
    "aten.conv3d.padding": nn.Conv3d,
    "aten.conv_transpose1d.default": nn.ConvTranspose1d,
    "aten.conv_transpose2d.input": nn.ConvTranspose2d,
    "aten.conv_transpose3d.input": nn.ConvTranspose3d,
}


def linear_settings(module: nn.Module) -> dict[str, Any]:
    """Settings of a convolution but for its tensors; none for a Linear layer.

    Example:
        >>> linear_settings(nn.Conv1d(2, 2, 3, padding=1))["padding"]
        [[1, 1]]
    """
    if not isinstance(module, nn.modules.conv._ConvNd):
        return {}
    padding = _padding(module)
    wraps = module.padding_mode == "circular" and any(sum(pair) for pair in padding)
    return {
        "stride": list(module.stride),
        "padding": [list(pair) for pair in padding],
        "dilation": list(module.dilation),
        "groups": module.groups,
        "mode": "circular" if wraps else "zeros",
        "transposed": module.transposed,
        "output_padding": list(module.output_padding),
    }


def module_of_call(op: str, call: Mapping[str, Any]) -> nn.Module:
    """A layer without numbers that has the settings of a functional call."""
    kind = FUNCTIONAL_LAYERS[op]
    first, second, *taps = call["weight"].shape
    if kind is nn.Linear:
        return nn.Linear(second, first, device="meta")

    def each(value: Any) -> Any:
        values = [value] if isinstance(value, int) else value
        return tuple(values) * len(taps) if len(values) == 1 else tuple(values)

    groups = call["groups"]
    settings: dict[str, Any] = {name: each(call[name]) for name in ("stride", "dilation")}
    settings["padding"] = call["padding"] if isinstance(call["padding"], str) else each(call["padding"])
    channels = (first, second * groups)
    if "transpose" in op:
        settings["output_padding"] = each(call["output_padding"])
    else:
        channels = second * groups, first
    return kind(*channels, tuple(taps), groups=groups, bias=call["bias"] is not None, device="meta", **settings)
