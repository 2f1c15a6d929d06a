"""LLN, last-layer normalisation: rows of norm 1 instead of a layer of norm 1."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from onelip.core.errors import UnsupportedLayer
from onelip.core.geometry import Geometry
from onelip.core.parametrization import LipschitzParametrization, find_parametrization, working_type
from onelip.core.precision import full_precision
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
    *not* 1-Lipschitz, and the radius margin $/ (\sqrt 2 L)$ would be wrong. Certificates use `pair_distances`; the
    field `certificate` of the method states it.

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
        >>> bool(pair_distances(layer.weight).max() < 2.001)
        True
    """
    advice = "use it for the classifier only, and another method for the layers before"
    check_kind(module, (nn.Linear,), "last-layer normalisation", advice)
    return attach_new(UnitRows, module, name)


def normalise_last_layer(model: nn.Module) -> nn.Module:
    """Apply `lln` to the last Linear layer of a model, in place, and return the model.

    A method that constrains the layer is removed first. Certify the result by the formula of `UnitRows`, where L is the
    constant of the network before the layer.

    Args:
        model: a module with a Linear layer.

    Returns:
        The same model.

    Raises:
        onelip.UnsupportedLayer: if there is no Linear layer.

    Examples:
        >>> import onelip
        >>> model = onelip.constrain(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 10)))
        >>> normalise_last_layer(model)[2].weight.norm(dim=1).allclose(torch.ones(10))
        True
    """
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    if not layers:
        raise UnsupportedLayer(
            f"expected a model with a Linear layer at its end, got {type(model).__name__} without any; "
            "add one, or keep the last layer of the method and the radius margin / (sqrt(2) L)"
        )
    last = layers[-1]
    if find_parametrization(last) is not None:
        parametrize.remove_parametrizations(last, "weight", leave_parametrized=True)
    lln(last)
    return model


@torch.no_grad()
def pair_distances(weight: Tensor) -> Tensor:
    r"""Return $\|w_i - w_j\|$ for all pairs of rows of a weight, rounded up.

    Differences of scores, divided by these distances and by the constant of the network before the layer, are certified
    radii; see `UnitRows`.

    Args:
        weight: (classes, features).

    Returns:
        The distances (classes, classes), in float64.

    Raises:
        ValueError: if the weight is not a matrix.

    Examples:
        >>> pair_distances(torch.eye(2))[0, 1] >= 2**0.5
        tensor(True)
    """
    if weight.dim() != 2:
        raise ValueError(f"expected a weight (classes, features), got shape {tuple(weight.shape)}")
    rows = weight.double()
    # One row at a time: all differences at once would need memory for classes^2 * features numbers.
    distances = torch.stack([torch.linalg.vector_norm(rows - row, dim=1) for row in rows])
    # Rounding of differences, squares and sums: a relative error of at most (features + 4) 2^-53.
    return distances * (1 + 2 * (weight.shape[1] + 8) * 2.0**-53)


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
