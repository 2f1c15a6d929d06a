"""`onelip train`: train by a preset and options, or resume a run."""

import argparse
import json
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from onelip.cli._common import Flag, OptionalPath, make_console, new_run_directory, parse, unset
from onelip.core.errors import Diverged, OtherProcessFailed, RecipeError, Stopped
from onelip.training.recipe import (
    DEFAULT_BUDGET,
    Recipe,
    changed_fields,
    default_preset,
    for_choices,
    parse_seconds,
    preset,
    recipe_for_budget,
)
from onelip.training.run_directory import RunDirectory, read_config


@dataclass(frozen=True)
class Train:
    """Train a 1-Lipschitz network.

    Without options, it trains on the handwritten digits in the package, in about a minute. With --data NAME, or --data
    FOLDER for your own images, it takes a network sized to them, for ten minutes; --budget changes the time. With
    --preset paper, or --model and an architecture of the paper, it uses the recipe of the paper. The defaults below are
    those of the preset or budget. Ctrl-C and SIGTERM stop the run after the current step and save it. Models and
    methods of your own: --import MODULE, which registers them; the run remembers it.
    """

    recipe: Annotated[Recipe, tyro.conf.arg(name="")]
    out: OptionalPath = None
    """Directory of the new run. Default: a new directory in runs/."""
    resume: OptionalPath = None
    """Resume the run in this directory. If its data were moved, add --data PATH."""
    preset: Annotated[str | None, unset("NAME")] = None
    """Recipe to start from: paper, paper-short (5 epochs of AOL-Small by SGD), short (70 epochs of aol-fast-medium),
    teacher (a plain network for --teacher) or digits."""
    budget: Annotated[str | None, unset("TIME")] = None
    """Train for this time, such as 30s, 10m or 1h: network, batch size and learning rate come from a table, the number
    of epochs from the speed of the first steps. Other options take precedence. Default: 10m, unless a preset, epochs or
    an architecture of the paper are given."""
    data_root: OptionalPath = None
    """Directory of named data sets; see onelip data. The run remembers it."""
    save_minutes: float = 10.0
    """Minutes between checkpoints, in addition to one after each epoch; 0 to switch off."""
    save_steps: int = 0
    """Steps between checkpoints; 0 to switch off."""
    log: tuple[Literal["csv", "tensorboard", "wandb", "trackio"], ...] = ()
    """Logs besides log.jsonl. csv writes log.csv; the others need pip install 'onelip[NAME]'."""
    json: Flag = False
    """Print the results as JSON; everything else goes to standard error."""


