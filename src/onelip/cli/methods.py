"""`onelip methods`: the table of methods."""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from onelip.cli._parse import parse


@dataclass(frozen=True)
class Methods:
    """List the methods that --method takes, with what is guaranteed of each."""

    json: bool = False
    """Print JSON."""


def run(arguments: Sequence[str]) -> int:
    """Parse and list."""
    command = parse(Methods, "methods", arguments)

    from rich.console import Console
    from rich.table import Table

    from onelip.methods._registry import METHODS

    rows = [
        {
            "name": method.name,
            "title": method.title,
            "mechanism": method.mechanism,
            "guarantee": method.guarantee,
            "layers": [layer.__name__ for layer in method.layers],
        }
        for method in METHODS.values()
    ]
    if command.json:
        print(json.dumps(rows))
        return 0
    table = Table("name", "title", "mechanism", "guarantee", "layers")
    for row in rows:
        table.add_row(row["name"], row["title"], row["mechanism"], row["guarantee"], ", ".join(row["layers"]))
    Console().print(table)
    return 0
