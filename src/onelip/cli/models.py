"""`onelip models`: the architectures by name."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from onelip.cli._parse import parse


@dataclass(frozen=True)
class Models:
    """List the architectures that --model takes."""

    filter: str = "*"
    """Only names that match; * stands for anything."""
    json: bool = False
    """Print JSON."""


def run(arguments: Sequence[str]) -> int:
    """Parse and list."""
    command = parse(Models, "models", arguments)

    from onelip.models import list_models

    names = list_models(command.filter)
    print(json.dumps(names) if command.json else "\n".join(names) or f"no model matches {command.filter!r}")
    return 0
