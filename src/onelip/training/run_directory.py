"""The directory of a run, and what is in it.

config.json             the recipe, and what the data were
environment.json        machine, versions and command of each session
log.jsonl               one line an epoch
checkpoint.safetensors  all that is needed to go on
weights.safetensors     parameters at the end, as training has them (P)
plain.safetensors       the same network baked: what is evaluated, proved and shipped (W)
results.json            the table at the end
"""

import json
import os
import platform
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from onelip._version import __version__
from onelip.training.errors import NoRun, PlaceTaken, RecipeError, RunError
from onelip.training.files import read_json, write_json, write_whole
from onelip.training.lock import LOCK, locked
from onelip.training.recipe import Recipe

CONFIG_VERSION = 1


@dataclass(frozen=True)
class RunDirectory:
    """Paths of a run's files."""

    path: Path

    @property
    def config(self) -> Path:
        """Recipe and data."""
        return self.path / "config.json"

    @property
    def log(self) -> Path:
        """One line an epoch."""
        return self.path / "log.jsonl"

    @property
    def environment(self) -> Path:
        """Machine and versions."""
        return self.path / "environment.json"

    @property
    def checkpoint(self) -> Path:
        """What is needed to go on."""
        return self.path / "checkpoint.safetensors"

    @property
    def weights(self) -> Path:
        """Parameters at the end."""
        return self.path / "weights.safetensors"

    @property
    def plain(self) -> Path:
        """The baked network at the end."""
        return self.path / "plain.safetensors"

    @property
    def results(self) -> Path:
        """The table at the end."""
        return self.path / "results.json"

    @property
    def resume_command(self) -> str:
        """How to go on, for people: with as many processes as now, to be pasted into a shell."""
        count = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("WORLD_SIZE", "1")
        onelip = "onelip" if count == "1" else f"torchrun --nproc-per-node {count} -m onelip"
        return f"{onelip} train --resume {shlex.quote(str(self.path))}"


@dataclass(frozen=True)
class RunConfig:
    """What config.json holds: with it the network can be built without the data."""

    recipe: Recipe
    data_name: str
    fingerprint: str
    class_names: tuple[str, ...]
    shape: tuple[int, int, int]  # channels, height, width

    def to_json(self) -> dict[str, Any]:
        """As config.json has it."""
        return {
            "version": CONFIG_VERSION,
            "onelip": __version__,
            "recipe": self.recipe.to_json(),
            "data": {
                "name": self.data_name,
                "fingerprint": self.fingerprint,
                "class_names": list(self.class_names),
                "shape": list(self.shape),
            },
        }


def read_config(run: RunDirectory) -> RunConfig:
    """The config of a run, checked."""
    if not run.config.is_file():
        what = "a directory without config.json" if run.path.is_dir() else "no directory"
        raise NoRun(f"{run.path}: expected the directory of a run, got {what}; begin one with onelip train --out")
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
        return RunConfig(recipe, str(data["name"]), str(data["fingerprint"]), names, shape)
    except (KeyError, TypeError, ValueError) as error:
        raise RunError(f"{run.config}: expected name, fingerprint, class_names and shape of the data") from error


@contextmanager
def open_run(run: RunDirectory, recipe: Recipe, *, resume: bool) -> Iterator[None]:
    """Make the directory of a new run, or take that of an old one, and keep other processes from writing there.

    A command that is refused before it has written anything leaves no directory behind.
    """
    if resume:
        recipe.check_continues(read_config(run).recipe)
    elif run.config.exists():
        raise PlaceTaken(
            f"{run.path}: expected a new directory, got one that holds a run; "
            f"go on with it by `{run.resume_command}`, or choose another --out"
        )
    if run.path.is_file():
        raise PlaceTaken(f"{run.path}: expected a directory, got a file; choose another --out")
    made = [path for path in (run.path, *run.path.parents) if not path.exists()]
    with locked(run.path, "expected a run that stands still, got one that another process writes"):
        try:
            yield
        except BaseException:
            _remove_empty(run.path, made)
            raise


def _remove_empty(directory: Path, made: list[Path]) -> None:
    """Remove the lock if nothing else is in the directory, and then the directories that were made for it."""
    if [path.name for path in directory.iterdir()] != [LOCK]:
        return
    with suppress(OSError):  # others may have put something there meanwhile
        (directory / LOCK).unlink()
        for path in made:
            path.rmdir()


def record_session(run: RunDirectory, **facts: Any) -> dict[str, Any]:
    """Add this session to environment.json; returns those facts of the session before that have changed, if any."""
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
    """The whole lines of the log; a last line that a kill cut short is left out."""
    if not run.log.exists():
        return []
    lines = run.log.read_bytes().split(b"\n")[:-1]
    try:
        return [json.loads(line) for line in lines]
    except ValueError as error:
        raise RunError(f"{run.log}: expected one JSON object a line, got another line; the file is damaged") from error


def trim_log(run: RunDirectory, epochs: int) -> None:
    """Drop what was logged after the checkpoint: those epochs come again."""
    kept = [line for line in read_log(run) if line["epoch"] <= epochs]
    write_whole(run.log, "".join(json.dumps(line) + "\n" for line in kept).encode())
