"""Batches of images in memory, in a random order that can be resumed and split over processes.

The random numbers of an epoch (the order, then the augmentation of each global batch) come from one generator and do
not depend on the number of processes: process r of R gets its part of the same global batches, with the same
augmentation.
"""

from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass

import torch
from torch import Tensor

from onelip.core.errors import DataError
from onelip.core.images import to_float
from onelip.data.augmentation import Augmentation
from onelip.data.image_data import check_images_and_labels


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
