"""Options of commands: dataclasses that tyro fills, the types of their fields, and checks of paths."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import tyro

from onelip.core.errors import RecipeError

T = TypeVar("T")


def unset(metavar: str) -> Any:
    """The annotation of an option without a default: the help shows this metavar, and no "default: None"."""
    return tyro.conf.arg(metavar=metavar, help_behavior_hint="")


RunPath = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
OptionalPath = Annotated[Path | None, unset("PATH")]
OptionalNumber = Annotated[int | None, unset("INT")]
Flag = Annotated[bool, tyro.conf.FlagCreatePairsOff, tyro.conf.arg(help_behavior_hint="")]


# Names of other programs for our options. tyro itself suggests names that are spelled alike.
_OTHER_NAMES = {
    "learning_rate": "lr",
    "rate": "lr",
    "optim": "optimizer",
    "opt": "optimizer",
    "wd": "weight_decay",
    "arch": "model",
    "architecture": "model",
    "network": "model",
    "dataset": "data",
    "data_dir": "data",
    "bs": "batch_size",
    "num_epochs": "epochs",
    "max_epochs": "epochs",
    "scheduler": "schedule",
    "sched": "schedule",
    "clip_grad": "gradient_clip",
    "grad_clip": "gradient_clip",
    "val_split": "validation",
    "gpu": "device",
    "output": "out",
    "output_dir": "out",
    "save_dir": "out",
    "checkpoint": "resume",
    "num_threads": "threads",
    "time": "budget",
    "format": "json",
}


def parse(kind: type[T], command: str, arguments: Sequence[str], default: T | None = None) -> T:
    """Fill the dataclass of a command from its arguments; a usage error exits with code 2."""
    _suggest_name(kind, arguments)
    settings: dict[str, Any] = {} if default is None else {"default": default}
    return tyro.cli(kind, args=list(arguments), prog=f"onelip {command}", **settings)


def _suggest_name(kind: type, arguments: Sequence[str]) -> None:
    """Raise an error for the name that another program has for an option of this command."""
    names = {name for field in dataclasses.fields(kind) for name in (field.name, *_nested(kind, field.name))}
    for argument in arguments:
        given = argument.partition("=")[0]
        name = given.removeprefix("--").replace("-", "_")
        if given.startswith("--") and name not in names and _OTHER_NAMES.get(name) in names:
            ours = _OTHER_NAMES[name].replace("_", "-")
            raise RecipeError(f"unknown option {given}; did you mean --{ours}?")


def _nested(kind: type, name: str) -> list[str]:
    """Names of the options of a field that is a dataclass itself, as the recipe of `onelip train`."""
    inner = get_type_hints(kind)[name]
    return [field.name for field in dataclasses.fields(inner)] if dataclasses.is_dataclass(inner) else []


def require_file(flag: str, path: Path | None) -> None:
    """Raise an error if a file to read is missing; None is no file."""
    if path is not None and not path.is_file():
        raise RecipeError(f"{flag} {path}: {'this is a directory, not a file' if path.is_dir() else 'no such file'}")


def require_writable(flag: str, path: Path | None) -> None:
    """Raise an error if a file cannot be written because of its path; None is no file."""
    if path is None:
        return
    if path.is_dir():
        raise RecipeError(f"{flag} {path}: this is a directory; give the name of a file")
    if not path.parent.is_dir():
        raise RecipeError(f"{flag} {path}: there is no directory {path.parent}; create it, or choose another path")
