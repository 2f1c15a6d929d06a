"""`onelip reproduce [list|NAME]`: the tables and figures of the paper, beside runs on this machine."""

import json
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from onelip.cli._common import DataRoot, Device, Flag, OptionalPath, listing, make_console, output_width, parse, unset
from onelip.core.errors import Stopped
from onelip.reproduce.experiments import find_experiment, list_experiments


@dataclass(frozen=True)
class Reproduce:
    """Reproduce a table or figure of the paper, with the paper's numbers beside those of runs on this machine.

    Without a name, or with list, it lists all of them. The runs and their estimated time are shown before the first one
    starts. The same command resumes a stopped session and uses finished runs. The table is printed and written as
    Markdown, CSV, LaTeX and JSON. A run that fails costs its own row; the exit code is then 1.
    """

    name: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="[list|NAME]", help_behavior_hint="")] = "list"
    """Table or figure, such as table-5 or trade-off."""
    out: OptionalPath = None
    """Directory of the runs and tables; several tables can share it. Default: runs/reproduce, followed by the options
    that change the result."""
    budget: Annotated[str | None, unset("BUDGET")] = None
    """Budget of each run: time (10m, 1h), to which the width of the network and the number of epochs are scaled, or
    epochs (20ep). Scaled runs are labelled wherever they are shown. Default: the 1000 epochs of the paper."""
    recipe: Annotated[Literal["paper", "fast"] | None, unset("{paper,fast}")] = None
    """paper: as published. fast: the recipe of onelip train --budget (muon, one cycle) for the networks of the paper.
    Default: fast with --budget, else paper."""
    width: Annotated[float | None, unset("PART")] = None
    """Part of the width of the networks, such as 0.125, with a budget in epochs or none; such runs are scaled too."""
    model: Annotated[str | None, unset("NAME")] = None
    """Another network for a table of one network, such as aol-fast-small."""
    only: Annotated[str | None, unset("N/M")] = None
    """Train every M-th run from the N-th on: one job of M that share --out."""
    plan: Flag = False
    """Train nothing: show the runs and their time, and the table of the runs that are finished."""
    seed: int = 0
    """Seed of all runs."""
    device: Device = "auto"
    threads: int = 0
    """Threads of a process on the CPU; 0 for torch's own choice."""
    data_root: DataRoot = None
    json: Flag = False
    """Print JSON; everything else goes to standard error."""

    @property
    def place(self) -> Path:
        """Directory of the runs and tables."""
        seed = f"seed{self.seed}" if self.seed else None
        width = f"width{self.width:g}" if self.width else None
        parts = ("reproduce", self.budget, self.recipe, width, seed)
        return self.out or Path("runs", "-".join(filter(None, parts)))


def run(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    command = parse(Reproduce, "reproduce", arguments)
    if command.name == "list":
        return _list(command)
    find_experiment(command.name)

    from onelip.reproduce.run import reproduce
    from onelip.training.display import Display

    is_first = os.environ.get("RANK", "0") == "0"
    display = Display(make_console(stderr=command.json))
    again = shlex.join(["onelip", "reproduce", *arguments])
    try:
        found = reproduce(
            command.name,
            command.place,
            budget=command.budget,
            style=command.recipe,
            width=command.width,
            model=command.model,
            only=command.only,
            plan_only=command.plan,
            seed=command.seed,
            device=command.device,
            threads=command.threads,
            data_root=command.data_root,
            display=display,
            command=again,
            handle_signals=True,
        )
    except Stopped as stopped:
        if is_first:
            print(f"onelip reproduce: {stopped}; finished runs are kept; resume with\n  {again}", file=sys.stderr)
        return 128 + stopped.signal_number
    if is_first and command.json:
        print((command.place / f"{found.experiment.name}.json").read_text(), end="")
    elif is_first:
        display.print_table(found.table.to_rich(), *found.table.notes)
        print(f"Written: {', '.join(map(str, found.files))}")
    if found.failed:
        names = ", ".join(found.failed)
        print(f"onelip reproduce: failed: {names}; the same command tries again", file=sys.stderr)
    return 1 if found.failed else 0


def _list(command: Reproduce) -> int:
    experiments = list_experiments()
    if command.json:
        keys = ("name", "also", "kind", "title", "label")
        rows = [{key: getattr(e, key) for key in keys} | {"runs": len(e.trained)} for e in experiments]
        print(json.dumps(rows))
        return 0
    lines = [(e.name, e.also, str(len(e.trained)) if e.trained else "none", e.title) for e in experiments]
    print(listing(("name", "or", "runs", "content"), lines, 2, output_width()))
    print("\nRuns and their time: onelip reproduce NAME --plan. Shorter: onelip reproduce NAME --budget 10m")
    return 0
