"""A training step with AOL relative to the plain network: exact scale, or P itself with a retraction every k steps.

python benchmarks/step_cost.py [--networks aol-fc:250 aol-small:250 ...] [--rounds 5]      # results/step_cost.json

The plain network has the same layers from torch.nn and SGD. Its strided convolutions are those of torch; AOL layers
compute them as products of matrices in training, which is faster, and the ratios of the aol-fast networks contain that.
Steps are made in turn; ratios are medians of the ratios of CPU seconds within a round of 8 steps each, so that each
round has one retraction at every 8th step.
"""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from _harness import publish
from torch import nn
from torch.nn import functional as F

import onelip
from onelip.training.learner import training_weights

STEPS = 8  # of each candidate in a round
NETWORKS = ("aol-fc:250", "aol-fast-medium:250", "aol-small:250", "aol-small:32")
CANDIDATES: dict[str, dict[str, object] | None] = {
    "AOL, SGD": None,
    "tangent SGD, R2 every step": {"orthogonalize": 0, "every": 1},
    "tangent SGD, R2 every 8th": {"orthogonalize": 0, "every": 8},
    "LipschitzMuon, R2 every step": {"every": 1},
    "LipschitzMuon, R2 every 8th": {"every": 8},
}


def make_step(name: str, batch: int, candidate: str) -> Callable[[], None]:
    """A function that makes one step."""
    torch.manual_seed(0)
    model: nn.Module = onelip.create_model(name, method=None if candidate == "plain" else "aol")
    model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]  torch has no type for it
    model.train()
    options = CANDIDATES.get(candidate)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, nesterov=True)
    if options is not None:
        optimizer = onelip.optim.LipschitzMuon(model, lr=1e-3, momentum=0.9, **options)  # pyright: ignore
    images = torch.rand(batch, 3, 32, 32).contiguous(memory_format=torch.channels_last)
    labels = torch.randint(10, (batch,))

    def step() -> None:
        with training_weights(model, optimizer):
            loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="*", default=NETWORKS, help="name:batch")
    parser.add_argument("--candidates", nargs="*", default=list(CANDIDATES), choices=list(CANDIDATES))
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for network in args.networks:
        name, batch = network.split(":")
        steps = {who: make_step(name, int(batch), who) for who in ("plain", *args.candidates)}
        times: dict[str, list[float]] = {who: [] for who in steps}
        for step in steps.values():
            step()
        for _ in range(args.rounds):
            for who, step in steps.items():
                start = time.process_time()
                for _ in range(STEPS):
                    step()
                times[who].append((time.process_time() - start) / STEPS)
        for who, seconds in times.items():
            ratio = statistics.median(a / b for a, b in zip(seconds, times["plain"], strict=True))
            row = {"network": name, "batch": int(batch), "step": who, "ratio to plain": round(ratio, 2)}
            rows.append({**row, "cpu ms": round(1000 * statistics.median(seconds), 1)})
        publish(
            "step_cost", rows, what="CPU time of a training step relative to the plain network, one thread, float32"
        )


if __name__ == "__main__":
    main()
