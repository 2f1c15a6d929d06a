"""Files as anybody may have made them: what is not exactly of the format ends in Rejected, with a reason."""

import itertools
import json
import math
import re
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import numpy as np

MAX_FILE, MAX_HEADER, MAX_ENTRIES, MAX_SETTING = 2**34, 100_000_000, 2**28, 2**12
Tensors = dict[str, np.ndarray]


class Rejected(Exception):
    """The certificate does not prove what it says."""


class Unreadable(Exception):
    """A file, or a library, is not there."""


def need(condition: Any, message: str) -> None:
    if not condition:
        raise Rejected(message)


# ---- values


def fields(value: Any, where: str, required: set[str], optional: tuple[str, ...] = ()) -> None:
    need(type(value) is dict, f"{where}: expected an object")
    need(not (missing := required - value.keys()), f"{where}: {sorted(missing)} missing")
    need(not (extra := value.keys() - required - {*optional}), f"{where}: unknown {sorted(extra)}; of a newer version?")


def integer(value: Any, where: str, low: int = 0, high: int = MAX_ENTRIES) -> int:
    need(type(value) is int and low <= value <= high, f"{where}: expected an integer from {low} to {high}")
    return value


def items(value: Any, where: str, length: int | None = None) -> list[Any]:
    right = type(value) is list and length in (None, len(value))
    need(right, f"{where}: expected a list" + ("" if length is None else f" of {length}"))
    return value


def integers(value: Any, where: str, length: int | None, low: int = 0, high: int = MAX_SETTING) -> tuple[int, ...]:
    return tuple(integer(v, where, low, high) for v in items(value, where, length))


def shape_of(value: Any, where: str, low: int = 1) -> tuple[int, ...]:
    shape = integers(value, where, None, low, MAX_ENTRIES)
    need(len(shape) <= 8 and math.prod(shape) <= MAX_ENTRIES, f"{where}: shape {shape[:8]} is too large")
    return shape


def number(value: Any, where: str) -> Fraction:
    """A float.hex() of a finite float, to the letter."""
    try:
        found = float.fromhex(value) if type(value) is str else math.nan
    except (ValueError, OverflowError):
        found = math.nan
    need(math.isfinite(found) and found.hex() == value, f"{where}: expected a finite float.hex()")
    return Fraction(found)


def fraction(value: Any, where: str) -> Fraction:
    good = type(value) is str and re.fullmatch(r"[0-9]{1,4000}/[1-9][0-9]{0,3999}", value)
    need(good, f"{where} is no fraction")
    found = Fraction(value)
    need(f"{found.numerator}/{found.denominator}" == value, f"{where} is not in lowest terms")
    return found


def same(value: Any, derived: Any, where: str) -> None:
    """The file's hexadecimal numbers, or tables of them, are the derived ones."""
    if isinstance(derived, list):
        for v, d in zip(items(value, where, len(derived)), derived, strict=True):
            same(v, d, where)
    else:
        need(value == float(derived).hex(), f"{where}: expected {float(derived).hex()}, got {value!r}")


# ---- files


def read(path: Path) -> bytes:
    try:
        if not path.is_file():
            raise FileNotFoundError(2, "no such file")
        need(path.stat().st_size <= MAX_FILE, f"{path}: larger than {MAX_FILE} bytes")
        return path.read_bytes()
    except (OSError, ValueError) as error:
        raise Unreadable(f"cannot read {path}: {error}; give its path (--help)") from error


def tidy(value: Any, key: str) -> None:
    """Only what a certificate can hold: no true for 1, no negative, absurd or broken number anywhere."""
    if isinstance(value, dict | list):
        for name, part in value.items() if isinstance(value, dict) else zip(itertools.repeat(key), value):
            tidy(part, key if key == "cra" else name)
    elif isinstance(value, bool | float):
        places = ("transposed", "pairs") if isinstance(value, bool) else ("accuracy", "cra")
        need(key in places, f"{key}: got {value}")
    elif isinstance(value, int):
        need(0 <= value <= (2**2000 if key == "scale" else 2**53), f"{key}: expected an integer from 0 to 2^53")


def parse_json(data: bytes, where: str) -> dict[str, Any]:
    def pairs(found: list[tuple[str, Any]]) -> dict[str, Any]:
        need(len(once := dict(found)) == len(found), f"{where}: a key occurs twice")
        return once

    def constant(text: str) -> NoReturn:
        raise Rejected(f"{where}: {text} is no JSON number")

    try:
        found = json.loads(data.decode("utf-8"), object_pairs_hook=pairs, parse_constant=constant)
        tidy(found, "")
    except (ValueError, RecursionError) as error:
        raise Rejected(f"{where}: broken or truncated, no JSON ({error})") from error
    need(type(found) is dict, f"{where}: expected an object")
    return found


