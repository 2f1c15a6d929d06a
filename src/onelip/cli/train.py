"""`onelip train`: train by a preset and options, or resume a run."""

import argparse
import json
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from onelip.cli._parse import parse
from onelip.core.errors import Diverged, OtherProcessFailed, RecipeError, Stopped
from onelip.training.recipe import Recipe, parse_seconds, preset, preset_for, recipe_for_budget, with_method
from onelip.training.run_directory import RunDirectory, read_config


@dataclass(frozen=True)
class Train:
    """Train a 1-Lipschitz network.

    Without options: on the handwritten digits in the package, in about a minute. With --data: the paper's recipe. With
    --budget: the most that is known to fit into that time. The defaults below are those of the preset or the budget.
    Ctrl-C and SIGTERM save the run and stop it after the current step.
    """

    recipe: Annotated[Recipe, tyro.conf.arg(name="")]
    out: Path | None = None
    """Directory of the new run; by default a new one in runs/."""
    resume: Path | None = None
    """Resume the run in this directory with its own recipe. If its data were moved, add --data PATH."""
    preset: str | None = None
    """paper, short (5 epochs of AOL-Small by SGD) or digits."""
    budget: str | None = None
    """Train for this time, such as 30s, 10m or 1h: network, batch size and learning rate come from a table, the number
    of epochs from the speed of the first steps. Other options take precedence."""
    data_root: Path | None = None
    """Directory of named data sets; see onelip data."""
    save_minutes: float = 10.0
    """Minutes between checkpoints, besides the one after each epoch; 0 for none."""
    save_steps: int = 0
    """Steps between checkpoints; 0 for none."""
    tensorboard: bool = False
    """Also log for TensorBoard."""
    json: bool = False
    """Print the results as JSON; everything else goes to standard error."""


def run(arguments: Sequence[str]) -> int:
    """Parse, train, print the table."""
    command = parse(Train, "train", arguments, Train(_starting_recipe(arguments)))
    if command.resume is not None:
        _check_resume(command)
    if ":" in command.recipe.loss:
        sys.path.insert(0, os.getcwd())  # as `python -m onelip` does: a loss of one's own is a module in this directory

    # Only now: help and wrong options need no torch.
    from rich.console import Console

    from onelip.training.display import Display, results_table
    from onelip.training.distributed import stop_on_signals
    from onelip.training.trainer import train

    is_first = os.environ.get("RANK", "0") == "0"
    out = command.resume or command.out or _new_directory(command.recipe)
    console = Console(stderr=command.json)
    display = Display(console)
    try:
        with stop_on_signals() as stop:
            results = train(
                command.recipe,
                out,
                resume=command.resume is not None,
                budget=None if command.budget is None else parse_seconds(command.budget),
                data_root=command.data_root,
                display=display,
                tensorboard=command.tensorboard,
                save_minutes=command.save_minutes,
                save_steps=command.save_steps,
                stop=stop,
            )
    except Stopped as stopped:
        if is_first:
            print(f"onelip train: {stopped}; resume with\n  {RunDirectory(out).resume_command}", file=sys.stderr)
        return 128 + stopped.signal_number
    except OtherProcessFailed:  # that process prints why
        return 1
    except Diverged:  # in all processes alike
        if is_first:
            raise
        return 1
    if not is_first:
        return 0
    if command.json:
        print(json.dumps({"run": str(out), **results}))
        return 0
    for part in results.values():
        console.print(results_table(part))
    constant = results["test"]["lipschitz"]
    display.print(
        f"CRA with the Lipschitz constant {constant:g}, {results['test']['mode']}."
        if constant is not None
        else "No CRA: no Lipschitz constant is proved for this network."
    )
    display.print(f"Run: {out} (config.json, log.jsonl, results.json, weights.safetensors, plain.safetensors)")
    display.print(f"Next: onelip evaluate {shlex.quote(str(out))}")
    return 0


def _starting_recipe(arguments: Sequence[str]) -> Recipe:
    """The recipe that the options change: that of the run to resume, of the named preset, or of the data's preset."""
    peek = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for flag in ("--resume", "--preset", "--data", "--method", "--budget", "--epochs"):
        peek.add_argument(flag, nargs="?")
    try:
        known, _ = peek.parse_known_args(list(arguments))
    except argparse.ArgumentError:
        return preset("digits")  # tyro will report the error
    if known.resume:
        if known.preset or known.budget:
            given = "--preset" if known.preset else "--budget"
            raise RecipeError(f"--resume and {given} exclude each other: a run keeps its recipe")
        return read_config(RunDirectory(known.resume)).recipe
    if known.budget:
        if known.preset or known.epochs:
            given = "--preset" if known.preset else "--epochs"
            raise RecipeError(f"--budget and {given} exclude each other: the budget decides the number of epochs")
        starting = recipe_for_budget(parse_seconds(known.budget)).replace(data=known.data or "digits")
        return with_method(starting, known.method)
    return with_method(preset(known.preset or preset_for(known.data)), known.method)


def _check_resume(command: Train) -> None:
    assert command.resume is not None
    if command.out is not None:
        raise RecipeError("--resume and --out exclude each other: a run is resumed in its own directory")
    kept = read_config(RunDirectory(command.resume)).recipe
    command.recipe.check_resumes(kept)
    if command.recipe.data != kept.data and not Path(command.recipe.data).expanduser().exists():
        raise RecipeError(f"--data {command.recipe.data}: there is no such file or directory")


def _new_directory(recipe: Recipe) -> Path:
    stem = f"{Path(recipe.data).stem}-{recipe.model}"
    number = next(n for n in range(1, 10**6) if not Path("runs", f"{stem}-{n}", "config.json").exists())
    return Path("runs", f"{stem}-{number}")
