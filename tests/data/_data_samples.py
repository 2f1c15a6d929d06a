"""Small samples in the official formats, for the tests of data; test_data_samples.py checks them.

The python batches are written opcode by opcode as Python 2's cPickle wrote the official ones, since Python 3 cannot.
"""

import gzip
import hashlib
import io
import struct
import tarfile
from pathlib import Path

import numpy as np

FOLDERS = {
    ("cifar10", "binary"): "cifar-10-batches-bin",
    ("cifar10", "python"): "cifar-10-batches-py",
    ("cifar100", "binary"): "cifar-100-binary",
    ("cifar100", "python"): "cifar-100-python",
}
IDX = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


def random_images(count: int, *shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, *shape), dtype=np.uint8)


def idx(array: np.ndarray) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def cifar_binary(images: np.ndarray, labels: np.ndarray, coarse: bool) -> bytes:
    columns = [labels[:, None] // 5] if coarse else []
    return (
        np.concatenate([*columns, labels[:, None], images.reshape(len(images), -1)], axis=1).astype(np.uint8).tobytes()
    )


class CPickle:
    """Writes pickles like cPickle of Python 2 with protocol 2."""

    def __init__(self) -> None:
        self.out, self.count = bytearray(b"\x80\x02"), 0

    def put(self) -> None:
        self.count += 1
        self.out += b"q" + bytes([self.count]) if self.count < 256 else b"r" + struct.pack("<I", self.count)

    def string(self, text: bytes) -> None:
        self.out += b"U" + bytes([len(text)]) + text if len(text) < 256 else b"T" + struct.pack("<i", len(text)) + text
        self.put()

    def integer(self, value: int) -> None:
        if 0 <= value < 256:
            self.out += b"K" + bytes([value])
        elif 0 <= value < 65536:
            self.out += b"M" + struct.pack("<H", value)
        else:
            self.out += b"J" + struct.pack("<i", value)

    def items(self, values: list[int] | list[bytes]) -> None:
        self.out += b"]"
        self.put()
        for start in range(0, len(values), 1000):  # cPickle appends a thousand at a time
            self.out += b"("
            for value in values[start : start + 1000]:
                self.integer(value) if isinstance(value, int) else self.string(value)
            self.out += b"e"

    def array(self, array: np.ndarray) -> None:
        self.out += b"cnumpy.core.multiarray\n_reconstruct\n"
        self.put()
        self.out += b"cnumpy\nndarray\n"
        self.put()
        self.out += b"K\x00\x85"
        self.string(b"b")
        self.out += b"\x87R"
        self.put()
        self.out += b"(K\x01"
        self.integer(array.shape[0])
        self.integer(array.shape[1])
        self.out += b"\x86cnumpy\ndtype\n"
        self.put()
        self.string(b"u1")
        self.out += b"K\x00K\x01\x87R"
        self.put()
        self.out += b"(K\x03"
        self.string(b"|")
        self.out += b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89"
        self.string(array.tobytes())
        self.out += b"tb"

    def dictionary(self, entries: dict[bytes, object]) -> bytes:
        self.out += b"}"
        self.put()
        self.out += b"("
        for key, value in entries.items():
            self.string(key)
            if isinstance(value, np.ndarray):
                self.array(value)
            elif isinstance(value, list):
                self.items(value)
            else:
                assert isinstance(value, bytes)
                self.string(value)
        return bytes(self.out + b"u.")


def cifar_python(images: np.ndarray, labels: np.ndarray, coarse: bool) -> bytes:
    names = [f"image_{i:06}.png".encode() for i in range(len(labels))]
    fine: dict[bytes, object] = {b"batch_label": b"training batch 1 of 5", b"labels": labels.tolist()}
    if coarse:
        fine = {b"fine_labels": labels.tolist(), b"coarse_labels": (labels // 5).tolist()}
    return CPickle().dictionary({**fine, b"data": images.reshape(len(images), -1), b"filenames": names})


def tar_gz(members: dict[str, bytes]) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w:gz") as archive:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return out.getvalue()


def digests_of(files: dict[str, bytes]) -> dict[str, str]:
    return {name: f"sha256:{hashlib.sha256(content).hexdigest()}" for name, content in files.items()}


class CifarSample:
    """CIFAR-10 or -100 with few images: files, digests, and the arrays that loading must give."""

    def __init__(self, name: str, version: str) -> None:
        classes, batches = (10, 5) if name == "cifar10" else (100, 1)
        self.folder = FOLDERS[name, version]
        make = cifar_binary if version == "binary" else cifar_python
        ending = ".bin" if version == "binary" else ""
        names = [f"data_batch_{i + 1}" for i in range(5)] + ["test_batch"] if batches == 5 else ["train", "test"]
        images = [random_images(classes + i, 3, 32, 32, seed=i) for i in range(batches + 1)]
        labels = [np.arange(classes + i)[::-1] % classes for i in range(batches + 1)]
        self.files = {n + ending: make(x, y, classes == 100) for n, x, y in zip(names, images, labels, strict=True)}
        self.digests = digests_of(self.files)
        self.train_images, self.test_images = np.concatenate(images[:-1]), images[-1]
        self.train_labels, self.test_labels = np.concatenate(labels[:-1]), labels[-1]

    def write_folder(self, root: Path) -> Path:
        (root / self.folder).mkdir(parents=True)
        for name, content in self.files.items():
            (root / self.folder / name).write_bytes(content)
        return root / self.folder

    def archive(self) -> bytes:
        extra = {f"{self.folder}/readme.html": b"<html>", f"{self.folder}/batches.meta": b"not read"}
        return tar_gz({**extra, **{f"{self.folder}/{name}": content for name, content in self.files.items()}})


class IdxSample:
    """MNIST with few images of 4x5."""

    def __init__(self, seed: int = 0) -> None:
        self.train_images, self.test_images = random_images(20, 4, 5, seed=seed), random_images(10, 4, 5, seed=seed + 1)
        self.train_labels, self.test_labels = (np.arange(n, dtype=np.uint8) % 10 for n in (20, 10))
        arrays = (self.train_images, self.train_labels, self.test_images, self.test_labels)
        self.files = {name: idx(array) for name, array in zip(IDX, arrays, strict=True)}
        self.digests = digests_of(self.files)

    def write(self, folder: Path, packed: bool = False, dotted: bool = False) -> Path:
        folder.mkdir(parents=True)
        for name, content in self.files.items():
            name = name.replace("-idx", ".idx") if dotted else name
            (folder / (name + ".gz" * packed)).write_bytes(gzip.compress(content) if packed else content)
        return folder
