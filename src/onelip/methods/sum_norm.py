"""Norms other than 2: linear layers with a constant in the 1-norm or the maximum norm, by sums of magnitudes."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from onelip.core.geometry import Geometry
from onelip.core.modes import full_precision
from onelip.core.parametrization import LipschitzParametrization, working_type
from onelip.methods.numerics import widest_type
from onelip.methods.registry import Layer, attach_new, check_kind

Norm = Literal["1", "inf", "1-inf"]
_AXES: dict[str, tuple[int, ...]] = {"1": (0,), "inf": (1,), "1-inf": ()}


class SumNorm(LipschitzParametrization):
    r"""Divide columns, rows or entries by their sum of magnitudes where it is above $L$; `sum_norm` registers it.

    **Theorem.** With $s$ the sums of $|P|$ over the columns, over the rows, or $|P|$ itself, $W = P / \max(1, s / L)$
    satisfies

    | norm | sums | inequality |
    |---|---|---|
    | "1" | columns | $\|W x\|_1 \le L \|x\|_1$ |
    | "inf" | rows | $\|W x\|_\infty \le L \|x\|_\infty$ |
    | "1-inf" | entries | $\|W x\|_\infty \le L \|x\|_1$ |

    A first layer "1-inf" and layers "inf" after it, with activations that are 1-Lipschitz in the maximum norm (ReLU,
    `onelip.nn.MaxMin`), are a network whose partial derivatives are at most the product of the $L$.

    **Guarantee.** Proved for the stored weight, with rounding, in these norms. None for L2: `onelip.summary` reports
    the layer as unproved, and `onelip.audit` and `onelip.certify` bound its stored weight.

    The arguments are those of `LipschitzParametrization`, and the options of `sum_norm`.
    """

    def __init__(
        self, geometry: Geometry, weight_shape: Sequence[int], *, norm: Norm = "inf", lipschitz: float = 1.0
    ) -> None:
        super().__init__(geometry, weight_shape, lipschitz=lipschitz)
        if norm not in _AXES:
            raise ValueError(f"expected norm to be '1', 'inf' or '1-inf', got {norm!r}")
        self.norm: Norm = norm

    def forward(self, P: Tensor) -> Tensor:
        working_type(P.dtype)
        with full_precision(P.device):
            wide = P.to(widest_type(P))
            sums = wide.abs()
            for axis in _AXES[self.norm]:
                sums = sums.sum(axis, keepdim=True)
            # Room for the rounding of n products and sums in the wide type, and of each stored entry.
            n, limits = max(1, *P.shape), torch.finfo(P.dtype)
            limit = self.lipschitz * (1 - limits.eps - 4 * n * torch.finfo(wide.dtype).eps)
            limit = max(0.0, limit - n * limits.smallest_normal * limits.eps)
            return (wide * (limit / sums.clamp(min=limit))).to(P.dtype) if limit else torch.zeros_like(P)

    def describe(self) -> str:
        return f"sums of magnitudes, norm {self.norm}: no L2 constant"


def sum_norm(module: Layer, name: str = "weight", *, norm: Norm = "inf", lipschitz: float = 1.0) -> Layer:
    """Limit the constant of a linear layer in the 1-norm or the maximum norm, in place, and return it; see `SumNorm`.

    The weight is kept if its sums are not above `lipschitz`.

    Args:
        module: Linear.
        name: name of the parameter to constrain.
        norm: "1", "inf", or "1-inf" from the 1-norm to the maximum norm.
        lipschitz: the constant to guarantee in that norm instead of 1.

    Returns:
        The same module, with a parametrized weight.

    Raises:
        onelip.UnsupportedLayer: for any other layer.
        ValueError: for options out of range.

    Examples:
        >>> layer = sum_norm(nn.Linear(100, 4))
        >>> bool(layer.weight.abs().sum(1).max() <= 1)
        True
    """
    advice = "flatten the input, or use a method for L2 such as 'aol'"
    check_kind(module, (nn.Linear,), "sums of magnitudes", advice)
    return attach_new(SumNorm, module, name, norm=norm, lipschitz=lipschitz)
