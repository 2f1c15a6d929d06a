"""Images with labels for the evaluation of a network that was trained on other data."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from onelip.core.errors import DataError
from onelip.data.image_data import ImageData, check_images_and_labels, stratified_split
from onelip.data.own import HELD_OUT, load_unsplit
from onelip.data.registry import OFFICIAL, find_in, known_name


@dataclass(frozen=True, eq=False)
class LabelledImages:
    """Images and labels without a split. The constructor does not check them.

    Attributes:
        name: name of the data.
        split: which images these are: "test", "train" or "all".
        images: (N, C, H, W) uint8.
        labels: (N) int64, indices of `class_names`.
        class_names: names of the classes.
        source: path that the data were read from, for messages.
    """

    name: str
    split: Literal["test", "train", "all"]
    images: Tensor
    labels: Tensor
    class_names: tuple[str, ...]
    source: str

    def for_network(self, class_names: Sequence[str], shape: tuple[int, int, int]) -> "LabelledImages":
        """Return the images with the labels of a network; classes are matched by name, and some may be missing.

        Classes whose names are the numbers from 0, as those of an .npz file without `class_names`, are matched by
        number. Grey images are repeated for a network of three channels.

        Raises:
            DataError: if there are other classes, or images of another shape.
        """
        by_number = self.class_names == tuple(map(str, range(len(self.class_names))))
        names = {name: index for index, name in enumerate(class_names)}
        if by_number and len(self.class_names) <= len(class_names):
            names |= {name: index for index, name in enumerate(self.class_names)}
        if unknown := [name for name in self.class_names if name not in names]:
            raise DataError(
                f"{self.source}: the network has no class {unknown[0]!r}; classes of the network: "
                f"{_listed(class_names)}; classes of the data: {_listed(self.class_names)}"
            )
        images = self.images
        if images.shape[1] == 1 and shape[0] == 3:
            images = images.expand(-1, 3, -1, -1)
        if images.shape[1:] != shape:
            sizes = ["x".join(map(str, size)) for size in (shape, images.shape[1:])]
            raise DataError(f"{self.source}: the network takes images {sizes[0]}, got {sizes[1]} (channels first)")
        order = torch.tensor([names[name] for name in self.class_names])
        return replace(self, images=images, labels=order[self.labels], class_names=tuple(class_names))

    def split_as_for_training(self) -> ImageData | None:
        """Return the data with the split that `load_data` makes; None if they cannot be split."""
        try:
            kept, held = stratified_split(self.labels, HELD_OUT)
            parts = self.images[kept], self.labels[kept], self.images[held], self.labels[held]
            return ImageData(self.name, *parts, class_names=self.class_names, source=self.source)
        except DataError:
            return None


def all_labelled(path: str | os.PathLike[str], image_size: tuple[int, int] | None = None) -> LabelledImages | None:
    """Return all images of a folder or an .npz file without a split; None for other data, which have test images.

    Args:
        path: the folder or file.
        image_size: (height, width) to resize the images to; None to keep their size.
    """
    place = Path(path).expanduser()
    is_folder = place.is_dir() and not any(list(find_in(official, place)) for official in OFFICIAL.values())
    if known_name(path) is not None or not (is_folder or (place.is_file() and place.suffix == ".npz")):
        return None
    if (found := load_unsplit(place, image_size=image_size)) is None:
        return None
    arrays, class_names = found[:2], tuple(found[2])
    images, labels = (torch.from_numpy(np.require(array, requirements=["C", "W"])) for array in arrays)
    check_images_and_labels(images, labels, str(place))
    if int(labels.min()) < 0 or int(labels.max()) >= len(class_names):
        raise DataError(f"{place}: expected labels 0 to {len(class_names) - 1}, got {int(labels.max())}")
    return LabelledImages(place.resolve().stem, "all", images, labels, class_names, str(place))


def part_of(data: ImageData, split: Literal["test", "train"]) -> LabelledImages:
    """Return the test or the training images of a data set."""
    images, labels = (data.test_images, data.test_labels) if split == "test" else (data.train_images, data.train_labels)
    return LabelledImages(data.name, split, images, labels, data.class_names, data.source or data.name)


def _listed(names: Sequence[str], most: int = 20) -> str:
    return ", ".join(names[:most]) + (f", ... ({len(names)})" if len(names) > most else "")
