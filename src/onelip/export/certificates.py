"""Certificates on their way out: a file goes along only with the weights that it is about.

Checked here: whole JSON, the format and its version, the digest over all of it, and the hashes of weights and config.
Whether the certificate is *true* is the question of `onelip check`, which recomputes everything.
"""

import json
from pathlib import Path
from typing import Any

from onelip.checker.certificate import FORMAT, VERSION
from onelip.export.errors import ExportError

SIZE_LIMIT = 2**30  # bytes; ten thousand images take a few millions


def read_certificate(path: str | Path, weights_sha256: str, config_sha256: str | None = None) -> tuple[bytes, Any]:
    """The certificate as bytes and as JSON, if it is about these weights (and this config, if it names one).

    Raises:
        ExportError: if it is damaged, of another version, or about something else.
    """
    from onelip.certify.certificate import digest  # which needs `bake`, from here

    path = Path(path)
    try:
        size = path.stat().st_size
        if size > SIZE_LIMIT:
            raise ExportError(f"{path}: expected a certificate of at most {SIZE_LIMIT:,} bytes, got {size:,}")
        raw = path.read_bytes()
        content = json.loads(raw, parse_constant=int)  # which refuses NaN and Infinity
    except OSError as error:
        raise ExportError(f"{path}: expected a certificate, got {error.strerror}; make one: onelip certify") from error
    except (ValueError, RecursionError) as error:
        raise ExportError(
            f"{path}: expected a certificate as JSON, got something else ({error}); it is damaged or truncated"
        ) from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        raise ExportError(f"{path}: expected an {FORMAT}, got another file; make one: onelip certify RUN --out {path}")
    if content.get("version") != VERSION:
        raise ExportError(
            f"{path}: expected version {VERSION} of the format, got {content.get('version')!r}; certify "
            "again, or use the onelip that wrote it"
        )
    if content.get("digest") != digest(content):
        raise ExportError(f"{path}: expected the digest of its content, got another; it was changed or is damaged")
    _check_hash(path, content.get("weights"), weights_sha256, "weights")
    if config_sha256 is not None and content.get("config") is not None:
        _check_hash(path, content["config"], config_sha256, "config")
    return raw, content


def _check_hash(path: Path, entry: object, wanted: str, what: str) -> None:
    found = entry.get("sha256") if isinstance(entry, dict) else None
    if found != wanted:
        told = f"{found[:12]}…" if isinstance(found, str) else "none"
        raise ExportError(
            f"{path}: expected a certificate for this {what} (sha256 {wanted[:12]}…), got one for {told}; "
            "certify this run again: onelip certify"
        )
