"""Matched pairs for the fast networks, and all methods with one budget of time, on CIFAR-10.

python benchmarks/fast_trials.py ablation --data-root DIR    # one epoch each: results/fast_ablation.json
python benchmarks/fast_trials.py methods --data-root DIR     # 20 CPU seconds each: results/methods_by_time.json
python benchmarks/fast_trials.py retraction --data-root DIR  # half an epoch each: results/retract_every.json
python benchmarks/fast_trials.py paper --data-root DIR       # three epochs each: results/paper_optimizers.json
python benchmarks/fast_trials.py averaging --data-root DIR   # five epochs each: results/weight_averaging.json
python benchmarks/fast_trials.py losses --data-root DIR      # ten epochs each: results/fast_losses.json

All parts hold out a tenth of the training images; the first two use the recipe of `onelip train --budget`. A run that
is in the file already is not run again. Seconds are those of the CPU, because the machine is shared.

The second part gives each method the same network, augmentation, batch size and CPU seconds. The learning rate follows
the seconds that are used, so it reaches zero with the budget whatever a step costs. Its peak is the best on the
held-out images, at one seed: the search starts at one rate for each optimizer, and triples or divides it by three until
it gets worse. Test images are used for the table only, with three seeds at the best rate.

The third part trains a narrow AOL-Small with SGD: the exact scale of AOL in each step, against P itself with R2 after
every k-th step (`--retract-every`).

The fourth part trains AOL-Small with 64 instead of 192 channels, with the loss and the augmentation of the paper, by
SGD and by the optimizers of onelip: equal epochs, each evaluated after every half epoch.

The fifth part compares a rate that falls to zero with constant ones, each with and without a moving average of weights.

The sixth part compares losses: one network and recipe, each loss with several offsets.
"""

import argparse
import itertools
import json
import math
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from _harness import RESULTS
from torch import nn

from onelip.core.bake import bake
from onelip.core.errors import Diverged
from onelip.core.files import read_json, write_json
from onelip.data import ImageData, load_data, validation_split
from onelip.methods.registry import METHODS
from onelip.training.build import build_model
from onelip.training.distributed import Process
from onelip.training.evaluation import Scores, evaluate, find_constants
from onelip.training.learner import Learner, learning_rate, make_batches
from onelip.training.objective import OF_THE_LOSS
from onelip.training.recipe import Recipe, preset, recipe_for_budget

BASE = recipe_for_budget(20).replace(epochs=1, bf16=True, threads=1)
SGD: dict[str, Any] = {"optimizer": "sgd", "momentum": 0.9, "optimizer_options": ()}

# One setting changed at a time.
PAIRS: dict[str, dict[str, Any]] = {
    "base": {},
    "float32 in steps and optimizer": {"bf16": False, "products": "float32"},
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
    "three iterations": {"optimizer_options": ("orthogonalize=3",)},
    "five iterations": {"optimizer_options": ("orthogonalize=5",)},
    "offset 0.7": {"offset": 0.7},
    "offset 1.41": {"offset": 1.41},
    "batch 1000, lr 0.11": {"batch_size": 1000, "lr": 0.11},
    "momentum 0.9": {"momentum": 0.9},
    "SGD, lr 0.03": {**SGD, "lr": 0.03},
}

# All methods of the registry with SGD and batch centring, then the ingredients one by one. Patches do not overlap, so
# that every linear layer is one of the method.
SHARED: dict[str, Any] = {**SGD, "lr": 0.3, "model_options": ("overlap=0",)}
MUON: dict[str, Any] = {"optimizer": "muon", "momentum": BASE.momentum, "lr": BASE.lr}
ADAMW: dict[str, Any] = {"optimizer": "adamw", "lr": 0.003}
WITHOUT_CENTRING = {"model_options": ("overlap=0", "centred=false")}


def _only(**options: object) -> dict[str, Any]:
    """SGD with a part of Muon."""
    given = {"retraction": None, "tangent": False, "orthogonalize": 0, **options}
    return {"optimizer": "muon", "optimizer_options": tuple(f"{k}={json.dumps(v)}" for k, v in given.items())}


