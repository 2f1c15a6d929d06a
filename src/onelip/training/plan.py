"""What a run will do, for the block that is shown before it starts."""

import torch

from onelip.data import ImageData, validation_split
from onelip.training.budget import measure_cost_here
from onelip.training.distributed import Process
from onelip.training.learner import make_batches
from onelip.training.memory import StepMemory, format_bytes
from onelip.training.objective import resolve_method
from onelip.training.recipe import Recipe, format_seconds


def describe_run(
    recipe: Recipe, data: ImageData, process: Process, memory: tuple[StepMemory, float], budget: float | None = None
) -> list[tuple[str, str]]:
    """Labels and texts: data, split, network, training, memory, device, steps and time of a run.

    Args:
        recipe: the recipe.
        data: training and test images.
        process: this process among several.
        memory: estimate of a step and free bytes, from `require_memory`.
        budget: seconds of the run; None to time three steps and a part of an evaluation.
    """
    used = validation_split(data, recipe.validation) if recipe.validation else data
    channels, height, width = data.shape
    held = f", {len(used.test_labels):,} validation" if recipe.validation else ""
    steps = recipe.epochs * len(make_batches(recipe, used, process, torch.Generator()))
    method = resolve_method(recipe)
    if budget is None:
        seconds = measure_cost_here(recipe, data, process, 3).seconds
        time = f"about {format_seconds(seconds)}, from the speed of three steps"
    else:
        time = f"{format_seconds(budget)}, the budget"
    need, free = memory
    several = f", {_counted(process.count, 'process')}" if process.count > 1 else ""
    resized = "" if recipe.resize_to is None else ", resized"
    return [
        ("data", f"{data.name}: {data.num_classes} classes, {channels}x{height}x{width} pixels{resized}"),
        ("images", f"{len(used.train_labels):,} training{held}, {len(data.test_labels):,} test ({data.split})"),
        (
            "network",
            f"{recipe.model}, {'plain layers' if method is None else method.name}: {need.parameters:,} parameters",
        ),
        ("training", f"{recipe.optimizer}, learning rate {recipe.lr:.3g}, batch size {recipe.batch_size}"),
        ("memory", f"about {format_bytes(need.estimate)} for a step; {format_bytes(free)} are free"),
        ("device", f"{process.device}, {_counted(torch.get_num_threads(), 'thread')}{several}"),
        ("steps", f"{steps:,}, {recipe.epochs * recipe.epoch_part:.3g} passes over the training images"),
        ("time", time),
    ]


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 'es' if noun.endswith('s') else 's'}"
