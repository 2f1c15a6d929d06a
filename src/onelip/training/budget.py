"""Budgets of time instead of numbers of epochs: a recipe for it, and the epochs that fit, from the measured speed.

The network, the batch size and the learning rate come from a small table; results/fast_training.json has the runs that
it was chosen by. Steps run in bfloat16 where that is measured to be faster; evaluation never does. The number of steps
is fixed before the run starts, so the learning rate ends at zero with the last of them, and a run that is killed
resumes to the same weights.
"""

import math
import statistics
import time
from dataclasses import dataclass
from itertools import islice

import torch

from onelip.core.bake import bake
from onelip.core.errors import RecipeError
from onelip.data import ImageData, validation_split
from onelip.training.distributed import Process
from onelip.training.evaluation import evaluate, find_constants
from onelip.training.learner import Learner, make_batches
from onelip.training.memory import require_memory, trial_model
from onelip.training.recipe import Recipe, format_seconds, recipe_for_budget

_EVALUATIONS = 10  # at most, in a run: each takes time from training
_FEWEST_STEPS = 20  # fewer train nothing
_WORTHWHILE = 0.9  # bfloat16 is used where it takes at most this part of the time of a step
_RESERVE = 0.03  # of the budget, for checkpoints and for steps that are slower than the measured ones


def fit_to_budget(recipe: Recipe, seconds: float, data: ImageData, process: Process) -> Recipe:
    """The recipe with as many epochs as fit into a budget on this machine.

    Some steps, in float32 and in bfloat16, and one evaluation are run with other networks of the recipe and timed;
    nothing of them is kept.

    Args:
        recipe: everything but the number of epochs.
        seconds: of the steps and evaluations; loading the data is not part of it.
        data: training and test images.
        process: this process among several; the first one decides for all.

    Raises:
        RecipeError: if the budget is too small.
    """
    recipe = process.run_on_all(_fit, recipe, seconds, data, process)
    return process.broadcast(recipe)


@dataclass(frozen=True)
class Cost:
    """Measured time of a recipe on this machine.

    Attributes:
        step: seconds of a training step, with its batch.
        evaluation: seconds of an evaluation.
        steps: number of steps of the whole recipe.
        evaluations: number of evaluations of the whole recipe.
    """

    step: float
    evaluation: float
    steps: int
    evaluations: int

    @property
    def seconds(self) -> float:
        """The estimate for the whole recipe, without loading the data."""
        return self.step * self.steps + self.evaluation * self.evaluations


def measure_cost(recipe: Recipe, data: ImageData, process: Process) -> Cost:
    """Estimate the time of a recipe from some steps and one evaluation with another network; nothing is kept.

    Args:
        recipe: the recipe.
        data: training and test images.
        process: this process among several; the first one measures for all.

    Returns:
        The measured times and the counts that they are multiplied by.
    """
    return process.broadcast(process.run_on_all(measure_cost_here, recipe, data, process))


def measure_cost_here(recipe: Recipe, data: ImageData, process: Process, most: int = 20) -> Cost:
    """`measure_cost` for this process only, from at most some steps."""
    return Cost(
        seconds_per_step(recipe, data, process, most),
        seconds_per_evaluation(recipe, data, process),
        recipe.epochs * -(-round(_images(recipe, data) * recipe.epoch_part) // recipe.batch_size),
        -(-recipe.epochs // recipe.evaluate_every) + 1,  # one more for the results
    )


def _images(recipe: Recipe, data: ImageData) -> int:
    return len((validation_split(data, recipe.validation) if recipe.validation else data).train_images)


def _fit(recipe: Recipe, seconds: float, data: ImageData, process: Process) -> Recipe:
    images = _images(recipe, data)
    if recipe.batch_size == recipe_for_budget(seconds).batch_size:
        # Few images: at least 20 steps per epoch. The rate goes with the root of the batch size, as noise does.
        need, free = require_memory(recipe.replace(batch_size=20), data.num_classes, data.shape, process)
        fitting = int(20 * (free / 2 - need.fixed) / max(need.estimate - need.fixed, 1))
        batch_size = max(20, min(recipe.batch_size, images // 20, fitting))
        recipe = recipe.replace(batch_size=batch_size, lr=recipe.lr * math.sqrt(batch_size / recipe.batch_size))
    require_memory(recipe, data.num_classes, data.shape, process)
    step, evaluation = seconds_per_step(recipe, data, process), seconds_per_evaluation(recipe, data, process)
    if not recipe.bf16 and process.device.type in ("cpu", "cuda"):
        low = recipe.replace(bf16=True)
        if (faster := seconds_per_step(low, data, process)) < _WORTHWHILE * step:
            recipe, step = low, faster
    left = seconds * (1 - _RESERVE) - 2 * evaluation  # after the last epoch, and for the results
    steps = int(left / step)
    if steps < _FEWEST_STEPS:
        least = (_FEWEST_STEPS * step + 2 * evaluation) / (1 - _RESERVE)
        raise RecipeError(
            f"a budget of {format_seconds(seconds)} is too small: here a step takes {step:.2g} s and an evaluation "
            f"{evaluation:.2g} s; use at least --budget {format_seconds(least * 1.2)}"
        )
    per_epoch = -(-images // recipe.batch_size)
    evaluations = min(_EVALUATIONS, max(1, steps // per_epoch))
    steps = max(_FEWEST_STEPS, int((left - (evaluations - 1) * evaluation) / step))
    epochs = -(-steps // per_epoch)
    return recipe.replace(
        epochs=epochs,
        epoch_part=min(1.0, steps / epochs * recipe.batch_size / images),
        evaluate_every=-(-epochs // evaluations),
    )


def seconds_per_step(recipe: Recipe, data: ImageData, process: Process, most: int = 20) -> float:
    """Seconds of a step with its batch, the median of some; nothing of them is kept.

    Args:
        recipe: the recipe.
        data: training and test images.
        process: this process among several, whose part of a batch is used.
        most: number of steps at most.
    """
    used = validation_split(data, recipe.validation) if recipe.validation else data
    model = trial_model(recipe, data.num_classes, data.shape, process.device)
    learner = Learner(recipe, model, Process(process.device))
    learner.objective.check(data.shape)
    model.train()
    times: list[float] = []
    batches = make_batches(recipe, used, process, torch.Generator().manual_seed(recipe.seed))
    clock = time.monotonic()
    # With a rate of zero every optimizer does all of its work, and nothing can diverge.
    for batch in islice((b for _ in range(most) for b in batches), most):
        loss = learner.step(batch.images, batch.labels, batch_size=batch.global_size, progress=0.0, lr=0.0)
        float(loss)  # waits for a GPU
        times.append(time.monotonic() - clock)
        clock = time.monotonic()
        # Large networks: as few steps as tell something. All processes make the same number: layers may communicate.
        if process.broadcast(sum(times) > (2 if len(times) >= 8 else 20)):
            break
    return statistics.median(times[2:] or times)  # the first steps are slower


def seconds_per_evaluation(recipe: Recipe, data: ImageData, process: Process) -> float:
    """Seconds of an evaluation, from a part of the images; arguments as above."""
    used = validation_split(data, recipe.validation) if recipe.validation else data
    model = trial_model(recipe, data.num_classes, data.shape, process.device)
    start = time.monotonic()
    plain = bake(model, expand=False)
    constants = find_constants(model, plain, recipe, data.shape)
    baked = time.monotonic()
    evaluate(plain, used.test_images[:2000], used.test_labels[:2000], constants)
    return baked - start + (time.monotonic() - baked) * max(1.0, len(used.test_images) / 2000)
