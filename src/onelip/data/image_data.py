"""`ImageData`, the training and test images of a data set, and functions that split it."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from onelip.core.errors import DataError
from onelip.core.images import check_labels


@dataclass(frozen=True, eq=False)
class ImageData:
    """Images and labels for training and testing. The constructor checks them.

    Images stay uint8; `Batches` and `to_float` convert them to floats in [0, 1].

    Attributes:
        name: name of the data set.
        train_images: (N, C, H, W) uint8.
        train_labels: (N) int64, from 0.
        test_images: (M, C, H, W) uint8.
        test_labels: (M) int64, from 0.
        class_names: one name per class.
        source: path that the data were read from, for display.
        split: how training and test images were split, for display.

    Raises:
        DataError: if shapes, types or labels are inconsistent, or a class has no training images.

    Examples:
        >>> images, labels = torch.zeros(2, 1, 8, 8, dtype=torch.uint8), torch.tensor([0, 1])
        >>> ImageData("blank", images, labels, images, labels, ("left", "right"))
        ImageData(blank: 2 + 2 images, 1x8x8, 2 classes)
    """

    name: str
    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor
    class_names: tuple[str, ...]
    source: str = ""
    split: str = ""

    def __post_init__(self) -> None:
        if len(set(self.class_names)) != len(self.class_names) or len(self.class_names) < 2:
            raise DataError(f"{self.name}: expected at least two classes with distinct names, got {self.class_names}")
        for part, images, labels in (
            ("train", self.train_images, self.train_labels),
            ("test", self.test_images, self.test_labels),
        ):
            check_images_and_labels(images, labels, f"{self.name}, {part}")
            check_labels(labels, len(self.class_names), f"{self.name}, {part}: ", DataError)
        if self.train_images.shape[1:] != self.test_images.shape[1:]:
            raise DataError(
                f"{self.name}: expected training and test images of the same shape, "
                f"got {tuple(self.train_images.shape[1:])} and {tuple(self.test_images.shape[1:])}"
            )
        # A class without training images cannot be learned, and is nearly always an error in the labels.
        counts = torch.bincount(self.train_labels, minlength=len(self.class_names))
        empty = [name for name, count in zip(self.class_names, counts.tolist(), strict=True) if count == 0]
        if empty:
            raise DataError(
                f"{self.name}: there are no training images of {', '.join(empty[:5])}"
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
        """SHA-256 of all images, labels and class names; it does not depend on where the data were read from."""
        digest = hashlib.sha256(b"onelip image data 1\n")
        digest.update("\n".join(self.class_names).encode())
        for tensor in (self.train_images, self.train_labels, self.test_images, self.test_labels):
            digest.update(f"\n{tensor.dtype} {tuple(tensor.shape)}\n".encode())
            # Little endian on every machine, so that the fingerprint of a run can be compared elsewhere.
            array = tensor.contiguous().numpy()
            digest.update((array if array.dtype == np.uint8 else array.astype("<i8")).data)
        return digest.hexdigest()

    def __repr__(self) -> str:
        channels, height, width = self.shape
        return (
            f"ImageData({self.name}: {len(self.train_labels)} + {len(self.test_labels)} images, "
            f"{channels}x{height}x{width}, {self.num_classes} classes)"
        )


def image_data_from_arrays(
    name: str,
    train: tuple[np.ndarray, np.ndarray],
    test: tuple[np.ndarray, np.ndarray],
    class_names: Sequence[str],
    source: str,
    split: str = "as published",
) -> ImageData:
    """Create `ImageData` from pairs (images, labels) of numpy arrays; labels may have any integer type."""
    # torch needs contiguous and writable arrays; arrays created from the bytes of a file are read-only.
    tensors = [
        torch.from_numpy(np.require(array, requirements=["C", "W"]))
        for images, labels in (train, test)
        for array in (images, labels.astype(np.int64))
    ]
    return ImageData(name, *tensors, class_names=tuple(class_names), source=source, split=split)


def check_images_and_labels(images: Tensor, labels: Tensor, what: str) -> None:
    """Raise a DataError unless images are uint8 (N, C, H, W) with N > 0 and labels int64 (N)."""
    if images.dtype != torch.uint8 or images.dim() != 4:
        raise DataError(
            f"{what}: expected uint8 images (N, C, H, W), got {images.dtype} {tuple(images.shape)}; "
            "scale to 0..255, round, and put the channels second"
        )
    if 0 in images.shape:
        raise DataError(f"{what}: expected at least one image of at least one pixel, got shape {tuple(images.shape)}")
    if labels.dtype != torch.int64 or labels.dim() != 1:
        raise DataError(
            f"{what}: expected int64 labels (N), got {labels.dtype} {tuple(labels.shape)}; use labels.long()"
        )
    if len(labels) != len(images):
        raise DataError(f"{what}: expected one label for each image, got {len(images)} images, {len(labels)} labels")


def stratified_split(
    labels: Tensor, fraction: float, seed: int = 0, class_names: Sequence[str] | None = None
) -> tuple[Tensor, Tensor]:
    """Split indices so that the same fraction of every class is held out.

    The order is derived from the raw output of PCG64, which numpy guarantees never to change, so a split is the same on
    every machine and in every version.

    Args:
        labels: (N) int64.
        fraction: fraction of every class to hold out, rounded to at least one image.
        seed: seed of the split.
        class_names: names of the classes, for messages.

    Returns:
        Indices of the kept and of the held-out images, both ascending.

    Raises:
        DataError: if an argument is out of range, or a class has fewer than two images.

    Examples:
        >>> stratified_split(torch.tensor([0, 0, 1, 1]), 0.5)[1].shape
        torch.Size([2])
    """
    if not 0 < fraction < 1:
        raise DataError(f"expected a fraction between 0 and 1, got {fraction}")
    if not isinstance(seed, int) or seed < 0:
        raise DataError(f"expected seed to be an integer of at least 0, got {seed!r}")
    classes = labels.cpu().numpy()
    order = np.argsort(np.random.PCG64(seed).random_raw(len(classes)), kind="stable")
    held = []
    for label in np.unique(classes):
        members = order[classes[order] == label]
        if len(members) < 2:
            name = label if class_names is None else repr(class_names[label])
            raise DataError(
                f"expected at least two images of each class to split them, got one of class {name}; "
                "remove the class, or add images"
            )
        held.append(members[: min(max(round(fraction * len(members)), 1), len(members) - 1)])
    mask = np.zeros(len(classes), dtype=bool)
    mask[np.concatenate(held)] = True
    return torch.from_numpy(np.flatnonzero(~mask)), torch.from_numpy(np.flatnonzero(mask))


def validation_split(data: ImageData, fraction: float = 0.1, seed: int = 0) -> ImageData:
    """Hold out a part of the training images as test images, to choose settings without the real test images.

    Args:
        data: the data set; its test images are not used.
        fraction: fraction of every class to hold out.
        seed: seed of the split.

    Returns:
        The data set with the held-out images as test images.

    Examples:
        >>> from onelip.data import load_data
        >>> validation_split(load_data("digits"))
        ImageData(digits (validation 0.1, seed 0): 1299 + 143 images, 1x8x8, 10 classes)
    """
    kept, held = stratified_split(data.train_labels, fraction, seed, data.class_names)
    return ImageData(
        name=f"{data.name} (validation {fraction:g}, seed {seed})",
        train_images=data.train_images[kept],
        train_labels=data.train_labels[kept],
        test_images=data.train_images[held],
        test_labels=data.train_labels[held],
        class_names=data.class_names,
        source=data.source,
        split=data.split,
    )
