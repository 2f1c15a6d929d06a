"""`onelip compare`: train the same network with several methods and compare them."""

import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from onelip.cli._common import DataRoot, Device, Flag, OptionalNumber, OptionalPath, make_console, parse, unset
from onelip.core.errors import Stopped
from onelip.training.recipe import Recipe, preset


@dataclass(frozen=True)
class Compare:
    """Train the same network with several methods, each with the same budget, and compare the results.

    Each method is an ordinary run in OUT/NAME, with the learning rate, momentum and weight decay that its authors
    recommend. The same command resumes a stopped comparison. Finished methods are not trained again, and more methods
    can be added. A method that fails is a row with the reason. The exit code is 1 if all methods failed.
    """

    methods: Annotated[str, tyro.conf.arg(metavar="NAME,NAME,...")]
    """Methods (see onelip methods), or all; none is the network without a method, the baseline."""
    budget: Annotated[str, tyro.conf.arg(metavar="BUDGET")]
    """Budget of each method: epochs (20ep), or time of training steps (90s, 10m, 1h30m)."""
    out: OptionalPath = None
    """Directory of the comparison. Default: runs/compare-DATA-MODEL-BUDGET."""
    data: str = "digits"
    """Name of a data set (see onelip data), or a path."""
    model: Annotated[str | None, unset("NAME")] = None
    """Architecture; see onelip models. Default: that of the preset."""
    model_options: Annotated[tuple[str, ...], unset("KEY=VALUE ...")] = ()
    """Options of the model."""
    preset: Annotated[str | None, unset("NAME")] = None
    """Recipe that all methods share: paper, paper-short, short or digits. Default: digits for the digits, else
    paper-short."""
    batch_size: OptionalNumber = None
    """Images per step. Default: that of the preset."""
    seed: int = 0
    """Seed of the initial weights, the order of the images and the augmentation."""
    validation: float = 0.0
    """Fraction of the training images held out for validation; the table then shows the validation accuracy."""
    device: Device = "auto"
    data_root: DataRoot = None
    memory: bool = True
    """Measure the peak memory, in separate processes."""
    retry: Flag = False
    """Train methods again that failed before."""
    json: Flag = False
    """Print the comparison as JSON; everything else goes to standard error."""


def run(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    command = parse(Compare, "compare", arguments)
    recipe = _shared_recipe(command)
    name = "-".join(("compare", Path(command.data).stem, recipe.model, command.budget))
    out = command.out or Path("runs", name)

    from onelip.compare.run import Plan, compare, comparison_tables, failures
    from onelip.training.display import Display

    plan = Plan.make(command.methods, budget=command.budget, recipe=recipe)
    console = make_console(stderr=command.json)
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
        display.print(f"The comparison is in {out}: index.html (page) and comparison.json (all numbers).")
    how_many = f"{len(worked)} of {len(asked)} methods finished"
    print(f"onelip compare: {how_many}.", file=sys.stderr)
    return 0 if worked else 1


def _shared_recipe(command: Compare) -> Recipe:
    # The recipe for few epochs: the schedule of the paper is made for 1000.
    chosen = preset(command.preset or ("digits" if command.data == "digits" else "paper-short"))
    return chosen.replace(
        data=command.data,
        model=command.model or chosen.model,
        model_options=command.model_options,
        batch_size=chosen.batch_size if command.batch_size is None else command.batch_size,
        seed=command.seed,
        validation=command.validation,
        device=command.device,
    )