def read_tensors(data: bytes) -> Tensors:
    """safetensors: header length, JSON header, tensors that fill the rest without holes; as float64, which is exact."""
    length = int.from_bytes(data[:8], "little")
    need(len(data) >= 8 and length <= min(MAX_HEADER, len(data) - 8), "weights: truncated, or no safetensors file")
    header, body = parse_json(data[8 : 8 + length], "weights"), memoryview(data)[8 + length :]
    header.pop("__metadata__", None)
    tensors, spans = {}, [(0, 0)]
    for name, entry in header.items():
        where = f"weights, {name!r}"
        fields(entry, where, {"dtype", "shape", "data_offsets"})
        need(entry["dtype"] in ("F32", "F64"), f"{where}: expected F32 or F64, got {entry['dtype']!r}")
        kind = np.dtype("<f4" if entry["dtype"] == "F32" else "<f8")
        shape = shape_of(entry["shape"], where, 0)
        begin, end = integers(entry["data_offsets"], where, 2, 0, len(body))
        need(end - begin == math.prod(shape) * kind.itemsize, f"{where}: offsets do not fit the shape")
        spans.append((begin, end))
        tensors[name] = np.frombuffer(body[begin:end], kind).reshape(shape).astype(np.float64)
        need(np.isfinite(tensors[name]).all(), f"{where}: NaN or infinity")
    spans.sort()
    whole = all(a[1] == b[0] for a, b in itertools.pairwise(spans)) and spans[-1][1] == len(body)
    need(whole, "weights: tensors overlap, or leave holes")
    return tensors


# ---- nodes: the settings of every operation, and how each is read


def tensor(value: Any, where: str, axes: int, tensors: Tensors) -> np.ndarray:
    need(type(value) is str and value in tensors, f"{where}: no tensor {value!r} in the weight file")
    return tensors[value]


def factor(value: Any, where: str, axes: int, tensors: Tensors) -> Fraction:
    need(abs(found := number(value, where)) < 2**500, f"{where} beyond 2^500")
    return found


def pairs_of(value: Any, where: str, axes: int, tensors: Tensors) -> tuple[tuple[int, ...], ...]:
    need(type(value) is list and len(value) == axes, f"{where}: expected padding for each axis")
    return tuple(integers(pair, where, 2) for pair in value)


def mode(value: Any, where: str, axes: int, tensors: Tensors) -> str:
    need(value in ("zeros", "circular"), f"{where}: unknown mode {value!r}")
    return value


def flag(value: Any, where: str, axes: int, tensors: Tensors) -> bool:
    need(type(value) is bool, f"{where}: expected true or false")
    return value


def at_least(low: int) -> Callable[..., tuple[int, ...]]:
    return lambda value, where, axes, tensors: integers(value, where, axes, low)


NODE = {"op", "inputs", "shape", "lipschitz", "norm", "error"}
MAP = "weight bias bound sigma absolute bias_norm"
SETTINGS = {
    **dict.fromkeys(("input", "relu", "abs", "identity", "flatten", "reshape", "add", "concat"), ""),
    "linear": MAP,
    "conv": f"{MAP} stride padding dilation groups mode transposed output_padding",
    "maxmin": "axis",
    "groupsort": "axis group_size",
    "concatenate": "kernel",
    "first_channels": "count",
    "pad_channels": "count",
    "max_pool": "kernel stride padding dilation",
    "avg_pool": "kernel stride scale",
    "normalize": "mean std",
    "scale": "factor",
}
READERS: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("weight", "mean", "std"), tensor),
    "bias": lambda value, *rest: None if value is None else tensor(value, *rest),
    **dict.fromkeys(("kernel", "stride", "dilation"), at_least(1)),
    **dict.fromkeys(("padding", "output_padding"), at_least(0)),
    "conv padding": pairs_of,
    **dict.fromkeys(("groups", "count", "group_size"), lambda value, where, *_: integer(value, where, 1)),
    "axis": lambda value, where, axes, _: integer(value, where, 0, axes),
    **dict.fromkeys(("scale", "factor"), factor),
    "mode": mode,
    "transposed": flag,
    **dict.fromkeys(("bound", "sigma", "absolute", "bias_norm"), lambda value, *_: value),  # for the proof to compare
}


def read_nodes(nodes: Any, tensors: Tensors) -> list[SimpleNamespace]:
    need(type(nodes) is list and len(nodes) >= 2, "nodes: expected a list of two or more")
    found = []
    for i, node in enumerate(nodes):
        op: Any = node.get("op") if type(node) is dict else None
        need(type(op) is str and op in SETTINGS, f"node {i} ({op!r}): no rule for it; of a newer version?")
        where = f"node {i} ({op})"
        names = SETTINGS[op].split()
        fields(node, where, NODE | {*names}, ("place",))
        need((op == "input") == (i == 0), f"{where}: expected the input at node 0 and nowhere else")
        count = {"input": 0, "add": 2, "concat": max(2, len(items(node["inputs"], f"{where}, inputs")))}.get(op, 1)
        inputs = integers(node["inputs"], f"{where}, inputs", count, 0, i - 1)
        shape = shape_of(node["shape"], where)
        need(shape, f"{where}: expected a shape of one axis or more")
        read = {}
        for key in names:
            reader = READERS.get(f"{op} {key}") or READERS[key]
            read[key] = reader(node[key], f"{where}, {key}", len(shape) - 1, tensors)
        claims = {key: node[key] for key in ("lipschitz", "norm", "error")}
        found.append(SimpleNamespace(op=op, where=where, inputs=inputs, shape=shape, claims=claims, **read))
    return found
