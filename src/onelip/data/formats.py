"""Safe readers for untrusted files: gzip, tar, zip, .npy, IDX (MNIST), CIFAR's binary and python batches.

Nothing is extracted to disk, and at most a fixed number of bytes is read. Sizes stated in an archive are not trusted:
bytes are counted while they are read. A tar file with links, devices, absolute paths or '..' is rejected as a whole;
the official archives have none.
"""

import gzip
import io
import math
import pickletools
import struct
import tarfile
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import IO, Any

import numpy as np

from onelip.core.errors import DataError

# CIFAR unpacks to 185 MB, the largest official file. Loaders of your own data take a limit as an argument.
OFFICIAL_CAP = 512 * 2**20
OWN_CAP = 4 * 2**30

Part = tuple[np.ndarray, np.ndarray]  # images (N, C, H, W) uint8, labels (N)

_DAMAGED = (EOFError, zlib.error, gzip.BadGzipFile, tarfile.TarError, zipfile.BadZipFile)
_CIFAR_PIXELS = 3 * 32 * 32
_WRITE = "write it again with np.savez"


# Archives.


def read_file(path: Path, cap: int = OFFICIAL_CAP) -> bytes:
    """Return the bytes of a file, unpacked if it is gzipped (judged by its first bytes, not by its name)."""
    try:
        with _unpacked(path) as stream:
            content = stream.read(cap + 1)
    except _DAMAGED as error:
        raise damaged(path, error) from error
    if len(content) > cap:
        raise _too_large(path, cap)
    return content


def read_tar(path: Path, wanted: Iterable[str], cap: int = OFFICIAL_CAP) -> dict[str, bytes]:
    """Return the wanted members of a .tar or .tar.gz file, by their full names."""
    wanted, found = set(wanted), dict[str, bytes]()
    try:
        # As a stream ("r|"), which never seeks, so that skipped members are counted too.
        with (
            _unpacked(path) as stream,
            tarfile.open(fileobj=_Limited(stream, path, cap), mode="r|") as archive,
        ):
            for member in archive:
                _refuse_unsafe(member, path)
                if member.name not in wanted:
                    continue
                content = archive.extractfile(member)
                if content is None or member.name in found:
                    raise DataError(f"{path}: {member.name} is duplicated or not a regular file")
                found[member.name] = content.read()
    except DataError:
        raise
    except (*_DAMAGED, ValueError, OverflowError) as error:  # the last two: invalid numbers in a header
        raise damaged(path, error) from error
    for name in sorted(wanted - found.keys()):
        raise DataError(f"{path}: the archive has no member {name}; fetch the file again")
    return found


def read_arrays(path: Path, cap: int = OWN_CAP) -> dict[str, np.ndarray]:
    """Return the arrays of an .npz file by name; only numbers and text, never Python objects."""
    try:
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
            names = [entry.filename for entry in entries]
            if len(set(names)) != len(names):
                raise DataError(f"{path}: a member is duplicated; write the file again")
            if sum(entry.file_size for entry in entries) > cap:
                raise _too_large(path, cap)
            # zipfile returns at most the stated size of each member, so the sum above is a bound.
            contents = {name: archive.read(entry) for name, entry in zip(names, entries, strict=True)}
    except (*_DAMAGED, NotImplementedError, RuntimeError) as error:  # the last two: unknown compression, encrypted
        raise damaged(path, error, _WRITE) from error
    return {name.removesuffix(".npy"): _read_array(content, name, path) for name, content in contents.items()}


def _read_array(content: bytes, name: str, path: Path) -> np.ndarray:
    # np.load allocates the size given in the header before it reads the data, so the header is checked first.
    stream = io.BytesIO(content)
    try:
        version = np.lib.format.read_magic(stream)
        read_header = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
        shape, fortran, dtype = read_header[version](stream)
    except (ValueError, KeyError, TypeError) as error:
        raise damaged(path, f"{name} is not a numpy array: {error}", _WRITE) from error
    if dtype.hasobject:
        raise DataError(f"{path}: {name}: expected numbers or text, got Python objects; save plain arrays")
    rest = len(content) - stream.tell()
    if math.prod(shape) * dtype.itemsize != rest:
        raise damaged(path, f"{name} has {rest} bytes, which do not match the shape {shape} of {dtype}", _WRITE)
    array = np.frombuffer(content, dtype, offset=stream.tell())
    return array.reshape(shape, order="F" if fortran else "C")


def damaged(path: Path, error: Exception | str, advice: str = "delete it and download it again") -> DataError:
    """Return the error for a file that cannot be read completely."""
    return DataError(f"{path}: the file is damaged or truncated ({error}); {advice}")


