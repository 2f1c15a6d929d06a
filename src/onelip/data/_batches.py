"""Batches from memory: uint8 until its turn, an order that can be saved and gone on with, a share for each process.

The random numbers of an epoch (the order, then the augmentation of each global batch) come from one generator and do
not depend on the number of processes: process r of R gets its part of the same global batches, changed the same way.
"""

from collections.abc import Iterator
from dataclasses import KW_ONLY, dataclass

import torch
from torch import Tensor

from onelip.data._augmentation import Augmentation
from onelip.data._errors import DataError
from onelip.data._image_data import check_images_and_labels, to_float


@dataclass(frozen=True, eq=False)
class Batch:
    """One process's part of a global batch. Unpacks as `images, labels`."""

    images: Tensor  # (n, C, H, W) float32 in [0, 1]
    labels: Tensor  # (n) int64
    indices: Tensor  # (n) where in the data these are, on the data's device
    global_size: int  # images in the global batch, over all processes: what a mean loss is to be divided by

    def __iter__(self) -> Iterator[Tensor]:
        return iter((self.images, self.labels))

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(eq=False, repr=False)
class Batches:
    """Goes through uint8 images and their labels in batches of `batch_size` over all processes.

    Iterating gives a `Batch` each time, which unpacks as float images in [0, 1] and labels, on `device`. Each iteration
    is an epoch and takes its random numbers from the generator; save `generator.get_state()` before an epoch to go on
    from there (`epoch`).

    Example:
        >>> images, labels = torch.zeros(10, 1, 8, 8, dtype=torch.uint8), torch.arange(10)
        >>> loader = batches(images, labels, 4, shuffle=True, generator=torch.Generator().manual_seed(0))
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
    augmentation: Augmentation | None = None
    device: torch.device | str | None = None  # None: where the images are
    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        check_images_and_labels(self.images, self.labels, "batches")
        if isinstance(self.batch_size, bool) or not isinstance(self.batch_size, int) or self.batch_size < 1:
            raise DataError(f"expected a batch size of at least 1, got {self.batch_size!r}")
        if not 0 <= self.rank < self.world_size:
            raise DataError(f"expected 0 <= rank < world_size, got rank {self.rank} of {self.world_size}")
        if self.drop_last and self.batch_size > len(self.images):
            raise DataError(
                f"expected a batch size of at most {len(self.images)}, the number of images, since the last incomplete "
                f"batch is dropped; got {self.batch_size}"
            )
        if self.augmentation is not None and self.augmentation.is_identity:
            self.augmentation = None
        if self.generator is None and (self.shuffle or self.augmentation is not None):
            raise DataError(
                "expected a generator to shuffle or augment with, got none; "
                "give torch.Generator().manual_seed(...), and keep it: it carries the state from epoch to epoch"
            )

    def __len__(self) -> int:
        full, rest = divmod(len(self.images), self.batch_size)
        return full if self.drop_last or not rest else full + 1

    def __iter__(self) -> Iterator[Batch]:
        return self.epoch()

    def epoch(self, skip: int = 0) -> Iterator[Batch]:
        """The batches of one epoch, without the first `skip`.

        To go on in the middle of an epoch, set the generator to its state at the beginning of that epoch and skip the
        batches that are done: their random numbers are drawn and dropped, so that all that follows is the same, bit for
        bit.
        """
        if not 0 <= skip <= len(self):
            raise DataError(f"expected to skip 0 to {len(self)} batches, got {skip}")
        return self._epoch(skip)

    def _epoch(self, skip: int) -> Iterator[Batch]:
        order = self._order()
        for number in range(len(self)):
            chosen = order[number * self.batch_size : (number + 1) * self.batch_size]
            draws = self._draws(len(chosen))
            if number >= skip:
                yield self._batch(chosen, draws)

    def _order(self) -> Tensor:
        count, device = len(self.images), self.images.device
        if not self.shuffle:
            return torch.arange(count, device=device)
        assert self.generator is not None
        order = torch.randperm(count, generator=self.generator, device=self.generator.device)
        return order.to(device)

    def _draws(self, count: int) -> Tensor | None:
        if self.augmentation is None:
            return None
        assert self.generator is not None
        return self.augmentation.draw(count, self.generator)

    def _batch(self, chosen: Tensor, draws: Tensor | None) -> Batch:
        # Parts of the ranks in order make the global batch again, and differ in size by at most one. A part may be
        # empty, but there is one for every batch: processes that wait for each other must make equally many steps.
        start, end = (len(chosen) * r // self.world_size for r in (self.rank, self.rank + 1))
        mine = chosen[start:end]
        device = self.images.device if self.device is None else self.device
        images = to_float(self.images.index_select(0, mine).to(device, non_blocking=True))
        if self.augmentation is not None and draws is not None:
            images = self.augmentation.apply(images, draws[start:end])
        labels = self.labels.index_select(0, mine.to(self.labels.device)).to(device, non_blocking=True)
        return Batch(images, labels, mine, len(chosen))


batches = Batches  # the verb, for `for images, labels in batches(...)`
