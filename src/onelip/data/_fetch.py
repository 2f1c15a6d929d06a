"""Downloads the official files: resumes, verifies, and puts a file in its place only when it is whole and right.

A download goes to "<file>.part" beside its target. Whatever stops it, the part stays and the next call goes on from
there (HTTP Range), or starts again if the server cannot. When the checksum is right the part is renamed: a file that
has its name is always whole. Nothing is unpacked.
"""

import errno
import os
import shutil
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.client import HTTPException, HTTPResponse
from pathlib import Path
from typing import IO

from onelip.data._archives import OFFICIAL_CAP
from onelip.data._checksums import file_matches, split_digest
from onelip.data._errors import ChecksumError, DataError, FetchError
from onelip.data._official import OFFICIAL, File
from onelip.data._places import data_places

# Called with the file's name, the bytes that are there, and how many there will be (None if the server does not say).
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
    """Download an official data set; files that are there and right are left as they are.

    Args:
        name: one of the official names of `list_data()`.
        root: where to put it; without one, the first of `data_places()`.
        url: a folder on another server that has the same files, instead of the official ones.
        progress: called after every piece, see `Progress`.
        digests: expected digests by file name in place of the official ones; a file not in the table is refused.
        cap: the most bytes that any file may have.
        timeout: seconds without a byte after which the server counts as gone.
    """
    if name not in OFFICIAL:
        raise DataError(f"expected one of {', '.join(OFFICIAL)} to fetch, got {name!r}")
    official = OFFICIAL[name]
    folder = data_places(root)[0] / official.download_folder
    bases = official.urls if url is None else (url,)
    paths = []
    for file in official.downloads:
        digest = file.digest if digests is None else digests.get(file.name)
        if digest is None:
            raise ChecksumError(f"expected a digest of {file.name} in the table given, got none")
        split_digest(digest)
        paths.append(_fetch_file(File(file.name, digest), folder, bases, progress, cap, timeout))
    return paths


def _fetch_file(
    file: File, folder: Path, bases: tuple[str, ...], progress: Progress | None, cap: int, timeout: float
) -> Path:
    target, part = folder / file.name, folder / f"{file.name}.part"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if target.is_file() and file_matches(target, file.digest):
            return target
        with part.open("ab") as out, _only_one(out, part):
            failures = _try_each(file, out, part, bases, progress, cap, timeout)
            empty = _size(out) == 0
        if not failures:
            os.replace(part, target)
            return target
        if empty:
            part.unlink()
    except OSError as error:
        raise _disk_error(error, folder) from error
    raise failures[0] if len(failures) == 1 else FetchError("\n".join(map(str, failures)))


def _try_each(
    file: File, out: IO[bytes], part: Path, bases: tuple[str, ...], progress: Progress | None, cap: int, timeout: float
) -> list[DataError]:
    """Download from the first server that has the file; what went wrong, or nothing."""
    failures: list[DataError] = []
    for base in bases:
        try:
            _download_verified(f"{base.rstrip('/')}/{file.name}", file, out, part, progress, cap, timeout)
        except (FetchError, ChecksumError) as error:
            failures.append(error)
        else:
            return []
    return failures


def _download_verified(
    address: str, file: File, out: IO[bytes], part: Path, progress: Progress | None, cap: int, timeout: float
) -> None:
    resumed = _size(out) > 0
    _download(address, file.name, out, progress, cap, timeout)
    if not file_matches(part, file.digest) and resumed:
        # The beginning was of another file, or of another state of it.
        out.truncate(0)
        _download(address, file.name, out, progress, cap, timeout)
    if not file_matches(part, file.digest):
        size = _size(out)
        out.truncate(0)
        raise ChecksumError(
            f"{address}: expected a file with {file.digest}, got another one of {size} bytes; it was deleted. The "
            "server may have answered with an error page: look at the address in a browser, or give another server's"
        )
    os.fsync(out.fileno())


def _download(address: str, name: str, out: IO[bytes], progress: Progress | None, cap: int, timeout: float) -> None:
    """Append to `out` what it lacks of the file at the address."""
    have = _size(out)
    with _open(address, have, timeout) as response:
        if response is None:  # nothing after what is there
            return
        if response.status == 206 and not response.headers.get("Content-Range", "").startswith(f"bytes {have}-"):
            raise FetchError(f"{address}: expected the bytes from {have} on, got another range; delete the .part file")
        if response.status != 206 and have:
            out.truncate(0)  # the server cannot resume: all of it comes again
            have = 0
        length = response.headers.get("Content-Length", "")
        total = have + int(length) if length.isdigit() else None
        if total is not None and total > cap:
            raise FetchError(
                f"{address}: expected at most {cap} bytes, got a file of {total}; it is not the official one"
            )
        if total is not None and (free := shutil.disk_usage(Path(out.name).parent).free) < total - have:
            raise OSError(errno.ENOSPC, f"{total - have} bytes are still needed and {free} are free")
        for chunk in _chunks(response, address):
            have += len(chunk)
            if have > cap:
                out.truncate(0)
                raise FetchError(f"{address}: expected at most {cap} bytes, got more; it is not the official file")
            out.write(chunk)
            if progress is not None:
                progress(name, have, total)
        out.flush()
        if total is not None and have < total:
            raise FetchError(
                f"{address}: expected {total} bytes, got {have}, then the server stopped; fetch again to go on"
            )


@contextmanager
def _open(address: str, have: int, timeout: float) -> Iterator[HTTPResponse | None]:
    """The answer of the server, asked for the bytes from `have` on; None if there are none."""
    if urllib.parse.urlsplit(address).scheme not in ("http", "https"):  # urllib would also open file: and ftp:
        raise FetchError(f"expected an http or https address, got {address!r}")
    # "identity": a server must not pack what is checked byte by byte.
    headers = {"User-Agent": "onelip", "Accept-Encoding": "identity"} | ({"Range": f"bytes={have}-"} if have else {})
    try:
        response = urllib.request.urlopen(urllib.request.Request(address, headers=headers), timeout=timeout)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == 416 and have:
            yield None
            return
        raise FetchError(f"{address}: expected the file, got HTTP {error.code} {error.reason}") from error
    except (HTTPException, OSError) as error:
        raise FetchError(f"{address}: expected a server, got no connection ({error}); go on later") from error
    with response:
        yield response


def _chunks(response: HTTPResponse, address: str) -> Iterator[bytes]:
    try:
        while chunk := response.read(_CHUNK):
            yield chunk
    except (HTTPException, OSError) as error:  # of the network: writing happens outside this generator
        raise FetchError(f"{address}: the connection broke ({error!r}); fetch again to go on from there") from error


@contextmanager
def _only_one(out: IO[bytes], part: Path) -> Iterator[None]:
    """Two processes must not write the same part; where files cannot be locked, the checksum has the last word."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    try:
        fcntl.flock(out, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise FetchError(f"{part}: another process is fetching this file; wait for it") from error
    yield


def _size(out: IO[bytes]) -> int:
    out.flush()
    return os.fstat(out.fileno()).st_size


def _disk_error(error: OSError, folder: Path) -> FetchError:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return FetchError(f"{folder}: the disk is full ({error}); what has come is kept: make room and fetch again")
    return FetchError(f"{folder}: cannot write there ({error}); give another root, or set ONELIP_DATA")
