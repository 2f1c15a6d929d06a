"""Memory and time of a run before it starts: estimates, the epochs that fit into a budget, and the printed block.

The network, the batch size and the learning rate of a budget come from a small table (`onelip.training.recipe`);
results/fast_training.json has the runs that it was chosen by. Steps run in bfloat16 where that is measured to be
faster; evaluation never does. The number of steps is fixed before the run starts, so the learning rate ends at zero
with the last of them, and a run that is killed resumes to the same weights.
"""

import math
import os
import statistics
import time
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from torch import Tensor, nn

from onelip.core.bake import bake
from onelip.core.errors import RecipeError
from onelip.data import ImageData
from onelip.nn import BatchCentering
from onelip.optim import retract_
from onelip.training.build import build_model, split_data
from onelip.training.distributed import Process, use_threads
from onelip.training.evaluation import evaluate, find_constants
from onelip.training.learner import Learner, make_batches
from onelip.training.objective import resolve_method
from onelip.training.recipe import Recipe, changed_fields, for_gpu, format_seconds, is_fast, parse_options
from onelip.training.teacher import load_teacher

_STATES = {"sgd": 1, "muon": 1, "adamw": 2}  # tensors of the optimizer for each parameter
_TEMPORARY = 2.0  # memory of a step relative to its saved tensors; measured: 0.2 to 2.9, about 2 for aol-fast


@dataclass(frozen=True)
class StepMemory:
    """Memory of a training step, without that of the data and of Python itself.

    Attributes:
        parameters: number of parameters.
        fixed: bytes of weights, gradients, optimizer and average.
        saved: bytes that the backward pass needs.
    """

    parameters: int
    fixed: int
    saved: int

    @property
    def least(self) -> int:
        """Bytes without which a run is refused. Some steps were seen to need less, but most need more."""
        return self.fixed + self.saved

    @property
    def estimate(self) -> int:
        """Bytes of a step with its temporary tensors."""
        return self.fixed + round(_TEMPORARY * self.saved)


