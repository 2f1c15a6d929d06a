"""Reading packed files without trust: named members to memory, never to disk, never more bytes than a cap.

Nothing here extracts. A tar with links, devices, absolute paths or '..' is refused as a whole, even where the wanted
members are harmless: the official archives have none. Sizes that an archive states are not believed: bytes are counted
while they are read.
"""

import gzip
import io
import tarfile
import zipfile
import zlib
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import IO

from onelip.data._errors import DataError

# CIFAR unpacks to 185 MB; nothing official is larger. Own data (npz, folders) may be, and their loaders take a cap.
OFFICIAL_CAP = 512 * 2**20
OWN_CAP = 4 * 2**30

_DAMAGED = (EOFError, zlib.error, gzip.BadGzipFile, tarfile.TarError, zipfile.BadZipFile)


def read_file(path: Path, cap: int = OFFICIAL_CAP) -> bytes:
    """The bytes of a file, unpacked if it is gzipped (told by its first bytes, not by its name)."""
    with path.open("rb") as raw:
        packed = raw.read(2) == b"\x1f\x8b"
        raw.seek(0)
        stream = gzip.GzipFile(fileobj=raw) if packed else raw
        try:
            content = stream.read(cap + 1)
        except _DAMAGED as error:
            raise damaged(path, error) from error
    if len(content) > cap:
        raise _too_large(path, cap)
    return content


def read_tar(path: Path, wanted: Iterable[str], cap: int = OFFICIAL_CAP) -> dict[str, bytes]:
    """The wanted members of a .tar.gz (or .tar), by their full names."""
    wanted, found = set(wanted), dict[str, bytes]()
    with path.open("rb") as raw:
        packed = raw.read(2) == b"\x1f\x8b"
        raw.seek(0)
        counted = _Counted(gzip.GzipFile(fileobj=raw) if packed else raw, path, cap)
        try:
            # As a stream ("r|"): never seeks, so that all that is unpacked, skipped members too, is counted.
            with tarfile.open(fileobj=counted, mode="r|") as archive:
                for member in archive:
                    _refuse_unsafe(member, path)
                    if member.name not in wanted:
                        continue
                    content = archive.extractfile(member)
                    if content is None or member.name in found:
                        raise DataError(f"{path}: expected one regular file {member.name}, got something else or two")
                    found[member.name] = content.read()
        except DataError:
            raise
        except (*_DAMAGED, ValueError, OverflowError) as error:  # the last two: nonsense in a header
            raise damaged(path, error) from error
    for name in sorted(wanted - found.keys()):
        raise DataError(f"{path}: expected the member {name}, got an archive without it; fetch the file again")
    return found


def read_zip(path: Path, cap: int = OWN_CAP) -> dict[str, bytes]:
    """All members of a zip file, by name."""
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
            names = [entry.filename for entry in entries]
            if len(set(names)) != len(names):
                raise DataError(f"{path}: expected every member once, got some twice; write the file again")
            if sum(entry.file_size for entry in entries) > cap:
                raise _too_large(path, cap)
            # zipfile gives at most the stated size of each member, so that the sum above is a bound.
            return {entry.filename: archive.read(entry) for entry in entries}
    except (*_DAMAGED, NotImplementedError, RuntimeError) as error:  # the last two: unknown compression, encrypted
        raise damaged(path, error) from error


def damaged(path: Path, error: Exception | str) -> DataError:
    """The error for a file that cannot be read to its end."""
    return DataError(
        f"{path}: expected a whole file, got a damaged or truncated one ({error}); delete it, get it again"
    )


def _refuse_unsafe(member: tarfile.TarInfo, path: Path) -> None:
    parts = PurePosixPath(member.name.replace("\\", "/"))
    kind = None
    if member.islnk() or member.issym():
        kind = "a link"
    elif member.issparse():  # a few bytes that stand for any number of zeros
        kind = "a sparse file"
    elif not (member.isreg() or member.isdir()):
        kind = "a device or special file"
    elif parts.is_absolute() or ".." in parts.parts or ":" in member.name:
        kind = "a path that leads outside"
    if kind:
        raise DataError(
            f"{path}: expected an archive of plain files, got {kind} ({member.name!r}); this is not the official "
            "archive and may be meant to do harm: delete it"
        )


def _too_large(path: Path, cap: int) -> DataError:
    return DataError(
        f"{path}: expected at most {cap / 2**20:.0f} MB when unpacked, got more; this is not the file it says it is"
    )


class _Counted(io.RawIOBase):
    """A stream for reading that refuses to give more than `cap` bytes altogether."""

    def __init__(self, stream: IO[bytes] | gzip.GzipFile, path: Path, cap: int) -> None:
        self._stream, self._path, self._cap, self._given = stream, path, cap, 0

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        room = self._cap - self._given
        content = self._stream.read(room + 1 if size < 0 else min(size, room + 1))
        self._given += len(content)
        if self._given > self._cap:
            raise _too_large(self._path, self._cap)
        return content
