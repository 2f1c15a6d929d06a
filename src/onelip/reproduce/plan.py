"""The runs of a table: their recipes, fixed once for a directory, and their cost.

plan.json of the directory has the recipe of each run by the name of the run. A budget of time is measured once for each
network: all runs of it have the same width and number of epochs, also in later sessions and other jobs.
"""

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onelip.compare.plan import Budget
from onelip.core.errors import OtherProcessFailed, RecipeError, RunError, reason
from onelip.core.files import locked, read_json, write_json
from onelip.data import ImageData
from onelip.models.registry import model_options
from onelip.reproduce.experiments import Experiment, Row, Style, narrower
from onelip.reproduce.text import TextTable
from onelip.training.budget import fit_to_budget, measure_cost
from onelip.training.display import Display
from onelip.training.distributed import Process, use_threads
from onelip.training.recipe import MACHINE_FIELDS, Recipe, format_seconds
from onelip.training.run_directory import RunDirectory

FORMAT = "onelip reproduction 1"
_PARTS = (1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1)  # of the width
_PASSES = 5  # a wider network is used if it can see the training images this often

# The fields of a recipe that a budget of time decides.
_SCALED = ("epochs", "epoch_part", "evaluate_every", "batch_size", "lr", "bf16", "model_options")


@dataclass(frozen=True)
class Options:
    """The choices of the user; all runs of a directory have the same ones, except for device and threads.

    Attributes:
        budget: of each run; None for the epochs of the recipe.
        style: recipe as published, or the fast one.
        width: part of the width of all networks; a budget of time decides it otherwise.
        seed: seed of all runs.
        device: device to compute on.
        threads: threads on the CPU; 0 for torch's own choice.
    """

    budget: Budget | None = None
    style: Style = "paper"
    width: float = 1.0
    seed: int = 0
    device: str = "auto"
    threads: int = 0

    def to_json(self) -> dict[str, Any]:
        """The settings that a later session must have too."""
        return {
            "budget": None if self.budget is None else self.budget.text,
            "recipe": self.style,
            "width": self.width,
            "seed": self.seed,
        }


@dataclass(frozen=True)
class Planner:
    """Decides the recipes of the runs of a table in a directory, and estimates their time.

    Attributes:
        experiment: the table or figure.
        out: directory of the runs.
        data: the images.
        options: choices of the user.
        process: this process among several; the first one reads and writes the plan.
        display: shows the progress of the measurements.
    """

    experiment: Experiment
    out: Path
    data: ImageData
    options: Options
    process: Process
    display: Display

    def runs(self) -> tuple[dict[str, Recipe], dict[str, str]]:
        """The recipes of the runs by their names, and the reasons why other runs are impossible, by their names.

        Recipes that are in plan.json are kept; new ones are added to it.

        Raises:
            RecipeError: if the directory has runs of other options, or contains something else.
            RunError: if another process has been planning for ten minutes.
        """
        options, process = self.options, self.process
        with ExitStack() as opened:
            process.run_on_all(_lock, opened, self.out, process)
            kept: dict[str, Recipe] = process.broadcast(process.run_on_all(_read_kept, self.out, options))
            runs, refused = {}, {}
            too_small: dict[str | None, str] = {}  # networks for which the budget is too small: measured once
            for row in self.experiment.trained:
                name, network = row.run_name(self.experiment.data), row.network or row.model
                if name not in kept and network not in too_small:
                    try:
                        kept[name] = self._new_recipe(row, kept)
                    except (RecipeError, OtherProcessFailed) as error:
                        too_small[network] = reason(error)
                if name in kept:
                    runs[name] = kept[name].replace(device=options.device, threads=options.threads)
                else:
                    refused[name] = too_small[network]
                    self.display.print(f"{name}: FAILED: {refused[name]}")
            process.run_on_all(_write, self.out, options, kept, process)
        return runs, refused

    def _new_recipe(self, row: Row, kept: dict[str, Recipe]) -> Recipe:
        options, budget = self.options, self.options.budget
        wanted = row.recipe(self.experiment.data, options.style)
        wanted = wanted.replace(
            model_options=narrower(model_options(wanted.model), options.width),
            seed=options.seed,
            device=options.device,
            threads=options.threads,
        )
        if budget is None:
            return wanted
        if budget.epochs is not None:
            return wanted.replace(epochs=budget.epochs)
        assert budget.seconds is not None
        same = next((kin for kin in kept.values() if (kin.model, kin.data) == (wanted.model, wanted.data)), None)
        if same is None:
            self.display.print(f"measuring {wanted.model}: width and epochs that fit into {budget.text}")
            same = _fitted(wanted, budget.seconds, self.data, self.process)
        return wanted.replace(**{name: getattr(same, name) for name in _SCALED})

    def table(self, runs: dict[str, Recipe]) -> TextTable:
        """A table of runs: network, epochs, estimated time from now on, and state."""
        measured: dict[Recipe, float] = {}
        lines, total = [], 0.0
        for name, recipe in runs.items():
            state = self.process.broadcast(state_of(RunDirectory(self.out / name)))
            seconds = 0.0 if state == "finished" else self._seconds(recipe, measured)
            network = " ".join((recipe.model, *recipe.model_options))
            lines.append((name, network, f"{recipe.epochs * recipe.epoch_part:.3g}", format_seconds(seconds), state))
            total += seconds
        time = (
            f"All together about {format_seconds(total)} on this machine, from measured steps; Ctrl-C saves and stops."
        )
        notes = [time if total else "All runs are finished."]
        heads = ("run", "network", "epochs", "time", "state")
        return TextTable(f"{self.experiment.name}: runs in {self.out}", heads, lines, notes, 2)

    def _seconds(self, recipe: Recipe, measured: dict[Recipe, float]) -> float:
        """A budget of time, or the estimate from measured steps, which are added to `measured`."""
        if self.options.budget is not None and self.options.budget.seconds is not None:
            return self.options.budget.seconds
        # Runs that differ in the loss only take the same time.
        key = recipe.replace(offset=1.0, temperature=1.0, **{n: getattr(Recipe(), n) for n in MACHINE_FIELDS})
        if key not in measured:
            self.display.print(f"measuring a few steps of {recipe.model}")
            with use_threads(recipe.threads):
                measured[key] = measure_cost(recipe, self.data, self.process).seconds
        return measured[key]


