"""SGD as the paper has it: weight decay for the weights of linear layers, and for nothing else."""

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from onelip.geometry import LINEAR_LAYERS
from onelip.training.recipe import Recipe


def make_optimizer(model: nn.Module, recipe: Recipe) -> torch.optim.SGD:
    """Two groups of parameters: weights, which decay, and the rest (biases, log_q, parameters of activations)."""
    weights = linear_weights(model)
    chosen = {id(weight) for weight in weights}
    rest = [p for p in model.parameters() if id(p) not in chosen]
    groups = [
        {"params": weights, "weight_decay": recipe.weight_decay},
        {"params": rest, "weight_decay": 0.0},
    ]
    return torch.optim.SGD(
        [group for group in groups if group["params"]],
        lr=recipe.lr,
        momentum=recipe.momentum,
        nesterov=recipe.nesterov,
    )


def linear_weights(model: nn.Module) -> list[Tensor]:
    """What the weight of each linear layer is made of: the parameter P where a method is applied, else the weight.

    Example:
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
            # The originals belong to the list itself; what a map learns beside them (log_q) belongs to the map.
            originals = list(lists["weight"].parameters(recurse=False))
        else:
            originals = [module.weight]
        found |= {id(p): p for p in originals}
    return list(found.values())
