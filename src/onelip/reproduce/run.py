"""Reproduce a table or figure of the paper: plan the runs, train those that are missing, and write the table.

plan.json                  recipes of the runs
RUN/                       the runs, as written by `onelip train`
table-5.md .csv .tex .json the table; for a figure also figure-1.png and .svg

The tables come from the run directories alone. So a session can be stopped or killed at any time, and several jobs can
share the directory.
"""

import functools
import re
import shlex
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from onelip._version import __version__
from onelip.compare.run import Budget
from onelip.core.errors import OtherProcessFailed, RecipeError, RunError, noted_errors, reason
from onelip.core.files import locked, read_json, write_json, write_whole
from onelip.data import ImageData, load_data
from onelip.models.registry import list_models, model_builder, model_options
from onelip.reproduce.experiments import Experiment, Row, Style, find_experiment, narrower
from onelip.reproduce.tables import (
    TextTable,
    draw_figure,
    figure_table,
    layers_table,
    methods_table,
    orthogonality,
    panels_of,
    results_of,
    results_table,
)
from onelip.training.budget import fit_to_budget, measure_cost
from onelip.training.display import Display
from onelip.training.distributed import Process, processes, use_threads
from onelip.training.recipe import MACHINE_FIELDS, Recipe, format_seconds
from onelip.training.run_directory import RunDirectory
from onelip.training.trainer import train_or_reuse


@dataclass(frozen=True)
class Reproduction:
    """The result of `reproduce`.

    Attributes:
        experiment: the table or figure.
        table: the table; for a figure its numbers.
        plan: the runs with their estimated time; None without runs.
        failed: reasons by the name of the run, for runs that failed in this session.
        files: the files that were written.
    """

    experiment: Experiment
    table: TextTable
    plan: TextTable | None
    failed: dict[str, str]
    files: list[Path]


def reproduce(
    name: str,
    out: str | Path,
    *,
    budget: str | None = None,
    style: Style | None = None,
    width: float | None = None,
    model: str | None = None,
    only: str | None = None,
    plan_only: bool = False,
    seed: int = 0,
    device: str = "auto",
    threads: int = 0,
    data: ImageData | None = None,
    data_root: str | Path | None = None,
    display: Display | None = None,
    command: str | None = None,
    handle_signals: bool = False,
) -> Reproduction:
    """Reproduce a table or figure of the paper.

    Runs that are finished in the directory are used, stopped ones are resumed, and others trained. A run that fails
    costs its own row only. Under torchrun all processes call this function.

    Args:
        name: such as "table-5" or "trade-off"; see `list_experiments`.
        out: directory of the runs and tables; several tables can share it.
        budget: for each run, as `onelip compare` takes it: epochs ("20ep"), or time ("10m"), to which the width of the
            network and the number of epochs are scaled. Rows of scaled runs are labelled.
        style: "paper" for the recipe as published, "fast" for that of `onelip train --budget`. Default: fast with a
            budget, else paper.
        width: part of the width of the networks, without a budget of time.
        model: another network for a table of one network.
        only: "N/M" trains every M-th run from the N-th on, for M jobs that share the directory.
        plan_only: train nothing: plan, estimate, and write the table of the runs that are finished.
        seed: seed of all runs.
        device: device to compute on.
        threads: threads on the CPU; 0 for torch's own choice.
        data: the images; by default loaded by the name of the data set.
        data_root: directory of named data sets.
        display: shows the progress; None shows nothing.
        command: the command to record; by default that of the process.
        handle_signals: on SIGINT and SIGTERM, save the training in progress and stop.

    Returns:
        The table, and the runs that failed.

    Raises:
        RecipeError: for an unknown name or option, or a directory with runs of other options.
        Stopped: after SIGINT or SIGTERM in a training, with `handle_signals`; the same call resumes it.

    Examples:
        >>> found = reproduce("table-8", "")  # an architecture: nothing is trained
        >>> found.table.rows[0]
        ('1 × Flatten: 3072', '1 × Flatten: 3072', 'none')
    """
    experiment = find_experiment(name)
    if model is not None:
        if model_builder(model) is None:
            raise RecipeError(f"unknown model {model!r}; known: {', '.join(list_models())}")
        experiment = experiment.with_network(model)
    if not experiment.trained:
        table = methods_table(experiment) if experiment.kind == "methods" else layers_table(experiment)
        files = _write_files(Path(out), experiment, table, {}, command) if str(out) else []
        return Reproduction(experiment, table, None, {}, files)
    chosen: Style = style or ("paper" if budget is None else "fast")
    options = Options(
        None if budget is None else Budget.parse(budget), chosen, seed=seed, device=device, threads=threads
    )
    if width is not None:
        if not 0 < width <= 1 or (options.budget is not None and options.budget.seconds is not None):
            raise RecipeError("--width is above 0 and at most 1, without a budget of time, which decides it")
        options = replace(options, width=width)
    number, count = parse_part(only)
    out = Path(out)
    data = load_data(experiment.data, data_root) if data is None else data
    shown = display or Display(None)
    with processes(device) as process:
        shown = shown if process.is_first else Display(None)
        planner = Planner(experiment, out, data, options, process, shown)
        runs, failed = planner.runs()
        runs = dict(list(runs.items())[number - 1 :: count])
        plan = planner.table(runs)
        shown.print_table(plan.to_rich(), *plan.notes)
        settings: dict[str, Any] = {"data": data, "data_root": data_root, "handle_signals": handle_signals}
        for index, (run, recipe) in enumerate(runs.items() if not plan_only else (), start=1):
            title = f"[{index}/{len(runs)}] {run}"
            shown.print(f"{title}: {state_of(RunDirectory(out / run))}")
            with noted_errors(functools.partial(failed.__setitem__, run)):  # the next run follows
                train_or_reuse(recipe, out / run, display=shown, **settings)
            if run in failed:
                shown.print(f"{title}: FAILED: {failed[run]}")
        is_first = process.is_first
    table, content, panels = _table(experiment, out, failed)
    files = _write_files(out, experiment, table, content, command, panels, shown) if is_first else []
    return Reproduction(experiment, table, plan, failed, files)


