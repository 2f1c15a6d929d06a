"""One step of training: a network with its optimizer, its loss and the average of its weights; and its batches."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from onelip.core.errors import RecipeError
from onelip.data import Augmentation, Batches, DataError, ImageData
from onelip.optim import LipschitzMuon, retract_after, training_weights
from onelip.optim.layers import linear_weights, orthogonal_parameters
from onelip.optim.muon import bfloat16_is_faster
from onelip.training.distributed import Process
from onelip.training.objective import Objective
from onelip.training.recipe import Recipe, parse_options


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
    for name in ("lr", "momentum", "nesterov", "weight_decay", "products"):
        if name in options:
            raise ValueError(f"{name} is an option of its own: --{name.replace('_', '-')}")
    if "betas" in options:
        raise ValueError("the first of the betas is --momentum, the second is 0.999")
    if recipe.optimizer == "muon":
        if not orthogonal_parameters(model):
            raise ValueError("it keeps AOL and Björck layers orthogonal, and the network has none; use --optimizer sgd")
        own = {"momentum": recipe.momentum, "weight_decay": recipe.weight_decay, "products": recipe.products}
        return LipschitzMuon(model, recipe.lr, **own, **options)
    weights = linear_weights(model)
    chosen = {id(weight) for weight in weights}
    rest = [p for p in model.parameters() if id(p) not in chosen]
    groups = [
        {"params": weights, "weight_decay": recipe.weight_decay},
        {"params": rest, "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    optimizer: torch.optim.Optimizer
    if recipe.optimizer == "adamw":
        optimizer = torch.optim.AdamW(groups, lr=recipe.lr, betas=(recipe.momentum, 0.999), **options)
    else:
        optimizer = torch.optim.SGD(groups, lr=recipe.lr, momentum=recipe.momentum, nesterov=recipe.nesterov, **options)
    if recipe.retract_every:
        retract_after(optimizer, model, every=recipe.retract_every, products=recipe.products)
    return optimizer


def with_measured_products(recipe: Recipe, device: torch.device) -> Recipe:
    """The recipe with the faster type of products on a device, so that the same recipe gives the same weights."""
    if recipe.products != "auto" or not (recipe.optimizer == "muon" or recipe.retract_every):
        return recipe
    return recipe.replace(products="bfloat16" if bfloat16_is_faster(device) else "float32")


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


class Learner:
    """A network with its loss and its optimizer: what one step of training needs, and nothing of the run around it.

    Args:
        recipe: everything that decides the step.
        model: the network, on its device.
        process: this process among several.
        teacher: gives the labels of images; see `onelip.training.teacher.load_teacher`.
    """

    def __init__(
        self,
        recipe: Recipe,
        model: nn.Module,
        process: Process | None = None,
        teacher: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self.recipe = recipe
        self.model = model
        self.device = next(model.parameters()).device
        self.process = process or Process(self.device)
        self.layout = set_layout(model, recipe)
        self.optimizer = make_optimizer(model, recipe)
        self.objective = Objective(recipe, model, teacher)
        self.average = WeightAverage(model, recipe.ema) if recipe.ema else None
        self.network: nn.Module = model  # what is run: the model, or a wrapper of it

    @property
    def evaluated(self) -> nn.Module:
        """The network that is evaluated and saved: the average of the weights, if there is one, else the model."""
        return self.model if self.average is None else self.average.model

    def wrap(self) -> None:
        """Wrap the network for several processes and for torch.compile, once its weights are in place."""
        if self.process.count > 1:
            self.network = DistributedDataParallel(self.model)
        if self.recipe.compile:
            self.network.compile()

    def step(self, images: Tensor, labels: Tensor, *, batch_size: int, progress: float, lr: float) -> Tensor:
        """One step of the optimizer.

        Args:
            images: (N, C, H, W), the part of the batch of this process.
            labels: (N).
            batch_size: number of images of the whole batch.
            progress: part of the run that is done.
            lr: learning rate.

        Returns:
            The part of this process of the loss before the step.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.zero_grad(set_to_none=True)
        # As many parts in all processes, which communicate in each: by the size of the whole batch.
        count = max(1, min(self.recipe.accumulate, batch_size // self.process.count))
        *others, last = zip(images.tensor_split(count), labels.tensor_split(count), strict=True)
        total = torch.zeros((), device=self.device)
        for part in others:
            with self.network.no_sync() if isinstance(self.network, DistributedDataParallel) else nullcontext():
                total += self._backward(*part, batch_size, progress)
        total += self._backward(*last, batch_size, progress)
        if self.recipe.gradient_clip:
            # After the average over processes: all have the same gradient, and clip it alike.
            nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.gradient_clip)
        self.optimizer.step()
        self.objective.after_step()
        if self.average is not None:
            self.average.update(self.model)
        return total

    def _backward(self, images: Tensor, labels: Tensor, batch_size: int, progress: float) -> Tensor:
        """Add the gradient of a part of the batch; returns its part of the loss."""
        precision = torch.autocast(self.device.type, torch.bfloat16) if self.recipe.bf16 else nullcontext()
        with training_weights(self.model, self.optimizer):
            loss = self.objective(
                self.network,
                images.contiguous(memory_format=self.layout),
                labels,
                batch_size=batch_size,
                progress=progress,
                precision=precision,
            )
        # DistributedDataParallel averages over processes, but their losses are parts of a sum.
        (loss * self.process.count).backward()
        return loss.detach()


def make_batches(recipe: Recipe, data: ImageData, process: Process, generator: torch.Generator) -> Batches:
    """The batches of the training images, with the augmentation of the recipe."""
    return Batches(
        data.train_images,
        data.train_labels,
        recipe.batch_size,
        shuffle=True,
        generator=generator,
        part=recipe.epoch_part,
        augmentation=make_augmentation(recipe),
        device=process.device,
        rank=process.rank,
        world_size=process.count,
    )


def make_augmentation(recipe: Recipe) -> Augmentation | None:
    """Return the augmentation of a recipe; None if it has none."""
    if not recipe.augment:
        return None
    try:
        return Augmentation(
            hue=recipe.hue,
            saturation=recipe.saturation,
            brightness=recipe.brightness,
            contrast=recipe.contrast,
            rotation=recipe.rotation,
            translation=recipe.translation,
            flip=recipe.flip,
            interpolations=recipe.interpolations,
        )
    except DataError as error:
        raise RecipeError(str(error)) from error


def set_layout(model: nn.Module, recipe: Recipe) -> torch.memory_format:
    """Set the memory format of a model to that of the recipe; return it, for the images.

    It determines the order of sums: with the format of the training, results are the same bit for bit.
    """
    layout = torch.channels_last if recipe.channels_last else torch.contiguous_format
    # This use of `to` is documented, but missing from torch's annotations.
    model.to(memory_format=layout)  # pyright: ignore[reportCallIssue]
    return layout
