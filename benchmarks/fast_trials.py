"""Matched pairs for the fast networks, and all methods with one budget of time: CIFAR-10, a tenth of the training
images held out, several seeds.

python benchmarks/fast_trials.py ablation --data-root DIR      # one epoch each: results/fast_ablation.json
python benchmarks/fast_trials.py methods --data-root DIR       # 20 CPU seconds each: results/methods_by_time.json

Everything else is the recipe of `onelip train --budget`. A row that is in the file already is not run again. Seconds
are those of the CPU: the machine is shared. The steps of a run of the second part are the budget divided by the median
time of ten steps; its learning rate is the best of three at one seed, on the same held-out images.
"""

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from _harness import RESULTS

from onelip.core.bake import bake
from onelip.core.files import read_json, write_json
from onelip.data import ImageData, load_data, validation_split
from onelip.training.build import build_model
from onelip.training.distributed import Process
from onelip.training.evaluation import evaluate, find_constants
from onelip.training.learner import Learner, learning_rate, make_batches
from onelip.training.objective import with_method
from onelip.training.recipe import Recipe, recipe_for_budget

BASE = recipe_for_budget(20).replace(epochs=1, bf16=True, threads=1)
SGD: dict[str, Any] = {"optimizer": "sgd", "momentum": 0.9, "optimizer_options": ()}

# One setting changed at a time.
PAIRS: dict[str, dict[str, Any]] = {
    "base": {},
    "float32 in steps and optimizer": {"bf16": False, "optimizer_options": ("products=float32",)},
    "R1 instead of R2": {"optimizer_options": ("retraction=r1",)},
    "tangent projection without retraction": {"optimizer_options": ("retraction=null",)},
    "neither retraction nor tangent projection": {"optimizer_options": ("retraction=null", "tangent=false")},
    "patches without overlap": {"model_options": ("overlap=0",)},
    "no batch centring": {"model_options": ("centred=false",)},
    "SGD, lr 0.1": {**SGD, "lr": 0.1},
    "R2 after every 4th step": {"optimizer_options": ("every=4",)},
    "no tangent projection": {"optimizer_options": ("tangent=false",)},
    "rows of norm 1 in the last layer (LLN)": {"method_options": ("normalise_last_layer=true",)},
    "patches with overlap 4": {"model_options": ("overlap=4",)},
    "one iteration of Newton and Schulz": {"optimizer_options": ("orthogonalize=1",)},
    "offset 0.7": {"offset": 0.7},
    "offset 1.41": {"offset": 1.41},
    "batch 1000, lr 0.11": {"batch_size": 1000, "lr": 0.11},
    "momentum 0.9": {"momentum": 0.9},
    "SGD, lr 0.03": {**SGD, "lr": 0.03},
}

METHODS = (
    "aol",
    "bjorck",
    "cayley",
    "soc",
    "bcop",
    "cholesky",
    "aoc",
    "sll",
    "cpl",
    "sandwich",
    "bro",
    "spectral-norm",
)
RATES = (0.3, 1.0, 3.0)  # times the rate of the authors or of docs/methods.md, at the batch size of the comparison


