"""`ImageData`, the training and test images of a data set, functions that split it, and batches of images."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from onelip.core.errors import DataError
from onelip.core.images import check_labels, to_float
from onelip.data.augmentation import Augmentation


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


# ---- Batches of images in memory, in a random order that can be resumed and split over processes
#
# The random numbers of an epoch (the order, then the augmentation of each global batch) come from one generator and do
# not depend on the number of processes: process r of R gets its part of the same global batches, with the same
# augmentation.


@dataclass(frozen=True, eq=False)
class Batch:
    """The part of a global batch that one process gets. Unpacks as `images, labels`.

    Attributes:
        images: (n, C, H, W) float32 in [0, 1].
        labels: (n) int64.
        indices: (n), positions in the data set, on its device.
        global_size: number of images in the global batch, over all processes: the divisor of a mean loss.

    Examples:
        >>> images, labels = torch.zeros(3, 1, 8, 8, dtype=torch.uint8), torch.arange(3)
        >>> batch = next(iter(Batches(images, labels, 2)))
        >>> batch.images.shape, batch.indices
        (torch.Size([2, 1, 8, 8]), tensor([0, 1]))
    """

    images: Tensor
    labels: Tensor
    indices: Tensor
    global_size: int

    def __iter__(self) -> Iterator[Tensor]:
        return iter((self.images, self.labels))

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(eq=False, repr=False)
class Batches:
    """Iterate over uint8 images and their labels in batches.

    Each iteration is an epoch and yields one `Batch` at a time, which unpacks as float images in [0, 1] and labels. It
    takes its random numbers from the generator; save `generator.get_state()` before an epoch to resume it (`epoch`).

    Args:
        images: (N, C, H, W) uint8.
        labels: (N) int64.
        batch_size: number of images per batch over all processes.
        generator: random number generator; required for shuffling and augmentation.
        shuffle: draw a new order for each epoch.
        drop_last: drop the last batch if it is smaller.
        part: part of the images in an epoch, above 0 and at most 1: the first images of its order.
        augmentation: augmentation of each batch.
        device: device of the batches. Default: that of the images.
        rank: rank of this process.
        world_size: number of processes.

    Raises:
        DataError: if an argument is out of range, or a generator is missing.

    Examples:
        >>> images, labels = torch.zeros(10, 1, 8, 8, dtype=torch.uint8), torch.arange(10)
        >>> loader = Batches(images, labels, 4, shuffle=True, generator=torch.Generator().manual_seed(0))
        >>> [len(y) for x, y in loader]
        [4, 4, 2]
    """

    images: Tensor
    labels: Tensor
    batch_size: int
    _: KW_ONLY
    generator: torch.Generator | None = None
    shuffle: bool = False
    drop_last: bool = False
    part: float = 1.0
    augmentation: Augmentation | None = None
    device: torch.device | str | None = None
    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        check_images_and_labels(self.images, self.labels, "batches")
        if isinstance(self.batch_size, bool) or not isinstance(self.batch_size, int) or self.batch_size < 1:
            raise DataError(f"expected a batch size of at least 1, got {self.batch_size!r}")
        if not 0 < self.part <= 1:
            raise DataError(f"expected the part of the images in an epoch above 0 and at most 1, got {self.part!r}")
        if not 0 <= self.rank < self.world_size:
            raise DataError(f"expected 0 <= rank < world_size, got rank {self.rank} of {self.world_size}")
        if self.drop_last and self.batch_size > self.images_per_epoch:
            raise DataError(
                f"expected a batch size of at most {self.images_per_epoch}, the number of images, with drop_last=True; "
                f"got {self.batch_size}"
            )
        if self.augmentation is not None and self.augmentation.is_identity:
            self.augmentation = None
        if self.generator is None and (self.shuffle or self.augmentation is not None):
            raise DataError(
                "shuffling and augmentation need a generator: pass generator=torch.Generator().manual_seed(...), and "
                "reuse it for all epochs, since it holds the random state"
            )

    @property
    def images_per_epoch(self) -> int:
        """Number of images in an epoch."""
        return max(1, round(len(self.images) * self.part)) if len(self.images) else 0

    def __len__(self) -> int:
        full, rest = divmod(self.images_per_epoch, self.batch_size)
        return full if self.drop_last or not rest else full + 1

    def __iter__(self) -> Iterator[Batch]:
        return self.epoch()

    def epoch(self, skip: int = 0) -> Iterator[Batch]:
        """Iterate over the batches of one epoch, without the first `skip`.

        To resume in the middle of an epoch, set the generator to its state at the start of that epoch and skip the
        batches that are done. Their random numbers are drawn and discarded, so all others are the same, bit for bit.

        Args:
            skip: number of batches to skip.
        """
        if not 0 <= skip <= len(self):
            raise DataError(f"expected to skip 0 to {len(self)} batches, got {skip}")
        return self._epoch(skip)

    def _epoch(self, skip: int) -> Iterator[Batch]:
        device = self.images.device
        order = torch.arange(len(self.images), device=device)
        if self.shuffle and self.generator is not None:
            order = torch.randperm(len(order), generator=self.generator, device=self.generator.device).to(device)
        order = order[: self.images_per_epoch]
        for number in range(len(self)):
            chosen = order[number * self.batch_size : (number + 1) * self.batch_size]
            draws = None
            if self.augmentation is not None and self.generator is not None:
                draws = self.augmentation.draw(len(chosen), self.generator)
            if number >= skip:
                yield self._batch(chosen, draws)

    def _batch(self, chosen: Tensor, draws: Tensor | None) -> Batch:
        # The parts of all ranks in order are the global batch; their sizes differ by at most one. A part may be empty,
        # but every rank gets a part of every batch: synchronised processes must take the same number of steps.
        start, end = (len(chosen) * r // self.world_size for r in (self.rank, self.rank + 1))
        mine = chosen[start:end]
        device = self.images.device if self.device is None else self.device
        images = to_float(self.images.index_select(0, mine).to(device, non_blocking=True))
        if self.augmentation is not None and draws is not None:
            images = self.augmentation.apply(images, draws[start:end])
        labels = self.labels.index_select(0, mine.to(self.labels.device)).to(device, non_blocking=True)
        return Batch(images, labels, mine, len(chosen))
