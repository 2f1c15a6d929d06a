"""An exponential moving average of the weights of a network in training."""

import copy

import torch
from torch import Tensor, nn


class WeightAverage(nn.Module):
    """An exponential moving average of parameters and of means of batches.

    After $t$ updates the decay is $\\min(d, (1 + t) / (10 + t))$, so that initial weights are soon forgotten. Other
    buffers, such as vectors of a power iteration, are copied. Parameters of methods are averaged, not the weights that
    they give: the average is constrained like every other network of the method.

    Args:
        model: the network in training; it is copied.
        decay: the decay d, in [0, 1).

    Examples:
        >>> layer = nn.Linear(1, 1, bias=False)
        >>> average = WeightAverage(layer, 0.9)
        >>> with torch.no_grad():
        ...     _ = layer.weight.add_(10)
        >>> average.update(layer)
        >>> torch.allclose(average.model.weight, layer.weight - 1)
        True
    """

    updates: Tensor

    def __init__(self, model: nn.Module, decay: float) -> None:
        super().__init__()
        self.model = copy.deepcopy(model).requires_grad_(False)
        self.decay = decay
        self.register_buffer("updates", torch.zeros((), dtype=torch.int64))

    @torch.no_grad()
    def update(self, model: nn.Module) -> None:
        """Add the current weights of the network in training."""
        done = int(self.updates)
        weight = 1 - min(self.decay, (1 + done) / (10 + done))
        for mine, other in zip(self.model.parameters(), model.parameters(), strict=True):
            mine.lerp_(other, weight)
        for (name, mine), other in zip(self.model.named_buffers(), model.buffers(), strict=True):
            if name.rpartition(".")[2].startswith("running_") and mine.is_floating_point():
                mine.lerp_(other, weight)
            else:
                mine.copy_(other)
        self.updates += 1
