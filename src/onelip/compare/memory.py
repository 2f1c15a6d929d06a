"""Memory: how far the peak grows over a training step, in a process of its own.

Only a fresh process has no memory that others have left to be used again. On a CPU the growth of the resident set since
the network was built, three steps long (momentum is there from the second): Linux tells it. On a GPU torch's own count.
What torch's libraries take when they are first used is not the network's: a small network of torch layers makes a step
before.
"""

import json
import subprocess
import sys
from pathlib import Path

from onelip.core.errors import RunError
from onelip.training.recipe import Recipe

_STATUS, _FORGET = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def peak_mebibytes(recipe: Recipe, num_classes: int, shape: tuple[int, int, int], timeout: float = 900.0) -> float:
    """Growth of the peak memory over training steps of the recipe's batch size, in MiB.

    Raises:
        RunError: where it cannot be measured, saying why.
    """
    request = {"recipe": recipe.to_json(), "num_classes": num_classes, "shape": list(shape)}
    command = [sys.executable, "-m", "onelip.compare.memory"]
    try:
        done = subprocess.run(
            command, input=json.dumps(request), capture_output=True, text=True, timeout=timeout, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise RunError(f"expected three steps within {timeout:g} s to measure memory, got none") from error
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise RunError(f"expected to measure memory in a process of its own, got: {last}")
    return float(json.loads(done.stdout))


def _measure(recipe: Recipe, num_classes: int, shape: tuple[int, int, int]) -> float:
    import torch

    from onelip.compare.stepping import training_step
    from onelip.training.distributed import find_device, use_threads

    device = find_device(recipe.device)
    if device.type != "cuda" and not _FORGET.exists():
        raise RunError("the peak of memory is known on Linux and on GPUs only")
    generator = torch.Generator().manual_seed(recipe.seed)
    images = torch.rand((recipe.batch_size, *shape), generator=generator)
    labels = torch.randint(num_classes, (recipe.batch_size,), generator=generator)
    with use_threads(recipe.threads):
        _wake_libraries()
        step = training_step(recipe, num_classes, shape)
        if device.type == "cuda":
            before = torch.cuda.memory_allocated(device) / 2**20
            torch.cuda.reset_peak_memory_stats(device)
        else:
            before = _status_mebibytes("VmRSS")
            _FORGET.write_text("5")  # forget the peak of building the network
        for _ in range(3):
            step(images, labels)
    after = torch.cuda.max_memory_allocated(device) / 2**20 if device.type == "cuda" else _status_mebibytes("VmHWM")
    return after - before


def _wake_libraries() -> None:
    """One step of something else, and of the decompositions that methods use."""
    import torch
    from torch import nn

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
    # getrusage's peak would be inherited from the parent process.
    lines = _STATUS.read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field))


def _main() -> None:
    request = json.load(sys.stdin)
    c, h, w = request["shape"]
    print(json.dumps(_measure(Recipe.from_json(request["recipe"]), request["num_classes"], (c, h, w))))


if __name__ == "__main__":
    _main()