INGREDIENTS: dict[str, tuple[str, dict[str, Any]]] = {
    "aol, no batch centring": ("aol", WITHOUT_CENTRING),
    "aol, float32": ("aol", {"bf16": False}),
    "aol, R1": ("aol", _only(retraction="r1")),
    "aol, R2": ("aol", _only(retraction="r2")),
    "aol, R2 and tangent": ("aol", _only(retraction="r2", tangent=True)),
    "aol, orthogonal steps": ("aol", {**_only(orthogonalize=2), "lr": BASE.lr}),
    "aol, Muon (R2, tangent, orthogonal steps)": ("aol", MUON),
    "aol, Muon, no batch centring": ("aol", {**MUON, **WITHOUT_CENTRING}),
    "aol, Muon, float32": ("aol", {**MUON, "bf16": False, "products": "float32"}),
    "aol, AdamW": ("aol", ADAMW),
    "bjorck, Muon": ("bjorck", MUON),
    "bcop, AdamW": ("bcop", ADAMW),
    "cayley, AdamW": ("cayley", ADAMW),
    "sll, AdamW": ("sll", ADAMW),
    "bcop, no batch centring": ("bcop", WITHOUT_CENTRING),
    "cayley, no batch centring": ("cayley", WITHOUT_CENTRING),
}
# A narrow AOL-Small with the optimizer of the paper.
NARROW = preset("paper-short").replace(
    model_options=("channels=64", "width=8", "convs=4", "linears=4"), epochs=1, epoch_part=0.5, warmup=0.15, threads=1
)
RETRACTIONS: dict[str, dict[str, Any]] = {
    f"lr {lr:g}, {f'R2 every {every}th step' if every else 'exact scale'}": {"lr": lr, "retract_every": every}
    for lr, every in [(0.005, 0), (0.005, 8), (0.005, 16), (0.001, 0), (0.001, 16), (0.01, 0), (0.01, 4)]
}
# AOL-Small with 64 instead of 192 channels; loss and augmentation of the paper, one cycle of the rate.
PAPER = preset("paper").replace(
    model_options=("channels=64", "width=8"), epochs=3, schedule="one-cycle", warmup=0.15, weight_decay=0.0, threads=1
)
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD, lr 0.01, exact scale": {"lr": 0.01},
    "SGD, lr 0.03, exact scale": {"lr": 0.03},
    "SGD, lr 0.01, R2 every 4th step": {"lr": 0.01, "retract_every": 4},
    "LipschitzMuon, lr 0.03": {"optimizer": "muon", "momentum": 0.8, "lr": 0.03},
    "LipschitzMuon, lr 0.005": {"optimizer": "muon", "momentum": 0.8, "lr": 0.005},
}
# Five epochs are 450 steps; a decay of 0.98 averages about 50 of them.
AVERAGES: dict[str, dict[str, Any]] = {
    f"{name}{f', average with decay {decay:g}' if decay else ''}": {**schedule, "ema": decay}
    for name, schedule in {
        "rate falls from 0.08 to 0": {},
        "rate stays at 0.08": {"schedule": "steps", "drop_at": ()},
        "rate stays at 0.02": {"schedule": "steps", "drop_at": (), "lr": 0.02},
    }.items()
    for decay in (0.0, 0.98)
}
GIVES_UP = "generalised-cross-entropy"
LOSSES: dict[str, dict[str, Any]] = {
    "offset cross-entropy, u = 1": {},
    "offset cross-entropy, u = 1.41": {"offset": 1.41},
    "offset cross-entropy, u = 5.66, t = 1": {"offset": 5.66, "temperature": 1.0},
    "logit annealing, u = 1.41, beta 1": {"offset": 1.41, "loss": "logit-annealing"},
    **{
        f"generalised, q = {q:g}, u from 1 to {u:g}": {
            "loss": GIVES_UP,
            "loss_options": (f"exponent={q}", f"final_offset={u}"),
        }
        for q, u in [(0.5, 0.2), (0.5, 0.5), (1, 0.2), (1, 0.5), (1, 1)]
    },
}
FACTOR, MOST_RATES = 3.0, 6


