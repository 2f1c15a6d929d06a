"""Reads the pickles of CIFAR's python version without executing them.

A pickle is a program for a stack machine; `pickle.load` runs it, and it may call anything. The CIFAR batches (Python 2,
protocol 2) are dictionaries of strings, lists of small numbers and strings, and one uint8 array. This reader knows the
opcodes that make those and no others. Global names are never imported: the three that numpy arrays of that time need
are compared as text, and all that can come of them is `np.frombuffer`.
"""

import struct
from dataclasses import dataclass
from typing import Any

import numpy as np

from onelip.data._errors import DataError

_RECONSTRUCT = ("numpy.core.multiarray", "_reconstruct")
_NDARRAY = ("numpy", "ndarray")
_DTYPE = ("numpy", "dtype")
_MARK = object()


@dataclass(frozen=True)
class _Global:
    name: tuple[str, str]


class _Array:
    """An array that is still without content; BUILD brings shape, type and bytes."""

    def __init__(self) -> None:
        self.content: np.ndarray | None = None


class _Dtype:
    """The type uint8, the only one there is here."""


def read_pickled_dict(content: bytes, what: str) -> dict[str, Any]:
    """The dictionary that a CIFAR batch holds: keys as str, arrays as numpy, strings as memoryview."""
    try:
        value = _Reader(content).run()
    except (IndexError, struct.error, KeyError, TypeError, AttributeError, ValueError) as error:
        raise DataError(
            f"{what}: expected a CIFAR batch as its authors pickled it, got {error or type(error).__name__}; nothing "
            "of it was executed. Get the official archive, best the binary version"
        ) from error
    return value


class _Reader:
    def __init__(self, content: bytes) -> None:
        self.bytes, self.at = memoryview(content), 0
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}

    def run(self) -> dict[str, Any]:
        while (code := bytes(self.take(1))) != b".":
            operation = _OPERATIONS.get(code)
            if operation is None:
                raise ValueError(f"the instruction {code!r} at byte {self.at - 1}, which no CIFAR batch has")
            operation(self)
        (value,) = self.stack
        if not isinstance(value, dict):
            raise ValueError(f"a {type(value).__name__}, not a dictionary")
        return {
            str(bytes(key), "ascii"): item.content if isinstance(item, _Array) else item for key, item in value.items()
        }

    # What the stream holds: bytes, numbers, lines.
    def take(self, count: int) -> memoryview:
        piece = self.bytes[self.at : self.at + count]
        if len(piece) != count:
            raise ValueError(f"an end after {len(self.bytes)} bytes, in the middle")
        self.at += count
        return piece

    def number(self, form: str) -> int:
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def long(self) -> int:
        return int.from_bytes(self.take(self.number("<B")), "little", signed=True)

    def line(self) -> str:
        # Names are short: a line is looked for in the next 100 bytes only.
        length = bytes(self.bytes[self.at : self.at + 100]).index(b"\n")
        return str(bytes(self.take(length + 1)[:-1]), "ascii")

    def to_mark(self) -> list[Any]:
        """Pop what lies above the topmost mark, and the mark."""
        items = []
        while (item := self.stack.pop()) is not _MARK:
            items.append(item)
        return items[::-1]

    def push_tuple(self, count: int) -> None:
        items = tuple(self.stack.pop() for _ in range(count))
        self.stack.append(items[::-1])

    # What the program does.
    def append(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not list:
            raise ValueError(f"an append to a {type(target).__name__}")
        target.extend(items)

    def set_items(self, items: list[Any]) -> None:
        target = self.stack[-1]
        if type(target) is not dict:
            raise ValueError(f"an entry of a {type(target).__name__}")
        for key, item in zip(items[::2], items[1::2], strict=True):
            if not isinstance(key, memoryview):
                raise ValueError("a key that is not a string")
            target[key] = item

    def push_global(self) -> None:
        name = (self.line(), self.line())
        if name not in (_RECONSTRUCT, _NDARRAY, _DTYPE):
            raise ValueError(f"the name {'.'.join(name)}, which no CIFAR batch has")
        self.stack.append(_Global(name))

    def reduce(self) -> None:
        arguments, function = self.stack.pop(), self.stack.pop()
        if function == _Global(_RECONSTRUCT) and arguments[0] == _Global(_NDARRAY):
            self.stack.append(_Array())
        elif function == _Global(_DTYPE) and arguments[0] == b"u1":
            self.stack.append(_Dtype())
        else:
            raise ValueError("a call that no CIFAR batch has")

    def build(self) -> None:
        state, target = self.stack.pop(), self.stack[-1]
        if isinstance(target, _Dtype):
            return  # byte order and alignment, which one byte has not
        if not isinstance(target, _Array):
            raise ValueError("a state for something that is not an array")
        _, shape, dtype, fortran, content = state
        if not isinstance(dtype, _Dtype) or not isinstance(content, memoryview):
            raise ValueError("an array that is not of bytes")
        if len(shape) != 2 or min(shape) < 0 or shape[0] * shape[1] != len(content):
            raise ValueError(f"an array of shape {shape} in {len(content)} bytes")
        target.content = np.frombuffer(content, np.uint8).reshape(shape, order="F" if fortran else "C")


_OPERATIONS = {
    b"\x80": lambda r: r.take(1),  # protocol
    b"(": lambda r: r.stack.append(_MARK),
    b"}": lambda r: r.stack.append({}),
    b"]": lambda r: r.stack.append([]),
    b")": lambda r: r.stack.append(()),
    b"N": lambda r: r.stack.append(None),
    b"\x88": lambda r: r.stack.append(True),
    b"\x89": lambda r: r.stack.append(False),
    b"K": lambda r: r.stack.append(r.number("<B")),
    b"M": lambda r: r.stack.append(r.number("<H")),
    b"J": lambda r: r.stack.append(r.number("<i")),
    b"\x8a": lambda r: r.stack.append(r.long()),  # Python 2 on some machines has longs for the lengths of axes
    b"U": lambda r: r.stack.append(r.take(r.number("<B"))),  # strings of Python 2
    b"T": lambda r: r.stack.append(r.take(r.number("<I"))),
    b"q": lambda r: r.memo.__setitem__(r.number("<B"), r.stack[-1]),
    b"r": lambda r: r.memo.__setitem__(r.number("<I"), r.stack[-1]),
    b"h": lambda r: r.stack.append(r.memo[r.number("<B")]),
    b"j": lambda r: r.stack.append(r.memo[r.number("<I")]),
    b"a": lambda r: r.append([r.stack.pop()]),
    b"e": lambda r: r.append(r.to_mark()),
    b"s": lambda r: r.set_items([r.stack.pop(), r.stack.pop()][::-1]),
    b"u": lambda r: r.set_items(r.to_mark()),
    b"t": lambda r: r.stack.append(tuple(r.to_mark())),
    b"\x85": lambda r: r.push_tuple(1),
    b"\x86": lambda r: r.push_tuple(2),
    b"\x87": lambda r: r.push_tuple(3),
    b"c": lambda r: r.push_global(),
    b"R": lambda r: r.reduce(),
    b"b": lambda r: r.build(),
}