def _too_large(path: Path, cap: int) -> DataError:
    return DataError(f"{path}: the unpacked file is larger than {cap / 2**20:.0f} MB, so it is not the expected file")


def _refuse_unsafe(member: tarfile.TarInfo, path: Path) -> None:
    parts = PurePosixPath(member.name.replace("\\", "/"))
    kind = None
    if member.islnk() or member.issym():
        kind = "a link"
    elif member.issparse():  # a few bytes can represent any number of zeros
        kind = "a sparse file"
    elif not (member.isreg() or member.isdir()):
        kind = "a device or special file"
    elif parts.is_absolute() or ".." in parts.parts or ":" in member.name:
        kind = "a path outside the archive"
    if kind:
        raise DataError(
            f"{path}: expected an archive of plain files, got {kind} ({member.name!r}); this is not the official "
            "archive and may be malicious: delete it"
        )


@contextmanager
def _unpacked(path: Path) -> Iterator[IO[bytes] | gzip.GzipFile]:
    with path.open("rb") as raw:
        packed = raw.read(2) == b"\x1f\x8b"
        raw.seek(0)
        yield gzip.GzipFile(fileobj=raw) if packed else raw


class _Limited(io.RawIOBase):
    """A stream that raises an error instead of returning more than `cap` bytes in total."""

    def __init__(self, stream: IO[bytes] | gzip.GzipFile, path: Path, cap: int) -> None:
        self._stream, self._path, self._cap, self._left = stream, path, cap, cap

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        content = self._stream.read(self._left + 1 if size < 0 else min(size, self._left + 1))
        self._left -= len(content)
        if self._left < 0:
            raise _too_large(self._path, self._cap)
        return content


# Official formats.


def parse(kind: str, contents: Sequence[bytes], names: Sequence[str], classes: int) -> Part:
    """Return images and labels from the training or the test files of one version."""
    if kind == "idx":
        return parse_idx(contents[0], names[0], dims=3)[:, None], parse_idx(contents[1], names[1], dims=1)
    if kind == "cifar-binary":
        parts = [parse_cifar_binary(c, n, classes) for c, n in zip(contents, names, strict=True)]
    else:
        parts = [parse_cifar_python(c, n) for c, n in zip(contents, names, strict=True)]
    return np.concatenate([images for images, _ in parts]), np.concatenate([labels for _, labels in parts])


def parse_idx(content: bytes, what: str, dims: int) -> np.ndarray:
    """Parse an IDX file of unsigned bytes: two zeros, 8, number of axes, their lengths (big endian), then the data."""
    header = 4 + 4 * dims
    if len(content) < header or content[:4] != bytes([0, 0, 8, dims]):
        raise DataError(
            f"{what}: expected an IDX file of bytes with {dims} axes, got one that starts with {content[:4].hex()}; "
            "images and labels may be swapped, or it is a different file"
        )
    shape = struct.unpack(f">{dims}I", content[4:header])
    expected, got = math.prod(shape), len(content) - header
    if expected != got:
        raise DataError(f"{what}: expected {expected} bytes for the shape {shape}, got {got}; the file is incomplete")
    return np.frombuffer(content, np.uint8, offset=header).reshape(shape)


def parse_cifar_binary(content: bytes, what: str, classes: int) -> Part:
    """Parse records of one label byte (CIFAR-10) or two, coarse and fine (CIFAR-100), and 3072 bytes of RGB planes."""
    labels = 2 if classes == 100 else 1
    record = labels + _CIFAR_PIXELS
    if not content or len(content) % record:
        raise DataError(f"{what}: expected records of {record} bytes, got {len(content)} bytes; the file is incomplete")
    records = np.frombuffer(content, np.uint8).reshape(-1, record)
    return records[:, labels:].reshape(-1, 3, 32, 32), records[:, labels - 1]


def parse_cifar_python(content: bytes, what: str) -> Part:
    """Parse a pickled dictionary with `data` (N, 3072) and `labels` or `fine_labels`, without executing it."""
    batch = read_cifar_pickle(content, what)
    images, labels = batch.get("data"), batch.get("fine_labels", batch.get("labels"))
    if not isinstance(images, np.ndarray) or images.ndim != 2 or images.shape[1] != _CIFAR_PIXELS:
        raise DataError(f"{what}: expected an array `data` of shape (N, {_CIFAR_PIXELS}), got {_describe(images)}")
    if not isinstance(labels, list) or len(labels) != len(images) or not all(type(y) is int for y in labels):
        raise DataError(f"{what}: expected a list of {len(images)} labels, got {_describe(labels)}")
    return images.reshape(-1, 3, 32, 32), np.array(labels, dtype=np.int64)


def _describe(value: object) -> str:
    if isinstance(value, np.ndarray):
        return f"shape {value.shape}"
    return f"a list of {len(value)}" if isinstance(value, list) else type(value).__name__


