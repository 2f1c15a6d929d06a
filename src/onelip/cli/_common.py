"""Shared parts of the commands: options and their checks, tables and progress for terminals, and data of runs."""

import ast
import dataclasses
import difflib
import functools
import inspect
import itertools
import json
import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, get_type_hints

import tyro

from onelip.core.errors import RecipeError

if TYPE_CHECKING:
    from rich.console import Console

    from onelip.data.own import LabelledImages
    from onelip.training.run_directory import RunConfig


T = TypeVar("T")


def unset(metavar: str, help: str | None = None) -> Any:
    """The annotation of an option without a default: the help shows this metavar, and no "default: None"."""
    return tyro.conf.arg(metavar=metavar, help=help, help_behavior_hint="")


UNFINISHED = "The run is not finished; these are the weights of its last checkpoint."

FinishedRun = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN", help="Directory of a finished run.")]
RunPath = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN", help="Directory of a run.")]
OptionalPath = Annotated[Path | None, unset("PATH")]
OptionalNumber = Annotated[int | None, unset("INT")]
Flag = Annotated[bool, tyro.conf.FlagCreatePairsOff, tyro.conf.arg(help_behavior_hint="")]
Json = Annotated[bool, tyro.conf.FlagCreatePairsOff, tyro.conf.arg(help="Print JSON.", help_behavior_hint="")]
DataRoot = Annotated[Path | None, unset("PATH", "Directory of named data sets; see onelip data.")]
Device = Annotated[str, tyro.conf.arg(help="Device to compute on: auto, cpu, cuda, ...")]


# Names of other programs for our options.
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
    _check_names(kind, command, arguments)
    settings: dict[str, Any] = {} if default is None else {"default": default}
    if "-h" in arguments or "--help" in arguments:
        settings["description"] = _join_lines(kind)
    return tyro.cli(kind, args=list(arguments), prog=f"onelip {command}", **settings)


