"""Read untrusted files. Anything that does not follow the format raises `Rejected` with a reason."""

import contextlib
import hashlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

WIDTHS = {"F32": 4, "F64": 8}  # bytes


class Rejected(Exception):
    """The certificate is not proved, or checking it would exceed a limit."""


def require(condition: Any, message: str) -> None:
    """Raise Rejected with this message unless the condition holds."""
    if not condition:
        raise Rejected(message)


def require_memory(needed: float, limit: float, what: str) -> None:
    """Raise Rejected if an estimate in bytes exceeds the limit in gigabytes."""
    message = f"estimated memory {needed / 1e9:.2g} GB, limit {limit:.2g} GB, most of it for {what}"
    require(needed <= limit * 1e9, f"{message}; --max-memory {math.ceil(needed / 1e8) / 10:g} allows it")


def ints(values: Any, low: int) -> Any:
    """Return `values` if it is a list of integers from `low` to 2^34; booleans do not count as integers."""
    right = type(values) is list and all(type(v) is int and low <= v < 2**34 for v in values)
    require(right, f"expected integers from {low} to 2^34, got {values!r:.80}")
    return values


def title(i: int, node: Any) -> str:
    return f"node {i} ({node['op']!r:.40} at {node['place']!r:.80})"


@contextlib.contextmanager
def context(what: str) -> Iterator[None]:
    """Prefix the reason of a rejection with `what`. Other errors caused by malformed values become rejections."""
    try:
        yield
    except (OSError, ImportError, MemoryError):
        raise
    except Exception as error:
        reason = str(error) if isinstance(error, Rejected) else f"malformed value ({type(error).__name__}: {error})"
        raise Rejected(f"{what}: {reason}") from error


def read(path: Path, memory: float, *sha256: str) -> bytes:
    """Return the content of a regular file that fits into `memory` gigabytes and has the given hash."""
    if not path.is_file():
        raise FileNotFoundError(f"cannot read {path}: no such file; pass its path (see --help)")
    size = path.stat().st_size
    require_memory(size, memory, f"{path}")
    with path.open("rb") as file:
        data = file.read(size)  # not read(): files under /proc may be endless
    own = hashlib.sha256(data).hexdigest()
    require(all(expected == own for expected in sha256), f"{path}: not the file that was certified (SHA-256 differs)")
    return data


class TrackedDict(dict[str, Any]):
    """A JSON object that records which of its keys have not been read."""

    __slots__ = ("unread",)

    def __init__(self, pairs: list[tuple[str, Any]]):
        super().__init__(pairs)
        require(len(self) == len(pairs), "a key occurs twice")
        self.unread = {*self}

    def __getitem__(self, key: str) -> Any:
        require(key in self, f"{key!r:.80} is missing")
        self.unread.discard(key)
        return super().__getitem__(key)


def unread(value: Any) -> Iterator[str]:
    """Yield the keys that were never read in all objects inside `value`: written by a newer version, or forged."""
    if isinstance(value, TrackedDict):
        yield from value.unread
        value = [*value.values()]
    for part in value if isinstance(value, list) else ():
        yield from unread(part)


def json_memory(data: bytes) -> int:
    """Upper bound on the bytes of the parsed objects in CPython: 500 for an object, 250 for each of its pairs, ..."""
    return 8 * len(data) + sum(n * data.count(c) for c, n in ((b"{", 500), (b":", 250), (b"[", 100), (b",", 100)))


def parse(data: bytes, memory: float) -> Any:
    """Parse JSON whose numbers are integers of at most 16 characters; the objects must fit into `memory` gigabytes."""

    def parsed(text: str) -> int:
        require(len(text) <= 16 and text.lstrip("-").isdigit(), f"expected an integer, got {text:.40}")
        return int(text)

    require_memory(json_memory(data), memory, f"{len(data)} bytes of JSON")
    try:
        numbers = dict.fromkeys(("parse_int", "parse_float", "parse_constant"), parsed)
        return json.loads(data.decode(), object_pairs_hook=TrackedDict, **numbers)
    except (ValueError, RecursionError) as error:
        raise Rejected(f"not JSON, truncated, or nested too deeply ({error})") from error


def read_tensors(data: bytes, memory: float) -> TrackedDict:
    """Read safetensors: length of the header, header, tensors in sequence. Converting to float64 is exact."""
    require_memory(3 * len(data), memory, f"{len(data)} bytes of weights in float64")
    start, tensors = 8 + int.from_bytes(data[:8], "little"), []
    header, at = parse(data[8:start], memory), start
    require(isinstance(header, TrackedDict), "header: expected an object")
    header.pop("__metadata__", None)
    for name, info in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        (first, last), shape, width = ints(info["data_offsets"], 0), info["shape"], WIDTHS.get(info["dtype"])
        require(start + first == at <= start + last <= len(data), f"{name}: gap or overlap of tensors; truncated?")
        # Products of many long integers would take quadratic time.
        require(len(ints(shape, 0)) <= 8, f"{name}: expected at most 8 axes")
        at, count = start + last, math.prod(shape)
        fits = width and last - first == width * count
        require(fits, f"{name}: expected F32 or F64 of shape {shape!r:.80}, got {info['dtype']!r:.9} of other size")
        array = np.frombuffer(data, f"<f{width}", count, start + first).astype(np.float64)
        in_range = -(2.0**500) < array.min(initial=0) <= array.max(initial=0) < 2.0**500  # not with NaN
        require(in_range, f"{name}: expected numbers below 2^500, got others or NaN")
        tensors.append((name, array.reshape(shape)))
    require(at == len(data), "data after the last tensor")
    return TrackedDict(tensors)
