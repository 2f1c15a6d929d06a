"""A proved bound that is computed anew only where the weight is another one: a proof can take seconds."""

import math

import torch
from torch import Tensor

from onelip.bounds import bound_weight
from onelip.core.geometry import Geometry


class KnownBound:
    """Remembers the last weight, how it acts, and its bound.

    Examples:
        >>> from onelip.core.geometry import geometry_of
        >>> layer = torch.nn.Linear(1, 1)
        >>> _ = torch.nn.init.constant_(layer.weight, 3.0)
        >>> round(KnownBound()(layer.weight, geometry_of(layer)), 6)
        3.0
    """

    _caches = ("._weight", "._geometry", "._bound")

    def __init__(self) -> None:
        self._weight: Tensor | None = None
        self._geometry: Geometry | None = None
        self._bound = math.nan

    def __call__(self, weight: Tensor, geometry: Geometry) -> float:
        """A number proved not to be below the norm of a layer with this weight.

        Raises:
            onelip.bounds.NonFiniteWeight: for infinities and NaNs.
            OverflowError: if the bound is beyond the range of float64.
        """
        weight, known = weight.detach(), self._weight
        # The numbers themselves are compared: a version counter does not see writes through `.data`.
        is_known = known is not None and known.device == weight.device and torch.equal(known, weight)
        if not is_known or geometry != self._geometry:
            self._bound = bound_weight(weight, geometry, effort="high").value
            self._weight, self._geometry = weight.clone(), geometry
        return self._bound
