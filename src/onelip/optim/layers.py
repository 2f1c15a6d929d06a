"""The parameters of a model that an optimiser keeps orthogonal, and the layers that they belong to."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from onelip.core.geometry import LINEAR_LAYERS, Geometry
from onelip.core.parametrization import find_parametrization, original_of
from onelip.nn.aol import AOL, find_aol
from onelip.optim.operators import Retraction, retract


@dataclass(frozen=True)
class OrthogonalParameter:
    """A parameter P whose operator is kept near orthonormal columns, and how it acts.

    Attributes:
        P: the parameter behind the weight of a layer.
        geometry: how the weight acts.
        side: whose channels are the columns.
    """

    P: nn.Parameter
    geometry: Geometry
    side: str

    def to_kernel(self, tensor: Tensor) -> Tensor:
        """Return a tensor of the shape of P as a kernel (groups, rows, columns, *taps) of at least float32."""
        tensor = tensor if tensor.dtype == torch.float64 else tensor.float()
        if not self._is_tiled:
            return self.geometry.to_kernel(tensor, self.side)
        rows = tensor.movedim(1, -1).flatten(1)[None]  # in this order without a copy if the kernel is channels last
        return rows if self.side == "inputs" else rows.mT

    def to_weight(self, kernel: Tensor) -> Tensor:
        """Return a kernel in the shape of P, without taps that the layer does not have: the inverse of `to_kernel`."""
        if not self._is_tiled:
            return self.geometry.to_weight(kernel, self.side)
        first, second, *taps = self.P.shape
        rows = kernel[0] if self.side == "inputs" else kernel[0].mT
        return rows.reshape(first, *taps, second).movedim(-1, 1)

    def set_kernel(self, kernel: Tensor) -> None:
        """Write a kernel into P."""
        self.P.copy_(self.to_weight(kernel))

    @property
    def _is_tiled(self) -> bool:
        """Whether all taps are phases of the stride; then the order of the rows does not matter."""
        g = self.geometry
        return g.groups == 1 and not g.transposed and g.kernel_size == g.phases

    @property
    def is_tall(self) -> bool:
        """Whether the columns can be orthonormal: there are at most as many as rows."""
        _, rows, columns, *_ = _kernel_shape(self.geometry, tuple(self.P.shape), self.side)
        return columns <= rows

    @property
    def has_one_tap(self) -> bool:
        """Whether the operator is a batch of matrices: a retraction is then exact."""
        return all(k == 1 for k in _kernel_shape(self.geometry, tuple(self.P.shape), self.side)[3:])


@lru_cache(maxsize=1024)
def _kernel_shape(geometry: Geometry, shape: tuple[int, ...], side: str) -> tuple[int, ...]:
    """Return the shape of a kernel. It is cached: each step asks for it, and it takes a kernel on the meta device."""
    return geometry.kernel_shape(shape, side)


def orthogonal_parameters(model: nn.Module) -> list[OrthogonalParameter]:
    """Return the parameters of AOL and of other orthogonal layers; tied parameters occur once.

    Examples:
        >>> import onelip
        >>> model = nn.Sequential(onelip.nn.AOLLinear(4, 8), nn.Linear(8, 2))
        >>> [tuple(found.P.shape) for found in orthogonal_parameters(model)]
        [(8, 4)]
    """
    found: dict[int, OrthogonalParameter] = {}
    for module in model.modules():
        parametrization = find_parametrization(module) if isinstance(module, LINEAR_LAYERS) else None
        if parametrization is None or (side := parametrization.orthogonal_side) is None:
            continue
        P = original_of(module)
        if isinstance(P, nn.Parameter) and P.requires_grad:
            found.setdefault(id(P), OrthogonalParameter(P, parametrization.geometry, side))
    return list(found.values())


def linear_weights(model: nn.Module) -> list[Tensor]:
    """The parameter behind the weight of each linear layer: P if a method is applied, else the weight itself.

    Examples:
        >>> import onelip
        >>> [tuple(P.shape) for P in linear_weights(nn.Sequential(onelip.nn.AOLLinear(4, 2), nn.Linear(2, 3)))]
        [(2, 4), (3, 2)]
    """
    found: dict[int, Tensor] = {}  # by identity: tied weights count once
    for module in model.modules():
        if not isinstance(module, LINEAR_LAYERS):
            continue
        if parametrize.is_parametrized(module, "weight"):
            lists = module.parametrizations
            assert isinstance(lists, nn.ModuleDict)
            # The originals belong to the list itself; other learned parameters (log_q) belong to the parametrization.
            originals = list(lists["weight"].parameters(recurse=False))
        else:
            originals = [module.weight]
        found |= {id(p): p for p in originals}
    return list(found.values())


@torch.no_grad()
def retract_(model: nn.Module, kind: Retraction = "r2") -> int:
    """Retract the parameters of all orthogonal layers of a model in place, and return their number.

    See `onelip.optim.retract`. `onelip.optim.retract_after` does it after each step of an optimizer.

    Examples:
        >>> import onelip
        >>> model = onelip.aol(nn.Linear(8, 8))
        >>> for _ in range(20):
        ...     _ = retract_(model)
        >>> bool(torch.linalg.svdvals(model.weight.detach()).min() > 0.99)
        True
    """
    found = orthogonal_parameters(model)
    for parameter in found:
        parameter.set_kernel(retract(parameter.to_kernel(parameter.P), kind))
    return len(found)


@contextmanager
def unscaled(model: nn.Module, *, convolutions: bool = False) -> Iterator[None]:
    r"""Run AOL layers with P itself as their weight in training mode, within the context.

    After R2 the norm of a matrix P is at most 1 and its columns are nearly orthonormal, so AOL would change it by less
    than the next step does: leaving it out saves the rescaling and its derivative. This affects only layers in training
    mode whose operator has at most as many columns as rows. Evaluation, `onelip.bake`, audits and certificates always
    apply AOL, within the context too.

    Args:
        model: a model whose optimiser retracts by R2, such as `onelip.optim.retract_after`.
        convolutions: False for layers whose operator is a matrix (dense layers, 1x1 convolutions, kernels as large as
            their stride). True for all kernels: R2 cuts products of larger kernels back to their size, so P can have a
            norm above 1. With SGD at the rate of the paper nothing is lost by it, but with `LipschitzMuon` at a rate of
            0.03 these layers did not learn.

    Examples:
        >>> import onelip
        >>> model = onelip.nn.AOLLinear(4, 4)
        >>> optimizer = onelip.optim.LipschitzMuon(model, lr=0.05)
        >>> with unscaled(model):
        ...     loss = model(torch.ones(1, 4)).sum()
        >>> loss.backward()
        >>> optimizer.step()
    """
    chosen: list[AOL] = []
    parameters = orthogonal_parameters(model)
    meant = {id(p.P) for p in parameters if p.is_tall and (convolutions or p.has_one_tap)}
    for module in model.modules():
        found = find_aol(module) if isinstance(module, LINEAR_LAYERS) else None
        if found is not None and found.log_q is None and not found.is_unscaled and id(original_of(module)) in meant:
            chosen.append(found)
    for parametrization in chosen:
        parametrization.is_unscaled = True
    try:
        yield
    finally:
        for parametrization in chosen:
            parametrization.is_unscaled = False
