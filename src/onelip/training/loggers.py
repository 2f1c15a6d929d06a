"""Logs of a run for other programs: a CSV file, TensorBoard, Weights & Biases, trackio.

Each is a class with `write(epoch, numbers)` and `close()`, created with the run and its config. When a run is resumed,
its config and log.jsonl are in place: a log continues after the last epoch in log.jsonl.
"""

import csv
import hashlib
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import redirect_stdout
from importlib.util import find_spec
from typing import Any

from onelip.core.errors import RunError, check_known
from onelip.core.files import disk_error, read_json
from onelip.training.run_directory import Logger, RunDirectory, numbers_in, read_log


class CsvLog:
    """log.csv: a line for each epoch, and a column for each number of the first line."""

    def __init__(self, run: RunDirectory, config: dict[str, Any]) -> None:
        self.path, self.columns = run.csv, list[str]()
        self.path.unlink(missing_ok=True)
        for line in read_log(run):
            self.write(line["epoch"], numbers_in(line))

    def write(self, epoch: int, numbers: dict[str, float]) -> None:
        """Add a line."""
        try:
            with self.path.open("a", newline="") as out:
                writer = csv.writer(out, lineterminator="\n")
                if not self.columns:
                    self.columns = list(numbers)
                    writer.writerow(["epoch", *self.columns])
                writer.writerow([epoch, *(numbers.get(name, "") for name in self.columns)])
        except OSError as error:
            raise disk_error(error, self.path) from error

    def close(self) -> None:
        """Do nothing: the file is closed after each line."""


class TensorBoardLog:
    """Files for TensorBoard in the directory tensorboard of the run."""

    def __init__(self, run: RunDirectory, config: dict[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter  # optional dependency

        self.writer = SummaryWriter(str(run.path / "tensorboard"), purge_step=_epochs(run) + 1)

    def write(self, epoch: int, numbers: dict[str, float]) -> None:
        """Add the numbers of an epoch."""
        for name, value in numbers.items():
            self.writer.add_scalar(name, value, epoch)
        self.writer.flush()

    def close(self) -> None:
        """Close the files."""
        self.writer.close()


class ServiceLog:
    """A run of wandb or trackio, whose functions init, log and finish are the same. The project is onelip.

    Their messages go to standard error.

    Args:
        config: config of the run.
        module: the imported package.
        settings: further arguments of its function init.

    Raises:
        RunError: if the package cannot start a run, for example without a login.
    """

    def __init__(self, config: dict[str, Any], module: Any, **settings: Any) -> None:
        self.module = module
        project = os.environ.get("WANDB_PROJECT", "onelip")
        try:
            with redirect_stdout(sys.stderr):
                module.init(project=project, config=config["recipe"], **settings)
        except Exception as error:
            what = next(iter(str(error).splitlines()), type(error).__name__)
            raise RunError(f"--log {module.__name__} failed: {what}") from error

    def write(self, epoch: int, numbers: dict[str, float]) -> None:
        """Add the numbers of an epoch."""
        with redirect_stdout(sys.stderr):
            # trackio reserves the name step.
            self.module.log({"steps" if name == "step" else name: n for name, n in numbers.items()}, step=epoch)

    def close(self) -> None:
        """End the run."""
        with redirect_stdout(sys.stderr):
            self.module.finish()


def _wandb(run: RunDirectory, config: dict[str, Any]) -> Logger:
    import wandb  # pyright: ignore[reportMissingImports]  # optional dependency

    settings = {"id": _identity(run), "name": run.path.name, "dir": str(run.path), "resume": "allow"}
    return ServiceLog(config, wandb, **settings)


def _trackio(run: RunDirectory, config: dict[str, Any]) -> Logger:
    import trackio  # pyright: ignore[reportMissingImports]  # optional dependency

    return ServiceLog(config, trackio, name=f"{run.path.name}-{_identity(run)}", resume="allow")


LOGGERS: dict[str, Callable[[RunDirectory, dict[str, Any]], Logger]] = {
    "csv": CsvLog,
    "tensorboard": TensorBoardLog,
    "wandb": _wandb,
    "trackio": _trackio,
}


def check_loggers(names: Sequence[str]) -> None:
    """Raise an error if a log is unknown or its package is missing."""
    for name in names:
        check_known("log", name, LOGGERS)
        if name != "csv" and find_spec(name) is None:
            raise RunError(f"--log {name} needs the package {name}: pip install 'onelip[{name}]'")


def _epochs(run: RunDirectory) -> int:
    return max((line["epoch"] for line in read_log(run)), default=0)


def _identity(run: RunDirectory) -> str:
    """The same for all sessions of a run, and different for a later run in the same directory."""
    first = read_json(run.environment)[0]["started"]
    return hashlib.sha256(f"{run.path.resolve()} {first}".encode()).hexdigest()[:8]