class Trials:
    """Trains by a recipe and evaluates on held-out and on test images; the data are loaded once."""

    def __init__(self, root: Path | None) -> None:
        self.all: ImageData = load_data("cifar10", root)
        self.data: ImageData = validation_split(self.all, 0.1)
        self.process = Process(torch.device("cpu"))

    def run(
        self,
        recipe: Recipe,
        seconds: float | None = None,
        curve_points: int = 0,
        make_optimizer: Callable[[nn.Module], Any] | None = None,
        is_annealed: bool = True,
    ) -> dict[str, Any]:
        """One run: the epochs of the recipe, or a number of CPU seconds. Accuracies are those of held-out images.

        With `curve_points`, the network is evaluated as often during the run, and the result has a "curve".
        `make_optimizer` replaces the optimizer of the recipe; if it is not annealed, its rate stays at the peak.
        """
        torch.manual_seed(recipe.seed)
        model = build_model(recipe, self.data.num_classes, self.data.shape)
        learner = Learner(recipe, model.train(), self.process)
        if make_optimizer is not None:
            learner.optimizer = make_optimizer(model)
        to_train, to_eval = (getattr(learner.optimizer, name, lambda: None) for name in ("train", "eval"))
        to_train()  # schedule-free optimizers evaluate other weights than they train
        loader = make_batches(recipe, self.data, self.process, torch.Generator().manual_seed(recipe.seed))
        steps, planned = 0, recipe.epochs * len(loader)
        curve: list[dict[str, float]] = []
        cpu, wall = time.process_time(), time.monotonic()
        for batch in itertools.chain.from_iterable(itertools.repeat(loader)):
            used = steps / planned if seconds is None else (time.process_time() - cpu) / seconds
            if used >= 1:
                break
            rate = learning_rate(recipe, int(used * 10**6), 10**6)
            if not is_annealed and used >= recipe.warmup:
                rate = recipe.lr
            loss = learner.step(batch.images, batch.labels, batch_size=len(batch), progress=used, lr=rate)
            steps += 1
            if not math.isfinite(loss):
                raise Diverged(f"the loss is {float(loss)} after {steps} steps")
            if curve_points and steps * curve_points // planned > (steps - 1) * curve_points // planned:
                found = self._evaluate(model, recipe, self.data)
                curve.append({"epoch": round(steps / len(loader), 3), "cra_36": found.cra["36/255"] or 0.0})
                model.train()
        to_eval()
        times = {"cpu_seconds": round(time.process_time() - cpu, 1), "wall_seconds": round(time.monotonic() - wall, 1)}
        held_out, test = (self._evaluate(learner.evaluated, recipe, data) for data in (self.data, self.all))
        return {
            "accuracy": held_out.accuracy,
            "cra": held_out.cra,
            "test_accuracy": test.accuracy,
            "test_cra": test.cra,
            "passes": round(steps / len(loader), 2),
            **times,
            **({"curve": curve} if curve else {}),
        }

    def _evaluate(self, model: nn.Module, recipe: Recipe, data: ImageData) -> Scores:
        """Accuracy and CRA of the test images of `data`."""
        plain = bake(model.eval())
        constants = find_constants(model, plain, recipe, data.shape)
        return evaluate(plain, data.test_images, data.test_labels, constants).total


def ablation(trials: Trials, args: argparse.Namespace) -> None:
    matched(trials, args, "fast_ablation", BASE, PAIRS)


def retraction(trials: Trials, args: argparse.Namespace) -> None:
    matched(trials, args, "retract_every", NARROW, RETRACTIONS)


def paper(trials: Trials, args: argparse.Namespace) -> None:
    matched(trials, args, "paper_optimizers", PAPER, OPTIMIZERS, curve_points=6)


def averaging(trials: Trials, args: argparse.Namespace) -> None:
    matched(trials, args, "weight_averaging", BASE.replace(epochs=5), AVERAGES)


