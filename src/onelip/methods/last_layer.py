"""LLN, last-layer normalisation: rows of norm 1 instead of a layer of norm 1."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from onelip.core.geometry import Geometry
from onelip.core.modes import full_precision
from onelip.core.parametrization import LipschitzParametrization, working_type
from onelip.methods.numerics import of_moderate_size, stored_constant, widest_type
from onelip.methods.registry import Layer, Method, attach_new, check_kind, register_method


class UnitRows(LipschitzParametrization):
    r"""Divide each row of the last layer by its norm; `lln` registers it. Zero rows stay zero.

    **Theorem.** If the network before the last layer has the constant $L$, the difference of two scores
    $w_y \cdot g + b_y$ and $w_i \cdot g + b_i$ changes by at most $L \|w_y - w_i\|$ times the change of the input. So
    the predicted class $y$ does not change within the radius

    $$\min_{i \ne y} \frac{f_y - f_i}{L\,\|w_y - w_i\|}.$$

    With rows of norm 1 these distances are at most 2, and mostly near $\sqrt 2$, for any number of classes.

    **Assumptions.** The layer is the last one of the network.

    **Guarantee.** The proved constant of the layer is $\sqrt{\mathrm{classes}}$, by the Frobenius norm. The layer is
    *not* 1-Lipschitz, and the radius margin $/ (\sqrt 2 L)$ would be wrong. Radii use the distances of
    the rows instead: the field `certificate` of the method is "pairs".

    Singla, Singla, Feizi, "Improved deterministic l2 robustness on CIFAR-10 and CIFAR-100", ICLR 2022.

    Args:
        geometry: of a Linear layer, from `onelip.core.geometry.geometry_of`.
        weight_shape: shape of the weight, (classes, features).
    """

    def __init__(self, geometry: Geometry, weight_shape: Sequence[int]) -> None:
        super().__init__(geometry, weight_shape, lipschitz=math.sqrt(max(1, weight_shape[0])))

    def forward(self, P: Tensor) -> Tensor:
        if P.numel() == 0:
            return P
        with full_precision(P.device):
            rows = P.to(working_type(P.dtype))
            rows = of_moderate_size(rows.to(widest_type(rows))[:, None])[:, 0]  # each row separately
            square = rows.square().sum(1, keepdim=True)
            empty = square == 0
            return torch.where(empty, 0.0, rows * torch.where(empty, 1.0, square).rsqrt()).to(P.dtype)

    @torch.no_grad()
    def reset(self, P: Tensor) -> None:
        """Initialise with orthogonal rows, if there are enough features."""
        if not P.is_meta:
            nn.init.orthogonal_(P)

    def constant_in(self, dtype: torch.dtype) -> float:
        """Return sqrt(classes), with the rounding of norms and entries."""
        classes, features = self.weight_shape
        return stored_constant(self.lipschitz, (features + 8) * 2.0**-53, 1, classes * features, dtype)

    def describe(self) -> str:
        return "rows of norm 1, constant sqrt(classes); certify by the distances of rows"


def lln(module: Layer, name: str = "weight") -> Layer:
    """Normalise the rows of the last Linear layer of a network, in place, and return it; see `UnitRows`.

    Args:
        module: Linear.
        name: name of the parameter to constrain.

    Returns:
        The same module, with a parametrized weight.

    Raises:
        onelip.UnsupportedLayer: for any other layer.

    Examples:
        >>> layer = lln(nn.Linear(8, 100))
        >>> layer.weight.norm(dim=1).allclose(torch.ones(100))
        True
        >>> bool(torch.pdist(layer.weight).max() < 2.001)
        True
    """
    advice = "use it for the classifier only, and another method for the layers before"
    check_kind(module, (nn.Linear,), "last-layer normalisation", advice)
    return attach_new(UnitRows, module, name)


register_method(
    Method(
        name="lln",
        title="LLN, last-layer normalisation (Singla et al., 2022)",
        citation="Sahil Singla, Surbhi Singla, Soheil Feizi, "
        '"Improved deterministic l2 robustness on CIFAR-10 and CIFAR-100", ICLR 2022.',
        guarantee="proved",
        layers=(nn.Linear,),
        apply=lln,
        certificate="pairs",
        note="for the last layer only; constant sqrt(classes); certified per pair of classes",
    )
)
