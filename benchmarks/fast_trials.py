"""Matched pairs for the fast networks: one setting changed at a time, CIFAR-10, 5,000 training images held out.

python benchmarks/fast_trials.py --data-root DIR [--only NAME ...]      # a minute of one core each; rows are appended

Three epochs of aol-fast-small with LipschitzMuon: alternating flips (each image is mirrored in every other epoch),
shifts by up to two pixels with zeros, warm-up 15 %, linear to zero. Evaluated with baked weights, in real arithmetic.
"""

import argparse
import json
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from _harness import RESULTS
from torch import Tensor, nn
from torch.nn import functional as F

import onelip
from onelip.core.files import read_json, write_json
from onelip.data import load_data
from onelip.losses import OffsetCrossEntropy
from onelip.optim import LipschitzMuon, unscaled

BASE: dict[str, Any] = {
    "epochs": 3, "batch_size": 500, "lr": 0.08, "momentum": 0.8, "retraction": "r2", "tangent": True, "iterations": 2,
    "activation": "maxmin", "centred": True, "forward": "P", "seed": 0,
}  # fmt: skip
TRIALS: dict[str, dict[str, Any]] = {
    "base": {},
    "|x| on half of the channels": {"activation": "abs"},
    "R1": {"retraction": "r1"},
    "no tangent projection": {"tangent": False},
    "no batch centring before the activations": {"centred": False},
    "lr 0.05": {"lr": 0.05},
    "batch 1000, lr 0.1": {"batch_size": 1000, "lr": 0.1},
    "AOL in the training forward pass": {"forward": "AOL"},
}
WARMUP, SHIFT = 0.15, 2


def batches(images: Tensor, s: dict[str, Any], steps: int) -> Any:
    """Indices and augmented images of each step."""
    generator = torch.Generator().manual_seed(s["seed"])
    pixels = images.permute(0, 2, 3, 1).contiguous()
    mirrored = torch.rand(len(images), generator=generator) < 0.5
    per_epoch, size = len(images) // s["batch_size"], s["batch_size"]
    order = torch.empty(0, dtype=torch.int64)
    for step in range(steps):
        if step % per_epoch == 0:
            order = torch.randperm(len(images), generator=generator)
        chosen = order[step % per_epoch * size :][:size]
        x = pixels[chosen]
        flip = mirrored[chosen] ^ (step // per_epoch % 2 == 1)
        x = F.pad(torch.where(flip[:, None, None, None], x.flip(2), x), (0, 0, *(SHIFT,) * 4))
        down, right = (torch.randint(0, 2 * SHIFT + 1, (size,), generator=generator) for _ in range(2))
        rows, columns = (shift[:, None] + torch.arange(32) for shift in (down, right))
        x = x[torch.arange(size)[:, None, None], rows[:, :, None], columns[:, None, :]]
        yield chosen, x.float().div_(255).permute(0, 3, 1, 2)


def trial(train: tuple[Tensor, Tensor], test: tuple[Tensor, Tensor], s: dict[str, Any]) -> dict[str, Any]:
    """Train with the settings and evaluate."""
    torch.manual_seed(s["seed"])
    model = onelip.create_model("aol-fast-small", centred=s["centred"])
    if s["activation"] == "abs":
        for name, child in list(model.named_children()):
            if isinstance(child, onelip.nn.MaxMin):
                setattr(model, name, onelip.nn.Abs(fraction=0.5))
    model.to(memory_format=torch.channels_last).train()  # pyright: ignore[reportCallIssue]
    options = {"retraction": s["retraction"], "tangent": s["tangent"], "orthogonalize": s["iterations"]}
    optimizer = LipschitzMuon(model, momentum=s["momentum"], **options)
    loss = OffsetCrossEntropy(1.0, 0.25)
    steps = s["epochs"] * len(train[0]) // s["batch_size"]
    cpu, wall = time.process_time(), time.monotonic()
    for step, (chosen, x) in enumerate(batches(train[0], s, steps)):
        done = (step + 0.5) / steps
        for group in optimizer.param_groups:
            group["lr"] = s["lr"] * (done / WARMUP if done < WARMUP else (1 - done) / (1 - WARMUP))
        with unscaled(model) if s["forward"] == "P" else nullcontext():
            value = loss(model(x), train[1][chosen])
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
    times = {"cpu_seconds": round(time.process_time() - cpu, 1), "wall_seconds": round(time.monotonic() - wall, 1)}
    return {**evaluate(onelip.bake(model.eval()), *test), **times}


@torch.no_grad()
def evaluate(plain: nn.Module, images: Tensor, labels: Tensor) -> dict[str, Any]:
    """Accuracy and certified accuracy of a 1-Lipschitz network."""
    scores = torch.cat([plain(part.float().div(255)) for part in images.split(1000)])
    top = scores.topk(2, 1).values
    radius, right = (top[:, 0] - top[:, 1]) / 2**0.5, scores.argmax(1) == labels
    radii = {"36/255": 36 / 255, "72/255": 72 / 255, "108/255": 108 / 255, "1": 1.0}
    cra = {name: round(float((right & (radius > r)).double().mean()), 4) for name, r in radii.items()}
    return {"accuracy": round(float(right.double().mean()), 4), "cra": cra}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", type=Path)
    parser.add_argument("--only", nargs="*", default=list(TRIALS), choices=list(TRIALS))
    args = parser.parse_args()
    torch.set_num_threads(1)
    data = load_data("cifar10", args.data_root)
    order = torch.randperm(len(data.train_images), generator=torch.Generator().manual_seed(123))
    held, rest = order[:5000], order[5000:]
    train, test = ((data.train_images[i], data.train_labels[i]) for i in (rest, held))
    path = RESULTS / "fast_training.json"
    record = read_json(path) if path.exists() else {}
    for name in args.only:
        row = {"trial": name, "settings": {**BASE, **TRIALS[name]}, **trial(train, test, {**BASE, **TRIALS[name]})}
        record.setdefault("trials", []).append(row)
        print(json.dumps(row), flush=True)
        write_json(path, record)


if __name__ == "__main__":
    main()