@functools.cache
def _join_lines(kind: type) -> str:
    """Make one line of the docstring of each option: tyro would break it where the source does.

    Returns:
        The docstring of the class, with one line for each paragraph.
    """
    (source,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(source, ast.ClassDef)
    for option, text in itertools.pairwise(source.body):
        if isinstance(option, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
            name, help = ast.unparse(option.target), " ".join(str(text.value.value).split())
            kind.__annotations__[name] = Annotated[kind.__annotations__[name], tyro.conf.arg(help=help)]
    for inner in get_type_hints(kind).values():
        if dataclasses.is_dataclass(inner):
            _join_lines(inner)
    return "\n\n".join(" ".join(text.split()) for text in (inspect.getdoc(kind) or "").split("\n\n"))


def _check_names(kind: type, command: str, arguments: Sequence[str]) -> None:
    """Raise an error for an unknown option, with the option of this command that it may stand for."""
    inner = [t for t in get_type_hints(kind).values() if dataclasses.is_dataclass(t)]  # as the recipe of `onelip train`
    names = [field.name for of in (kind, *inner) for field in dataclasses.fields(of)]
    for argument in arguments:
        given = argument.partition("=")[0]
        name = given.removeprefix("--").replace("-", "_")
        if not given.startswith("--") or name.removeprefix("no_") in (*names, "", "help") or name.startswith("tyro_"):
            continue
        near = _OTHER_NAMES.get(name)
        ours = [near] if near in names else difflib.get_close_matches(name, names, n=1)
        hint = f"did you mean --{ours[0].replace('_', '-')}?" if ours else f"see onelip {command} --help"
        raise RecipeError(f"unknown option {given}; {hint}")


def require_at_least(least: int, command: Any, *names: str) -> None:
    """Raise an error if an option of a command is below a number; None is no value, and NaN is below."""
    for name in names:
        value = getattr(command, name)
        if value is not None and not value >= least:
            raise RecipeError(f"expected --{name.replace('_', '-')} of at least {least}, got {value}")


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


_GAP = 2
_NARROWEST = 24  # of prose; narrower terminals wrap it themselves


def output_width() -> int:
    """Columns of the terminal, or COLUMNS; not limited in a file or a pipe, so that each entry is one line."""
    return shutil.get_terminal_size((10_000, 24)).columns


def make_console(stderr: bool = False) -> "Console":
    """A rich console as wide as the output."""
    from rich.console import Console

    return Console(stderr=stderr, width=None if sys.stdout.isatty() else min(output_width(), 160))


def listing(heads: Sequence[str], rows: Sequence[Sequence[str]], keep: int, width: int) -> str:
    """A line for each row; the last cell is prose.

    Columns between the first `keep` and the prose are left out from the right until nine of ten rows fit on a line.

    Examples:
        >>> print(listing(("name", "kind", "what"), [("a", "k", "two words")], 1, 20))
        name  kind  what
        a     k     two words
        >>> print(listing(("name", "kind", "what"), [("a", "k", "two words")], 1, 15))
        name  what
        a     two words
    """
    table = [heads, *rows]
    widths = [max(map(len, column)) + _GAP for column in zip(*table, strict=True)]
    widths.pop()
    usual = sorted(len(row[-1]) for row in table)[(len(table) - 1) * 9 // 10]
    shown = len(widths)
    while shown > keep and sum(widths[:shown]) + usual > width:
        shown -= 1
    lines: list[str] = []
    for row in table:
        left = "".join(cell.ljust(wide) for cell, wide in zip(row[:shown], widths, strict=False))
        lines += _hanging(left, row[-1], width)
    return "\n".join(lines)


def described(facts: Iterable[tuple[str, str]], width: int) -> str:
    """Labels with texts beside them; a label with an empty text is left out.

    Examples:
        >>> print(described([("guarantee", "proved"), ("note", "")], 80))
          guarantee  proved
    """
    shown = [(label, text) for label, text in facts if text]
    wide = max((len(label) for label, _ in shown), default=0) + 2 * _GAP
    lines: list[str] = []
    for label, text in shown:
        lines += _hanging(f"{'':{_GAP}}{label}".ljust(wide), text, min(width, 120))
    return "\n".join(lines)


def option_text(value: object) -> str:
    """The value of an option as --model-options and --method-options take it.

    Examples:
        >>> option_text(True), option_text(None), option_text((2, 3))
        ('true', '', '2 3')
    """
    if isinstance(value, tuple):
        return " ".join(map(option_text, value))
    return "" if value is None else value if isinstance(value, str) else json.dumps(value)


def printable(text: str) -> str:
    """Text without control characters, so that the content of a file cannot change the terminal."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def _hanging(left: str, prose: str, width: int) -> list[str]:
    room = max(width - len(left), _NARROWEST)
    parts = textwrap.wrap(prose, room, break_long_words=False, break_on_hyphens=False) or [""]
    return [f"{' ' * len(left) if number else left}{part}".rstrip() for number, part in enumerate(parts)]


class StageProgress:
    """Context manager and callback (done, total, what) for `onelip.certify` and `onelip.attack`."""

    def __enter__(self) -> "StageProgress":
        from rich.console import Console
        from rich.progress import Progress

        self.bar = Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty())
        self.stage, self.task = "", self.bar.add_task("", total=None)
        self.bar.start()
        return self

    def __call__(self, done: int, total: int, what: str) -> None:
        # Anything else is the name of a layer.
        stage = {"images": "certifying images", "attacking images": what}.get(what, "proving layers")
        if stage != self.stage and not sys.stderr.isatty():
            print(f"{stage}: {total}", file=sys.stderr, flush=True)
        self.stage = stage
        shown = stage if stage != "proving layers" else f"proving {what}"
        self.bar.update(self.task, description=shown, completed=done, total=total)

    def __exit__(self, *error: object) -> None:
        self.bar.stop()


def new_run_directory(name: str) -> Path:
    """The first of runs/NAME-1, runs/NAME-2, ... that contains no run."""
    number = next(n for n in range(1, 10**6) if not Path("runs", f"{name}-{n}", "config.json").exists())
    return Path("runs", f"{name}-{number}")


def load_labelled(
    config: "RunConfig",
    root: Path | None,
    other: str | None,
    split: Literal["test", "train"] = "test",
    *,
    resize: bool = False,
) -> "LabelledImages":
    """Load images with labels for a run: a split of its data, or other data that the user named.

    Other data are resized if the run resized its own, or if that was asked for. Of other data without a split, these
    are all images. If they are the data of the run, its split is used, so that the network is not tested on images that
    it was trained on.
    """
    from onelip.data import load_data
    from onelip.data.own import all_labelled, part_of
    from onelip.training.build import load_run_data

    if other is None:
        if resize:
            raise RecipeError("--resize needs --data: the images of the run have the size of its network")
        data = load_run_data(config, root, "; to use them nevertheless, name them with --data")
        return part_of(data, split)
    size = config.recipe.resize_to or (config.shape[1:] if resize else None)
    found = all_labelled(other, size)
    if found is None:
        found = part_of(load_data(other, root or config.data_root, image_size=size), split)
    elif (data := found.split_as_for_training()) is not None and data.fingerprint == config.fingerprint:
        found = part_of(data, split)
    elif split == "train":
        raise RecipeError(f"{other}: the data have no training images, so --split train is invalid; omit it")
    return found.for_network(config.class_names, config.shape)
