"""Trained networks in the package: `onelip zoo`, `onelip.from_pretrained("mnist-fast")`.

Each is a directory of `save_pretrained` in the folder zoo. zoo.json, written by benchmarks/zoo.py, has the command that
made it, its results, and the checksum of its weights.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onelip.core.files import read_json
from onelip.export.files import ExportError

FOLDER = Path(__file__).with_name("zoo")


@dataclass(frozen=True)
class ZooEntry:
    """A trained network of the package.

    Attributes:
        name: name for `from_pretrained`.
        path: its directory, with the model card README.md.
        facts: its entry in zoo.json: data, model, parameters, accuracy, cra, constant, attack, command, seconds.
    """

    name: str
    path: Path
    facts: dict[str, Any]


def list_zoo() -> list[ZooEntry]:
    """Return the trained networks of the package, in the order of their names.

    Examples:
        >>> "digits-fast" in [entry.name for entry in list_zoo()]
        True
    """
    entries = read_json(FOLDER / "zoo.json")["networks"]
    return [ZooEntry(name, FOLDER / name, facts) for name, facts in sorted(entries.items())]


def find_in_zoo(name: str) -> Path | None:
    """Return the directory of a network of the package; None if there is none of this name.

    Raises:
        ExportError: if its weights do not have the checksum of the package.
    """
    for entry in list_zoo():
        if entry.name == name:
            weights = entry.path / "model.safetensors"
            if hashlib.sha256(weights.read_bytes()).hexdigest() != entry.facts["sha256"]:
                raise ExportError(f"{weights}: the file is damaged (wrong checksum); reinstall onelip")
            return entry.path
    return None