def parse_part(only: str | None) -> tuple[int, int]:
    """N and M of "N/M"; (1, 1) for None.

    Examples:
        >>> parse_part("2/5"), parse_part(None)
        ((2, 5), (1, 1))
    """
    if only is None:
        return 1, 1
    match = re.fullmatch(r"(\d+)/(\d+)", only.strip())
    if match is None or not 1 <= int(match[1]) <= int(match[2]):
        raise RecipeError(f"expected --only N/M with N from 1 to M, such as 2/5, got {only!r}")
    return int(match[1]), int(match[2])


def _table(
    experiment: Experiment, out: Path, failed: Mapping[str, str]
) -> tuple[TextTable, dict[str, Any], list[dict[str, Any]]]:
    """The table, its content for the JSON file, and the panels of a figure."""
    if experiment.kind == "results":
        rows = results_of(experiment, out, failed)
        return results_table(experiment, rows), {"rows": rows}, []
    panels = panels_of(experiment, out, failed)
    rows = [
        {**panel, "crop": None if panel["crop"] is None else orthogonality(panel["crop"].matrix)} for panel in panels
    ]
    return figure_table(experiment, panels), {"panels": rows}, panels


def _write_files(
    out: Path,
    experiment: Experiment,
    table: TextTable,
    content: dict[str, Any],
    command: str | None,
    panels: list[dict[str, Any]] | None = None,
    display: Display | None = None,
) -> list[Path]:
    head = {
        "format": FORMAT,
        "command": command or shlex.join(sys.argv),
        "onelip": __version__,
        "torch": torch.__version__,
        "experiment": experiment.name,
        "title": experiment.title,
        "table": {"heads": table.heads, "rows": table.rows, "notes": table.notes},
    }
    paths = {suffix: out / f"{experiment.name}.{suffix}" for suffix in ("md", "csv", "tex", "json")}
    with locked(out, "another process is writing the tables; wait for it", wait=60):
        for suffix, text in (("md", table.to_markdown()), ("csv", table.to_csv()), ("tex", table.to_latex())):
            write_whole(paths[suffix], text.encode())
        write_json(paths["json"], {**head, **content})
        files = list(paths.values())
        if any(panel["crop"] is not None and "recipe" in panel for panel in panels or ()):
            try:
                for suffix in ("png", "svg"):
                    draw_figure(panels or [], out / f"{experiment.name}.{suffix}")
                    files.append(out / f"{experiment.name}.{suffix}")
            except ImportError as error:  # the numbers are written all the same
                (display or Display(None)).print(f"no picture: {error}")
    return files


# ---- The runs of a table: their recipes, fixed once for a directory, and their cost
#
# plan.json of the directory has the recipe of each run by the name of the run. A budget of time is measured once for
# each network: all runs of it have the same width and number of epochs, also in later sessions and other jobs.


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
