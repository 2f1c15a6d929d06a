"""`onelip data`: what data sets are there, where they are looked for, and fetching them. Needs no torch."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console

from onelip.cli._parse import parse
from onelip.training._fields import suggestion
from onelip.training.errors import RecipeError

_HELP = """usage: onelip data [list | fetch NAME] [options]

  list    which data sets there are, and where they lie (the default)
  fetch   download an official data set; goes on where it stopped, and checks what has come

onelip data list --help and onelip data fetch --help tell more.
"""


@dataclass(frozen=True)
class List:
    """List the data sets, and where each was found."""

    root: Path | None = None
    """Look only there."""
    json: bool = False
    """Print JSON."""


@dataclass(frozen=True)
class Fetch:
    """Download an official data set. What stopped goes on; a file takes its name only when its checksum is right."""

    name: Annotated[str, tyro.conf.Positional]
    """One of the names of onelip data list."""
    root: Path | None = None
    """Where to put it; by default the first place that is searched."""
    url: str | None = None
    """A folder of another server that has the same files."""
    json: bool = False
    """Print JSON."""


def run(arguments: Sequence[str]) -> int:
    """List, or fetch."""
    if arguments and arguments[0] in ("-h", "--help"):
        print(_HELP, end="")
        return 0
    if arguments and arguments[0] == "fetch":
        return _fetch(parse(Fetch, "data fetch", arguments[1:]))
    if arguments and not arguments[0].startswith("-") and arguments[0] != "list":
        near = suggestion(arguments[0], ("list", "fetch"))
        raise RecipeError(f"expected list or fetch, got {arguments[0]!r}{near}")
    return _list(parse(List, "data list", arguments[1:] if arguments[:1] == ["list"] else arguments))


def _list(command: List) -> int:
    from onelip.data import data_places, data_status

    status = data_status(command.root)
    places = [str(place) for place in data_places(command.root)]
    if command.json:
        rows = [
            {"name": s.name, "title": s.title, "found": s.found and str(s.found), "can_fetch": s.can_fetch}
            for s in status
        ]
        print(json.dumps({"data": rows, "places": places}))
        return 0
    width = max(len(s.name) for s in status)
    for s in status:
        where = s.found or f"not found; onelip data fetch {s.name}"
        print(f"{s.name:<{width}}  {s.title}\n{'':<{width}}  {where}")
    print(
        f"\nLooked in {', then '.join(places)}. Own data are named by their path: .npz, or a folder of images by class."
    )
    return 0


def _fetch(command: Fetch) -> int:
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    from onelip.data import fetch, list_data

    if command.name not in (names := [name for name in list_data() if name != "digits"]):
        near = suggestion(command.name, names)
        extra = "; the digits come with the package" if command.name == "digits" else near
        raise RecipeError(f"expected one of {', '.join(names)} to fetch, got {command.name!r}{extra}")
    if command.url is not None and not command.url.startswith(("http://", "https://")):
        raise RecipeError(f"expected --url to be an http or https address, got {command.url!r}")
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty()) as bar:
        tasks = {}

        def show(name: str, have: int, total: int | None) -> None:
            if name not in tasks:
                tasks[name] = bar.add_task(name, total=total)
            bar.update(tasks[name], completed=have, total=total)

        paths = [str(path) for path in fetch(command.name, command.root, command.url, progress=show)]
    print(json.dumps(paths) if command.json else "\n".join(paths))
    return 0
