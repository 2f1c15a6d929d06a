"""`onelip data`: list the data sets and the searched directories, or download one. Does not import torch."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import tyro
from rich.console import Console

from onelip.cli._common import Json, OptionalPath, parse, unset
from onelip.core.errors import RecipeError, did_you_mean

_HELP = """usage: onelip data [list | fetch NAME] [options]

  list    list the data sets and where they are (the default)
  fetch   download an official data set; resumes a partial download and verifies checksums

See onelip data list --help and onelip data fetch --help.
"""


@dataclass(frozen=True)
class List:
    """List the data sets, and where each was found."""

    root: OptionalPath = None
    """Search only this directory."""
    json: Json = False


@dataclass(frozen=True)
class Fetch:
    """Download an official data set. A partial download is resumed; checksums are verified."""

    name: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="NAME")]
    """Name of a data set; see onelip data list."""
    root: OptionalPath = None
    """Directory to write to. Default: the first searched directory."""
    url: Annotated[str | None, unset("URL")] = None
    """Folder on another server with the same files."""
    json: Json = False


Data = Annotated[List, tyro.conf.subcommand("list")] | Annotated[Fetch, tyro.conf.subcommand("fetch")]


def run(arguments: Sequence[str]) -> int:
    """List or fetch data sets."""
    if arguments and arguments[0] in ("-h", "--help"):
        print(_HELP, end="")
        return 0
    if arguments and arguments[0] == "fetch":
        return _fetch(parse(Fetch, "data fetch", arguments[1:]))
    if arguments and not arguments[0].startswith("-") and arguments[0] != "list":
        near = did_you_mean(arguments[0], ("list", "fetch"))
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
        where = s.found or f"not found; download it with onelip data fetch {s.name}"
        print(f"{s.name:<{width}}  {s.title}\n{'':<{width}}  {where}")
    print(f"\nSearched directories: {', '.join(places)}. Use your own data by their path: .npz, or a folder of images.")
    return 0


def _fetch(command: Fetch) -> int:
    from rich.progress import DownloadColumn, Progress, TransferSpeedColumn

    from onelip.data import fetch, list_data

    if command.name not in (names := [name for name in list_data() if name != "digits"]):
        near = did_you_mean(command.name, names)
        extra = "; the digits are part of the package" if command.name == "digits" else near
        raise RecipeError(f"expected one of {', '.join(names)}, got {command.name!r}{extra}")
    if command.url is not None and not command.url.startswith(("http://", "https://")):
        raise RecipeError(f"expected --url to be an http or https address, got {command.url!r}")
    columns = (*Progress.get_default_columns(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty()) as bar:
        tasks = {}

        def show(name: str, have: int, total: int | None) -> None:
            if name not in tasks:
                tasks[name] = bar.add_task(name, total=total)
            bar.update(tasks[name], completed=have, total=total)

        paths = [str(path) for path in fetch(command.name, command.root, command.url, progress=show)]
    print(json.dumps(paths) if command.json else "\n".join(paths))
    return 0
