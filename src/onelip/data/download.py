"""`onelip.data.fetch`: download, resume and verify official files.

A download is written to "<file>.part" next to its target. If it fails, the partial file is kept and the next call
resumes it (HTTP Range), or starts again if the server does not support ranges. The partial file is renamed when its
checksum is correct, so a file with its final name is always complete. Nothing is unpacked.
"""

import errno
import os
import shutil
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import IO

from onelip.core.errors import ChecksumError, DataError, FetchError
from onelip.core.files import disk_error
from onelip.data.formats import OFFICIAL_CAP
from onelip.data.registry import OFFICIAL, File, data_places, has_digest, split_digest

# Called with the name of the file, the number of bytes received, and the total (None if the server does not state it).
Progress = Callable[[str, int, int | None], None]

_CHUNK = 256 * 1024


def fetch(
    name: str,
    root: str | os.PathLike[str] | None = None,
    url: str | None = None,
    *,
    progress: Progress | None = None,
    digests: Mapping[str, str] | None = None,
    cap: int = OFFICIAL_CAP,
    timeout: float = 30.0,
) -> list[Path]:
    """Download an official data set. Existing files with the correct checksum are kept.

    Args:
        name: one of the names of `list_data()`, except "digits".
        root: directory to write to. Default: the first of `data_places()`.
        url: URL of a folder on another server with the same files.
        progress: called after each chunk with (file name, bytes received, total bytes or None).
        digests: expected digests by file name instead of the official ones; files without one raise a ChecksumError.
        cap: maximum size of a file, in bytes.
        timeout: seconds without data after which the download fails.

    Returns:
        Paths of the files.

    Raises:
        FetchError: if a download failed; call again to resume it.
        ChecksumError: if a file is not the official one. It is deleted.

    Examples:
        Download MNIST to ./downloads (not executed here):

            fetch("mnist", "downloads", progress=lambda name, received, total: print(name, received))
    """
    if name not in OFFICIAL:
        raise DataError(f"cannot fetch {name!r}; expected one of {', '.join(OFFICIAL)}")
    official = OFFICIAL[name]
    folder = data_places(root)[0] / official.download_folder
    bases = official.urls if url is None else (url,)
    paths = []
    for file in official.downloads:
        digest = file.digest if digests is None else digests.get(file.name)
        if digest is None:
            raise ChecksumError(f"digests has no entry for {file.name!r}")
        split_digest(digest)
        paths.append(_fetch_file(File(file.name, digest), folder, bases, progress, cap, timeout))
    return paths


def _fetch_file(
    file: File, folder: Path, bases: tuple[str, ...], progress: Progress | None, cap: int, timeout: float
) -> Path:
    target, part = folder / file.name, folder / f"{file.name}.part"
    failures: list[DataError] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if target.is_file() and has_digest(target, file.digest):
            return target
        with part.open("ab") as out, _locked(out, part):
            download = _Download(file, part, out, progress, cap, timeout)
            for base in bases:
                try:
                    download.verified(f"{base.rstrip('/')}/{file.name}")
                except (FetchError, ChecksumError) as error:
                    failures.append(error)
                else:
                    os.replace(part, target)
                    return target
            empty = download.size() == 0
        if empty:
            part.unlink()
    except OSError as error:
        advice = "received bytes are kept: fetch again to resume, or choose another root (or ONELIP_DATA)"
        raise FetchError(f"{disk_error(error, folder)}; {advice}") from error
    raise failures[0] if len(failures) == 1 else FetchError("\n".join(map(str, failures)))


@dataclass
class _Download:
    """A partial file that is open for appending."""

    file: File
    part: Path
    out: IO[bytes]
    progress: Progress | None
    cap: int
    timeout: float

    def size(self) -> int:
        self.out.flush()
        return os.fstat(self.out.fileno()).st_size

    def verified(self, address: str) -> None:
        """Download the rest of the file and check its digest."""
        resumed = self.size() > 0
        self.append(address)
        if not has_digest(self.part, self.file.digest) and resumed:
            # The partial file was of a different file or version.
            self.out.truncate(0)
            self.append(address)
        if not has_digest(self.part, self.file.digest):
            size = self.size()
            self.out.truncate(0)
            raise ChecksumError(
                f"{address}: expected a file with {self.file.digest}, got a different one of {size} bytes, which was "
                "deleted. The server may have sent an error page: open the address in a browser, or pass another url"
            )
        os.fsync(self.out.fileno())

    def append(self, address: str) -> None:
        """Append the missing bytes."""
        have = self.size()
        with _open(address, have, self.timeout) as response:
            if response is None:  # no bytes are missing
                return
            if response.status == 206 and not response.headers.get("Content-Range", "").startswith(f"bytes {have}-"):
                raise FetchError(f"{address}: expected the bytes from {have}, got another range; delete {self.part}")
            if response.status != 206 and have:
                self.out.truncate(0)  # the server cannot resume and sends the whole file
                have = 0
            length = response.headers.get("Content-Length", "")
            total = have + int(length) if length.isdigit() else None
            if total is not None and total > self.cap:
                raise FetchError(
                    f"{address}: expected at most {self.cap} bytes, got a file of {total}; "
                    "it is not the expected file: pass another url"
                )
            if total is not None and (free := shutil.disk_usage(self.part.parent).free) < total - have:
                raise OSError(errno.ENOSPC, f"{total - have} bytes are needed and {free} are free")
            for chunk in _chunks(response, address):
                have += len(chunk)
                if have > self.cap:
                    self.out.truncate(0)
                    raise FetchError(
                        f"{address}: expected at most {self.cap} bytes, got more; "
                        "it is not the expected file: pass another url"
                    )
                self.out.write(chunk)
                if self.progress is not None:
                    self.progress(self.file.name, have, total)
            self.out.flush()
            if total is not None and have < total:
                raise FetchError(f"{address}: the server stopped after {have} of {total} bytes; fetch again to resume")


@contextmanager
def _open(address: str, have: int, timeout: float) -> Iterator[HTTPResponse | None]:
    """Request the bytes from `have` on and yield the response; None if there are none."""
    if urllib.parse.urlsplit(address).scheme not in ("http", "https"):  # urllib would also open file: and ftp:
        raise FetchError(f"expected an http or https address, got {address!r}")
    # "identity": the checksum is that of the stored file, so the server must not compress it.
    headers = {"User-Agent": "onelip", "Accept-Encoding": "identity"} | ({"Range": f"bytes={have}-"} if have else {})
    try:
        response = urllib.request.urlopen(urllib.request.Request(address, headers=headers), timeout=timeout)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == 416 and have:
            yield None
            return
        raise FetchError(f"{address}: the server answered HTTP {error.code} {error.reason}") from error
    except (HTTPException, OSError) as error:
        raise FetchError(f"{address}: no connection to the server ({error}); try again later") from error
    with response:
        yield response


def _chunks(response: HTTPResponse, address: str) -> Iterator[bytes]:
    try:
        while chunk := response.read(_CHUNK):
            yield chunk
    except (HTTPException, OSError) as error:  # only network errors: files are written outside this generator
        raise FetchError(f"{address}: the connection broke ({error!r}); fetch again to resume") from error


@contextmanager
def _locked(out: IO[bytes], part: Path) -> Iterator[None]:
    """Lock the partial file against a second process. Without fcntl, only the checksum detects a conflict."""
    try:
        import fcntl

        fcntl.flock(out, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except ImportError:
        pass
    except BlockingIOError as error:
        raise FetchError(f"{part}: another process is fetching this file; wait for it to finish") from error
    yield