def losses(trials: Trials, args: argparse.Namespace) -> None:
    matched(trials, args, "fast_losses", BASE.replace(epochs=10), LOSSES)


def matched(
    trials: Trials,
    args: argparse.Namespace,
    file: str,
    base: Recipe,
    pairs: dict[str, dict[str, Any]],
    curve_points: int = 0,
) -> None:
    """Runs of one recipe with some settings changed, several seeds each."""
    record = Record(file, args, base, seeds=args.seeds)
    for name, changes in pairs.items():
        if (args.only and name not in args.only) or any(row["name"] == name for row in record.rows):
            continue
        recipes = [base.replace(seed=seed, **changes) for seed in range(args.seeds)]
        try:
            runs = [trials.run(recipe, curve_points=curve_points) for recipe in recipes]
        except Diverged as error:
            print(f"{name:45s} {error}", flush=True)
            continue
        row = {"name": name, "changes": dict(changes), **mean_and_spread(runs), "runs": runs}
        record.rows.append(row)
        record.write()
        print(f"{name:45s} {shown(row)}", flush=True)


def methods(trials: Trials, args: argparse.Namespace) -> None:
    recipe = BASE.replace(**SHARED)
    record = Record("methods_by_time", args, recipe, seeds=args.seeds, budget_cpu_seconds=args.seconds)
    for name, (method, changes) in {**{name: (name, {}) for name in METHODS}, **INGREDIENTS}.items():
        if args.only and name not in args.only:
            continue
        row = record.row(name, method=method, changes=changes)
        try:
            Runs(trials, record, row, method_recipe(method, changes), args.seconds).complete(args.seeds)
        except ValueError as error:
            row |= {"failed": str(error), **mean_and_spread([])}  # the method does not support the network
            record.write()
            print(f"{name:45s} {error}", flush=True)


class Runs:
    """The runs of a row, by learning rate and seed; those of an earlier session are not run again.

    Args:
        trials: makes the runs.
        record: the file.
        row: the row of the file.
        recipe: the recipe, with the first rate of the search.
        seconds: CPU seconds of a run.
        **options: other arguments of `Trials.run`.
    """

    def __init__(
        self, trials: Trials, record: "Record", row: dict[str, Any], recipe: Recipe, seconds: float, **options: Any
    ) -> None:
        self.trials, self.record, self.row, self.recipe, self.seconds = trials, record, row, recipe, seconds
        self.options = options

    def complete(self, seeds: int) -> None:
        """Search the best rate, and run it with all seeds."""
        self.row["lr"] = search(self.cra, self.recipe.lr)
        for seed in range(1, seeds):
            self.cra(self.row["lr"], seed)
        self.row |= mean_and_spread([run for run in self.row["runs"] if run["lr"] == self.row["lr"]], "test_")
        self.record.write()
        print(f"{self.row['name']:45s} {shown(self.row)}", flush=True)

    def cra(self, rate: float, seed: int = 0) -> float:
        """CRA at 36/255 on held-out images; 0 for a run that diverged or that has no proved constant."""
        run = next((run for run in self.row["runs"] if (run["lr"], run["seed"]) == (rate, seed)), None)
        if run is None:
            try:
                found = self.trials.run(self.recipe.replace(lr=rate, seed=seed), self.seconds, **self.options)
            except (Diverged, torch.linalg.LinAlgError) as error:  # pyright: ignore[reportPrivateImportUsage]
                found = {"diverged": str(error)}
            run = {"lr": rate, "seed": seed, **found}
            self.row["runs"].append(run)
            self.record.write()
            print(f"{self.row['name']:45s} lr {rate:<8g} seed {seed}: {run.get('cra', run)}", flush=True)
        return (run.get("cra") or {}).get("36/255") or 0.0


def method_recipe(method: str, changes: dict[str, Any]) -> Recipe:
    """The recipe of a row: loss and clipping are those of the authors of the method, all else is the same for all."""
    authors = METHODS[method].hyperparameters
    own = {key: authors[key] for key in OF_THE_LOSS if key in authors}
    return BASE.replace(**SHARED).replace(method=method, **own).replace(**changes)


