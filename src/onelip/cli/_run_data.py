"""Directories and data of runs."""

from pathlib import Path
from typing import TYPE_CHECKING

from onelip.core.errors import RunError

if TYPE_CHECKING:
    from onelip.data import ImageData
    from onelip.training.run_directory import RunConfig


def new_run_directory(name: str) -> Path:
    """The first of runs/NAME-1, runs/NAME-2, ... that contains no run."""
    number = next(n for n in range(1, 10**6) if not Path("runs", f"{name}-{n}", "config.json").exists())
    return Path("runs", f"{name}-{number}")


def load_run_data(
    config: "RunConfig",
    root: Path | None,
    other: str | None = None,
    advice: str = "; to use them nevertheless, name them with --data",
) -> "ImageData":
    """Load the data of a run, or other data that the user named.

    Args:
        config: configuration of the run.
        root: directory of named data sets.
        other: name or path of other data, of which only image shape and number of classes must be those of the run.
        advice: what to do if the data of the run have changed.
    """
    from onelip.data import DataNotFound, load_data

    try:
        data = load_data(other or config.recipe.data, root)
    except DataNotFound as error:
        if other:
            raise
        raise RunError(f"the data of the run are missing: {error}") from error  # not a usage error
    if other is None and data.fingerprint != config.fingerprint:
        raise RunError(
            f"{data.source}: these are not the data of the run (fingerprint {data.fingerprint[:12]}…, not "
            f"{config.fingerprint[:12]}…){advice}"
        )
    if data.shape != config.shape or data.num_classes != len(config.class_names):
        raise RunError(
            f"{data.source}: expected images {_times(config.shape)} of {len(config.class_names)} classes, got "
            f"{_times(data.shape)} of {data.num_classes}"
        )
    return data


def _times(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))
