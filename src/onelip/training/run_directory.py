"""The directory of a run, its config and its log.

config.json             the recipe, and the name and fingerprint of the data
environment.json        machine, versions and command of each session
log.jsonl               one line per epoch
log.csv                 the same as a table, with --log csv
checkpoint.safetensors  everything needed to resume
weights.safetensors     final parameters of training (P)
plain.safetensors       the final network, baked (W), which is evaluated, proved and exported
results.json            final results
teacher/                with --teacher, a copy of the network that labels the images
"""

import json
import os
import platform
import shlex
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from onelip._version import __version__
from onelip.core.errors import NoRun, PathTaken, RecipeError, RunError
from onelip.core.files import LOCK, disk_error, locked, read_json, write_json, write_whole
from onelip.training.recipe import Recipe

CONFIG_VERSION = 1
LOG_FOLDERS = ("tensorboard", "wandb")  # that other logs create


class RunDirectory:
    """Paths of the files of a run, as listed in the docstring of this module.

    Args:
        path: the directory.

    Examples:
        >>> RunDirectory("runs/first").resume_command
        'onelip train --resume runs/first'
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.config = self.path / "config.json"
        self.environment = self.path / "environment.json"
        self.log = self.path / "log.jsonl"
        self.csv = self.path / "log.csv"
        self.checkpoint = self.path / "checkpoint.safetensors"
        self.weights = self.path / "weights.safetensors"
        self.plain = self.path / "plain.safetensors"
        self.results = self.path / "results.json"
        self.teacher = self.path / "teacher"
        self.teacher_part = self.path / "teacher.part"

    @property
    def resume_command(self) -> str:
        """The command that resumes the run with the current number of processes, quoted for a shell."""
        count = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("WORLD_SIZE", "1")
        onelip = "onelip" if count == "1" else f"torchrun --nproc-per-node {count} -m onelip"
        return f"{onelip} train --resume {shlex.quote(str(self.path))}"


@dataclass(frozen=True)
class RunConfig:
    """The content of config.json, from which the network can be built without the data.

    Attributes:
        recipe: recipe of the run.
        data_name: name of the data.
        fingerprint: fingerprint of the data.
        class_names: names of the classes, in the order of the labels.
        shape: shape of an image (channels, height, width).
        data_root: directory of named data sets that the run was started with; None for the default places.
        imports: modules outside of onelip that register the model, the method or the loss.
    """

    recipe: Recipe
    data_name: str
    fingerprint: str
    class_names: tuple[str, ...]
    shape: tuple[int, int, int]
    data_root: str | None = None
    imports: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the content of config.json."""
        return {
            "version": CONFIG_VERSION,
            "onelip": __version__,
            "recipe": self.recipe.to_json(),
            "data": {
                "name": self.data_name,
                "fingerprint": self.fingerprint,
                "class_names": list(self.class_names),
                "shape": list(self.shape),
                "root": self.data_root,
            },
            "imports": list(self.imports),
        }


def read_config(run: RunDirectory) -> RunConfig:
    """Read and check the config of a run.

    Args:
        run: the run directory.

    Returns:
        The config.

    Raises:
        NoRun: if the directory contains no run.
        RunError: if the config is damaged or of another version.
    """
    if not run.config.is_file():
        what = "the directory has no config.json" if run.path.is_dir() else "there is no such directory"
        raise NoRun(f"{run.path} is not a run: {what}; start one: onelip train --out {shlex.quote(str(run.path))}")
    content = read_json(run.config)
    version = content.get("version") if isinstance(content, dict) else None
    if version != CONFIG_VERSION:
        raise RunError(
            f"{run.config}: expected a config of version {CONFIG_VERSION}, got version {version!r}; "
            f"use the onelip that wrote it (this is {__version__})"
        )
    try:
        recipe = Recipe.from_json(content.get("recipe"))
    except RecipeError as error:
        raise RunError(f"{run.config}: {error}") from error
    try:
        data = content["data"]
        shape = tuple(int(n) for n in data["shape"])
        names = tuple(str(name) for name in data["class_names"])
        if len(shape) != 3 or min(shape) < 1 or len(names) < 2:
            raise ValueError
        root, imports = data.get("root"), tuple(str(name) for name in content.get("imports", ()))
        root = None if root is None else str(root)
        return RunConfig(recipe, str(data["name"]), str(data["fingerprint"]), names, shape, root, imports)
    except (KeyError, TypeError, ValueError) as error:
        raise RunError(
            f"{run.config}: name, fingerprint, class_names or shape of the data are missing or invalid"
        ) from error


