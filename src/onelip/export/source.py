"""A finished run as something to ship: its network, and the very bytes of its files, with their hashes."""

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from torch import nn

from onelip.export.errors import ExportError
from onelip.training.build import load_run
from onelip.training.run_directory import RunConfig, RunDirectory, read_config


@dataclass(frozen=True)
class Source:
    """What an export is made of."""

    config: RunConfig
    plain: nn.Module
    weights: bytes  # a plain.safetensors
    config_bytes: bytes  # a config.json
    lipschitz: float | None  # by construction, in real arithmetic
    results: dict[str, Any] | None  # the table of the test images, if the run has one

    @cached_property
    def weights_sha256(self) -> str:
        """What a certificate calls the weights by."""
        return hashlib.sha256(self.weights).hexdigest()

    @cached_property
    def config_sha256(self) -> str:
        """What a certificate calls the config by."""
        return hashlib.sha256(self.config_bytes).hexdigest()


def read_source(path: str | Path) -> Source:
    """A run that has ended; the network has the stored numbers bit for bit."""
    run = RunDirectory(Path(path))
    read_config(run)
    if not run.plain.exists():
        raise ExportError(
            f"{run.path}: expected a finished run, got one without plain.safetensors; go on: {run.resume_command}"
        )
    loaded = load_run(run.path)
    try:
        weights, config = run.plain.read_bytes(), run.config.read_bytes()
    except OSError as error:
        raise ExportError(f"{run.path}: expected readable files, got {error.strerror}") from error
    return Source(loaded.config, loaded.plain, weights, config, loaded.lipschitz, _results(run))


def _results(run: RunDirectory) -> dict[str, Any] | None:
    """The test table, for people: one that cannot be read is left out, since nothing rests on it."""
    try:
        table = json.loads(run.results.read_bytes())["test"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return table if isinstance(table, dict) else None
