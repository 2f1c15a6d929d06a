"""Several files that are put in their places together, or not at all."""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from onelip.export.errors import ExportError, ExportTaken
from onelip.training.errors import RunError
from onelip.training.files import disk_error, write_whole


def check_free(paths: Sequence[Path], *, force: bool) -> None:
    """Refuse places that are taken, before any work is done."""
    for path in paths:
        if path.is_dir():
            raise ExportTaken(f"{path}: expected a file name, got a directory; name a file in it")
        if path.exists() and not force:
            raise ExportTaken(f"{path}: expected a new file, got one that exists; choose another name, or use --force")


def place(files: Sequence[tuple[Path, bytes]], *, force: bool) -> None:
    """Write all files, each of them whole; if one cannot be written, those that are new are taken away again."""
    check_free([path for path, _ in files], force=force)
    new: list[Path] = []
    try:
        for path, content in files:
            make_folder(path.parent)
            if not path.exists():
                new.append(path)
            write_whole(path, content)
    except RunError as error:
        for path in new:
            with suppress(OSError):
                path.unlink(missing_ok=True)
        raise ExportError(str(error)) from error


def make_folder(folder: Path) -> None:
    """The folder, made if it is not there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise disk_error(error, folder) from error
