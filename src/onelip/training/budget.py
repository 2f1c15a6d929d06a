"""Budgets of time instead of numbers of epochs: a recipe for it, and the epochs that fit, from the measured speed.

The network, the batch size and the learning rate come from a small table; results/fast_training.json has the runs that
it was chosen by. The number of steps is fixed before the run starts, so the learning rate ends at zero with the last of
them, and a run that is killed resumes to the same weights.
"""

import math
import statistics
import time
from itertools import islice

import torch

from onelip.core.bake import bake
from onelip.core.errors import RecipeError
from onelip.data import ImageData, validation_split
from onelip.training.build import build_model
from onelip.training.distributed import Process
from onelip.training.evaluation import evaluate, find_constants
from onelip.training.learner import Learner, make_batches
from onelip.training.recipe import Recipe, format_seconds, recipe_for_budget

_EVALUATIONS = 10  # at most, in a run: each takes time from training
_FEWEST_STEPS = 20  # fewer train nothing
_RESERVE = 0.03  # of the budget, for checkpoints and for steps that are slower than the measured ones


def fit_to_budget(recipe: Recipe, seconds: float, data: ImageData, process: Process) -> Recipe:
    """The recipe with as many epochs as fit into a budget on this machine.

    Some steps and one evaluation are run with a copy of the network and timed; nothing of them is kept.

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


def _fit(recipe: Recipe, seconds: float, data: ImageData, process: Process) -> Recipe:
    images = len((validation_split(data, recipe.validation) if recipe.validation else data).train_images)
    if recipe.batch_size == recipe_for_budget(seconds).batch_size:
        # Few images: at least 20 steps per epoch. The rate goes with the root of the batch size, as noise does.
        batch_size = max(20, min(recipe.batch_size, images // 20))
        recipe = recipe.replace(batch_size=batch_size, lr=recipe.lr * math.sqrt(batch_size / recipe.batch_size))
    step, evaluation = _measure(recipe, data, process)
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


def _measure(recipe: Recipe, data: ImageData, process: Process) -> tuple[float, float]:
    """Seconds of a step, with its batch, and of an evaluation."""
    used = validation_split(data, recipe.validation) if recipe.validation else data
    generator = torch.Generator().manual_seed(recipe.seed)
    with torch.random.fork_rng(devices=[process.device] if process.device.type == "cuda" else []):
        torch.manual_seed(recipe.seed)
        model = build_model(recipe, data.num_classes, data.shape).to(process.device)
        learner = Learner(recipe, model, Process(process.device))
        model.train()
        times: list[float] = []
        batches = make_batches(recipe, used, process, generator)
        clock = time.monotonic()
        # The first steps are slower. A rate of zero would skip work in no optimizer, and nothing can diverge.
        for batch in islice((b for _ in range(20) for b in batches), 20):
            loss = learner.step(batch.images, batch.labels, batch_size=batch.global_size, progress=0.0, lr=0.0)
            float(loss)  # waits for a GPU
            times.append(time.monotonic() - clock)
            clock = time.monotonic()
            if len(times) >= 8 and sum(times) > 3:
                break
        step = statistics.median(times[2:] or times)
        some = used.test_images[:2000]
        clock = time.monotonic()
        plain = bake(model, forms=False)
        constants = find_constants(model, plain, recipe, data.shape)
        fixed = time.monotonic() - clock
        evaluate(plain, some, used.test_labels[:2000], constants)
        evaluation = fixed + (time.monotonic() - clock - fixed) * len(used.test_images) / max(1, len(some))
    return step, evaluation