def step_memory(
    recipe: Recipe, num_classes: int, shape: tuple[int, int, int], free: float, batch_size: int
) -> StepMemory:
    """Estimate the memory of a step of one process.

    Parameters are counted on the meta device. If they fit, the network runs on two and on four images, and the tensors
    that are kept for its backward pass are counted.

    Args:
        recipe: the recipe.
        num_classes: number of classes.
        shape: shape of an image.
        free: bytes that may be allocated.
        batch_size: images of the process.
    """
    count, fixed = _fixed_memory(recipe, num_classes, shape)
    if fixed > free:
        return StepMemory(count, fixed, 0)
    model = trial_model(recipe, num_classes, shape)
    for layer in model.modules():
        if isinstance(layer, BatchCentering):
            layer.of_all_processes = False  # the others may not get here, and their device may be a GPU
    two, four = (_saved_bytes(model, torch.zeros(images, *shape)) for images in (2, 4))
    each = max(0, four - two) / 2
    return StepMemory(count, fixed, round(two + each * (-(-batch_size // recipe.accumulate) - 2)))


def _fixed_memory(recipe: Recipe, num_classes: int, shape: tuple[int, int, int]) -> tuple[int, int]:
    """Number of parameters, and bytes of weights, gradients, optimizer and average; the network is not allocated."""
    with torch.device("meta"):
        parameters = list(build_model(recipe, num_classes, shape).parameters())
    stored = sum(p.numel() * p.element_size() for p in parameters)
    return sum(p.numel() for p in parameters), stored * (2 + _STATES[recipe.optimizer] + bool(recipe.ema))


def _saved_bytes(model: nn.Module, images: Tensor) -> int:
    """Bytes of the different tensors that a forward pass keeps for the backward pass."""
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    with torch.random.fork_rng(devices=[]), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = model(images)
    del output
    return sum(t.untyped_storage().nbytes() for pointer, t in kept.items() if pointer not in weights)


def trial_model(
    recipe: Recipe, num_classes: int, shape: tuple[int, int, int], device: torch.device | None = None
) -> nn.Module:
    """A network of the recipe for measurements; the random generators are unchanged."""
    with torch.random.fork_rng(devices=[device] if device is not None and device.type == "cuda" else []):
        return build_model(recipe, num_classes, shape).to(device)


def free_memory(device: torch.device) -> float:
    """Bytes that can be allocated on a device; infinite if that is unknown."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if device.type != "cpu":
        return float("inf")
    found: list[float] = []
    with suppress(OSError, ValueError, IndexError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        found.append(next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")))
    with suppress(OSError, ValueError):  # the limit of a container
        limit, used = (Path("/sys/fs/cgroup", name).read_text() for name in ("memory.max", "memory.current"))
        found.append(int(limit) - int(used))
    with suppress(OSError, ValueError, AttributeError):
        found.append(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return min(found, default=float("inf"))


def require_memory(
    recipe: Recipe,
    num_classes: int,
    shape: tuple[int, int, int],
    process: Process,
    batch_size: int | None = None,
) -> tuple[StepMemory, float]:
    """Estimate the memory of a step, and compare it with the free memory, before the network is allocated.

    Args:
        recipe: the recipe.
        num_classes: number of classes.
        shape: shape of an image.
        process: this process among several, which share the memory of the machine.
        batch_size: images of a step, over all processes. Default: that of the recipe.

    Returns:
        The estimate, and the free bytes of the process that has least.

    Raises:
        RecipeError: if a step cannot fit; the message has options that make it fit.
    """
    free = free_memory(process.device)
    if process.device.type == "cpu":
        free /= int(os.environ.get("LOCAL_WORLD_SIZE", process.count))
    (taken,) = process.max_over_ranks(-round(min(free, 2.0**60)))  # so that all decide alike
    free = free if math.isinf(free) else float(-taken)
    batch_size = batch_size or recipe.batch_size
    need = step_memory(recipe, num_classes, shape, free, -(-batch_size // process.count))
    if need.least <= free:
        return need, free
    advice = []
    if need.fixed < free and (fewer := int((free - need.fixed) / max(need.saved, 1) * batch_size * 0.6)):
        advice.append(f"--batch-size {fewer}, --accumulate {-(-batch_size // fewer)}")
    if need.fixed > free / 4 and not is_fast(recipe.model):
        advice.append("--budget 10m without --model, which takes a network sized to the images,")
    if max(shape[1:]) > 64 and _fixed_memory(recipe, num_classes, (shape[0], 64, 64))[1] < free / 2:
        advice.append("--image-size 64")
    raise RecipeError(
        f"{recipe.model} has {need.parameters / 1e6:,.1f} M parameters for images of {shape[2]}x{shape[1]} pixels; "
        f"a step needs about {format_bytes(need.least)} or more, and {format_bytes(free)} of memory are free; use "
        f"{' or '.join(advice).rstrip(',') or 'a smaller network (--model-options)'}"
    )


def format_bytes(count: float) -> str:
    """Bytes as MB or GB.

    Examples:
        >>> format_bytes(3.2e6), format_bytes(2.5e9)
        ('3 MB', '2.5 GB')
    """
    return f"{count / 1e9:,.1f} GB" if count >= 1e9 else f"{max(1, count / 1e6):.0f} MB"


_EVALUATIONS = 10  # at most, in a run
_EVALUATING = 0.1  # part of the budget, at most, for evaluations besides the last: they take time from training
_FEWEST_STEPS = 20  # fewer train nothing
_WORTHWHILE = 0.9  # bfloat16 is used where it takes at most this part of the time of a step
_RESERVE = 0.03  # of the budget, for checkpoints and for steps that are slower than the measured ones
_PATIENCE = 20.0  # seconds after which no further step is timed
_TIMING = 0.05  # part of the budget after which no further step of one timing begins; there are up to four


def fit_to_budget(
    recipe: Recipe, seconds: float, data: ImageData, process: Process, chosen: Collection[str] | None = None
) -> Recipe:
    """The recipe with as many epochs as fit into a budget on this machine.

    A few steps, with one and with all threads, in float32 and in bfloat16, and one evaluation are timed with trial
    networks, which are discarded. The faster choices are taken.

    Args:
        recipe: everything but the number of epochs.
        seconds: of the steps and evaluations; loading the data and the timing itself are not part of it.
        data: training and test images.
        process: this process among several; the first one decides for all.
        chosen: names of fields of the recipe that must stay as they are. Default: those whose values are not those of
            `recipe_for_budget`.

    Raises:
        RecipeError: if the budget is too small.
    """
    kept = changed_fields(recipe, seconds) if chosen is None else chosen
    return process.broadcast(process.run_on_all(_fit, recipe, seconds, data, process, kept))


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
    """Estimate the time of a recipe from a few steps and one evaluation of a trial network, which is discarded.

    Args:
        recipe: the recipe.
        data: training and test images.
        process: this process among several; the first one measures for all.

    Returns:
        The measured times and the counts that they are multiplied by.
    """
    return process.broadcast(process.run_on_all(measure_cost_here, recipe, data, process))


def measure_cost_here(recipe: Recipe, data: ImageData, process: Process, most: int = 20) -> Cost:
    """`measure_cost` for this process only, from at most `most` steps."""
    return Cost(
        seconds_per_step(recipe, data, process, most),
        seconds_per_evaluation(recipe, data, process),
        recipe.epochs * -(-round(len(split_data(recipe, data).train_images) * recipe.epoch_part) // recipe.batch_size),
        -(-recipe.epochs // recipe.evaluate_every) + 1,  # one more for the results
    )


def _fit(recipe: Recipe, seconds: float, data: ImageData, process: Process, kept: Collection[str]) -> Recipe:
    """`fit_to_budget` in each process. All take the same decisions: layers may communicate in each step."""
    if process.device.type != "cpu" and not recipe.start_from:
        recipe = for_gpu(recipe, seconds, kept)
    images = len(split_data(recipe, data).train_images)
    if "batch_size" not in kept:
        # Few images: at least 20 steps per epoch. The rate goes with the root of the batch size, as noise does.
        need, free = require_memory(recipe, data.num_classes, data.shape, process, 20)
        fitting = int(20 * (free / 2 - need.fixed) / max(need.estimate - need.fixed, 1))
        batch_size = max(20, recipe.accumulate, min(recipe.batch_size, images // 20, fitting))
        lr = recipe.lr if "lr" in kept else recipe.lr * math.sqrt(batch_size / recipe.batch_size)
        recipe = recipe.replace(batch_size=batch_size, lr=lr)
    require_memory(recipe, data.num_classes, data.shape, process)
    patience = min(_PATIENCE, _TIMING * seconds)
    if "threads" not in kept and has_choice_of_threads(recipe, process):
        one = recipe.replace(threads=1)
        with use_threads(1):
            alone = seconds_per_step(one, data, process, 8, patience)
        if alone < seconds_per_step(recipe, data, process, 8, patience):
            recipe = one
    with use_threads(recipe.threads):
        step = seconds_per_step(recipe, data, process, 20, patience)
        if "bf16" not in kept and process.device.type in ("cpu", "cuda"):
            low = recipe.replace(bf16=True)
            if (faster := seconds_per_step(low, data, process, 20, patience)) < _WORTHWHILE * step:
                recipe, step = low, faster
        return _with_epochs(recipe, seconds, data, step, seconds_per_evaluation(recipe, data, process))


def _with_epochs(recipe: Recipe, seconds: float, data: ImageData, step: float, evaluation: float) -> Recipe:
    """The recipe with as many whole batches as fit."""
    images = len(split_data(recipe, data).train_images)
    last = 2 + bool(recipe.validation)  # evaluations at the end: the last epoch, and one or two for the results
    left = seconds * (1 - _RESERVE) - last * evaluation
    steps = int(left / step)
    if steps < _FEWEST_STEPS:
        least = (_FEWEST_STEPS * step + last * evaluation) / (1 - _RESERVE)
        raise RecipeError(
            f"a budget of {format_seconds(seconds)} is too small: here a step takes {step:.2g} s and an evaluation "
            f"{evaluation:.2g} s; use at least --budget {format_seconds(least * 1.2)}"
        )
    per_epoch = -(-images // recipe.batch_size)
    affordable = 1 + int(_EVALUATING * left / max(evaluation, 1e-9))
    evaluations = min(_EVALUATIONS, max(1, steps // per_epoch), affordable)
    steps = max(_FEWEST_STEPS, int((left - (evaluations - 1) * evaluation) / step))
    # Whole batches: whole epochs and a rest that is left out, or one epoch more and all of them a little shorter.
    lengths = {
        epochs: min(per_epoch, steps // epochs) for epochs in (steps // per_epoch, -(-steps // per_epoch)) if epochs
    }
    epochs = max(lengths, key=lambda epochs: epochs * lengths[epochs])
    return recipe.replace(
        epochs=epochs,
        epoch_part=min(1.0, lengths[epochs] * recipe.batch_size / images),
        evaluate_every=-(-epochs // evaluations),
    )


def has_choice_of_threads(recipe: Recipe, process: Process) -> bool:
    """Whether to time steps with one thread too: it is faster for small steps, and on a busy machine."""
    is_alone = process.device.type == "cpu" and process.count == 1
    return is_alone and recipe.threads == 0 and torch.get_num_threads() > 1 and not recipe.compile


def seconds_per_step(
    recipe: Recipe, data: ImageData, process: Process, most: int = 20, patience: float = _PATIENCE
) -> float:
    """Mean time in seconds of a step with its batch, without torch.compile; the network is discarded.

    It is the median of a few steps. If only every k-th step retracts, it is that of the others, with the k-th part of a
    retraction.

    Args:
        recipe: the recipe.
        data: training and test images.
        process: this process among several; it uses its own part of each batch. All get the time of the first one.
        most: largest number of steps.
        patience: seconds after which no step after the third begins.
    """
    used, recipe = split_data(recipe, data), recipe.replace(compile=False)
    model = trial_model(recipe, data.num_classes, data.shape, process.device)
    learner = Learner(recipe, model, process, load_teacher(recipe, data, process.device))
    learner.objective.check(data.shape)
    learner.wrap()
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
        # Fewer steps for large networks. All processes make the same number of them: layers may communicate.
        enough = min(2.0, patience) if len(times) >= 8 else patience if len(times) >= 3 else _PATIENCE
        if process.broadcast(sum(times) > enough):
            break
    interval = retraction_interval(recipe)
    usual = [seconds for number, seconds in enumerate(times, 1) if interval == 1 or number % interval]
    step = statistics.median(usual[2:] or usual)  # the first steps are slower
    if interval > 1:
        clock = time.monotonic()
        retract_(model)  # in float32, which takes at least as long as the retraction of the run
        float(next(model.parameters()).detach().sum())  # waits for a GPU
        step += (time.monotonic() - clock) / interval
    return process.broadcast(step)


def retraction_interval(recipe: Recipe) -> int:
    """The number of steps from one retraction to the next; 1 also for recipes without retractions.

    Examples:
        >>> retraction_interval(Recipe(retract_every=16)), retraction_interval(Recipe())
        (16, 1)
    """
    return recipe.retract_every or int(parse_options(recipe.optimizer_options).get("every", 1))


def seconds_per_evaluation(recipe: Recipe, data: ImageData, process: Process) -> float:
    """Estimated time in seconds of an evaluation, measured on at most 2000 images by the first process."""
    used = split_data(recipe, data)
    model = trial_model(recipe, data.num_classes, data.shape, process.device)
    start = time.monotonic()
    plain = bake(model, expand=False)
    constants = find_constants(model, plain, recipe, data.shape)
    baked = time.monotonic()
    evaluate(plain, used.test_images[:2000], used.test_labels[:2000], constants)
    found = baked - start + (time.monotonic() - baked) * max(1.0, len(used.test_images) / 2000)
    return process.broadcast(found)


def describe_run(
    recipe: Recipe,
    data: ImageData,
    process: Process,
    memory: tuple[StepMemory, float],
    budget: float | None = None,
    other_threads: int = 0,
) -> list[tuple[str, str]]:
    """Labels and texts: data, split, network, training, memory, device, steps and time of a run.

    Args:
        recipe: the recipe.
        data: training and test images.
        process: this process among several.
        memory: estimate of a step and free bytes, from `require_memory`.
        budget: seconds of the run; None to time three steps and a part of an evaluation.
        other_threads: number of threads that was measured to be slower; 0 if there was no choice.
    """
    used = split_data(recipe, data)
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
    threads = f" (faster than {other_threads}, measured)" if other_threads else ""
    resized = "" if recipe.resize_to is None else ", resized"
    labels = f", labels by {recipe.teacher}" if recipe.teacher else ""
    return [
        ("data", f"{data.name}: {data.num_classes} classes, {channels}x{height}x{width} pixels{resized}"),
        ("images", f"{len(used.train_labels):,} training{held}, {len(data.test_labels):,} test ({data.split})"),
        (
            "network",
            f"{recipe.model}, {'plain layers' if method is None else method.name}: {need.parameters:,} parameters",
        ),
        ("training", f"{recipe.optimizer}, learning rate {recipe.lr:.3g}, batch size {recipe.batch_size}{labels}"),
        ("memory", f"about {format_bytes(need.estimate)} for a step; {format_bytes(free)} are free"),
        ("device", f"{process.device}, {_counted(torch.get_num_threads(), 'thread')}{threads}{several}"),
        ("steps", f"{steps:,}, {_counted(recipe.epochs * recipe.epoch_part, 'pass')} over the training images"),
        ("time", time),
    ]


def _counted(count: float, noun: str) -> str:
    return f"{count:.3g} {noun}{'' if count == 1 else 'es' if noun.endswith('s') else 's'}"
