"""Helpers of several layers: checks of axes, halves of an axis, vectors that broadcast along an axis."""

from torch import Tensor


def axis_length(x: Tensor, dim: int, layer: str) -> int:
    """Return the length of axis `dim` of `x`; the error message for a missing axis names the layer."""
    if not -x.dim() <= dim < x.dim():
        raise ValueError(
            f"{layer} expected an input that has axis {dim}, got shape {tuple(x.shape)}; "
            "add the missing axes (a batch axis?) or pass another `dim`"
        )
    return x.shape[dim]


def check_channels(x: Tensor, dim: int, channels: int, layer: str, argument: str = "channels") -> None:
    """Raise an error unless axis `dim` of `x` has the number of channels that the layer was built for."""
    length = axis_length(x, dim, layer)
    if length != channels:
        raise ValueError(
            f"{layer} expected {channels} channels on axis {dim}, got {length} (input of shape {tuple(x.shape)}); "
            f"build the layer with {argument}={length}"
        )


def halves(x: Tensor, dim: int, layer: str) -> tuple[Tensor, Tensor]:
    """Return the first and the second half of an axis of even length, as views."""
    n = axis_length(x, dim, layer)
    if n % 2:
        raise ValueError(
            f"{layer} expected an even length of axis {dim}, got {n} (input of shape {tuple(x.shape)}); "
            f"use an even number of channels, or append a zero channel with PadChannels({n + 1}, dim={dim})"
        )
    return x.narrow(dim, 0, n // 2), x.narrow(dim, n // 2, n // 2)


def along_axis(values: Tensor, x: Tensor, dim: int) -> Tensor:
    """View a vector (c,) so that it broadcasts along axis `dim` of `x`; (..., c) keeps its leading axes."""
    trailing = x.dim() - 1 - dim % x.dim()
    return values.reshape(*values.shape, *(1,) * trailing)