# Pickles of CIFAR's python version.

_RECONSTRUCT, _NDARRAY, _DTYPE = "numpy.core.multiarray _reconstruct", "numpy ndarray", "numpy dtype"
_MARK, _UINT8 = object(), object()
_NUMBERS_AND_STRINGS = ("BININT", "BININT1", "BININT2", "LONG1", "SHORT_BINSTRING", "BINSTRING")
_CONSTANTS = {"MARK": _MARK, "NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
_TUPLES = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


class _Array:
    """An array that has no content yet; BUILD provides shape, type and bytes."""

    content: np.ndarray | None = None


def read_cifar_pickle(content: bytes, what: str) -> dict[str, Any]:
    """Return the dictionary in a CIFAR batch: strings, lists of numbers and strings, and one uint8 array.

    A pickle is a program for a stack machine, and `pickle.load` lets it call any function. Here `pickletools` splits it
    into instructions, and only those of a CIFAR batch (Python 2, protocol 2) are interpreted. Names are compared as
    text and never imported; the only objects created are numbers, strings, lists, tuples, dictionaries and one array
    by `np.frombuffer`.

    Raises:
        DataError: for all other pickles.
    """
    try:
        value = _interpret(content)
    except (IndexError, KeyError, TypeError, ValueError) as error:
        raise DataError(
            f"{what}: not an official CIFAR batch ({error or type(error).__name__}); none of its code was executed. "
            "Download the official archive, preferably the binary version"
        ) from error
    return {key: item.content if isinstance(item, _Array) else item for key, item in value.items()}


def _interpret(content: bytes) -> dict[str, Any]:
    stack: list[Any] = []
    memo: dict[Any, Any] = {}

    def pop_to_mark() -> list[Any]:
        items = []
        while (item := stack.pop()) is not _MARK:
            items.append(item)
        return items[::-1]

    for opcode, argument, position in pickletools.genops(content):
        name = opcode.name
        if name in _NUMBERS_AND_STRINGS:
            stack.append(argument)
        elif name in _CONSTANTS:
            stack.append(_CONSTANTS[name])
        elif name == "EMPTY_DICT":
            stack.append({})
        elif name == "EMPTY_LIST":
            stack.append([])
        elif name in ("BINPUT", "LONG_BINPUT"):
            memo[argument] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
        elif name in ("APPEND", "APPENDS"):
            items = [stack.pop()] if name == "APPEND" else pop_to_mark()
            _require(stack[-1], list).extend(items)
        elif name in ("SETITEM", "SETITEMS"):
            items = [stack.pop(), stack.pop()][::-1] if name == "SETITEM" else pop_to_mark()
            target = _require(stack[-1], dict)
            for key, item in zip(items[::2], items[1::2], strict=True):
                target[_require(key, str)] = item
        elif name == "TUPLE":
            stack.append(tuple(pop_to_mark()))
        elif name in _TUPLES:
            items = tuple(stack.pop() for _ in range(_TUPLES[name]))
            stack.append(items[::-1])
        elif name == "GLOBAL" and argument in (_RECONSTRUCT, _NDARRAY, _DTYPE):
            stack.append(argument)
        elif name == "REDUCE":
            arguments, function = stack.pop(), stack.pop()
            stack.append(_call(function, arguments))
        elif name == "BUILD":
            state = stack.pop()
            _fill(stack[-1], state)
        elif name not in ("PROTO", "STOP"):
            raise ValueError(f"unexpected instruction {name} {str(argument)[:60]} at byte {position}")
    (value,) = stack
    return _require(value, dict)


def _require(value: Any, kind: type) -> Any:
    if type(value) is not kind:
        raise ValueError(f"a {type(value).__name__} instead of a {kind.__name__}")
    return value


def _call(function: object, arguments: Any) -> object:
    if function == _RECONSTRUCT and arguments[0] == _NDARRAY:
        return _Array()
    if function == _DTYPE and arguments[0] == "u1":
        return _UINT8
    raise ValueError("unexpected call")


def _fill(target: object, state: Any) -> None:
    if target is _UINT8:
        return  # byte order and alignment do not matter for single bytes
    if not isinstance(target, _Array):
        raise ValueError("a state for an object that is not an array")
    _, shape, dtype, fortran, text = state
    if dtype is not _UINT8:
        raise ValueError("an array whose dtype is not uint8")
    content = _require(text, str).encode("latin-1")
    rows, columns = (_require(length, int) for length in shape)
    if min(rows, columns) < 0 or rows * columns != len(content):
        raise ValueError(f"an array of shape {shape} in {len(content)} bytes")
    target.content = np.frombuffer(content, np.uint8).reshape(rows, columns, order="F" if fortran else "C")