def search(score: Callable[[float], float], start: float) -> float:
    """The best rate: from `start` upwards while it improves; if it never does, downwards until one is worse.

    Examples:
        >>> search(lambda rate: 1 / (1 + abs(rate - 2.7)), 0.1)
        2.7
        >>> search(lambda rate: float(rate < 0.02), 0.1)
        0.0111
    """
    scores = {start: score(start)}
    for factor in (FACTOR, 1 / FACTOR):
        rate, best = start, scores[start]
        while len(scores) < MOST_RATES:
            rate = float(f"{rate * factor:.3g}")
            scores[rate] = score(rate)
            if scores[rate] <= best and (best or factor > 1):
                break
            best = scores[rate]
        if max(scores.values()) > scores[start]:
            break
    return max(scores, key=lambda rate: scores[rate])


def mean_and_spread(runs: list[dict[str, Any]], images: str = "") -> dict[str, Any]:
    """Mean and range over seeds."""
    if not all("accuracy" in run for run in runs) or not runs:
        return {"cra_36": None, "spread": None, "accuracy": None, "cpu_seconds": None}
    values = [run[f"{images}cra"]["36/255"] or 0.0 for run in runs]
    return {
        "cra_36": round(statistics.mean(values), 4),
        "spread": round(max(values) - min(values), 4),
        "accuracy": round(statistics.mean(run[f"{images}accuracy"] for run in runs), 4),
        "cpu_seconds": round(statistics.mean(run["cpu_seconds"] for run in runs), 1),
    }


def shown(row: dict[str, Any]) -> str:
    if row["cra_36"] is None:
        return "diverged"
    return f"{100 * row['cra_36']:.1f} (range {100 * row['spread']:.1f}), {row['cpu_seconds']} s"


class Record:
    """A file of results, written after each run; rows of an earlier session are kept."""

    def __init__(self, name: str, args: argparse.Namespace, recipe: Recipe, **facts: Any) -> None:
        self.path = (args.out or RESULTS) / f"{name}.json"
        what = f"CIFAR-10, 5,000 training images held out; {recipe.model}; mean and range over seeds; one thread"
        head = {
            "what": what,
            "command": f"python benchmarks/{args.command} --data-root DIR",
            "torch": torch.__version__,
            **facts,
        }
        new = {**head, "recipe": recipe.to_json(), "rows": []}
        self.content = read_json(self.path) if self.path.exists() else new
        changed = [key for key, value in facts.items() if self.content[key] != value]
        if changed or Recipe.from_json(self.content["recipe"]) != recipe:
            raise SystemExit(f"{self.path} has other {changed[0] if changed else 'recipes'}; move it, or use --out")
        self.rows: list[dict[str, Any]] = self.content["rows"]

    def row(self, name: str, **facts: Any) -> dict[str, Any]:
        """The row of this name; a new one has these facts and no runs."""
        for row in self.rows:
            if row["name"] == name:
                return row
        self.rows.append({"name": name, **facts, "runs": []})
        return self.rows[-1]

    def write(self) -> None:
        write_json(self.path, self.content)


PARTS = {
    "ablation": ablation,
    "methods": methods,
    "retraction": retraction,
    "paper": paper,
    "averaging": averaging,
    "losses": losses,
}


def make_parser(description: str | None) -> argparse.ArgumentParser:
    """The options of a comparison."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", type=Path)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=20.0, help="CPU seconds of a run, where they are fixed")
    parser.add_argument("--only", nargs="*", default=[], help="names of rows")
    parser.add_argument("--out", type=Path, help="directory of the file; default: results/")
    return parser


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("part", choices=PARTS)
    args = parser.parse_args()
    args.command = f"fast_trials.py {args.part}"
    torch.set_num_threads(1)
    PARTS[args.part](Trials(args.data_root), args)


if __name__ == "__main__":
    main()
