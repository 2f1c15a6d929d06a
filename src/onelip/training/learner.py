"""One step of training: a network with its loss and its optimizer; and the batches that it gets."""

from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from onelip.data import Batches, ImageData
from onelip.training.average import WeightAverage
from onelip.training.build import make_augmentation, set_layout
from onelip.training.distributed import Process
from onelip.training.objective import Objective
from onelip.training.optimizer import make_optimizer, training_weights
from onelip.training.recipe import Recipe


class Learner:
    """A network with its loss and its optimizer: what one step of training needs, and nothing of the run around it.

    Args:
        recipe: everything that decides the step.
        model: the network, on its device.
        process: this process among several.
    """

    def __init__(self, recipe: Recipe, model: nn.Module, process: Process | None = None) -> None:
        self.recipe = recipe
        self.model = model
        self.device = next(model.parameters()).device
        self.process = process or Process(self.device)
        self.layout = set_layout(model, recipe)
        self.optimizer = make_optimizer(model, recipe)
        self.objective = Objective(recipe, model)
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
        most = max(1, -(-len(images) // self.recipe.accumulate))
        *others, last = zip(images.split(most), labels.split(most), strict=True)
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
    """The training images in batches, as the recipe has it."""
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
