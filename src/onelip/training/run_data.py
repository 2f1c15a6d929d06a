"""The data of a run."""

from pathlib import Path

from onelip.core.errors import RunError
from onelip.data import DataNotFound, ImageData, load_data
from onelip.training.run_directory import RunConfig


def load_run_data(config: RunConfig, root: str | Path | None = None, advice: str = "") -> ImageData:
    """Load the data of a run.

    Args:
        config: configuration of the run.
        root: directory of named data sets; by default that of the run.
        advice: what to do if the data of the run have changed.

    Raises:
        RunError: if the data are missing, or not those of the run.
    """
    try:
        data = load_data(config.recipe.data, root or config.data_root, image_size=config.recipe.resize_to)
    except DataNotFound as error:
        raise RunError(f"the data of the run are missing: {error}") from error  # not a usage error
    if data.fingerprint != config.fingerprint:
        raise RunError(
            f"{data.source}: these are not the data of the run (fingerprint {data.fingerprint[:12]}…, not "
            f"{config.fingerprint[:12]}…){advice}"
        )
    return data
