"""Audit, proof and check of typical models in two trees of this repository: seconds of CPU, and their ratio.

git worktree add --detach ../before a463789
python benchmarks/soundness_cost.py ../before
"""

import argparse
import contextlib
import inspect
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _harness import publish
from torch import nn

ROOT = Path(__file__).resolve().parent.parent


class Block(nn.Module):
    """A residual block of plain torch."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.one = nn.Conv2d(channels, channels, 3, padding=1)
        self.two = nn.Conv2d(channels, channels, 3, padding=1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x + self.two(torch.relu(self.one(x))))


def _aol() -> tuple[nn.Module, tuple[int, ...]]:
    import onelip

    options: dict[str, Any] = {"channels": 32, "width": 4, "convs": 4, "linears": 4}
    return onelip.create_model("aol-small", num_classes=10, image_size=32, in_channels=3, **options), (3, 32, 32)


def _patchwise() -> tuple[nn.Module, tuple[int, ...]]:
    import onelip

    return onelip.create_model("patchwise-tiny", num_classes=10, image_size=8, in_channels=1), (1, 8, 8)


def _residual() -> tuple[nn.Module, tuple[int, ...]]:
    blocks = [Block(16), nn.MaxPool2d(2), Block(16), Block(16)]
    stem, last = nn.Conv2d(3, 16, 3, padding=1), nn.Linear(16, 10)
    return nn.Sequential(stem, nn.ReLU(), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), last), (3, 16, 16)


def _dense() -> tuple[nn.Module, tuple[int, ...]]:
    layers = [nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 10)]
    return nn.Sequential(*layers), (1, 28, 28)


def _cpl() -> tuple[nn.Module, tuple[int, ...]]:
    import onelip

    blocks = [nn.Conv2d(8, 8, 3, padding=1) for _ in range(3)]
    constrained = onelip.constrain(nn.Sequential(*blocks), "cpl")
    return nn.Sequential(nn.Conv2d(1, 8, 1), constrained, nn.Flatten(), nn.Linear(512, 10)), (1, 8, 8)


MODELS: dict[str, Callable[[], tuple[nn.Module, tuple[int, ...]]]] = {
    "aol-small, narrow": _aol,
    "patchwise-tiny": _patchwise,
    "residual, plain torch": _residual,
    "dense, plain torch": _dense,
    "cpl": _cpl,
}


def tasks(name: str, folder: Path) -> dict[str, Callable[[], object]]:
    """Audit, exact proof and check of one model, with the tree that this process imports."""
    import numpy as np

    import onelip

    try:
        from onelip.certification.certificate import WeightFile, write_certificate
    except ImportError:  # its name in older trees
        from onelip.certify.certificate import WeightFile, write_certificate  # pyright: ignore[reportMissingImports]
    from onelip.checker import check
    from onelip.export import save_plain

    torch.manual_seed(0)
    model, shape = MODELS[name]()
    model.eval()
    audit: Any = getattr(onelip, "audit", None)
    audit = audit if callable(audit) else getattr(onelip, "lipschitz")  # noqa: B009  its name in older trees
    images = torch.randint(0, 256, (8, *shape), dtype=torch.uint8)
    plain = onelip.bake(model).double()
    save_plain(model, folder / "plain.safetensors")
    np.save(folder / "images.npy", images.numpy())
    certify: Any = onelip.certify
    certify = certify if callable(certify) else certify.certify
    is_new = "exact" in inspect.signature(onelip.prove).parameters
    exact: dict[str, Any] = {"exact": True} if is_new else {"proof": "exact"}
    found = certify(plain, images, **exact)
    path = folder / "cert.json"
    write_certificate(
        path, found, images, WeightFile(folder / "plain.safetensors"), source="", images_file="images.npy"
    )
    example = torch.rand(1, *shape)
    return {
        "audit": lambda: audit(model, example),
        "proof": lambda: onelip.prove(model, shape, **exact),
        "check": lambda: check(path),
    }


def work() -> None:
    """Reads names of models and tasks from stdin, writes seconds."""
    torch.set_num_threads(1)
    made: dict[str, Any] = {}
    for line in sys.stdin:
        name, task = json.loads(line)
        if name not in made:
            with contextlib.redirect_stdout(sys.stderr):
                made[name] = tasks(name, Path(tempfile.mkdtemp(prefix="cost-")))
        start = time.process_time()
        made[name][task]()
        print(json.dumps(time.process_time() - start), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before", type=Path, help="another tree of this repository")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    workers = []
    for tree in (arguments.before, ROOT):
        environment = os.environ | {"PYTHONPATH": str(tree / "src"), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, __file__, "--work"]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        workers.append(subprocess.Popen(command, env=environment, **pipes))

    def ask(worker: Any, name: str, task: str) -> float:
        print(json.dumps([name, task]), file=worker.stdin, flush=True)
        return float(worker.stdout.readline())

    rows: list[dict[str, Any]] = []
    for name in MODELS:
        for task in ("audit", "proof", "check"):
            seconds = []
            for turn in range(-1, arguments.rounds):  # the first warms up
                order = workers if turn % 2 else workers[::-1]
                found = {id(worker): ask(worker, name, task) for worker in order}
                seconds.append([found[id(worker)] for worker in workers])
            before, after = (statistics.median(column) for column in zip(*seconds[1:], strict=True))
            ratio = statistics.median(b / a for a, b in seconds[1:])
            rows.append({"model": name, "task": task, "before": before, "after": after, "ratio": ratio})
            print(rows[-1], file=sys.stderr, flush=True)
    for worker in workers:
        worker.stdin.close()
    commits = [
        subprocess.run(["git", "rev-parse", "--short=12", "HEAD"], cwd=tree, capture_output=True, text=True).stdout
        for tree in (arguments.before, ROOT)
    ]
    publish("soundness_cost", rows, before=commits[0].strip(), after=commits[1].strip(), seconds="of CPU, one thread")


if __name__ == "__main__":
    work() if "--work" in sys.argv else main()