class Trials:
    """Trains by a recipe and evaluates on held-out images; the data are loaded once."""

    def __init__(self, root: Path | None) -> None:
        self.data: ImageData = validation_split(load_data("cifar10", root), 0.1)
        self.process = Process(torch.device("cpu"))

    def run(self, recipe: Recipe, seconds: float | None = None) -> dict[str, Any]:
        """One run: a number of epochs, or of CPU seconds."""
        torch.manual_seed(recipe.seed)
        model = build_model(recipe, self.data.num_classes, self.data.shape)
        learner = Learner(recipe, model, self.process)
        loader = make_batches(recipe, self.data, self.process, torch.Generator().manual_seed(recipe.seed))
        steps = recipe.epochs * len(loader)
        if seconds is not None:
            steps = max(20, int(seconds / self.seconds_per_step(recipe)))
        model.train()
        cpu, wall = time.process_time(), time.monotonic()
        done = 0
        while done < steps:
            for batch in loader:
                if done == steps:
                    break
                rate = learning_rate(recipe, done, steps)
                learner.step(batch.images, batch.labels, batch_size=len(batch), progress=done / steps, lr=rate)
                done += 1
        times = {"cpu_seconds": round(time.process_time() - cpu, 1), "wall_seconds": round(time.monotonic() - wall, 1)}
        plain = bake(model.eval())
        constants = find_constants(model, plain, recipe, self.data.shape)
        found = evaluate(plain, self.data.test_images, self.data.test_labels, constants).total
        return {"accuracy": found.accuracy, "cra": found.cra, "passes": round(steps / len(loader), 2), **times}

    def seconds_per_step(self, recipe: Recipe) -> float:
        """Median CPU seconds of ten steps of another network of the recipe."""
        learner = Learner(recipe, build_model(recipe, self.data.num_classes, self.data.shape).train(), self.process)
        times = []
        for batch in make_batches(recipe, self.data, self.process, torch.Generator().manual_seed(0)):
            start = time.process_time()
            learner.step(batch.images, batch.labels, batch_size=len(batch), progress=0.0, lr=0.0)
            times.append(time.process_time() - start)
            if len(times) == 12:
                break
        return statistics.median(times[2:])

    def seeds(self, recipe: Recipe, count: int, seconds: float | None = None) -> dict[str, Any]:
        """Mean and spread of runs with several seeds."""
        runs = [self.run(recipe.replace(seed=seed), seconds) for seed in range(count)]
        values = [run["cra"]["36/255"] for run in runs]
        return {
            "cra_36": round(statistics.mean(values), 4),
            "spread": round(max(values) - min(values), 4),
            "accuracy": round(statistics.mean(run["accuracy"] for run in runs), 4),
            "cpu_seconds": round(statistics.mean(run["cpu_seconds"] for run in runs), 1),
            "runs": runs,
        }


def ablation(trials: Trials, seeds: int, only: list[str]) -> None:
    record = Record("fast_ablation", seeds=seeds, recipe=BASE.to_json())
    for name, changes in PAIRS.items():
        if (not only or name in only) and not record.has(name):
            record.add(
                {"name": name, "changes": dict(changes)},
                trials.seeds(BASE.replace(**changes), seeds),
            )


def methods(trials: Trials, seeds: int, only: list[str], seconds: float) -> None:
    record = Record("methods_by_time", seeds=seeds, budget_cpu_seconds=seconds, recipe=BASE.to_json())
    for name in ("aol, muon", *METHODS):
        if (only and name not in only) or record.has(name):
            continue
        recipe = BASE
        if name != "aol, muon":
            authors = with_method(BASE.replace(**SGD, lr=0.02), name)
            recipe = authors.replace(
                **{field: getattr(BASE, field) for field in ("schedule", "warmup", "weight_decay")}
            )
        try:
            tried = {rate: trials.run(recipe.replace(lr=recipe.lr * rate), seconds)["cra"]["36/255"] for rate in RATES}
        except (ValueError, RuntimeError) as error:  # a method that does not accept the network, or that diverged
            print(f"{name}: {error}")
            continue
        best = recipe.replace(lr=recipe.lr * max(tried, key=lambda rate: tried[rate]))
        tried_rates = {f"{recipe.lr * rate:.3g}": value for rate, value in tried.items()}
        record.add({"name": name, "lr": best.lr, "rates": tried_rates}, trials.seeds(best, seeds, seconds))


class Record:
    """A file of results, written after each row."""

    def __init__(self, name: str, **facts: Any) -> None:
        self.path = RESULTS / f"{name}.json"
        what = "CIFAR-10, 5,000 training images held out; aol-fast-small; mean and range over seeds; one thread"
        new = {
            "what": what,
            "command": str(__doc__).split("python ")[1 + (name != "fast_ablation")].split("  ")[0].strip(),
        }
        self.content = (
            read_json(self.path) if self.path.exists() else {**new, "torch": torch.__version__, **facts, "rows": []}
        )

    def has(self, name: str) -> bool:
        return any(row["name"] == name for row in self.content["rows"])

    def add(self, what: dict[str, Any], found: dict[str, Any]) -> None:
        self.content["rows"].append({**what, **found})
        write_json(self.path, self.content)
        print(
            f"{what['name']:45s} {100 * found['cra_36']:.1f} (range {100 * found['spread']:.1f}), "
            f"{found['cpu_seconds']} s",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("ablation", "methods"))
    parser.add_argument("--data-root", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--only", nargs="*", default=[])
    args = parser.parse_args()
    torch.set_num_threads(1)
    trials = Trials(args.data_root)
    if args.part == "ablation":
        ablation(trials, args.seeds, args.only)
    else:
        methods(trials, args.seeds, args.only, args.seconds)


if __name__ == "__main__":
    main()
