"""`onelip train`: train by a preset and flags, or go on with a run."""

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
from onelip.training.errors import Diverged, OtherFailed, RecipeError, Stopped
from onelip.training.presets import preset, preset_for, with_method
from onelip.training.recipe import Recipe
from onelip.training.run_directory import RunDirectory, read_config


@dataclass(frozen=True)
class Train:
    """Train a 1-Lipschitz network.

    Without flags: on the handwritten digits that come with the package, in about a minute. With --data the paper's
    recipe. The defaults below are those of the preset.
    """

    recipe: Annotated[Recipe, tyro.conf.arg(name="")]
    out: Path | None = None
    """Directory of the new run; by default a new one in runs/."""
    resume: Path | None = None
    """Go on with the run in this directory; its recipe is kept. --data PATH says where its data are now."""
    preset: str | None = None
    """paper, short (CIFAR-10 in about an hour on two cores) or digits."""
    data_root: Path | None = None
    """Where to look for named data sets; see onelip data."""
    save_minutes: float = 10.0
    """Write a checkpoint that often, besides after the steps of each epoch; 0 for never."""
    save_steps: int = 0
    """The same in steps."""
    tensorboard: bool = False
    """Log for TensorBoard too."""
    json: bool = False
    """Print the results as JSON; all else goes to standard error."""


def run(arguments: Sequence[str]) -> int:
    """Parse, train, show the table."""
    command = parse(Train, "train", arguments, Train(_starting_recipe(arguments)))
    if command.resume is not None:
        _check_resume(command)

    # Only now: help and wrong flags need no torch.
    from rich.console import Console

    from onelip.training.display import Display, results_table
    from onelip.training.loop import train

    is_first = os.environ.get("RANK", "0") == "0"
    out = command.resume or command.out or _new_directory(command.recipe)
    directory = RunDirectory(out)
    console = Console(stderr=command.json)
    display = Display(console)
    try:
        results = train(
            command.recipe,
            out,
            resume=command.resume is not None,
            data_root=command.data_root,
            display=display,
            tensorboard=command.tensorboard,
            save_minutes=command.save_minutes,
            save_steps=command.save_steps,
        )
    except Stopped as stopped:
        if is_first:
            print(f"onelip train: {stopped}; go on with\n  {directory.resume_command}", file=sys.stderr)
        return 128 + stopped.signal_number
    except OtherFailed:  # who failed says why
        return 1
    except Diverged:  # of the same weights in all processes
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
    display.say(
        f"CRA with the Lipschitz constant {constant:g}, {results['test']['mode']}."
        if constant is not None
        else "No CRA: nobody vouches for a Lipschitz constant of this network."
    )
    display.say(f"The run is in {out}: config.json, log.jsonl, results.json, weights.safetensors, plain.safetensors.")
    display.say(f"Next: onelip evaluate {shlex.quote(str(out))}")
    return 0


def _starting_recipe(arguments: Sequence[str]) -> Recipe:
    """What the flags change: the recipe of the run to go on with, of the preset named, or of the data's preset."""
    peek = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for flag in ("--resume", "--preset", "--data", "--method"):
        peek.add_argument(flag, nargs="?")
    try:
        known, _ = peek.parse_known_args(list(arguments))
    except argparse.ArgumentError:
        return preset("digits")  # tyro will say what is wrong
    if known.resume:
        if known.preset:
            raise RecipeError("expected --resume or --preset, got both; a run keeps its recipe")
        return read_config(RunDirectory(Path(known.resume))).recipe
    return with_method(preset(known.preset or preset_for(known.data)), known.method)


def _check_resume(command: Train) -> None:
    assert command.resume is not None
    if command.out is not None:
        raise RecipeError("expected --resume or --out, got both; a run goes on in its own directory")
    kept = read_config(RunDirectory(command.resume)).recipe
    command.recipe.check_continues(kept)
    if command.recipe.data != kept.data and not Path(command.recipe.data).expanduser().exists():
        raise RecipeError(f"expected --data to say where the run's data are, got {command.recipe.data!r}: not there")


def _new_directory(recipe: Recipe) -> Path:
    stem = f"{Path(recipe.data).stem}-{recipe.model}"
    number = next(n for n in range(1, 10**6) if not Path("runs", f"{stem}-{n}", "config.json").exists())
    return Path("runs", f"{stem}-{number}")
