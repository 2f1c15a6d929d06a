"""Options of commands: dataclasses that tyro fills, the types of their fields, and checks of paths."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

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


def parse(kind: type[T], command: str, arguments: Sequence[str], default: T | None = None) -> T:
    """Fill the dataclass of a command from its arguments; a usage error exits with code 2."""
    settings: dict[str, Any] = {} if default is None else {"default": default}
    return tyro.cli(kind, args=list(arguments), prog=f"onelip {command}", **settings)


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
