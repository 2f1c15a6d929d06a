"""Cost of each method in AOL-Small: time of a training step relative to plain networks, and memory.

    python benchmarks/methods.py --batch 32                 # all methods; finished rows are kept
    python benchmarks/methods.py --methods bcop,soc --again

Two plain networks stand beside each method, in turn with it in one process: the fastest we know (channels_last, MaxMin
as one function), which is the limit, and plain torch as most would write it (NCHW, MaxMin by maximum and minimum): the
public implementations were measured against that. Memory is the growth of the peak in a
process of its own.
"""

import argparse
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from _harness import RESULTS, interleaved, publish
from torch import Tensor, nn

from onelip.compare.measures import peak_mebibytes, training_step
from onelip.methods.registry import METHODS
from onelip.nn import MaxMin
from onelip.training import build_model, preset
from onelip.training.learner import Learner
from onelip.training.objective import with_method
from onelip.training.recipe import Recipe

SHAPE, CLASSES = (3, 32, 32), 10


class UsualMaxMin(nn.Module):
    """MaxMin as it is usually written."""

    def forward(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, 1)
        return torch.cat([torch.maximum(a, b), torch.minimum(a, b)], 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--again", action="store_true", help="measure again what is there")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    name = f"methods_batch{args.batch}"
    rows = read_rows(RESULTS / f"{name}.json")
    shared = preset("paper-short").replace(batch_size=args.batch, threads=args.threads)
    plain = peak_mebibytes(shared.replace(method="none"), CLASSES, SHAPE)
    for method in args.methods.split(","):
        if method in rows and not args.again:
            continue
        rows[method] = {"method": method, **measured(with_method(shared, method), shared, plain, args.rounds)}
        print(json.dumps(rows[method]), flush=True)
        publish(name, list(rows.values()), what=f"AOL-Small, batch {args.batch}: a training step", plain_MiB=plain)


def read_rows(path: Path) -> dict[str, dict[str, Any]]:
    return {row["method"]: row for row in json.loads(path.read_text())["rows"]} if path.exists() else {}


def measured(recipe: Recipe, shared: Recipe, plain_mebibytes: float, rounds: int) -> dict[str, Any]:
    keys = ("to limit", "to usual plain", "memory")
    try:
        images = torch.rand(recipe.batch_size, *SHAPE)
        labels = torch.randint(CLASSES, (recipe.batch_size,))
        limit = shared.replace(method="none")
        steps = {
            "method": training_step(recipe, CLASSES, SHAPE),
            "limit": training_step(limit, CLASSES, SHAPE),
            "usual": usual_step(limit),
        }
        times = interleaved({key: lambda s=step: s(images, labels) for key, step in steps.items()}, rounds)
        memory = peak_mebibytes(recipe, CLASSES, SHAPE) / plain_mebibytes
        values = (
            times["method"].ratio_to(times["limit"]),
            times["method"].ratio_to(times["usual"]),
            memory,
        )
        return {**{key: float(f"{value:.3g}") for key, value in zip(keys, values, strict=True)}, "failed": ""}
    except Exception as error:  # a method that does not fit is a row that says so
        return {**dict.fromkeys(keys, math.nan), "failed": f"{type(error).__name__}: {error}"[:200]}


def usual_step(limit: Recipe):
    """A step of the plain network as most would write it."""
    recipe = replace(limit, channels_last=False)
    model = build_model(recipe, CLASSES, SHAPE).train()
    for parent in list(model.modules()):
        for key, child in parent.named_children():
            if isinstance(child, MaxMin):
                setattr(parent, key, UsualMaxMin())
    learner = Learner(recipe, model)

    def step(images: Tensor, labels: Tensor) -> None:
        learner.step(images, labels, batch_size=len(labels), progress=0.5, lr=recipe.lr)

    return step


if __name__ == "__main__":
    main()
