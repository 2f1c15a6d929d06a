"""Files as anybody may have made them: what is not as it must be ends in Rejected, with a reason."""

import contextlib
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np


class Rejected(Exception):
    """The certificate does not prove what it says."""


def need(condition: Any, message: str) -> None:
    if not condition:
        raise Rejected(message)


def ints(values: Any, low: int) -> Any:
    """These whole numbers; nothing else will do, not even true for 1, which numpy takes for a mask."""
    right = type(values) is list and all(type(v) is int and low <= v < 2**34 for v in values)
    need(right, f"expected whole numbers from {low} to 2^34, got {values!r:.80}")
    return values


@contextlib.contextmanager
def about(what: str) -> Iterator[None]:
    """Whatever goes wrong with a value that does not fit, in Python or in numpy, is a reason to reject."""
    try:
        yield
    except (OSError, ImportError, MemoryError):
        raise
    except Exception as error:
        raise Rejected(f"{what}: {error if isinstance(error, Rejected) else repr(error)}") from error


def read(path: Path, *sha256: str) -> bytes:
    if not path.is_file():  # a pipe might never end
        raise FileNotFoundError(f"cannot read {path}: no such file; give its path (--help)")
    data = path.read_bytes()
    own = hashlib.sha256(data).hexdigest()
    need(all(told == own for told in sha256), f"{path}: another file than the one that was certified")
    return data


class Told(dict[str, Any]):
    """An object of a file, which remembers what nobody has asked for."""

    def __init__(self, pairs: list[tuple[str, Any]]):
        super().__init__(pairs)
        need(len(self) == len(pairs), "a key occurs twice")
        self.unread = {*self}

    def __getitem__(self, key: str) -> Any:
        self.unread.discard(key)
        return super().__getitem__(key)


def unread(value: Any) -> Iterator[str]:
    """Keys of all objects in it that nobody has asked for: what a newer version says, or a forger."""
    if isinstance(value, Told):
        yield from value.unread
        value = [*value.values()]
    for part in value if isinstance(value, list) else ():
        yield from unread(part)


def parse(data: bytes) -> Any:
    """JSON of texts, lists, objects, true, false, null, and whole numbers of at most 16 characters."""

    def parsed(text: str) -> int:
        need(len(text) <= 16 and text.lstrip("-").isdigit(), f"expected a whole number, got {text:.40}")
        return int(text)

    try:
        numbers = dict.fromkeys(("parse_int", "parse_float", "parse_constant"), parsed)
        return json.loads(data.decode(), object_pairs_hook=Told, **numbers)
    except (ValueError, RecursionError) as error:
        raise Rejected(f"broken or truncated, no JSON ({error})") from error


def read_tensors(data: bytes) -> dict[str, np.ndarray]:
    """safetensors: length of the header, header, tensors one after the other. As float64, which is exact."""
    start, tensors = 8 + int.from_bytes(data[:8], "little"), {}
    header, at = parse(data[8:start]), start
    header.pop("__metadata__", None)
    for name, told in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        first, last = ints(told["data_offsets"], 0)
        need(start + first == at <= start + last <= len(data), f"{name}: does not follow the tensor before; truncated?")
        at = start + last
        array = np.frombuffer(data[start + first : at], {"F32": "<f4", "F64": "<f8"}[told["dtype"]])
        need(np.isfinite(array).all(), f"{name}: NaN or infinity")
        tensors[name] = array.astype(np.float64).reshape(ints(told["shape"], 0))
    need(at == len(data), "more than the tensors")
    return tensors
