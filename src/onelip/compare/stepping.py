"""Time: a training step of a recipe by itself, and how many epochs fit into a budget.

A ratio of two networks is measured with their steps in turn, in one process: the median over rounds of the ratio within
a round. The machine's mood changes more slowly than a round, so the ratio is worth something where seconds are not.
"""

import itertools
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from onelip.core.errors import RunError
from onelip.core.images import to_float
from onelip.data import Batches, ImageData, validation_split
from onelip.training.build import build_model, make_augmentation
from onelip.training.distributed import find_device, use_threads
from onelip.training.learner import Learner
from onelip.training.recipe import Recipe

Step = Callable[[Tensor, Tensor], None]


def training_step(recipe: Recipe, num_classes: int, shape: tuple[int, int, int]) -> Step:
    """A function of images and labels that makes one step as the loop does: forward, loss, backward, SGD, projection.

    The learning rate is a thousandth of the recipe's: cost does not depend on it, and the weights stay in range.
    """
    device = find_device(recipe.device)
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(recipe.seed)
        model = build_model(recipe, num_classes, shape).to(device).train()
    learner = Learner(recipe, model)

    def step(images: Tensor, labels: Tensor) -> None:
        loss = learner.step(
            images.to(device), labels.to(device), batch_size=len(labels), progress=0.5, lr=recipe.lr * 1e-3
        )
        float(loss)  # as the trainer does; waits for a GPU

    return step


@dataclass(frozen=True)
class Timing:
    """Times of a candidate and of what it is compared with, round by round."""

    seconds: list[float]
    reference: list[float]

    def to_json(self) -> dict[str, Any]:
        """The ratio, and the medians it goes with."""
        return {
            "ratio": statistics.median(a / b for a, b in zip(self.seconds, self.reference, strict=True)),
            "seconds": statistics.median(self.seconds),
            "plain_seconds": statistics.median(self.reference),
            "rounds": len(self.seconds),
        }


def interleaved(candidate: Callable[[], object], reference: Callable[[], object], seconds: float = 3.0) -> Timing:
    """Time two functions in turn, in alternating order, for about so long: 5 to 50 rounds after two that do not count.

    Examples:
        >>> timing = interleaved(lambda: sum(range(20000)), lambda: sum(range(20000)), seconds=0.0)
        >>> 0 < timing.to_json()["ratio"] < 100, len(timing.seconds)
        (True, 5)
    """
    times: tuple[list[float], list[float]] = ([], [])
    pair = ((candidate, times[0]), (reference, times[1]))
    end = float("inf")
    for turn in range(-2, 50):
        if turn == 0:
            end = time.perf_counter() + seconds
        if turn >= 5 and time.perf_counter() > end:
            break
        for function, taken in pair if turn % 2 else reversed(pair):
            start = time.perf_counter()
            function()
            if turn >= 0:
                taken.append(time.perf_counter() - start)
    return Timing(*times)


def step_times(recipe: Recipe, plain: Recipe, data: ImageData, seconds: float = 3.0) -> dict[str, Any]:
    """A step of the recipe against one of its plain twin, on the same batch, which is in place already."""
    images = to_float(data.train_images[: recipe.batch_size])
    labels = data.train_labels[: recipe.batch_size]
    with use_threads(recipe.threads):
        ours, theirs = (training_step(r, data.num_classes, data.shape) for r in (recipe, plain))
        return interleaved(lambda: ours(images, labels), lambda: theirs(images, labels), seconds).to_json()


def epochs_within(budget: float, recipe: Recipe, data: ImageData) -> int:
    """How many whole epochs of training steps the recipe makes in so many seconds, measured with real batches.

    Whole epochs, known before the run begins: the learning rate's schedule ends where the run ends. What comes after
    an epoch (evaluation, checkpoint) is not the method's and does not count.

    Raises:
        RunError: if not even one does.
    """
    used = validation_split(data, recipe.validation) if recipe.validation else data
    loader = Batches(
        used.train_images,
        used.train_labels,
        recipe.batch_size,
        shuffle=True,
        generator=torch.Generator().manual_seed(recipe.seed),
        augmentation=make_augmentation(recipe),
        device=find_device(recipe.device),
    )
    with use_threads(recipe.threads):
        step = training_step(recipe, data.num_classes, data.shape)
        again = itertools.chain.from_iterable(loader.epoch() for _ in itertools.count())
        for batch in itertools.islice(again, 2):  # the first steps allocate
            step(batch.images, batch.labels)
        start, done, taken = time.perf_counter(), 0, 0.0
        for batch in again:
            step(batch.images, batch.labels)
            done += 1
            taken = time.perf_counter() - start
            if done >= 5 and (taken > min(5.0, 0.05 * budget) or done >= 500):
                break
    epoch = taken / done * len(loader)
    if not epoch <= budget:
        raise RunError(
            f"expected an epoch to fit into the budget of {budget:g} s, got about {epoch:.3g} s for one; "
            "give a longer --budget, or one in epochs"
        )
    return int(budget / epoch)
