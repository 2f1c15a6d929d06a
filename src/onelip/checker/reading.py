"""Files as anybody may have made them: what is not exactly of the format ends in Rejected, with a reason."""

import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

MAX_FILE, MAX_HEADER, MAX_ENTRIES, MAX_SETTING = 2**34, 100_000_000, 2**28, 2**12
SHAPE = "a shape of at most 8 axes and 2^28 entries"


class Rejected(Exception):
    """The certificate does not prove what it says."""


class Unreadable(Exception):
    """A file is not there."""


def need(condition: Any, message: str) -> None:
    if not condition:
        raise Rejected(message)


# ---- values: what cannot be derived is taken and checked, all else must be as it is derived


def same(given: Any, own: Any, where: str) -> None:
    """Refuses what is not, to the letter, what was derived: other, more or fewer values, true or 1.0 for 1."""
    if given is own:  # taken, and checked
        return
    if isinstance(given, dict) and isinstance(own, dict):
        for key in [*own, *given]:
            need(key in given, f"{where}: {key} is missing")
            need(key in own, f"{where}: unknown {key!r:.80}; of a newer version?")
            same(given[key], own[key], f"{where}, {key}")
    elif isinstance(given, list) and isinstance(own, list) and len(given) == len(own):
        for one, other in zip(given, own, strict=True):
            same(one, other, where)
    elif repr(given) != repr(own):
        raise Rejected(f"{where}: expected {own!r:.200}, got {given!r:.200}")


def in_hex(value: Any) -> Any:
    """A number, or a table of them, as files write it."""
    return [in_hex(v) for v in value] if isinstance(value, list) else float(value).hex()


def is_hex(value: Any) -> bool:
    """A float.hex() of a finite float, to the letter."""
    try:
        found = float.fromhex(value) if type(value) is str else math.nan
    except (ValueError, OverflowError):
        return False
    return math.isfinite(found) and found.hex() == value


def are_integers(value: Any, length: int | None, low: int, high: int) -> bool:
    right = type(value) is list and length in (None, len(value))
    return right and all(type(v) is int and low <= v <= high for v in value)


def is_shape(value: Any, low: int = 1) -> bool:
    return are_integers(value, None, low, MAX_ENTRIES) and len(value) <= 8 and math.prod(value) <= MAX_ENTRIES


class Part:
    """An object of the file. What is taken from it, and what `agree` is told of the rest, must be all that it holds."""

    def __init__(self, given: Any, where: str):
        need(type(given) is dict, f"{where}: expected an object")
        self.given, self.where, self.own = given, where, {}

    def take(self, key: str, good: Callable[[Any], Any], wanted: str) -> Any:
        need(key in self.given, f"{self.where}: {key} is missing")
        value = self.own[key] = self.given[key]
        if not good(value):
            raise Rejected(f"{self.where}, {key}: expected {wanted}, got {value!r:.80}")
        return value

    def part(self, key: str) -> "Part":
        return Part(self.take(key, lambda v: type(v) is dict, "an object"), f"{self.where}, {key}")

    def items(self, key: str, length: int | None = None) -> list[Any]:
        wanted = "a list" if length is None else f"a list of {length}"
        return self.take(key, lambda v: type(v) is list and length in (None, len(v)), wanted)

    def is_null(self, key: str) -> bool:
        return self.given.get(key) is None and self.own.setdefault(key) is None

    def text(self, key: str) -> str:
        return self.take(key, lambda v: type(v) is str, "a text")

    def choice(self, key: str, *among: Any) -> Any:
        return self.take(key, lambda v: repr(v) in map(repr, among), f"one of {among}")

    def integer(self, key: str, low: int, high: int = MAX_ENTRIES) -> int:
        return self.take(key, lambda v: are_integers([v], 1, low, high), f"an integer from {low} to {high}")

    def integers(self, key: str, length: int | None, low: int, high: int = MAX_SETTING) -> tuple[int, ...]:
        wanted = f"{'some' if length is None else length} integers from {low} to {high}"
        return tuple(self.take(key, lambda v: are_integers(v, length, low, high), wanted))

    def agree(self, **derived: Any) -> None:
        same(self.given, self.own | derived, self.where)


# ---- files


def read(path: Path) -> bytes:
    try:
        if not path.is_file():
            raise FileNotFoundError(2, "no such file")
        need(path.stat().st_size <= MAX_FILE, f"{path}: larger than {MAX_FILE} bytes")
        return path.read_bytes()
    except (OSError, ValueError) as error:
        raise Unreadable(f"cannot read {path}: {error}; give its path (--help)") from error


def parse_json(data: bytes, where: str) -> dict[str, Any]:
    def pairs(found: list[tuple[str, Any]]) -> dict[str, Any]:
        need(len(once := dict(found)) == len(found), f"{where}: a key occurs twice")
        return once

    try:
        constant = lambda text: need(False, f"{where}: {text} is no JSON number")  # noqa: E731
        found = json.loads(data.decode("utf-8"), object_pairs_hook=pairs, parse_constant=constant)
    except (ValueError, RecursionError) as error:
        raise Rejected(f"{where}: broken or truncated, no JSON ({error})") from error
    need(type(found) is dict, f"{where}: expected an object")
    return found


def read_tensors(data: bytes) -> dict[str, np.ndarray]:
    """safetensors: header length, JSON header, tensors that fill the rest without holes; as float64, which is exact."""
    length = int.from_bytes(data[:8], "little")
    need(len(data) >= 8 and length <= min(MAX_HEADER, len(data) - 8), "weights: truncated, or no safetensors file")
    header, body = parse_json(data[8 : 8 + length], "weights"), memoryview(data)[8 + length :]
    words = header.pop("__metadata__", {})
    need(type(words) is dict and all(type(v) is str for v in words.values()), "weights: metadata are no words")
    tensors, spans, left = {}, [(0, 0)], len(body)
    for name, given in header.items():
        entry = Part(given, f"weights, {name!r}")
        kind = np.dtype({"F32": "<f4", "F64": "<f8"}[entry.choice("dtype", "F32", "F64")])
        shape = entry.take("shape", lambda v: is_shape(v, 0), SHAPE)
        begin, end = entry.integers("data_offsets", 2, 0, len(body))
        entry.agree()
        need(end - begin == math.prod(shape) * kind.itemsize, f"{entry.where}: offsets do not fit the shape")
        spans.append((begin, end))
        need((left := left - (end - begin)) >= 0, "weights: tensors overlap")  # before they fill the memory
        tensors[name] = np.frombuffer(body[begin:end], kind).reshape(shape).astype(np.float64)
        need(np.isfinite(tensors[name]).all(), f"{entry.where}: NaN or infinity")
    spans.sort()
    whole = all(a[1] == b[0] for a, b in itertools.pairwise(spans)) and spans[-1][1] == len(body)
    need(whole, "weights: tensors overlap, or leave holes")
    return tensors
