"""Files that an export writes: all of them or none, and certificates only with the weights that they are about."""

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from onelip.certification.certificate import digest
from onelip.checker.certificate import FORMAT, VERSION
from onelip.core.errors import RunError, UsageError
from onelip.core.files import disk_error, write_whole

SIZE_LIMIT = 2**30  # bytes of a certificate; ten thousand images take a few millions


class ExportError(RunError):
    """An export that cannot be written or read. Existing files are unchanged."""


class ExportTaken(UsageError, ExportError):
    """The path of an export exists already."""


def check_free(paths: Sequence[Path], *, force: bool) -> None:
    """Refuse paths that exist, before any work is done."""
    for path in paths:
        if path.is_dir():
            raise ExportTaken(f"{path}: expected a file name, got a directory; name a file in it")
        if path.exists() and not force:
            raise ExportTaken(f"{path}: the file exists; choose another name, or use --force")


def write_files(files: Sequence[tuple[Path, bytes]], *, force: bool) -> None:
    """Write all files. If one cannot be written, those that are new are removed again."""
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
    """Make a folder unless it exists."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise disk_error(error, folder) from error


def read_certificate(path: str | Path, weights_sha256: str, config_sha256: str | None = None) -> tuple[bytes, Any]:
    """Read a certificate to copy it, if it is about these weights (and this config, if it names one).

    The JSON, the format and its version, the digest and the hashes are checked. Whether the certificate is *true* is
    checked by `onelip check`, which recomputes everything.

    Args:
        path: the certificate.
        weights_sha256: hash of the file of the weights.
        config_sha256: hash of the config file.

    Returns:
        Its bytes and its JSON content.

    Raises:
        ExportError: if it is damaged, of another version, or about something else.
    """
    path = Path(path)
    try:
        size = path.stat().st_size
        if size > SIZE_LIMIT:
            raise ExportError(f"{path}: expected a certificate of at most {SIZE_LIMIT:,} bytes, got {size:,}")
        raw = path.read_bytes()
        content = json.loads(raw, parse_constant=int)  # which refuses NaN and Infinity
    except OSError as error:
        raise ExportError(
            f"{path}: cannot read the certificate ({error.strerror}); make one: onelip certify RUN --out {path}"
        ) from error
    except (ValueError, RecursionError) as error:
        raise ExportError(f"{path}: expected a certificate; the file is not JSON ({error}), or damaged") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ExportError(f"{path}: expected an {FORMAT}, got another file; make one: onelip certify RUN --out {path}")
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
