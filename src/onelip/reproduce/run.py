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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from onelip._version import __version__
from onelip.compare.plan import Budget
from onelip.core.errors import RecipeError, noted_errors
from onelip.core.files import locked, write_json, write_whole
from onelip.data import ImageData, load_data
from onelip.models.registry import list_models, model_builder
from onelip.reproduce.experiments import Experiment, Style, find_experiment
from onelip.reproduce.plan import FORMAT, Options, Planner, state_of
from onelip.reproduce.tables import (
    draw_figure,
    figure_table,
    layers_table,
    methods_table,
    orthogonality,
    panels_of,
    results_of,
    results_table,
)
from onelip.reproduce.text import TextTable
from onelip.training.display import Display
from onelip.training.distributed import processes
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
