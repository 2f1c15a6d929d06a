"""Files that are either whole or not there: written beside their place, made durable, then renamed."""

import errno
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from onelip.core.errors import RunError


def write_whole(path: Path, content: bytes) -> None:
    """Put a file in its place at once. Whatever happens, a kill or a full disk, the old file or the new one is there.

    Raises:
        RunError: if the disk refuses; what was there is untouched.
    """
    part = path.with_name(f"{path.name}.part")
    try:
        with part.open("wb") as out:
            out.write(content)
            out.flush()
            # Without it a crash of the machine can leave a renamed file of zero bytes.
            os.fsync(out.fileno())
        os.replace(part, path)
        _sync_directory(path.parent)
    except BaseException as error:  # Ctrl-C too: nothing is left behind
        with suppress(OSError):
            part.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise disk_error(error, path) from error
        raise


def _sync_directory(folder: Path) -> None:
    with suppress(OSError):  # not every file system lets a directory be synced; the rename stands all the same
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def write_json(path: Path, content: Any) -> None:
    """Readable JSON, whole."""
    write_whole(path, (json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode())


def read_json(path: Path) -> Any:
    """The content of a JSON file of a run."""
    try:
        return json.loads(path.read_bytes())
    except OSError as error:
        raise RunError(f"{path}: expected a readable file, got {error.strerror}") from error
    except ValueError as error:
        raise RunError(f"{path}: expected JSON, got something else ({error}); the file is damaged") from error


def disk_error(error: OSError, path: Path) -> RunError:
    """Convert an OSError to a RunError with advice."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return RunError(f"{path}: cannot be written, the disk is full ({error.strerror}); make room there")
    if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        return RunError(f"{path}: cannot be written, the directory is read-only ({error.strerror}); choose another")
    return RunError(f"{path}: cannot be written ({error.strerror or error})")


LOCK = ".lock"


@contextmanager
def locked(directory: Path, busy: str) -> Iterator[None]:
    """Make a directory, and keep other processes out of it; the lock ends with the process, however it ends.

    Args:
        directory: where.
        busy: message of the error for a second process.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        handle = (directory / LOCK).open("w")
    except OSError as error:
        raise disk_error(error, directory) from error
    with handle:
        try:
            import fcntl

            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except ImportError:
            pass  # platforms without fcntl have no locking
        except BlockingIOError as error:
            raise RunError(f"{directory}: {busy}") from error
        yield
