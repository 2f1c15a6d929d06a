"""Projection after the step: the weight is free for the optimizer, and moved back to where it belongs right after.

The rule of each layer lies on its weight as a parametrization that changes nothing in training. So it travels with the
layer: in copies, state dicts and `bake`, and `onelip.project(model)` finds it without being told.
"""

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from onelip.core.parametrization import LipschitzParametrization, find_parametrization, original_of


class Projection(LipschitzParametrization):
    """Base of methods by projection: override `project_`; in training the weight is the parameter itself."""

    def forward(self, P: Tensor) -> Tensor:
        return P

    def project_(self, P: Tensor) -> None:
        """Move the parameter, in place; called without gradients after each step of the optimizer."""
        raise NotImplementedError


@torch.no_grad()
def project(model: nn.Module) -> int:
    """Project the weights of all layers that have a method by projection, in place; returns how many there are.

    Call it after each step of the optimizer; `project_after` does that by itself.

    Examples:
        >>> from onelip.methods.norms.clipping import clipping
        >>> model = nn.Sequential(clipping(nn.Linear(4, 4)))
        >>> project(model)
        1
    """
    count = 0
    for module in model.modules():
        found = find_parametrization(module)
        if isinstance(found, Projection):
            found.project_(original_of(module))
            count += 1
    return count


def project_after(optimizer: torch.optim.Optimizer, model: nn.Module) -> RemovableHandle:
    """Make the optimizer project the model after each of its steps; `.remove()` the handle to end that.

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
    if not any(isinstance(find_parametrization(module), Projection) for module in model.modules()):
        raise ValueError(
            "expected a model with layers that are projected, got none; apply a method by projection first, "
            "such as onelip.constrain(model, 'lcc')"
        )

    def hook(optimizer: torch.optim.Optimizer, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        project(model)

    return optimizer.register_step_post_hook(hook)


def project_step(model: nn.Module) -> None:
    """`project` as what a method does after a step."""
    project(model)
