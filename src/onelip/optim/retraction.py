"""Retraction and tangent projection beside any optimizer of torch."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from onelip.core.errors import check_integer
from onelip.optim.layers import orthogonal_parameters, unscaled
from onelip.optim.muon import PRODUCTS, LipschitzMuon, Products, products_type
from onelip.optim.operators import RETRACTIONS, Retraction, retract, tangent as project_to_tangent

_KEEPS_NORMS = "keeps_norms"  # an attribute of the optimizer: the state dict of another one cannot set it
# The largest intervals that were measured: by SGD, and by steps that are orthogonalised (results/retract_every.json,
# results/fast_ablation.json). Norms drift between two retractions.
_MOST, _MOST_ORTHOGONALIZED = 16, 4
_STEP, _BFLOAT16 = "retraction_step", "retraction_bfloat16"  # in the state of each parameter, which a checkpoint has


class Retracted(RemovableHandle):
    """The handle of `retract_after`: `remove()` stops both the projection and the retraction."""

    def __init__(self, optimizer: Optimizer, *handles: RemovableHandle) -> None:
        self.optimizer, self.handles = optimizer, handles

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()
        self.optimizer.__dict__.pop(_KEEPS_NORMS, None)


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

    Parameters without a gradient are left unchanged, and so are those that the optimizer does not have. Run the forward
    pass of a step within `onelip.optim.training_weights(model, optimizer)`: the step then costs about as much as that
    of a plain network.

    Args:
        optimizer: any optimizer of torch.
        model: a model with orthogonal layers, such as AOL layers.
        retraction: "r1", "r2" (`onelip.optim.retract`) after the step, or None.
        tangent: project the gradients to the tangent space before the step (`onelip.optim.tangent`).
        every: retract after every `every`-th step of a parameter. The count is part of the state of the optimizer. In
            half an epoch with SGD, 16 lost nothing at rates of 0.001 and 0.005, and 4 nothing at 0.01
            (results/retract_every.json); in three epochs 4 at 0.01 lost 2.6 points of certified accuracy
            (results/paper_optimizers.json). Above 16 `training_weights` does not leave AOL out.
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
    setattr(optimizer, _KEEPS_NORMS, retraction == "r2" and every <= _MOST)

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


def keeps_norms(optimizer: Any) -> bool:
    """Whether an optimizer keeps the norms of orthogonal layers near 1, so that training can leave AOL out.

    True for `retract_after` with R2 after at most 16 steps, and for `LipschitzMuon` with R2 after each step, or after
    at most 4 (16 without orthogonalisation) along projected directions. An optimizer of your own that does so can have
    an attribute `keeps_norms = True`.
    """
    if not isinstance(optimizer, LipschitzMuon):
        return bool(getattr(optimizer, _KEEPS_NORMS, False))
    for group in optimizer.param_groups:
        most = 1 if not group["tangent"] else _MOST_ORTHOGONALIZED if group["orthogonalize"] else _MOST
        if group["retraction"] != "r2" or group["every"] > most:
            return False
    return True


def training_weights(model: nn.Module, optimizer: Any) -> AbstractContextManager[None]:
    """The context for the forward pass of a training step, which then costs about as much as that of a plain network.

    It is `onelip.optim.unscaled` if the optimizer keeps the norms of P near 1 (`keeps_norms`), for kernels of every
    size beside `retract_after` and for matrices beside `LipschitzMuon`; else nothing changes.

    Examples:
        >>> import onelip
        >>> model = onelip.nn.AOLLinear(4, 4)
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        >>> handle = retract_after(optimizer, model, every=16)
        >>> with training_weights(model, optimizer):
        ...     loss = model(torch.ones(1, 4)).sum()
        >>> loss.backward()
        >>> optimizer.step()
    """
    if not keeps_norms(optimizer):
        return nullcontext()
    return unscaled(model, convolutions=not isinstance(optimizer, LipschitzMuon))
