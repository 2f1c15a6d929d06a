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
    from rich.table import Column, Table

    from onelip.methods._registry import METHODS
    from onelip.methods._table import served_layers

    rows = [
        {
            "name": method.name,
            "title": method.title,
            "mechanism": method.mechanism,
            "guarantee": method.guarantee,
            "train_equals_eval": method.train_equals_eval,
            "paper": None if method.paper is None else {c: getattr(method.paper, c) for c in "EFGM"},
            "hyperparameters": dict(method.hyperparameters),
            "note": method.note,
            "layers": [layer.__name__ for layer in method.layers],
        }
        for method in METHODS.values()
    ]
    if command.json:
        print(json.dumps(rows))
        return 0
    # The name is what --method takes: never cut.
    table = Table(Column("name", no_wrap=True), "title", "mechanism", "guarantee", "layers")
    for method in METHODS.values():
        table.add_row(method.name, method.title, method.mechanism, method.guarantee, served_layers(method))
    Console().print(table)
    return 0
