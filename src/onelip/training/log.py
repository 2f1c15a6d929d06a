"""The log of a run: a JSON object a line, and TensorBoard for those who ask for it."""

import json
from pathlib import Path
from typing import Any

from onelip.training.errors import RunError
from onelip.training.files import disk_error
from onelip.training.run_directory import RunDirectory


class RunLog:
    """Appends to log.jsonl, each line at once on the disk."""

    def __init__(self, run: RunDirectory, *, tensorboard: bool, epoch: int) -> None:
        self.path = run.log
        self.writer = _tensorboard(run.path, epoch) if tensorboard else None

    def write(self, line: dict[str, Any]) -> None:
        """Add one line; `epoch` counts, numbers go to TensorBoard too."""
        try:
            with self.path.open("a") as out:
                out.write(json.dumps(line, allow_nan=False) + "\n")
        except OSError as error:
            raise disk_error(error, self.path) from error
        if self.writer is not None:
            for name, value in _numbers(line):
                self.writer.add_scalar(name, value, line["epoch"])
            self.writer.flush()

    def close(self) -> None:
        """Give TensorBoard time to write."""
        if self.writer is not None:
            self.writer.close()


def _numbers(line: dict[str, Any], prefix: str = "") -> list[tuple[str, float]]:
    found = []
    for key, value in line.items():
        if isinstance(value, dict):
            found += _numbers(value, f"{prefix}{key}/")
        elif isinstance(value, int | float) and key != "epoch":
            found.append((f"{prefix}{key}", float(value)))
    return found


def _tensorboard(path: Path, epoch: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise RunError(
            "expected the package tensorboard, got none; install it with `pip install 'onelip[tensorboard]'`"
        ) from error
    # What an earlier session wrote after its last checkpoint comes again.
    return SummaryWriter(str(path / "tensorboard"), purge_step=epoch + 1)
