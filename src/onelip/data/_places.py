"""Where data sets are looked for, and what is there.

A `root` that is given is the only place. Without one: the directory that the environment variable ONELIP_DATA names,
then $XDG_CACHE_HOME/onelip/data, which is ~/.cache/onelip/data if that variable is not set. Downloads go to the first.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from onelip.data._official import OFFICIAL, Official, Version

DIGITS_FILE = Path(__file__).parent / "digits.npz"


@dataclass(frozen=True)
class DataStatus:
    """What `data_status` tells of one data set."""

    name: str
    title: str
    found: Path | None  # the folder or archive that would be read; it is not verified before it is read
    looked_in: tuple[Path, ...]
    can_fetch: bool


def data_places(root: str | os.PathLike[str] | None = None) -> tuple[Path, ...]:
    """The directories that are searched, in this order."""
    if root is not None:
        return (Path(root).expanduser(),)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "onelip" / "data"
    own = os.environ.get("ONELIP_DATA")
    return (Path(own).expanduser(), cache) if own else (cache,)


def list_data() -> list[str]:
    """The names that `load_data` knows."""
    return ["digits", *OFFICIAL]


def known_name(given: str | os.PathLike[str]) -> str | None:
    """The name, however it is spelled: "CIFAR-10", "fashion_mnist". "./mnist" is a path, and gives None."""
    if not isinstance(given, str):
        return None

    def plain(text: str) -> str:
        return text.lower().replace("-", "").replace("_", "")

    return {plain(name): name for name in list_data()}.get(plain(given))


def from_everywhere(given: str) -> str:
    """What means the same data in every working directory: names as they are, paths made absolute.

    Example:
        >>> from_everywhere("digits"), from_everywhere("/images/../own.npz")
        ('digits', '/own.npz')
    """
    return given if known_name(given) else os.path.abspath(os.path.expanduser(given))


def data_status(root: str | os.PathLike[str] | None = None) -> list[DataStatus]:
    """Every data set with its title, and where it lies if it is there."""
    places = data_places(root)
    title = "Handwritten digits, 1442 + 355 grey images 8x8; part of this package"
    rows = [DataStatus("digits", title, DIGITS_FILE, (), False)]
    for official in OFFICIAL.values():
        found = next((where for place in places for _, where in find_in(official, place)), None)
        rows.append(DataStatus(official.name, official.title, found, places, True))
    return rows


def find_in(official: Official, place: Path) -> Iterator[tuple[Version, Path]]:
    """The versions of a data set that lie in a place: the folder of the files, or the archive."""
    for version in official.versions:
        # A folder counts as soon as one of its files is there, so that a missing one is named rather than overlooked.
        for folder in (*version.folders, *(f"{official.name}/{f}" for f in version.folders), official.name, "."):
            if any(find_file(place / folder, file.name) for file in version.files):
                yield version, place / folder
        for folder in ("", official.name):
            if version.archive and (place / folder / version.archive.name).is_file():
                yield version, place / folder / version.archive.name


def find_file(folder: Path, name: str) -> Path | None:
    """The file in the folder, gzipped or not; IDX files are also seen as "train-images.idx3-ubyte"."""
    dotted = name.replace("-idx", ".idx")
    for candidate in dict.fromkeys((name, f"{name}.gz", dotted, f"{dotted}.gz")):
        if (folder / candidate).is_file():
            return folder / candidate
    return None