def run(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    command = parse(Train, "train", arguments, _defaults(arguments))
    if command.resume is not None:
        _check_resume(command)
    if ":" in command.recipe.loss:
        sys.path.insert(0, os.getcwd())  # as `python -m onelip` does: module:callable may be in this directory

    # Help and usage errors do not import torch.
    from onelip.training.display import Display, constant_line, results_table
    from onelip.training.distributed import keep_freed_memory, stop_on_signals
    from onelip.training.trainer import train

    is_first = os.environ.get("RANK", "0") == "0"
    budget = None if command.budget is None else parse_seconds(command.budget)
    out = command.resume or command.out or new_run_directory(f"{Path(command.recipe.data).stem}-{command.recipe.model}")
    console = make_console(stderr=command.json)
    display = Display(console)
    keep_freed_memory()
    try:
        with stop_on_signals(at_once=True) as stop:
            results = train(
                command.recipe,
                out,
                resume=command.resume is not None,
                budget=budget,
                chosen=None if budget is None else _chosen(command.recipe, budget, arguments),
                data_root=command.data_root,
                display=display,
                log=command.log,
                save_minutes=command.save_minutes,
                save_steps=command.save_steps,
                stop=stop,
            )
    except Stopped as stopped:
        if is_first and RunDirectory(out).config.exists():
            print(f"onelip train: {stopped}; resume with\n  {RunDirectory(out).resume_command}", file=sys.stderr)
        elif is_first:
            print(f"onelip train: {stopped} before the first step; nothing was written", file=sys.stderr)
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
    display.print(constant_line(results["test"]))
    display.print(f"Run: {out} (config.json, log.jsonl, results.json, weights.safetensors, plain.safetensors)")
    display.print(f"Next: onelip evaluate {shlex.quote(str(out))}")
    return 0


def _defaults(arguments: Sequence[str]) -> Train:
    """The defaults of the options: the recipe of the run to resume, of the preset, of the budget or of the data."""
    peek = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    names = ("resume", "start-from", "preset", "data", "model", "method", "optimizer", "budget", "epochs", "epoch-part")
    for name in (*names, "evaluate-every"):
        peek.add_argument(f"--{name}", nargs="?")
    try:
        known, _ = peek.parse_known_args(list(arguments))
    except argparse.ArgumentError:
        return Train(preset("digits"))  # tyro will report the error
    for first, second, why in (
        ("resume", "preset", f"a run keeps its recipe; to train it further: --start-from {known.resume}"),
        ("resume", "budget", f"a run keeps its recipe; to train it further: --start-from {known.resume}"),
        ("start_from", "preset", "the new run has the recipe of the first one"),
        ("budget", "preset", "the budget decides the number of epochs"),
        ("budget", "epochs", "the budget decides the number of epochs"),
        ("budget", "epoch_part", "the budget decides the number of steps"),
        ("budget", "evaluate_every", "the budget decides the number of evaluations"),
    ):
        if getattr(known, first) and getattr(known, second):
            first, second = (name.replace("_", "-") for name in (first, second))
            raise RecipeError(f"--{first} and --{second} exclude each other: {why}")
    if known.resume:
        return Train(read_config(RunDirectory(known.resume)).recipe)
    budget, root = known.budget, None
    if known.start_from:
        kept = read_config(RunDirectory(Path(known.start_from).expanduser()))
        starting, root = kept.recipe, None if kept.data_root is None else Path(kept.data_root)
    elif not budget and (name := known.preset or default_preset(known.data, known.model)):
        starting = preset(name)
    else:
        budget = budget or DEFAULT_BUDGET
        for name, given in (("epoch-part", known.epoch_part), ("evaluate-every", known.evaluate_every)):
            if given and not known.epochs:
                raise RecipeError(f"--{name} needs --epochs: without it, the run has a budget of {budget}")
        usual = recipe_for_budget(parse_seconds(budget), known.data or "digits")
        starting = for_choices(usual, known.model, None)
    if known.method is not None:
        from onelip.training.objective import with_method

        starting = with_method(starting, known.method)
    if budget and not known.start_from and known.optimizer not in (None, starting.optimizer):
        starting = for_choices(starting, None, known.optimizer)
    return Train(starting, budget=None if known.epochs else budget, data_root=root)


def _chosen(recipe: Recipe, budget: float, arguments: Sequence[str]) -> set[str]:
    """The names of the fields of a recipe that a budget keeps: options that are named, and those of --start-from."""
    flags = (argument.partition("=")[0].replace("-", "_") for argument in arguments if argument.startswith("--"))
    names = {flag.removeprefix("__") for flag in flags}
    names |= {name.removeprefix("no_") for name in names}
    return names | changed_fields(recipe, budget) if recipe.start_from else names


def _check_resume(command: Train) -> None:
    assert command.resume is not None
    if command.out is not None:
        raise RecipeError("--resume and --out exclude each other: a run is resumed in its own directory")
    kept = read_config(RunDirectory(command.resume)).recipe
    command.recipe.check_resumes(kept)
    if command.recipe.data != kept.data and not Path(command.recipe.data).expanduser().exists():
        raise RecipeError(f"--data {command.recipe.data}: there is no such file or directory")
