"""The optimizer of a recipe, and its learning rate as a function of the step."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from onelip.core.errors import RecipeError
from onelip.core.geometry import LINEAR_LAYERS
from onelip.optim import LipschitzMuon, unscaled
from onelip.training.recipe import Recipe, parse_options


def make_optimizer(model: nn.Module, recipe: Recipe) -> torch.optim.Optimizer:
    """The optimizer of a recipe. Weights of linear layers decay; biases and parameters of activations do not.

    Raises:
        RecipeError: if an option of it is invalid.
    """
    try:
        return _make_optimizer(model, recipe, parse_options(recipe.optimizer_options))
    except (TypeError, ValueError) as error:
        raise RecipeError(f"optimizer {recipe.optimizer}: {error}") from error


def _make_optimizer(model: nn.Module, recipe: Recipe, options: dict[str, Any]) -> torch.optim.Optimizer:
    if recipe.optimizer == "muon":
        decay = recipe.weight_decay
        return LipschitzMuon(model, recipe.lr, momentum=recipe.momentum, weight_decay=decay, **options)
    weights = linear_weights(model)
    chosen = {id(weight) for weight in weights}
    rest = [p for p in model.parameters() if id(p) not in chosen]
    groups = [
        {"params": weights, "weight_decay": recipe.weight_decay},
        {"params": rest, "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if recipe.optimizer == "adamw":
        return torch.optim.AdamW(groups, lr=recipe.lr, betas=(recipe.momentum, 0.999), **options)
    return torch.optim.SGD(groups, lr=recipe.lr, momentum=recipe.momentum, nesterov=recipe.nesterov, **options)


def training_weights(model: nn.Module, optimizer: torch.optim.Optimizer) -> AbstractContextManager[None]:
    """The context of a forward pass in training: where steps end with R2, AOL can be left out of it.

    Also with a retraction at every k-th step: between two of them a step of rate lr along a tangent changes the square
    of the norm of P by about lr^2.
    """
    is_retracted = isinstance(optimizer, LipschitzMuon) and all(
        group["retraction"] == "r2" and (group["every"] == 1 or group["tangent"]) for group in optimizer.param_groups
    )
    return unscaled(model) if is_retracted else nullcontext()


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


def learning_rate(recipe: Recipe, step: int, steps: int) -> float:
    """Return the learning rate of a step, counted from 0, of a run of `steps`. It has no state that a checkpoint needs.

    With the paper's recipe the drops come at the first step of epochs 900, 990 and 999.

    Examples:
        >>> [learning_rate(Recipe(epochs=1000), epoch * 200, 1000 * 200) for epoch in (0, 899, 900)]
        [0.001, 0.001, 0.0001]
    """
    if recipe.schedule == "steps":
        drops = sum(step / steps >= part for part in recipe.drop_at)
        return recipe.lr * recipe.drop_factor**drops
    progress = (step + 0.5) / steps  # the middle of the step: at 0 exactly the step would be wasted
    if progress < recipe.warmup:
        return recipe.lr * progress / recipe.warmup
    return recipe.lr * (1 - progress) / (1 - recipe.warmup)
