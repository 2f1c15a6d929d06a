"""Estimates in training, proofs in evaluation: the part that methods by power iteration share.

In eval mode the weight is P times min(1, L / b) or L / b, where b >= ||P|| is the proved bound of `onelip.bounds`. So
the layer has constant L for every P, however far the iteration of training was from its end.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from onelip.core.geometry import Geometry
from onelip.core.parametrization import LipschitzParametrization, working_type
from onelip.methods.norms.known_bound import KnownBound
from onelip.methods.norms.power_iteration import Operator, estimated_norm, iterate
from onelip.methods.orthogonal.reshaped import stored_constant
from onelip.nn.init import tight_weight


def overlap_of_rows(geometry: Geometry, weight_shape: Sequence[int]) -> int:
    """T with ||J|| <= sqrt(T) ||M||, M being the weight as a matrix with one row per output (of a group).

    J maps windows by M, and each input is in at most T windows: all taps, or with a stride those of a phase. The phases
    of a transposed layer are outputs that do not share a row of M; their squares add up, which makes all taps again.

    Examples:
        >>> from onelip.core.geometry import geometry_of
        >>> for layer in (nn.Conv2d(2, 2, 3), nn.Conv2d(2, 2, 3, stride=2), nn.ConvTranspose2d(2, 2, 3, stride=2)):
        ...     overlap_of_rows(geometry_of(layer), layer.weight.shape)
        9
        4
        9
    """
    if geometry.transposed:
        return math.prod(geometry.kernel_size)
    return math.prod(geometry.kernel_shape(tuple(weight_shape), "inputs")[3:])


class PowerIterated(LipschitzParametrization):
    """A parametrization that follows the largest singular vector of its layer through training.

    Args:
        module: the layer.
        geometry: of the layer.
        weight_shape: of its weight.
        lipschitz: the constant that is aimed at.
        iterations: steps of the power method at a time.
        input_size: spatial size of the images that the layer will see.
    """

    v: Tensor

    def __init__(
        self,
        module: nn.Module,
        geometry: Geometry,
        weight_shape: Sequence[int],
        *,
        lipschitz: float = 1.0,
        iterations: int = 1,
        input_size: int | tuple[int, ...] | None = None,
    ) -> None:
        super().__init__(geometry, weight_shape, lipschitz=lipschitz)
        if isinstance(iterations, bool) or not isinstance(iterations, int) or iterations < 1:
            raise ValueError(f"expected iterations to be a whole number of at least 1, got {iterations!r}")
        self.iterations = iterations
        self.operator = self.make_operator(module, input_size)
        weight = module.weight
        assert isinstance(weight, Tensor)
        # Part of the state dict: a run that is gone on with must find the vector that it left.
        self.register_buffer("v", self.operator.start(weight))
        self._known_bound = KnownBound()

    def make_operator(self, module: nn.Module, input_size: int | tuple[int, ...] | None) -> Operator:
        """The operator whose norm is followed."""
        return Operator(module, input_size)

    def estimate(self, P: Tensor, steps: int | None = None) -> Tensor:
        """The norm of the layer with weight P after some more steps, differentiable; moves the vector in training."""
        P = P.to(working_type(P.dtype))
        v = self.v
        if self.training:
            v = iterate(self.operator, P, v, self.iterations if steps is None else steps)
            with torch.no_grad():
                self.v.copy_(v)
        return estimated_norm(self.operator, P, v)

    def proved_bound(self, P: Tensor) -> float:
        """A number proved not to be below the layer's norm; NaN for a weight that is not finite."""
        return self._known_bound(P, self.geometry) if bool(P.isfinite().all()) else math.nan

    def scaled_by_proof(self, P: Tensor, *, only_down: bool) -> Tensor:
        """P divided by its bound and multiplied by the constant; with `only_down` left alone where that is not more."""
        if P.numel() == 0 or P.is_meta:
            return P
        bound = self.proved_bound(P)
        if bound == 0 or (only_down and bound <= self.lipschitz):
            return P
        return (P.double() / bound * self.lipschitz).to(P.dtype)

    def constant_in(self, dtype: torch.dtype) -> float | None:
        """With what rounding adds when the divided weight is stored."""
        _, rows, columns, *taps = self.geometry.kernel_shape(self.weight_shape, "inputs")
        T = math.prod(taps)
        return stored_constant(self.lipschitz, 0.0, min(rows, columns) * T, rows * columns * T * T, dtype)

    @torch.no_grad()
    def reset(self, P: Tensor) -> None:
        """Begin with the identity, or orthogonal columns on the side with fewer channels: all singular values are 1."""
        columns = {side: self.geometry.kernel_shape(self.weight_shape, side)[2] for side in ("inputs", "outputs")}
        if not P.is_meta:
            P.copy_(tight_weight(self.geometry, self.weight_shape, min(columns, key=lambda side: columns[side])))

    def warm_up(self, module: nn.Module, steps: int = 15) -> None:
        """Begin near the largest singular vector."""
        weight = module.weight
        if isinstance(weight, Tensor) and not weight.is_meta and weight.numel():
            self.v.copy_(iterate(self.operator, weight.detach().to(working_type(weight.dtype)), self.v, steps))
