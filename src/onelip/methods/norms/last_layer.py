"""LLN: last-layer normalisation, rows of length 1 in place of a norm of 1.

Citation: Sahil Singla, Surbhi Singla, Soheil Feizi, "Improved deterministic l2 robustness on CIFAR-10 and CIFAR-100",
ICLR 2022.

Inequality: if the network up to the last layer has constant L, the difference of two scores w_y . g + b_y and
w_i . g + b_i changes by at most L ||w_y - w_i|| times the change of the input. So the class y is kept within

    min over i != y of (f_y - f_i) / (L ||w_y - w_i||),                                                          (1)

and with rows of length 1 these distances are at most 2, mostly near sqrt(2), however many classes there are.
Assumes: nothing of the rows but that they are those of the last layer.
Guarantee: proved is the constant sqrt(classes), by the Frobenius norm: the layer is *not* 1-Lipschitz, and sqrt(2) L
in place of (1) would be wrong. Certificates must go by `pair_distances`; `certificate` of the registry says so.
"""

import math
from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from onelip.core.errors import UnsupportedLayer
from onelip.core.geometry import Geometry, geometry_of
from onelip.core.parametrization import LipschitzParametrization, attach, find_parametrization, weight_of, working_type
from onelip.core.precision import full_precision
from onelip.methods.method import Method
from onelip.methods.orthogonal.reshaped import stored_constant
from onelip.methods.orthogonal.steps import of_moderate_size, widest_type

Layer = TypeVar("Layer", bound=nn.Module)


class UnitRows(LipschitzParametrization):
    """The map that divides each row by its length; `lln` registers it. Zero rows stay zero.

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
            rows = of_moderate_size(rows.to(widest_type(rows))[:, None])[:, 0]  # each row by itself
            square = rows.square().sum(1, keepdim=True)
            empty = square == 0
            return torch.where(empty, 0.0, rows * torch.where(empty, 1.0, square).rsqrt()).to(P.dtype)

    @torch.no_grad()
    def reset(self, P: Tensor) -> None:
        """Orthogonal rows, as far as there is room."""
        if not P.is_meta:
            nn.init.orthogonal_(P)

    def constant_in(self, dtype: torch.dtype) -> float:
        """sqrt(classes), with the rounding of lengths and entries."""
        classes, features = self.weight_shape
        return stored_constant(self.lipschitz, (features + 8) * 2.0**-53, 1, classes * features, dtype)

    def describe(self) -> str:
        return "rows of length 1, sqrt(classes); certify by the distances of rows"


def lln(module: Layer, name: str = "weight") -> Layer:
    """Give a Linear layer rows of length 1, in place, and return it. Only for the last layer of a network.

    Args:
        module: Linear.
        name: the parameter to constrain.

    Raises:
        onelip.UnsupportedLayer: for any other layer.

    Examples:
        >>> layer = lln(nn.Linear(8, 100))
        >>> layer.weight.norm(dim=1).allclose(torch.ones(100))
        True
        >>> bool(pair_distances(layer.weight).max() < 2.001)
        True
    """
    if not isinstance(module, nn.Linear):
        raise UnsupportedLayer(
            f"expected the last Linear layer for last-layer normalisation, got {type(module).__name__}; "
            "use it on the classifier only, and any other method on what comes before"
        )
    geometry = geometry_of(module)
    weight = weight_of(module, geometry, name)
    return attach(module, UnitRows(geometry, weight.shape), name)


def normalise_last_layer(model: nn.Module) -> nn.Module:
    """Put last-layer normalisation on the last Linear layer of a model, in place of what constrains it; return it.

    Certify the result by (1), with the constant of all that comes before that layer: L is not the model's own constant.

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
            "add one, or keep the method's own last layer and the radius margin / (sqrt(2) L)"
        )
    last = layers[-1]
    if find_parametrization(last) is not None:
        parametrize.remove_parametrizations(last, "weight", leave_parametrized=True)
    lln(last)
    return model


@torch.no_grad()
def pair_distances(weight: Tensor) -> Tensor:
    """||w_i - w_j|| for all pairs of rows of the last layer's weight (classes, features), rounded up; float64.

    Divided by these, and by the constant of the network before the layer, differences of scores are radii, (1).

    Examples:
        >>> pair_distances(torch.eye(2))[0, 1] >= 2**0.5
        tensor(True)
    """
    if weight.dim() != 2:
        raise ValueError(f"expected a weight (classes, features), got shape {tuple(weight.shape)}")
    rows = weight.double()
    # One row at a time: all differences at once would take classes^2 * features numbers.
    distances = torch.stack([torch.linalg.vector_norm(rows - row, dim=1) for row in rows])
    # Each difference is rounded once, each square and sum once: a part of (features + 4) 2^-53 of the length at most.
    return distances * (1 + 2 * (weight.shape[1] + 8) * 2.0**-53)


METHOD = Method(
    name="lln",
    title="LLN, last-layer normalisation (Singla et al., 2022)",
    mechanism="parametrization",
    guarantee="proved",
    layers=(nn.Linear,),
    apply=lln,
    certificate="pairs",
    note="for the last layer only: constant sqrt(classes); certified by the distances of its rows",
)
