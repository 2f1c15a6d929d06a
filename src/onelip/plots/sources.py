"""Inputs of the functions of `onelip.plots`: runs by path or loaded, certifications, and several of them by name."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from onelip.certification.predict import Certification
from onelip.training.build import LoadedRun, load_run, load_run_data
from onelip.training.run_directory import RunDirectory, read_log

Run = str | PathLike[str] | LoadedRun
Log = Sequence[Mapping[str, Any]]
T = TypeVar("T")


@dataclass(frozen=True)
class Certified:
    """A certification, with the images and the names of the classes if they are known."""

    certification: Certification
    images: Tensor | None
    class_names: Sequence[str]

    def name(self, label: int) -> str:
        """The name of a class, or its number."""
        return self.class_names[label] if label < len(self.class_names) else str(label)


def certified(
    source: Certification | Run, images: Tensor | None = None, class_names: Sequence[str] | None = None
) -> Certified:
    """A certification as it is, or the one of the test images of a run."""
    if isinstance(source, Certification):
        return Certified(source, images, class_names or ())
    run = loaded(source)
    data = load_run_data(run.config)
    found = run.predict(data.test_images).certification
    return Certified(replace(found, labels=data.test_labels), data.test_images, run.config.class_names)


def loaded(run: Run) -> LoadedRun:
    """A run that is loaded already, or by its path."""
    return run if isinstance(run, LoadedRun) else load_run(Path(run))


def log_of(source: Run | Log) -> Log:
    """The lines of the log of a run; a log as it is.

    Raises:
        ValueError: if no epoch is finished.
    """
    if isinstance(source, Sequence) and not isinstance(source, str):
        log = source
    else:
        log = read_log(source.directory if isinstance(source, LoadedRun) else RunDirectory(Path(source)))
    if not log:
        raise ValueError("the log is empty: no epoch is finished yet")
    return log


def by_name(sources: T | Mapping[str, T]) -> dict[str, T]:
    """Several sources by name; a single one has the name ""."""
    return dict(sources) if isinstance(sources, Mapping) else {"": sources}


def middle_image(run: LoadedRun) -> Tensor:
    """A grey image, for measurements that need an input of the right shape."""
    return torch.full((1, *run.config.shape), 0.5)
