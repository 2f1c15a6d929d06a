"""Helpers that the layers share: checks of axes, halves of channels, vectors along an axis."""

from torch import Tensor


def axis_length(x: Tensor, dim: int, layer: str) -> int:
    """Length of the axis `dim` of `x`, with an error that names the layer if there is no such axis."""
    if not -x.dim() <= dim < x.dim():
        raise ValueError(
            f"{layer} expected an input that has axis {dim}, got shape {tuple(x.shape)}; "
            "add the missing axes (a batch axis?) or give another `dim`"
        )
    return x.shape[dim]


def halves(x: Tensor, dim: int, layer: str) -> tuple[Tensor, Tensor]:
    """First and second half of an axis of even length, as views."""
    n = axis_length(x, dim, layer)
    if n % 2:
        raise ValueError(
            f"{layer} expected an even length of axis {dim}, got {n} (input of shape {tuple(x.shape)}); "
            f"choose an even number of channels, or append a zero channel with PadChannels({n + 1}, dim={dim})"
        )
    return x.narrow(dim, 0, n // 2), x.narrow(dim, n // 2, n // 2)


def along_axis(values: Tensor, x: Tensor, dim: int) -> Tensor:
    """View a vector (c,) so that it broadcasts along axis `dim` of `x`; (..., c) keeps its leading axes."""
    trailing = x.dim() - 1 - dim % x.dim()
    return values.reshape(*values.shape, *(1,) * trailing)
