"""Holding images out: seeded, the same share of every class, the same on every machine."""

import numpy as np
import torch
from torch import Tensor

from onelip.data._errors import DataError
from onelip.data._image_data import ImageData


def stratified_split(labels: Tensor, fraction: float, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Indices (kept, held out), both ascending; of every class `fraction` is held out, rounded, but at least one image.

    The order comes from the raw numbers of PCG64, which numpy promises never to change: a split is the same for ever.

    Example:
        >>> stratified_split(torch.tensor([0, 0, 1, 1]), 0.5)[1].shape
        torch.Size([2])
    """
    if not 0 < fraction < 1:
        raise DataError(f"expected a fraction between 0 and 1, got {fraction}")
    if not isinstance(seed, int) or seed < 0:
        raise DataError(f"expected a seed that is a whole number from 0 on, got {seed!r}")
    classes = labels.cpu().numpy()
    order = np.argsort(np.random.PCG64(seed).random_raw(len(classes)), kind="stable")
    held = []
    for label in np.unique(classes):
        members = order[classes[order] == label]
        if len(members) < 2:
            raise DataError(f"expected at least two images of each class to split them, got one of class {label}")
        held.append(members[: min(max(round(fraction * len(members)), 1), len(members) - 1)])
    mask = np.zeros(len(classes), dtype=bool)
    mask[np.concatenate(held)] = True
    return torch.from_numpy(np.flatnonzero(~mask)), torch.from_numpy(np.flatnonzero(mask))


def validation_split(data: ImageData, fraction: float = 0.1, seed: int = 0) -> ImageData:
    """For choosing: a part of the training images takes the place of the test images, which are not looked at."""
    kept, held = stratified_split(data.train_labels, fraction, seed)
    return ImageData(
        name=f"{data.name} (validation {fraction:g}, seed {seed})",
        train_images=data.train_images[kept],
        train_labels=data.train_labels[kept],
        test_images=data.train_images[held],
        test_labels=data.train_labels[held],
        class_names=data.class_names,
        source=data.source,
    )
