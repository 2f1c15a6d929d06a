"""`onelip compare`: methods side by side, under one budget, in one table and on one page."""

import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from onelip.cli._parse import parse
from onelip.core.errors import Stopped
from onelip.training.recipe import Recipe, preset


@dataclass(frozen=True)
class Compare:
    """Train the same network with several methods, each with the same budget, and compare.

    Each method is an ordinary run in OUT/NAME, with its authors' learning rate, momentum and decay where they recommend
    some. The same command goes on where it was stopped; methods that are done are not trained again, and others can be
    added. A method that fails is a row that says why. Exit code 1 if none worked.
    """

    methods: str
    """Names with commas between them (see onelip methods), or all; none is the plain network."""
    budget: str
    """Of each method: epochs as 20ep, or time of training steps as 90s, 10m, 1h30m (whole epochs that fit)."""
    out: Path | None = None
    """Directory of the comparison: new, or one of the same plan. runs/compare-DATA-MODEL-BUDGET if not given."""
    data: str = "digits"
    """Name of a data set, or a path; see onelip train."""
    model: str | None = None
    """Name of an architecture; see onelip models. That of the preset by default."""
    model_options: tuple[str, ...] = ()
    """What else the model knows, as key=value."""
    preset: str | None = None
    """Recipe to begin with: digits for the digits, else short."""
    batch_size: int | None = None
    """Images in a step; that of the preset by default."""
    seed: int = 0
    """Decides the first weights, the order and the augmentation."""
    validation: float = 0.0
    """Part of the training images that is held out, and that the table is then about: choose by it."""
    device: str = "auto"
    """Where to compute."""
    data_root: Path | None = None
    """Where to look for named data sets; see onelip data."""
    memory: bool = True
    """Measure the peak of memory, in processes of their own."""
    retry: bool = False
    """Try methods that failed before again."""
    json: bool = False
    """Print the comparison as JSON; all else goes to standard error."""


def run(arguments: Sequence[str]) -> int:
    """Parse, compare, show."""
    command = parse(Compare, "compare", arguments)
    recipe = _shared_recipe(command)
    name = "-".join(("compare", Path(command.data).stem, recipe.model, command.budget))
    out = command.out or Path("runs", name)

    from rich.console import Console

    from onelip.compare.page import comparison_tables, failures
    from onelip.compare.plan import Plan
    from onelip.compare.run import compare
    from onelip.training.display import Display

    plan = Plan.make(command.methods, budget=command.budget, recipe=recipe)
    console = Console(stderr=command.json)
    again = shlex.join(["onelip", "compare", *arguments])
    display = Display(console)
    try:
        record = compare(
            plan,
            out,
            data_root=command.data_root,
            display=display,
            memory=command.memory,
            retry=command.retry,
            command=again,
            handle_signals=True,
        )
    except (Stopped, KeyboardInterrupt) as stopped:
        number = stopped.signal_number if isinstance(stopped, Stopped) else 2
        what = str(stopped) or "stopped"
        print(f"onelip compare: {what}; finished methods are kept; resume with\n  {again}", file=sys.stderr)
        return 128 + number
    asked = [row for row in record["rows"] if row["method"] in plan.methods]
    worked = [row for row in asked if row["status"] == "done"]
    if command.json:
        print(json.dumps({"out": str(out), **record}))
    else:
        for table in comparison_tables(record):
            console.print(table)
        for line in failures(record):
            display.print(line)
        display.print(f"The comparison is in {out}: index.html to look at, comparison.json with everything.")
    how_many = f"{len(worked)} of {len(asked)} methods worked"
    print(f"onelip compare: {how_many}.", file=sys.stderr)
    return 0 if worked else 1


def _shared_recipe(command: Compare) -> Recipe:
    # A comparison has a budget, so the recipe for few passes: the paper's schedule is made for 1000 epochs.
    chosen = preset(command.preset or ("digits" if command.data == "digits" else "short"))
    return chosen.replace(
        data=command.data,
        model=command.model or chosen.model,
        model_options=command.model_options,
        batch_size=chosen.batch_size if command.batch_size is None else command.batch_size,
        seed=command.seed,
        validation=command.validation,
        device=command.device,
    )