def _lock(opened: ExitStack, out: Path, process: Process) -> None:
    if out.is_file():
        raise RecipeError(f"{out} is a file; choose another --out")
    if process.is_first:
        opened.enter_context(locked(out, "another process is planning the runs; wait for it to start", wait=600))


def _read_kept(out: Path, options: Options) -> dict[str, Recipe]:
    path = out / "plan.json"
    if not path.exists():
        return {}
    content = read_json(path)
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise RecipeError(f"{path} is not a plan of onelip reproduce ({FORMAT!r}); choose another --out")
    for key, now in options.to_json().items():
        if (before := content.get("options", {}).get(key)) != now:
            raise RecipeError(f"{out} has runs with --{key} {before}, got {now}; use the same, or choose another --out")
    try:
        return {str(name): Recipe.from_json(recipe) for name, recipe in content["runs"].items()}
    except (KeyError, AttributeError, RecipeError) as error:
        raise RunError(f"{path}: the plan is damaged ({error}); choose another --out") from error


def _write(out: Path, options: Options, recipes: dict[str, Recipe], process: Process) -> None:
    if process.is_first:
        runs = {name: recipe.to_json() for name, recipe in recipes.items()}
        write_json(out / "plan.json", {"format": FORMAT, "options": options.to_json(), "runs": runs})


def _fitted(recipe: Recipe, seconds: float, data: ImageData, process: Process) -> Recipe:
    """The widest network that can make some passes over the images, or the narrowest, and the epochs that fit."""
    best, refused = None, None
    options = model_options(recipe.model)
    widths = dict.fromkeys(narrower(options, part) for part in _PARTS)  # small ones can be the same
    with use_threads(recipe.threads):
        for width in widths:
            candidate = recipe.replace(model_options=width)
            try:
                fitted = fit_to_budget(candidate, seconds, data, process)
            except RecipeError as error:
                refused = refused or error
                break
            if best is not None and fitted.epochs * fitted.epoch_part < _PASSES:
                break
            best = fitted
    if best is None:
        assert refused is not None
        raise refused
    return best


def state_of(run: RunDirectory) -> str:
    """The state of a run: "finished", "started" or "new"."""
    if run.results.exists():
        return "finished"
    return "started" if run.config.exists() else "new"
