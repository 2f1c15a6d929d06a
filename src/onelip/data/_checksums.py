"""Is this the file it should be? Digests are written as "md5:…" or "sha256:…"."""

import hashlib
from pathlib import Path

from onelip.data._errors import DataError


def split_digest(digest: str) -> tuple[str, str]:
    """("sha256", "ab12…") of "sha256:ab12…"."""
    algorithm, _, value = digest.partition(":")
    lengths = {"md5": 32, "sha256": 64}
    if lengths.get(algorithm) != len(value) or not set(value) <= set("0123456789abcdef"):
        raise DataError(f'expected a digest "md5:<32 hex digits>" or "sha256:<64 hex digits>", got {digest!r}')
    return algorithm, value


def bytes_match(content: bytes, digest: str) -> bool:
    """Whether the bytes have this digest."""
    algorithm, value = split_digest(digest)
    return hashlib.new(algorithm, content, usedforsecurity=False).hexdigest() == value


def file_matches(path: Path, digest: str) -> bool:
    """Whether the file as it lies on the disk has this digest."""
    algorithm, value = split_digest(digest)
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, lambda: hashlib.new(algorithm, usedforsecurity=False)).hexdigest() == value
