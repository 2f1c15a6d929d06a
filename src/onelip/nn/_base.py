"""What every layer of `onelip.nn` promises: a number L with ||f(x) - f(y)||_2 <= L ||x - y||_2 for all x, y.

The number is about the module as a map between whole samples (all axes but the batch axis flattened), in eval mode,
in real arithmetic.  Rounding of the program is a matter for the certificate, not for this number.
Composition: L(f after g) <= L(f) L(g), the only rule used here; anything else is the work of the audit.
"""

import math
from typing import ClassVar

import torch
from torch import Tensor, nn


class UnknownLipschitzConstant(ValueError):
    """No Lipschitz constant is known for a module: nobody has proved one, which does not mean there is none."""


class LipschitzModule(nn.Module):
    """Base of the layers with a proved constant: set `proved_constant`, or override `lipschitz_constant`.

    Example:
        >>> class Mirror(LipschitzModule):
        ...     proved_constant = 1.0
        ...     def forward(self, x):
        ...         return -x
        >>> Mirror().lipschitz_constant
        1.0
    """

    proved_constant: ClassVar[float | None] = None

    @property
    def lipschitz_constant(self) -> float:
        """A proved bound on the L2 Lipschitz constant (eval mode, real arithmetic).

        Read by `onelip.summary`, and by the audit of whole networks.  A layer that overrides it must never
        return a smaller number than it can prove, and raises `UnknownLipschitzConstant` where it can prove none.
        """
        if self.proved_constant is None:
            raise UnknownLipschitzConstant(f"{type(self).__name__} states no constant; set `proved_constant`")
        return self.proved_constant


def multiply_up(*factors: float) -> float:
    """A float not below the real product of non-negative `factors`; exact where every factor is 1."""
    product = 1.0
    for factor in factors:
        rounded = product * factor
        exact = product == 1.0 or factor == 1.0
        product = rounded if exact else math.nextafter(rounded, math.inf)
    return product


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


def check_channels(name: str, value: object, minimum: int = 1) -> int:
    """An integer of at least `minimum`, or an error that says what came."""
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ValueError(f"expected {name} to be an integer of at least {minimum}, got {value!r}; give such a number")
    return value


def needs_plain_ops() -> bool:
    """Whether a graph is being captured: compilers and exporters want ordinary operations, not autograd functions."""
    return torch.compiler.is_compiling()
