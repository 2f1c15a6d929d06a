"""Files as anybody may have made them: what is not exactly of the format ends in Rejected, with a reason."""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

MAX_FILE = 2**34
Test = Callable[[Any], bool]


class Rejected(Exception):
    """The certificate does not prove what it says."""


class Unreadable(Exception):
    """A file is not there."""


def need(condition: Any, message: str) -> None:
    if not condition:
        raise Rejected(message)


# ---- values: what cannot be derived has a form, by its name; all else `agree` compares with what is derived


def integer(low: int, bits: int = 28) -> Test:
    return lambda v: type(v) is int and low <= v <= 2**bits


def like(pattern: str) -> Test:
    return lambda v: type(v) is str and re.fullmatch(pattern, v) is not None


def some(test: Test) -> Test:
    return lambda v: type(v) is list and all(map(test, v))


HEX = "-?0x(0[.]0p[+]0|0[.][0-9a-f]{13}p-1022|1[.][0-9a-f]{13}p[+-](0|[1-9][0-9]{0,2}|10[01][0-9]|102[0-3]))"
RADIUS = like("[0-9]{1,9}(/[1-9][0-9]{0,8})?")
VALUES: list[tuple[str, str, Test]] = [
    ("onelip created source sha256 dtype op place weight mean std", "a text", like("(?s:.*)")),
    ("file", "a relative path", like("(?s:([^/].*)?)")),
    ("bias", "a text or null", lambda v: v is None or type(v) is str),
    ("transposed", "true or false", lambda v: type(v) is bool),
    ("circular", "true or false for each axis", some(lambda v: type(v) is bool)),
    ("groups group_size", "an integer from 1 to 2^28", integer(1)),
    ("axis", "an integer from 0 to 2^28", integer(0)),
    ("steps", "an integer from 1 to 4", integer(1, 2)),
    ("node label", "an integer from 0 to 2^28, or null", lambda v: v is None or integer(0)(v)),
    ("stride dilation", "integers from 1 to 2^28", some(integer(1))),
    ("shape inputs offset", "integers from 0 to 2^28", some(integer(0))),
    ("data_offsets", "integers from 0 to 2^34", some(integer(0, 34))),
    ("take", "lists of integers from -1 to 2^28", some(some(integer(-1)))),
    ("scale", "lists of integers from 1 to 2^2000", some(some(integer(1, 2000)))),
    ("kind", "schur or cholesky", like("schur|cholesky")),
    ("side", "inputs or outputs", like("inputs|outputs")),
    ("square", "a fraction", like("[0-9]{1,4000}/[1-9][0-9]{0,3999}")),
    ("factor", "a finite float.hex()", like(HEX)),
    ("logits", "a finite float.hex() each", some(like(HEX))),
    ("cra", "at most 1000 radii as 36/255", lambda v: type(v) is dict and len(v) <= 1000 and all(map(RADIUS, v))),
    ("nodes results", "a list", some(lambda v: True)),
]
FORMS = {key: (words, test) for keys, words, test in VALUES for key in keys.split()}


def fit(given: Any, keys: str, where: str) -> None:
    """Refuses an object that has not just these keys, or under one of them what is not of its form."""
    need(type(given) is dict, f"{where}expected an object, got {given!r:.80}")
    for key in [*keys.split(), *given]:
        need(key in given, f"{where}{key} is missing")
        need(key in keys.split(), f"{where}unknown {key!r:.80}; of a newer version?")
        words, test = FORMS.get(key, ("", lambda v: True))
        need(test(given[key]), f"{where}{key}: expected {words}, got {given[key]!r:.80}")


def agree(given: dict[str, Any], derived: dict[str, Any], where: str) -> None:
    """Refuses what is not, to the letter, what was derived: other, more or fewer values, true or 1.0 for 1."""
    for key, own in derived.items():
        right = json.dumps(given[key], sort_keys=True) == json.dumps(own, sort_keys=True)
        need(right, f"{where}{key}: expected {own!r:.200}, got {given[key]!r:.200}")


def in_hex(value: Any) -> Any:
    """A number, or a table of them, as files write it."""
    return [in_hex(v) for v in value] if isinstance(value, list) else float(value).hex()


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

    try:  # int refuses the words NaN and Infinity
        found = json.loads(data.decode("utf-8"), object_pairs_hook=pairs, parse_constant=int)
    except (ValueError, RecursionError) as error:
        raise Rejected(f"{where}: broken or truncated, no JSON ({error})") from error
    need(type(found) is dict, f"{where}: expected an object")
    return found


def read_tensors(data: bytes) -> dict[str, np.ndarray]:
    """safetensors: header length, JSON header, tensors that fill the rest without holes; as float64, which is exact."""
    at = 8 + int.from_bytes(data[:8], "little")
    need(8 <= at <= len(data), "weights: truncated, or no safetensors file")
    header, tensors = parse_json(data[8:at], "weights"), {}
    words = header.pop("__metadata__", {})
    need(type(words) is dict and all(type(v) is str for v in words.values()), "weights: metadata are no words")
    for name, entry in header.items():
        fit(entry, "dtype shape data_offsets", f"weights, {name!r}, ")
        need(entry["dtype"] in ("F32", "F64"), f"weights, {name!r}: expected F32 or F64, got {entry['dtype']!r:.80}")
    start = at
    for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
        kind = np.dtype("<f4" if entry["dtype"] == "F32" else "<f8")
        end = at + math.prod(entry["shape"]) * kind.itemsize
        follows = entry["data_offsets"] == [at - start, end - start] and end <= len(data)
        need(follows, f"weights, {name!r}: does not follow the tensor before, or is not of its shape")
        tensors[name] = np.frombuffer(data[at:end], kind).reshape(entry["shape"]).astype(np.float64)
        need(np.isfinite(tensors[name]).all(), f"weights, {name!r}: NaN or infinity")
        at = end
    need(at == len(data), "weights: more than the tensors")
    return tensors
