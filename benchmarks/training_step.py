"""A training step of AOL-Small (forward, loss, backward, SGD): time and peak memory relative to the plain network.

The plain network has the same layers from torch.nn, the same MaxMin and channels_last. Times are measured in turn in
one process. Memory is the growth of the peak resident set over a step, in separate processes.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from _harness import interleaved, publish
from torch import nn

import onelip

NETWORKS = ("plain", "aol")


def training_step(network: str, batch: int):
    """A function that makes one step, and leaves nothing to be prepared for the next."""
    torch.manual_seed(0)
    model: nn.Module = onelip.create_model("aol-small", method=None if network == "plain" else "aol")
    model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]  torch has no type for it
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, nesterov=True)
    images = torch.rand(batch, 3, 32, 32).contiguous(memory_format=torch.channels_last)
    labels = torch.randint(10, (batch,))

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(images), labels).backward()
        optimizer.step()

    return step


def peak_mebibytes(network: str, batch: int) -> float:
    """Growth of the peak memory by the third step, when momentum is there; measured in a fresh process."""
    command = [sys.executable, __file__, "--memory-of", network, "--batch", str(batch)]
    return float(json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout))


def print_memory(network: str, batch: int) -> None:
    step = training_step(network, batch)
    before = status_mebibytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # forget the peak of building the network
    for _ in range(3):
        step()
    print(json.dumps(status_mebibytes("VmHWM") - before))


def status_mebibytes(field: str) -> float:
    """A line of Linux's /proc/self/status. getrusage's peak would be inherited from the parent process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15, help="at batch 250; smaller batches get more")
    parser.add_argument("--batches", type=int, nargs="+", default=[250, 64, 32])
    parser.add_argument("--memory-of", choices=NETWORKS, help=argparse.SUPPRESS)
    parser.add_argument("--batch", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.memory_of:
        print_memory(args.memory_of, args.batch)
        return
    rows = []
    for batch in args.batches:
        times = interleaved(
            {network: training_step(network, batch) for network in NETWORKS},
            args.rounds if batch > 100 else 2 * args.rounds,
        )
        memory = {network: peak_mebibytes(network, batch) for network in NETWORKS}
        rows += [
            {
                "batch": batch,
                "network": network,
                "ratio to plain": times[network].ratio_to(times["plain"]),
                "seconds": times[network].median,
                "memory ratio": memory[network] / memory["plain"],
                "MiB": memory[network],
            }
            for network in NETWORKS
        ]
    publish("training_step", rows, what="one training step of AOL-Small, channels_last, float32")


if __name__ == "__main__":
    main()
