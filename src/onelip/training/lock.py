"""One process at a time in a directory."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from onelip.training.errors import RunError
from onelip.training.files import disk_error

LOCK = ".lock"


@contextmanager
def locked(directory: Path, busy: str) -> Iterator[None]:
    """Make a directory, and keep other processes out of it; the lock ends with the process, however it ends.

    Args:
        directory: where.
        busy: what to tell whoever comes second.
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
            pass  # where files cannot be locked, nobody is kept away
        except BlockingIOError as error:
            raise RunError(f"{directory}: {busy}") from error
        yield
