"""Retraction and tangent projection beside any optimizer of torch."""

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from onelip.core.errors import check_integer
from onelip.optim.layers import orthogonal_parameters
from onelip.optim.muon import PRODUCTS, LipschitzMuon, Products, products_type
from onelip.optim.operators import RETRACTIONS, Retraction, retract, tangent as project_to_tangent

_KIND = "retraction_kind"  # in the first group of the optimizer
_STEP, _BFLOAT16 = "retraction_step", "retraction_bfloat16"  # in the state of each parameter, which a checkpoint has


class Retracted(RemovableHandle):
    """The handle of `retract_after`: `remove()` stops both the projection and the retraction."""

    def __init__(self, optimizer: Optimizer, *handles: RemovableHandle) -> None:
        self.optimizer, self.handles = optimizer, handles

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()
        self.optimizer.param_groups[0].pop(_KIND, None)


def retract_after(
    optimizer: Optimizer,
    model: nn.Module,
    *,
    retraction: Retraction | None = "r2",
    tangent: bool = False,
    every: int = 1,
    products: Products = "auto",
) -> RemovableHandle:
    """Keep the AOL layers of a model near orthogonality; `.remove()` of the returned handle stops it.

    Parameters without a gradient are left unchanged, and so are those that the optimizer does not have. Between
    retractions by R2 the training step can leave AOL out: run it within `onelip.optim.unscaled(model)`. It then costs
    about as much as the step of a plain network.

    Args:
        optimizer: any optimizer of torch.
        model: a model with orthogonal layers, such as AOL layers.
        retraction: "r1", "r2" (`onelip.optim.retract`) after the step, or None.
        tangent: project the gradients to the tangent space before the step (`onelip.optim.tangent`).
        every: retract after every `every`-th step of a parameter. The count is part of the state of the optimizer. In
            half an epoch with SGD, 16 lost nothing at rates of 0.001 and 0.005, and 4 nothing at 0.01
            (results/retract_every.json); larger ones were not run.
        products: type of the product of P and $P^\\top P - I$, for layers whose operator is a matrix: "float32",
            "bfloat16", or "auto" for bfloat16 where it is measured to be faster, at the first retraction; the choice
            becomes part of the state. The Gram matrix always has the precision of the parameter. Near orthogonality
            $P^\\top P - I$ is small, so its rounding hardly changes P.

    Examples:
        >>> import onelip
        >>> model = onelip.nn.AOLLinear(4, 4)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        >>> handle = retract_after(optimizer, model, tangent=True)
        >>> model(torch.ones(1, 4)).sum().backward()
        >>> optimizer.step()
    """
    if retraction is not None and retraction not in RETRACTIONS:
        raise ValueError(f"expected retraction to be 'r1', 'r2' or None, got {retraction!r}")
    if products not in PRODUCTS:
        raise ValueError(f"expected products to be 'auto', 'float32' or 'bfloat16', got {products!r}")
    check_integer("every", every)
    parameters = orthogonal_parameters(model)
    if not parameters:
        raise ValueError(
            "expected a model with AOL layers, got none; apply AOL first, such as onelip.constrain(model, 'aol')"
        )
    own = {id(p) for group in optimizer.param_groups for p in group["params"]}
    parameters = [p for p in parameters if id(p.P) in own]
    if not parameters:
        raise ValueError("expected an optimizer of parameters of the model, got one that has none of its AOL layers")
    optimizer.param_groups[0][_KIND] = retraction

    @torch.no_grad()
    def before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for parameter in parameters:
            if parameter.P.grad is not None and parameter.is_tall:
                kernel, gradient = parameter.to_kernel(parameter.P), parameter.to_kernel(parameter.P.grad)
                parameter.P.grad.copy_(parameter.to_weight(project_to_tangent(kernel, gradient)))

    @torch.no_grad()
    def after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if retraction is None:
            return
        for parameter in parameters:
            if parameter.P.grad is None:
                continue
            state = optimizer.state[parameter.P]
            state[_STEP] = state.get(_STEP, 0) + 1
            if state[_STEP] % every == 0:
                low = products_type(products, parameter.P, optimizer, _BFLOAT16)
                parameter.set_kernel(retract(parameter.to_kernel(parameter.P), retraction, dtype=low))

    handles = [optimizer.register_step_post_hook(after)]
    if tangent:
        handles.append(optimizer.register_step_pre_hook(before))
    return Retracted(optimizer, *handles)


def keeps_norms(optimizer: Optimizer) -> bool:
    """Whether an optimizer keeps the norms of orthogonal layers near 1, so that training can leave AOL out.

    True for `retract_after` with R2, and for `LipschitzMuon` with R2 at every step or along projected directions, along
    which the norms drift slowly.
    """
    if isinstance(optimizer, LipschitzMuon):
        groups = optimizer.param_groups
        return all(g["retraction"] == "r2" and (g["every"] == 1 or g["tangent"]) for g in groups)
    return optimizer.param_groups[0].get(_KIND) == "r2"
