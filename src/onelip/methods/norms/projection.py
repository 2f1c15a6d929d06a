"""Projection after the step of the optimizer.

The rule of a layer is a parametrization of its weight that is the identity in training. So it is part of copies, state
dicts and `bake`, and `onelip.project(model)` finds it.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.hooks import RemovableHandle

from onelip.core.parametrization import LipschitzParametrization, find_parametrization, original_of


class Projection(LipschitzParametrization):
    """Base of methods by projection: override `project_`. In training the weight is the parameter itself.

    Args:
        geometry: how the weight acts, from `onelip.core.geometry.geometry_of`.
        weight_shape: shape of the weight.
        lipschitz: the constant of the layer after the projection.

    Examples:
        >>> class Box(Projection):
        ...     def project_(self, P):
        ...         P.clamp_(-0.5, 0.5)
        >>> from onelip.core.geometry import geometry_of
        >>> from onelip.core.parametrization import attach
        >>> layer = nn.Linear(1, 1)
        >>> _ = nn.init.constant_(layer.weight, 2.0)
        >>> _ = project(attach(layer, Box(geometry_of(layer), layer.weight.shape)))
        >>> layer.weight.item()
        0.5
    """

    def forward(self, P: Tensor) -> Tensor:
        return P

    def project_(self, P: Tensor) -> None:
        """Move the parameter in place; called without gradients after each step of the optimizer."""
        raise NotImplementedError


def _projections(model: nn.Module) -> Iterator[tuple[Projection, Tensor]]:
    for module in model.modules():
        if not parametrize.is_parametrized(module):
            continue
        lists = module.parametrizations
        assert isinstance(lists, nn.ModuleDict)
        for name in lists:
            found = find_parametrization(module, name)
            if isinstance(found, Projection):
                yield found, original_of(module, name)


@torch.no_grad()
def project(model: nn.Module) -> int:
    """Project the weights of all layers with a method by projection (clipping, LCC, Parseval), in place.

    Call it after each step of the optimizer; `project_after` registers a hook that does so.

    Args:
        model: any module.

    Returns:
        The number of projected weights.

    Examples:
        >>> from onelip.methods.norms.clipping import clipping
        >>> model = nn.Sequential(clipping(nn.Linear(4, 4)))
        >>> project(model)
        1
    """
    count = 0
    for projection, parameter in _projections(model):
        projection.project_(parameter)
        count += 1
    return count


def project_after(optimizer: torch.optim.Optimizer, model: nn.Module) -> RemovableHandle:
    """Project the model after each step of the optimizer.

    Args:
        optimizer: a torch optimizer.
        model: a module with layers that have a method by projection.

    Returns:
        A handle; `.remove()` stops the projections.

    Raises:
        ValueError: if no layer of the model has a method by projection.

    Examples:
        >>> from onelip.methods.norms.clipping import clipping
        >>> model = clipping(nn.Linear(4, 4))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        >>> handle = project_after(optimizer, model)
        >>> model(torch.ones(1, 4)).sum().backward()
        >>> optimizer.step()
        >>> round(float(model.weight.detach().abs().max()), 6)  # 1 / sqrt(4 * 4)
        0.25
    """
    if not any(True for _ in _projections(model)):
        raise ValueError(
            "the model has no layer with a method by projection; apply a method by projection first, "
            "e.g. onelip.constrain(model, 'lcc')"
        )

    def hook(optimizer: torch.optim.Optimizer, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        project(model)

    return optimizer.register_step_post_hook(hook)