@contextmanager
def open_run(run: RunDirectory, recipe: Recipe, *, resume: bool) -> Iterator[frozenset[str]]:
    """Create the directory of a new run or open an existing one, and lock it against other processes.

    Yields the names of the files and folders that were there before. If the block fails before anything is written, a
    new directory is removed again.

    Args:
        run: the directory.
        recipe: the recipe; a resumed run must have the same one, except for options that may change.
        resume: whether to open an existing run.

    Raises:
        PathTaken: if a new run would overwrite a run or a file.
        NoRun: if there is no run to resume.
        RunError: if another process uses the run.
    """
    if resume:
        recipe.check_resumes(read_config(run).recipe)
    elif run.config.exists():
        raise PathTaken(
            f"{run.path} already contains a run; resume it with `{run.resume_command}`, or choose another --out"
        )
    elif left := [path.name for path in (run.checkpoint, run.weights, run.plain, run.results) if path.exists()]:
        raise PathTaken(
            f"{run.path} contains files of a run ({', '.join(left)}) but no config.json; choose another --out"
        )
    if run.path.is_file():
        raise PathTaken(f"{run.path} is a file; choose another --out")
    made = [path for path in (run.path, *run.path.parents) if not path.exists()]
    with locked(run.path, "the run is in use by another process; wait for it to finish, or stop it"):
        try:
            yield frozenset(path.name for path in run.path.iterdir())
        except BaseException:
            _remove_empty(run.path, made)
            raise


def remove_new(run: RunDirectory, kept: frozenset[str]) -> None:
    """Remove the files of a run that failed before its first step, so that it can be started again.

    Args:
        run: the directory.
        kept: names of what was there before the run, which stays.
    """
    folders = (run.teacher, run.teacher_part, *(run.path / name for name in LOG_FOLDERS))
    for path in (*folders, run.log, run.csv, run.environment, run.checkpoint, run.config):
        if path.name in kept:
            continue
        if path in folders:
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink(missing_ok=True)


def _remove_empty(directory: Path, made: list[Path]) -> None:
    """Remove the lock if nothing else is in the directory, and then the directories that were created for it."""
    if [path.name for path in directory.iterdir()] != [LOCK]:
        return
    with suppress(OSError):  # another process may have written something there
        (directory / LOCK).unlink()
        for path in made:
            path.rmdir()


def record_session(run: RunDirectory, **facts: Any) -> dict[str, Any]:
    """Add this session to environment.json; return the previous values of the `facts` that have changed."""
    sessions = read_json(run.environment) if run.environment.exists() else []
    session = {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": sys.argv,
        "onelip": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        **facts,
    }
    write_json(run.environment, [*sessions, session])
    return {key: sessions[-1].get(key) for key in facts if sessions[-1].get(key) != facts[key]} if sessions else {}


def read_log(run: RunDirectory) -> list[dict[str, Any]]:
    """Read the log of a run. An incomplete last line, left by a kill, is dropped.

    Args:
        run: the run directory.

    Returns:
        One dictionary per epoch; an empty list if there is no log.

    Raises:
        RunError: if the log is damaged.
    """
    if not run.log.exists():
        return []
    lines = run.log.read_bytes().split(b"\n")[:-1]
    try:
        return [json.loads(line) for line in lines]
    except ValueError as error:
        raise RunError(f"{run.log}: the file is damaged: expected a JSON object in each line") from error


def trim_log(run: RunDirectory, epochs: int) -> None:
    """Drop the lines after this number of epochs, which will be repeated."""
    kept = [line for line in read_log(run) if line["epoch"] <= epochs]
    write_whole(run.log, "".join(json.dumps(line) + "\n" for line in kept).encode())


class Logger(Protocol):
    """A log besides log.jsonl, as `onelip.training.loggers` opens one."""

    def write(self, epoch: int, numbers: dict[str, float]) -> None:
        """Add the numbers of an epoch."""
        ...

    def close(self) -> None:
        """End the log."""
        ...


class RunLog:
    """Appends lines to log.jsonl, flushes each, and passes their numbers to other logs.

    Args:
        run: the run.
        others: further logs.
    """

    def __init__(self, run: RunDirectory, others: Sequence[Logger] = ()) -> None:
        self.path, self.others = run.log, others

    def write(self, line: dict[str, Any]) -> None:
        """Add the line of an epoch."""
        try:
            with self.path.open("a") as out:
                out.write(json.dumps(line, allow_nan=False) + "\n")
        except OSError as error:
            raise disk_error(error, self.path) from error
        for other in self.others:
            other.write(line["epoch"], numbers_in(line))

    def close(self) -> None:
        """Close the other logs."""
        for other in self.others:
            other.close()


def numbers_in(line: dict[str, Any], prefix: str = "") -> dict[str, float]:
    """The numbers of a line by their names, except for the epoch.

    Examples:
        >>> numbers_in({"epoch": 1, "loss": 2.0, "cra": {"36/255": 0.5, "1": None}})
        {'loss': 2.0, 'cra/36/255': 0.5}
    """
    found: dict[str, float] = {}
    for key, value in line.items():
        if isinstance(value, dict):
            found |= numbers_in(value, f"{prefix}{key}/")
        elif isinstance(value, int | float) and key != "epoch":
            found[f"{prefix}{key}"] = float(value)
    return found
