"""`onelip zoo`: list the trained networks of the package; `onelip zoo NAME`: print the model card of one."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import tyro

from onelip.cli._common import Flag, listing, output_width, parse, unset
from onelip.core.errors import check_known


@dataclass(frozen=True)
class Zoo:
    """List the trained networks of the package, or print the model card of one.

    Use one with onelip predict --pretrained NAME, or onelip.from_pretrained("NAME") in Python.
    """

    name: Annotated[str | None, tyro.conf.Positional, unset("[NAME]")] = None
    """Network whose model card to print."""
    json: Flag = False
    """Print JSON: data, results, training command and checksum of all networks, or of one."""


def run(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    command = parse(Zoo, "zoo", arguments)

    from onelip.export.hub import list_zoo

    entries = {entry.name: entry for entry in list_zoo()}
    if command.name is not None:
        check_known("network", command.name, entries)
    if command.json:
        shown = entries.values() if command.name is None else [entries[command.name]]
        facts = [{"name": entry.name, "path": str(entry.path), **entry.facts} for entry in shown]
        print(json.dumps(facts if command.name is None else facts[0]))
        return 0
    if command.name is not None:
        print((entries[command.name].path / "README.md").read_text(), end="")
        return 0
    rows = []
    for entry in entries.values():
        shares = [entry.facts["accuracy"], *entry.facts["cra"].values()]
        numbers = [f"{100 * share:.1f}" for share in shares]
        rows.append((entry.name, *numbers, f"{entry.facts['data']}, {entry.facts['parameters']:,} parameters"))
    radii = next(iter(entries.values())).facts["cra"]
    heads = ("name", "accuracy", *(f"CRA {radius}" for radius in radii), "data and network")
    print(listing(heads, rows, 1, output_width()))
    print("\nPercent of the test images; certified with all rounding errors. Model card: onelip zoo NAME")
    return 0
