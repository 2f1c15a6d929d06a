"""Directories and data of runs."""

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from onelip.core.errors import RecipeError

if TYPE_CHECKING:
    from onelip.data.labelled import LabelledImages
    from onelip.training.run_directory import RunConfig


def new_run_directory(name: str) -> Path:
    """The first of runs/NAME-1, runs/NAME-2, ... that contains no run."""
    number = next(n for n in range(1, 10**6) if not Path("runs", f"{name}-{n}", "config.json").exists())
    return Path("runs", f"{name}-{number}")


def load_labelled(
    config: "RunConfig", root: Path | None, other: str | None, split: Literal["test", "train"] = "test"
) -> "LabelledImages":
    """Load images with labels for a run: a split of its data, or other data that the user named.

    Of other data without a split, these are all images. If they are the data of the run, its split is used, so that the
    network is not tested on images that it was trained on.
    """
    from onelip.data import load_data
    from onelip.data.labelled import all_labelled, part_of
    from onelip.training.run_data import load_run_data

    if other is None:
        data = load_run_data(config, root, "; to use them nevertheless, name them with --data")
        return part_of(data, split)
    size = config.recipe.resize_to
    found = all_labelled(other, size)
    if found is None:
        found = part_of(load_data(other, root or config.data_root, image_size=size), split)
    elif (data := found.split_as_for_training()) is not None and data.fingerprint == config.fingerprint:
        found = part_of(data, split)
    elif split == "train":
        raise RecipeError(f"{other}: the data have no training images, so --split train is invalid; omit it")
    return found.for_network(config.class_names, config.shape)
