"""A training step with AOL relative to the plain network: exact scale, or P itself with a retraction every k steps.

python benchmarks/step_cost.py [--networks aol-fc:250 aol-small:250 ...] [--rounds 5]      # results/step_cost.json

The plain network has the same layers from torch.nn and SGD. Its strided convolutions are those of torch; AOL layers
compute them as products of matrices in training, which is faster, and the ratios of the aol-fast networks contain that.
Steps are made in turn; ratios are medians of the ratios of CPU seconds within a round of 16 steps each (2 of the plain
network and of the exact scale, whose steps are all alike), so that each round has all retractions. Rows of other
networks that the file has already are kept. Peak memory is that of a process of its own for each candidate, with the
steps of one round.
"""

import argparse
import json
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from _harness import RESULTS, publish
from torch import nn
from torch.nn import functional as F

import onelip

STEPS = 16  # of each candidate in a round, or 2 where all steps are alike
CANDIDATES: dict[str, dict[str, object] | None] = {
    "AOL, SGD": None,
    "SGD, R2 every 16th": {"sgd": 16},
    "tangent SGD, R2 every step": {"orthogonalize": 0, "every": 1},
    "tangent SGD, R2 every 8th": {"orthogonalize": 0, "every": 8},
    "LipschitzMuon, R2 every step": {"every": 1},
    "LipschitzMuon, R2 every 4th": {"every": 4},
}
SHORT = ("AOL, SGD", "SGD, R2 every 16th")
# Networks with their batch, candidates and rounds: a round of the large ones takes minutes.
NETWORKS: dict[str, tuple[tuple[str, ...], int]] = {
    "aol-small:32": ((*SHORT, "LipschitzMuon, R2 every 4th"), 3),
    "aol-fast-medium:250": (tuple(CANDIDATES), 5),
    "aol-small:250": (SHORT, 2),
    "aol-large:250": (SHORT, 3),
    "aol-fc:250": (SHORT, 3),
}


def make_step(name: str, batch: int, candidate: str) -> Callable[[], None]:
    """A function that makes one step."""
    torch.manual_seed(0)
    model: nn.Module = onelip.create_model(name, method=None if candidate == "plain" else "aol")
    model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]  torch has no type for it
    model.train()
    options = CANDIDATES.get(candidate)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, nesterov=True)
    if options is not None and "sgd" in options:
        onelip.optim.retract_after(optimizer, model, every=options["sgd"])  # pyright: ignore
    elif options is not None:
        optimizer = onelip.optim.LipschitzMuon(model, lr=1e-3, momentum=0.9, **options)  # pyright: ignore
    images = torch.rand(batch, 3, 32, 32).contiguous(memory_format=torch.channels_last)
    labels = torch.randint(10, (batch,))

    def step() -> None:
        with onelip.optim.training_weights(model, optimizer):
            loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def steps_of(candidate: str) -> int:
    """The number of steps after which all kinds of steps were made."""
    return 2 if candidate in ("plain", "AOL, SGD") else STEPS


def peak_memory(network: str, candidate: str) -> int:
    """Bytes that a process of its own has held at most, in as many steps as a round has."""
    command = [sys.executable, __file__, "--peak", network, candidate]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def print_peak(network: str, candidate: str) -> None:
    """What `peak_memory` starts."""
    name, batch = network.split(":")
    step = make_step(name, int(batch), candidate)
    for _ in range(steps_of(candidate)):
        step()
    # Not ru_maxrss: it starts with that of the process that started this one.
    print(1024 * int(re.findall(r"VmHWM:\s*(\d+)", Path("/proc/self/status").read_text())[0]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="*", default=list(NETWORKS), help="name:batch")
    parser.add_argument("--candidates", nargs="*", choices=list(CANDIDATES), help="default: see NETWORKS in this file")
    parser.add_argument("--rounds", type=int, help="default: see NETWORKS in this file")
    parser.add_argument("--peak", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.peak:
        print_peak(*args.peak)
        return
    path = RESULTS / "step_cost.json"
    kept = json.loads(path.read_text())["rows"] if path.exists() else []
    for network in args.networks:
        name, batch = network.split(":")
        rows = [row for row in kept if (row["network"], str(row["batch"])) != (name, batch)]
        chosen, rounds = NETWORKS.get(network, (SHORT, 3))
        candidates, rounds = args.candidates or chosen, args.rounds or rounds
        peaks = {who: peak_memory(network, who) for who in ("plain", *candidates)}
        steps = {who: make_step(name, int(batch), who) for who in ("plain", *candidates)}
        times: dict[str, list[float]] = {who: [] for who in steps}
        for step in steps.values():
            step()
        for _ in range(rounds):
            for who, step in steps.items():
                count = steps_of(who)
                start = time.process_time()
                for _ in range(count):
                    step()
                times[who].append((time.process_time() - start) / count)
        for who, seconds in times.items():
            ratio = statistics.median(a / b for a, b in zip(seconds, times["plain"], strict=True))
            row = {"network": name, "batch": int(batch), "step": who, "ratio to plain": round(ratio, 2)}
            memory = {"peak GB": round(peaks[who] / 1e9, 2), "peak to plain": round(peaks[who] / peaks["plain"], 2)}
            rows.append({**row, "cpu ms": round(1000 * statistics.median(seconds), 1), **memory})
        kept = rows
        publish(
            "step_cost",
            rows,
            what="CPU time of a training step relative to the plain network, one thread; float32, but products of "
            "retractions in bfloat16 where it is faster",
        )


if __name__ == "__main__":
    main()
