"""The constants that certified radii rest on, for any method.

By construction: the product of what the layers' methods prove of every weight. Where a method proves nothing (free or
merely penalised weights) the stored weights of the baked network are bounded, layer by layer (`onelip.bounds`); an
estimate of training never enters. Either way

    f_i - f_j has the constant sqrt(2) L,  or per pair  K |w_i - w_j|,

K being the constant of the features and w the rows of the last layer; the second is what LMT, GloRo and last-layer
normalisation certify with.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from onelip._summary import summary
from onelip.geometry import LINEAR_LAYERS, UnsupportedLayer
from onelip.methods._parametrization import find_parametrization
from onelip.methods._registry import METHODS
from onelip.methods._tracking import head_rows, links, output_shape, pair_distances, split_head
from onelip.methods.last_layer import UnitRows
from onelip.nn._base import multiply_up
from onelip.training.recipe import Recipe

Effort = Literal["quick", "normal", "high"]

BY_CONSTRUCTION = "by construction (real arithmetic)"
BY_WEIGHTS = "by bounds of the stored weights (real arithmetic)"
BY_PAIRS = "by bounds of the stored weights, per pair of classes (real arithmetic)"

# Covers the rounding of float64 sums over a row of the last layer, far below what it could be: 2^-53 * 2^13 terms.
_SLACK = 1 + 1e-12


@dataclass(frozen=True)
class Constants:
    """What radii are computed from.

    Attributes:
        total: constant from the image to the scores; None: nobody vouches.
        pairs: (classes, classes) float64, constants of f_i - f_j, where the method certifies per pair.
        mode: how they were come by.
    """

    total: float | None
    pairs: Tensor | None
    mode: str


def constants_of(
    model: nn.Module, plain: nn.Module, recipe: Recipe, shape: Sequence[int], effort: Effort = "normal"
) -> Constants:
    """The constants of a network. A network without any method is not looked into: `onelip audit` does that.

    Args:
        model: as training has it.
        plain: the same, baked.
        recipe: names the method.
        shape: of an image (channels, height, width).
        effort: how hard to look for small bounds, where bounds are needed.
    """
    method = METHODS.get(recipe.method)
    per_pair = (method is not None and method.certificate == "pairs") or _has_normalised_rows(model)
    known = summary(model).constant
    if not per_pair and (method is None or known is not None):
        return Constants(known, None, BY_CONSTRUCTION)
    parts = split_head(plain) if per_pair else None
    if parts is None:
        return Constants(bound_chain(list(links(plain)), effort), None, BY_WEIGHTS)
    features, head = parts
    before, after = bound_chain(features, effort), bound_chain(head, effort)
    if before is None or after is None:
        return Constants(None, None, BY_PAIRS)
    return Constants(multiply_up(before, after), _pair_constants(features, head, shape, before), BY_PAIRS)


def _has_normalised_rows(model: nn.Module) -> bool:
    parts = split_head(model)
    return parts is not None and isinstance(find_parametrization(parts[1][0]), UnitRows)


def bound_chain(modules: Sequence[nn.Module], effort: Effort = "normal") -> float | None:
    """A proved constant of modules one after the other, with the weights they have stored; None where one has none.

    Example:
        >>> layer = nn.Linear(1, 1)
        >>> _ = nn.init.constant_(layer.weight, 2.0)
        >>> 2.0 <= bound_chain([layer, nn.ReLU()]) < 2.0 + 1e-9
        True
    """
    from onelip.bounds import bound_layer
    from onelip.bounds.modules import is_changed, vouch

    product = 1.0
    for module in modules:
        if isinstance(module, LINEAR_LAYERS) and not is_changed(module):
            try:
                factor: float | None = bound_layer(module, effort=effort).value
            except UnsupportedLayer:
                return None
        else:
            factor = vouch(module).constant
        if factor is None:
            return None
        product = multiply_up(product, factor)
    return product


def _pair_constants(features: list[nn.Module], head: list[nn.Module], shape: Sequence[int], before: float) -> Tensor:
    weight = next(head[0].parameters())
    feature_shape = output_shape(features, torch.zeros(1, *shape, dtype=weight.dtype, device=weight.device))
    wide = [_widened(module) for module in head]
    rows = head_rows(wide, feature_shape, torch.zeros((), dtype=torch.float64)).detach()
    return pair_distances(rows) * _SLACK * (before * _SLACK)


def _widened(module: nn.Module) -> nn.Module:
    """A copy in float64 on the CPU, where float32 weights are what they are."""
    import copy

    return copy.deepcopy(module).cpu().double().eval()
