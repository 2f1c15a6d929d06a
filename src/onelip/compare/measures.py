"""Cost and quality of a trained method, relative to the same network without a method (the baseline).

A ratio of times is the median, over rounds, of the ratio within a round in which both networks run in turn: the load of
the machine changes more slowly than a round. A measurement that fails is None with the reason.
"""

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from onelip.certification.audit import audit
from onelip.core.bake import bake
from onelip.core.errors import RunError, noted_errors
from onelip.core.images import to_float
from onelip.data import ImageData
from onelip.gram.jacobian import spectrum_of_network
from onelip.training.budget import seconds_per_step
from onelip.training.build import build_model, split_data
from onelip.training.distributed import Process, find_device, use_threads
from onelip.training.evaluation import is_channels_last
from onelip.training.learner import Learner, set_layout
from onelip.training.recipe import Recipe

_TIMEOUT = 900.0  # seconds
_LEAST_MEBIBYTES = 2  # the allocator takes memory from the system in pieces of about this size
_STATUS, _CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")

Step = Callable[[Tensor, Tensor], None]


def measure(
    recipe: Recipe,
    baseline: Recipe,
    model: nn.Module,
    plain: nn.Module,
    data: ImageData,
    *,
    baseline_memory: float | None = None,
    memory: bool = True,
    log: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """All measurements of a trained method.

    Args:
        recipe: recipe of the run.
        baseline: recipe of the same network without a method.
        model: the network as it is trained, on the CPU.
        plain: the same network, baked.
        data: training images for the times; the first test image is the input at which layers are differentiated.
        baseline_memory: memory of the baseline in MiB; None if it could not be measured.
        memory: measure memory.
        log: called with a message before each measurement.
    """
    fast = bake(model, expand=False)  # the network to predict with; `plain` is the one that can be certified
    log("measuring the training step")
    found = {"step": _or_reason(lambda: step_times(recipe, baseline, data))}
    log("measuring prediction")
    found["inference"] = _or_reason(lambda: inference_times(fast, recipe, baseline, data))
    if memory:
        log("measuring memory")
        found["memory"] = _or_reason(lambda: memory_ratio(recipe, data, baseline_memory))
    else:
        found["memory"] = _not_measured("not requested")
    log("proving the constant of the stored weights")
    found["constant"] = _or_reason(lambda: proved_constant(plain, data))
    log("computing singular values")
    found["singular_values"] = _or_reason(lambda: spectrum_of_network(fast, to_float(data.test_images[:1])))
    return found


# Time.


def interleaved(
    candidate: Callable[[], object], baseline: Callable[[], object], seconds: float = 3.0
) -> dict[str, float]:
    """Time two functions in turn, in alternating order: 5 to 50 rounds, after two warm-up rounds.

    Examples:
        >>> found = interleaved(lambda: sum(range(20000)), lambda: sum(range(20000)), seconds=0.0)
        >>> 0 < found["ratio"] < 100, found["rounds"]
        (True, 5)
    """
    times: tuple[list[float], list[float]] = ([], [])
    pair = ((candidate, times[0]), (baseline, times[1]))
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
    return ratio_of_times(*times)


def ratio_of_times(seconds: Sequence[float], baseline: Sequence[float]) -> dict[str, float]:
    """The median ratio within a round, and the medians of both.

    Examples:
        >>> ratio_of_times([2.0, 4.0, 30.0], [1.0, 2.0, 3.0])
        {'ratio': 2.0, 'seconds': 4.0, 'plain_seconds': 2.0, 'rounds': 3}
    """
    return {
        "ratio": statistics.median(a / b for a, b in zip(seconds, baseline, strict=True)),
        "seconds": statistics.median(seconds),
        "plain_seconds": statistics.median(baseline),
        "rounds": len(seconds),
    }


def training_step(recipe: Recipe, num_classes: int, shape: tuple[int, int, int]) -> Step:
    """A function of images and labels that runs one step of the trainer: forward, loss, backward, update, projection.

    The learning rate is a thousandth of that of the recipe: the cost does not depend on it, and the weights stay in
    range.
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


def step_times(recipe: Recipe, baseline: Recipe, data: ImageData) -> dict[str, Any]:
    """A training step of the recipe relative to one of the baseline, on the same batch."""
    images = to_float(data.train_images[: recipe.batch_size])
    labels = data.train_labels[: recipe.batch_size]
    with use_threads(recipe.threads):
        ours, theirs = (training_step(r, data.num_classes, data.shape) for r in (recipe, baseline))
        return interleaved(lambda: ours(images, labels), lambda: theirs(images, labels), 3.0)


def inference_times(plain: nn.Module, recipe: Recipe, baseline: Recipe, data: ImageData) -> dict[str, Any]:
    """Prediction by the baked network relative to the baseline, on the same batch."""
    device = find_device(recipe.device)
    with torch.random.fork_rng(devices=[]):
        other = bake(build_model(baseline, data.num_classes, data.shape))
    set_layout(other, baseline)
    layout = torch.channels_last if is_channels_last(plain) else torch.contiguous_format
    images = to_float(data.test_images[: recipe.batch_size]).to(device).contiguous(memory_format=layout)
    ours, theirs = plain.to(device).eval(), other.to(device).eval()

    def predict(model: nn.Module) -> float:
        return float(model(images)[0, 0])  # waits for a GPU

    try:
        with torch.no_grad(), use_threads(recipe.threads):
            return interleaved(lambda: predict(ours), lambda: predict(theirs), 2.0)
    finally:
        plain.cpu()


def epochs_within(budget: float, recipe: Recipe, data: ImageData) -> int:
    """The number of whole epochs of training steps that fit into a time, measured with real batches.

    It is fixed before the run starts, so that the schedule of the learning rate ends with the run. Evaluation and
    checkpoints after an epoch do not count.

    Args:
        budget: seconds.
        recipe: recipe of the run.
        data: the images.

    Raises:
        RunError: if one epoch takes longer.
    """
    images = len(split_data(recipe, data).train_images)
    with use_threads(recipe.threads):
        step = seconds_per_step(recipe, data, Process(find_device(recipe.device)))
    epoch = step * -(-images // recipe.batch_size)
    if not epoch <= budget:
        raise RunError(
            f"one epoch takes about {epoch:.3g} s, more than the budget of {budget:g} s; give a longer --budget, or "
            "one in epochs"
        )
    return int(budget / epoch)


# Memory.


def memory_ratio(recipe: Recipe, data: ImageData, baseline_memory: float | None) -> dict[str, Any]:
    """Growth of the peak memory over a training step relative to the baseline."""
    mine = peak_mebibytes(recipe, data.num_classes, data.shape)
    if baseline_memory is None:
        ratio, why = None, "the memory of the baseline could not be measured"
    elif not baseline_memory >= _LEAST_MEBIBYTES:
        ratio, why = None, f"the baseline needs {baseline_memory:.2g} MiB; below {_LEAST_MEBIBYTES} a ratio is noise"
    else:
        ratio, why = mine / baseline_memory, None
    return {"ratio": ratio, "mebibytes": mine, "plain_mebibytes": baseline_memory, "why": why}


def peak_mebibytes(recipe: Recipe, num_classes: int, shape: tuple[int, int, int]) -> float:
    """Growth of the peak memory over three training steps, in MiB, measured in a process of its own.

    Only a fresh process has no freed memory that is used again. On a CPU it is the growth of the resident set since the
    network was built, as Linux reports it; on a GPU it is the count of torch.

    Raises:
        RunError: if it cannot be measured.
    """
    request = {"recipe": recipe.to_json(), "num_classes": num_classes, "shape": list(shape)}
    command = [sys.executable, "-m", "onelip.compare.measures"]
    try:
        done = subprocess.run(
            command, input=json.dumps(request), capture_output=True, text=True, timeout=_TIMEOUT, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise RunError(f"measuring memory took more than {_TIMEOUT:g} s") from error
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise RunError(f"measuring memory failed: {last}")
    return float(json.loads(done.stdout))


def _peak_in_this_process(recipe: Recipe, num_classes: int, shape: tuple[int, int, int]) -> float:
    device = find_device(recipe.device)
    if device.type != "cuda" and not _CLEAR.exists():
        raise RunError("peak memory can be measured on Linux and on GPUs only")
    generator = torch.Generator().manual_seed(recipe.seed)
    images = torch.rand((recipe.batch_size, *shape), generator=generator)
    labels = torch.randint(num_classes, (recipe.batch_size,), generator=generator)
    with use_threads(recipe.threads):
        _load_libraries()
        step = training_step(recipe, num_classes, shape)
        if device.type == "cuda":
            before = torch.cuda.memory_allocated(device) / 2**20
            torch.cuda.reset_peak_memory_stats(device)
        else:
            before = _status_mebibytes("VmRSS")
            _CLEAR.write_text("5")  # reset the peak, which contains the construction of the network
        for _ in range(3):  # momentum is allocated in the first one
            step(images, labels)
    after = torch.cuda.max_memory_allocated(device) / 2**20 if device.type == "cuda" else _status_mebibytes("VmHWM")
    return after - before


def _load_libraries() -> None:
    """One step of a small network, and the decompositions of the methods: torch allocates when it first uses them."""
    model = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.Flatten(), nn.Linear(64, 4))
    model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]  torch has no type for it
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)
    images = torch.rand(4, 4, 4, 4).contiguous(memory_format=torch.channels_last)
    nn.functional.cross_entropy(model(images), torch.arange(4)).backward()
    optimizer.step()
    square = torch.eye(4)
    for use in (torch.linalg.qr, torch.linalg.svdvals, torch.linalg.inv, torch.linalg.eigvalsh, torch.fft.rfft2):
        use(square)


def _status_mebibytes(field: str) -> float:
    # The peak of getrusage would be inherited from the parent process.
    lines = _STATUS.read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field))


# Constant, and failures.


def proved_constant(plain: nn.Module, data: ImageData) -> dict[str, Any]:
    """The bound that the audit proves for the stored weights; None, with the unproved operations, if there is none."""
    found = audit(plain, to_float(data.test_images[:2]), lower=False, effort="high")
    why = None if found.upper is not None else "; ".join(found.unproved)
    return {"proved": found.upper, "why": why}


def _or_reason(take: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    found = _not_measured("")
    with noted_errors(lambda why: found.update(why=why)):  # the row keeps the other measurements
        return {"why": None, **take()}
    return found


def _not_measured(why: str) -> dict[str, Any]:
    return {"ratio": None, "proved": None, "why": why}


if __name__ == "__main__":
    request = json.load(sys.stdin)
    print(_peak_in_this_process(Recipe.from_json(request["recipe"]), request["num_classes"], tuple(request["shape"])))
