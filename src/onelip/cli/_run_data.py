"""The images that a run's network is looked at with: the run's own, or others of the same kind."""

from pathlib import Path
from typing import TYPE_CHECKING

from onelip.training.errors import RunError

if TYPE_CHECKING:
    from onelip.data import ImageData
    from onelip.training.run_directory import RunConfig


def load_run_data(
    config: "RunConfig",
    root: Path | None,
    other: str | None = None,
    advice: str = "; name them with --data if that is meant",
) -> "ImageData":
    """Load the data of a run, or those that the user named instead.

    Args:
        config: of the run.
        root: where to look for named data sets.
        other: name or path of other data; then only their kind must be the run's.
        advice: what to do if the run's data have changed.
    """
    from onelip.data import DataNotFound, load_data

    try:
        data = load_data(other or config.recipe.data, root)
    except DataNotFound as error:
        if other:
            raise
        raise RunError(f"the data of the run are not there: {error}") from error  # nothing of it was typed
    if other is None and data.fingerprint != config.fingerprint:
        raise RunError(
            f"{data.source}: expected the data of the run (fingerprint {config.fingerprint[:12]}…), got other "
            f"data ({data.fingerprint[:12]}…){advice}"
        )
    if data.shape != config.shape or data.num_classes != len(config.class_names):
        raise RunError(
            f"{data.source}: expected images {_times(config.shape)} of {len(config.class_names)} classes, got "
            f"{_times(data.shape)} of {data.num_classes}"
        )
    return data


def _times(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape))
