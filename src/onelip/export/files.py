"""Write the files of an export, all or none, and read certificates that match the exported weights."""

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from onelip.certification.certificate import digest
from onelip.checker.certificate import FORMAT, VERSION
from onelip.core.errors import RunError, UsageError
from onelip.core.files import disk_error, write_whole

SIZE_LIMIT = 2**30  # bytes of a certificate; one for ten thousand images has a few million


class ExportError(RunError):
    """An export cannot be written or read. Existing files are unchanged."""


class ExportTaken(UsageError, ExportError):
    """The output path of an export already exists."""


def check_free(paths: Sequence[Path], *, force: bool) -> None:
    """Raise `ExportTaken` for paths that exist, before any work is done."""
    for path in paths:
        if path.is_dir():
            raise ExportTaken(f"{path}: expected a file name, got a directory; name a file in it")
        if path.exists() and not force:
            raise ExportTaken(f"{path}: the file exists; choose another name, or use --force")


def write_files(files: Sequence[tuple[Path, bytes]], *, force: bool) -> None:
    """Write all files. If one cannot be written, the new ones are removed."""
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
    """Create a folder if it does not exist."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise disk_error(error, folder) from error


def read_certificate(path: str | Path, weights_sha256: str, config_sha256: str | None = None) -> tuple[bytes, Any]:
    """Read a certificate, to copy it, if it is for these weights (and for this config, if it names one).

    The JSON, the format and its version, the digest and the hashes are checked. To check that the certificate is
    *true*, use `onelip check`, which recomputes everything.

    Args:
        path: the certificate.
        weights_sha256: hash of the weight file.
        config_sha256: hash of the config file.

    Returns:
        Its bytes and its JSON content.

    Raises:
        ExportError: if it is damaged, has another version, or is for other files.
    """
    path = Path(path)
    try:
        size = path.stat().st_size
        if size > SIZE_LIMIT:
            raise ExportError(f"{path}: expected a certificate of at most {SIZE_LIMIT:,} bytes, got {size:,}")
        raw = path.read_bytes()
        content = json.loads(raw, parse_constant=int)  # int raises a ValueError for NaN and Infinity
    except OSError as error:
        raise ExportError(
            f"{path}: cannot read the certificate ({error.strerror}); create one: onelip certify RUN --out {path}"
        ) from error
    except (ValueError, RecursionError) as error:
        raise ExportError(
            f"{path}: expected a certificate, but the file is not JSON or is damaged ({error})"
        ) from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ExportError(f"{path}: the file is not an {FORMAT}; create one: onelip certify RUN --out {path}")
    if content.get("version") != VERSION:
        raise ExportError(
            f"{path}: expected version {VERSION} of the format, got {content.get('version')!r}; certify "
            "again, or use the onelip that wrote it"
        )
    if content.get("digest") != digest(content):
        raise ExportError(f"{path}: the digest does not match the content; the file was changed or is damaged")
    _check_hash(path, content.get("weights"), weights_sha256, "weights")
    if config_sha256 is not None and content.get("config") is not None:
        _check_hash(path, content["config"], config_sha256, "config")
    return raw, content


def _check_hash(path: Path, entry: object, wanted: str, what: str) -> None:
    found = entry.get("sha256") if isinstance(entry, dict) else None
    if found != wanted:
        other = f"{found[:12]}…" if isinstance(found, str) else "none"
        raise ExportError(
            f"{path}: the certificate is for another {what} file (sha256 {other}, not {wanted[:12]}…); certify this "
            "run: onelip certify RUN --out cert.json"
        )
