"""Arithmetic that the methods share: types, scaling, the rounding of stored weights, and bounds of stored weights."""

import math

import torch
from torch import Tensor

from onelip.bounds import bound_weight
from onelip.core.errors import NonFiniteWeight
from onelip.core.geometry import Geometry
from onelip.core.lipschitz_module import Bound
from onelip.gram.rescale import normalizer

UNIT64 = 2.0**-53  # unit roundoff of float64

# The geometry of a matrix.
MATRIX = Geometry(transposed=False, groups=1, kernel_size=(), phases=(), identity_tap=())


def widest_type(x: Tensor) -> torch.dtype:
    """Return float64, or float32 on devices without float64; there the stated rounding is not proved."""
    return torch.float32 if x.device.type == "mps" else torch.float64


def of_moderate_size(M: Tensor) -> Tensor:
    """Scale each matrix of M (g, m, n) by a power of two that keeps products in range; NaN if it is not finite."""
    empty = (M.detach() == 0).all(-1, keepdim=True).all(-2, keepdim=True)
    return M * torch.where(empty, 1.0, normalizer(M))


def stored_constant(lipschitz: float, excess: float, rank: int, entries: int, dtype: torch.dtype) -> float:
    r"""Return the constant of a layer of norm `lipschitz * (1 + excess)` after its weight is rounded to a type.

    Each entry $W$ changes by at most $u |W|$, or by half the smallest subnormal number. The first changes the norm by
    at most $u \| |W| \|_F = u \sqrt{\mathrm{rank}}$ times the constant, the second by $\sqrt{\mathrm{entries}}$ of
    these numbers. Two more units are for the factor.

    Args:
        lipschitz: the constant.
        excess: relative error of the norm before it is stored.
        rank: rank of the weight as a matrix.
        entries: number of its entries.
        dtype: type in which it is stored.

    Returns:
        The constant, rounded up.

    Examples:
        >>> stored_constant(1.0, 0.0, 4, 16, torch.float32) < 1 + 2e-7
        True
    """
    limits = torch.finfo(dtype)
    relative = excess + (limits.eps / 2 + 4 * UNIT64) * math.sqrt(rank)
    # The last factor covers the rounding of the sum itself.
    return (lipschitz * (1 + relative) + limits.smallest_normal * limits.eps * math.sqrt(entries)) * (1 + 2.0**-50)


class KnownBound:
    """A proved bound that is recomputed only when the weight has changed: a proof can take seconds.

    Examples:
        >>> round(KnownBound()(torch.tensor([[3.0]]), MATRIX), 6)
        3.0
    """

    _caches = ("._weight", "._geometry", "._bound")

    def __init__(self) -> None:
        self._weight: Tensor | None = None
        self._geometry: Geometry | None = None
        self._bound = math.nan

    def __call__(self, weight: Tensor, geometry: Geometry) -> float:
        """Return a proved upper bound on the norm of a layer with this weight.

        Raises:
            onelip.NonFiniteWeight: for infinities and NaNs.
            OverflowError: if the bound is beyond the range of float64.
        """
        weight, known = weight.detach(), self._weight
        # The values are compared: a version counter misses writes through `.data`.
        is_known = known is not None and known.device == weight.device and torch.equal(known, weight)
        if not is_known or geometry != self._geometry:
            self._bound = bound_weight(weight, geometry, effort="high").value
            self._weight, self._geometry = weight.clone(), geometry
        return self._bound


def stored_bound(weight: Tensor, geometry: Geometry, known: KnownBound | None = None) -> Bound:
    """Return the bound of a stored weight, or why it has none; `known` avoids a second proof of the same weight."""
    try:
        norm = bound_weight(weight.detach(), geometry).value if known is None else known(weight, geometry)
    except (NonFiniteWeight, OverflowError) as error:
        return Bound(None, str(error))
    return Bound(norm, "stored weights")
