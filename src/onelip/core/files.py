"""Atomic file writes (temporary file, fsync, rename), JSON files, hashes of files, and directory locks."""

import errno
import hashlib
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from onelip.core.errors import RunError


def write_whole(path: Path, content: bytes) -> None:
    """Write a file atomically: after a kill or a full disk, either the old file or the new one exists.

    Raises:
        RunError: if the file cannot be written; the old file is unchanged.
    """
    part = path.with_name(f"{path.name}.part")
    try:
        with part.open("wb") as out:
            out.write(content)
            out.flush()
            # Without fsync, a crash of the machine can leave a renamed file of zero bytes.
            os.fsync(out.fileno())
        os.replace(part, path)
        _sync_directory(path.parent)
    except BaseException as error:  # also Ctrl-C: remove the temporary file
        with suppress(OSError):
            part.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise disk_error(error, path) from error
        raise


def _sync_directory(folder: Path) -> None:
    with suppress(OSError):  # not every file system can sync a directory; the rename is still atomic
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def write_json(path: Path, content: Any) -> None:
    """Write indented JSON atomically."""
    write_whole(path, (json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode())


def _refuse(text: str) -> None:
    raise ValueError(f"{text} is no number of JSON")


def read_json(path: Path) -> Any:
    """Return the content of a JSON file.

    Raises:
        RunError: if the file cannot be read or is not JSON.
    """
    try:
        return json.loads(path.read_bytes(), parse_constant=_refuse)
    except OSError as error:
        raise RunError(f"{path}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise RunError(f"{path}: expected JSON, but the file is damaged ({error})") from error


def file_hash(path: Path) -> str:
    """Return the SHA-256 of a file.

    Raises:
        RunError: if the file cannot be read.
    """
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise RunError(f"{path}: cannot be read ({error.strerror})") from error


def disk_error(error: OSError, path: Path) -> RunError:
    """Convert an OSError to a RunError with advice."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        return RunError(f"{path}: cannot be written, the disk is full ({error.strerror}); free some space")
    if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        return RunError(f"{path}: cannot be written, it is read-only ({error.strerror}); choose another directory")
    return RunError(f"{path}: cannot be written ({error.strerror or error})")


LOCK = ".lock"


@contextmanager
def locked(directory: Path, busy: str, wait: float = 0.0) -> Iterator[None]:
    """Create a directory and lock it against other processes. The lock is released when the process ends.

    Args:
        directory: the directory.
        busy: error message for a second process.
        wait: seconds to wait for the other process.

    Raises:
        RunError: if another process holds the lock, or if the directory cannot be written.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        handle = (directory / LOCK).open("w")
    except OSError as error:
        raise disk_error(error, directory) from error
    with handle:
        try:
            import fcntl
        except ImportError:
            fcntl = None  # platforms without fcntl have no locking
        deadline = time.monotonic() + wait
        while fcntl is not None:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() >= deadline:
                    raise RunError(f"{directory}: {busy}") from error
                time.sleep(0.1)
        yield
