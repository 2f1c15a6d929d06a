"""The official formats, from bytes to arrays: IDX (MNIST), CIFAR's binary records, CIFAR's python batches."""

import math
import struct
from collections.abc import Sequence

import numpy as np

from onelip.data._errors import DataError
from onelip.data._pickled import read_pickled_dict

Part = tuple[np.ndarray, np.ndarray]  # images (N, C, H, W) uint8, labels (N)

_CIFAR_PIXELS = 3 * 32 * 32


def parse(kind: str, contents: Sequence[bytes], names: Sequence[str], classes: int) -> Part:
    """Images and labels of the training or of the test files of one version."""
    if kind == "idx":
        return parse_idx_images(contents[0], names[0]), parse_idx(contents[1], names[1], dims=1)
    if kind == "cifar-binary":
        parts = [parse_cifar_binary(c, n, classes) for c, n in zip(contents, names, strict=True)]
    else:
        parts = [parse_cifar_python(c, n) for c, n in zip(contents, names, strict=True)]
    return np.concatenate([images for images, _ in parts]), np.concatenate([labels for _, labels in parts])


def parse_idx(content: bytes, what: str, dims: int) -> np.ndarray:
    """An IDX file of unsigned bytes: two zeros, 8 for bytes, number of axes, their lengths (big endian), the bytes."""
    header = 4 + 4 * dims
    if len(content) < header or content[:4] != bytes([0, 0, 8, dims]):
        raise DataError(
            f"{what}: expected an IDX file of bytes with {dims} axes, got one that begins {content[:4].hex()}; "
            "images and labels may be exchanged, or it is another file"
        )
    shape = struct.unpack(f">{dims}I", content[4:header])
    expected, got = math.prod(shape), len(content) - header
    if expected != got:
        raise DataError(f"{what}: expected {expected} bytes for the shape {shape}, got {got}; the file is not whole")
    return np.frombuffer(content, np.uint8, offset=header).reshape(shape)


def parse_idx_images(content: bytes, what: str) -> np.ndarray:
    """Grey images (N, 1, H, W)."""
    return parse_idx(content, what, dims=3)[:, None]


def parse_cifar_binary(content: bytes, what: str, classes: int) -> Part:
    """Records of one label byte (CIFAR-10) or two, coarse and fine (CIFAR-100), and 3072 bytes of red, green, blue."""
    labels = 2 if classes == 100 else 1
    record = labels + _CIFAR_PIXELS
    if not content or len(content) % record:
        raise DataError(f"{what}: expected records of {record} bytes, got {len(content)} bytes; the file is not whole")
    records = np.frombuffer(content, np.uint8).reshape(-1, record)
    return records[:, labels:].reshape(-1, 3, 32, 32), records[:, labels - 1]


def parse_cifar_python(content: bytes, what: str) -> Part:
    """A pickled dictionary with `data` (N, 3072) and `labels` or `fine_labels`, read without executing it."""
    batch = read_pickled_dict(content, what)
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
