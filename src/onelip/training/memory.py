"""The memory of a training step, estimated before the network is allocated, and what the machine has."""

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from onelip.core.errors import RecipeError
from onelip.training.build import build_model
from onelip.training.distributed import Process
from onelip.training.recipe import Recipe

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
        """Bytes that a step needs in any case."""
        return self.fixed + self.saved

    @property
    def estimate(self) -> int:
        """Bytes of a step with its temporary tensors."""
        return self.fixed + round(_TEMPORARY * self.saved)


def step_memory(recipe: Recipe, num_classes: int, shape: tuple[int, int, int], free: float) -> StepMemory:
    """Estimate the memory of a step of one process.

    Parameters are counted on the meta device. If they fit, the network runs on two and on four images, and the tensors
    that are kept for its backward pass are counted.

    Args:
        recipe: the recipe.
        num_classes: number of classes.
        shape: shape of an image.
        free: bytes that may be allocated.
    """
    with torch.device("meta"):
        parameters = list(build_model(recipe, num_classes, shape).parameters())
    stored = sum(p.numel() * p.element_size() for p in parameters)
    fixed = stored * (2 + _STATES[recipe.optimizer] + bool(recipe.ema))
    count = sum(p.numel() for p in parameters)
    if fixed > free:
        return StepMemory(count, fixed, 0)
    model = trial_model(recipe, num_classes, shape)
    two, four = (_saved_bytes(model, torch.zeros(images, *shape)) for images in (2, 4))
    each = max(0, four - two) / 2
    return StepMemory(count, fixed, round(two + each * (-(-recipe.batch_size // recipe.accumulate) - 2)))


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
    """A network of the recipe to measure with; the random generators are unchanged."""
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
    recipe: Recipe, num_classes: int, shape: tuple[int, int, int], process: Process
) -> tuple[StepMemory, float]:
    """Estimate the memory of a step, and compare it with the free memory, before the network is allocated.

    Args:
        recipe: the recipe.
        num_classes: number of classes.
        shape: shape of an image.
        process: this process among several, which share the memory of the machine.

    Returns:
        The estimate, and the free bytes of this process.

    Raises:
        RecipeError: if a step cannot fit; the message has options that make it fit.
    """
    free = free_memory(process.device)
    if process.device.type == "cpu":
        free /= int(os.environ.get("LOCAL_WORLD_SIZE", process.count))
    need = step_memory(recipe.replace(batch_size=-(-recipe.batch_size // process.count)), num_classes, shape, free)
    if need.least <= free:
        return need, free
    advice = []
    if need.fixed < free and (batch_size := int((free - need.fixed) / max(need.saved, 1) * recipe.batch_size * 0.6)):
        advice.append(f"--batch-size {batch_size}, --accumulate {-(-recipe.batch_size // batch_size)}")
    if need.fixed > free / 4 and not recipe.model.startswith("aol-fast"):
        advice.append("--budget 10m, which takes a network sized to the images")
    if max(shape[1:]) > 64:
        advice.append("--image-size 64")
    raise RecipeError(
        f"{recipe.model} has {need.parameters / 1e6:,.1f} M parameters for images of {shape[2]}x{shape[1]} pixels; "
        f"a step needs at least {format_bytes(need.least)}, and {format_bytes(free)} of memory are free; use "
        f"{' or '.join(advice) or 'a smaller network (--model-options)'}"
    )


def format_bytes(count: float) -> str:
    """Bytes as MB or GB.

    Examples:
        >>> format_bytes(3.2e6), format_bytes(2.5e9)
        ('3 MB', '2.5 GB')
    """
    return f"{count / 1e9:,.1f} GB" if count >= 1e9 else f"{max(1, count / 1e6):.0f} MB"
