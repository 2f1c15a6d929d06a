"""What every source of images gives: one frozen record, checked when it is made, with a fingerprint of its content."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from onelip.data._errors import DataError


@dataclass(frozen=True, eq=False)
class ImageData:
    """Images for training and testing, uint8 until their batch (`to_float`, `batches`)."""

    name: str
    train_images: Tensor  # (N, C, H, W) uint8
    train_labels: Tensor  # (N) int64
    test_images: Tensor  # (M, C, H, W) uint8
    test_labels: Tensor  # (M) int64
    class_names: tuple[str, ...]
    source: str = ""  # where it was read from, for people

    def __post_init__(self) -> None:
        if len(set(self.class_names)) != len(self.class_names) or len(self.class_names) < 2:
            raise DataError(f"{self.name}: expected at least two classes of different names, got {self.class_names}")
        for part, images, labels in (
            ("train", self.train_images, self.train_labels),
            ("test", self.test_images, self.test_labels),
        ):
            check_images_and_labels(images, labels, f"{self.name}, {part}")
            _check_range(labels, len(self.class_names), f"{self.name}, {part}")
        if self.train_images.shape[1:] != self.test_images.shape[1:]:
            raise DataError(
                f"{self.name}: expected test images of the shape of the training images, "
                f"got {tuple(self.train_images.shape[1:])} and {tuple(self.test_images.shape[1:])}"
            )
        # A class without training images can never be learned, and is nearly always a mistake of labelling.
        counts = torch.bincount(self.train_labels, minlength=len(self.class_names))
        empty = [name for name, count in zip(self.class_names, counts.tolist(), strict=True) if count == 0]
        if empty:
            raise DataError(
                f"{self.name}: expected training images of every class, got none of {', '.join(empty[:5])}"
                f"{', ...' if len(empty) > 5 else ''}; add some or remove the class"
            )

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return len(self.class_names)

    @property
    def shape(self) -> tuple[int, int, int]:
        """(channels, height, width) of every image."""
        channels, height, width = self.train_images.shape[1:]
        return channels, height, width

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of all images, labels and class names: equal exactly when the data are, wherever they came from."""
        digest = hashlib.sha256(b"onelip image data 1\n")
        digest.update("\n".join(self.class_names).encode())
        for tensor in (self.train_images, self.train_labels, self.test_images, self.test_labels):
            digest.update(f"\n{tensor.dtype} {tuple(tensor.shape)}\n".encode())
            # Little endian whatever the machine, so that the fingerprint travels with a run.
            array = tensor.contiguous().numpy()
            digest.update((array if array.dtype == np.uint8 else array.astype("<i8")).data)
        return digest.hexdigest()

    def __repr__(self) -> str:
        channels, height, width = self.shape
        return (
            f"ImageData({self.name}: {len(self.train_labels)} + {len(self.test_labels)} images, "
            f"{channels}x{height}x{width}, {self.num_classes} classes)"
        )


def to_float(images: Tensor) -> Tensor:
    """uint8 images as float32 x/255, in [0, 1]: the one input scaling of the library, for training and certifying."""
    if images.dtype != torch.uint8:
        raise DataError(f"expected uint8 images, got {images.dtype}; floats need no conversion if they are in [0, 1]")
    return images.to(torch.float32).div_(255)


def image_data_from_arrays(
    name: str,
    train: tuple[np.ndarray, np.ndarray],
    test: tuple[np.ndarray, np.ndarray],
    class_names: Sequence[str],
    source: str,
) -> ImageData:
    """Make the record of numpy arrays; labels may have any integer type."""
    return ImageData(
        name=name,
        train_images=_own_tensor(train[0]),
        train_labels=torch.from_numpy(train[1].astype(np.int64)),
        test_images=_own_tensor(test[0]),
        test_labels=torch.from_numpy(test[1].astype(np.int64)),
        class_names=tuple(class_names),
        source=source,
    )


def _own_tensor(array: np.ndarray) -> Tensor:
    """Contiguous and writable: torch wants both, and arrays made of a file's bytes are read-only."""
    return torch.from_numpy(np.require(array, requirements=["C", "W"]))


def check_images_and_labels(images: Tensor, labels: Tensor, what: str) -> None:
    """Refuse all but uint8 images (N, C, H, W) with N > 0 and int64 labels (N)."""
    if images.dtype != torch.uint8 or images.dim() != 4:
        raise DataError(
            f"{what}: expected uint8 images (N, C, H, W), got {images.dtype} {tuple(images.shape)}; "
            "scale to 0..255, round, and put the channels second"
        )
    if 0 in images.shape:
        raise DataError(f"{what}: expected at least one image of at least one pixel, got shape {tuple(images.shape)}")
    if labels.dtype != torch.int64 or labels.dim() != 1:
        raise DataError(f"{what}: expected int64 labels (N), got {labels.dtype} {tuple(labels.shape)}")
    if len(labels) != len(images):
        raise DataError(f"{what}: expected one label for each image, got {len(images)} images, {len(labels)} labels")


def _check_range(labels: Tensor, classes: int, what: str) -> None:
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high >= classes:
        where = int(((labels < 0) | (labels >= classes)).nonzero()[0])
        raise DataError(
            f"{what}: expected labels 0 to {classes - 1} ({classes} classes), got {int(labels[where])} at index {where}"
            "; number the classes from 0 and name each of them"
        )
