"""Load your own images from an .npz file, or from a folder of PNG and JPEG files with one subfolder per class."""

import os
from pathlib import Path

import numpy as np
import torch

from onelip.data.errors import DataError
from onelip.data.formats import OWN_CAP, read_arrays
from onelip.data.image_data import ImageData, image_data_from_arrays, stratified_split
from onelip.data.image_files import IGNORED, read_pixels

_ARRAYS = (
    ("train_images", "train_labels", "test_images", "test_labels"),
    ("x_train", "y_train", "x_test", "y_test"),
)
_ENDINGS = (".png", ".jpg", ".jpeg")
_TEST_FOLDERS = ("test", "val", "validation")


# Arrays.


def load_npz(
    path: str | os.PathLike[str], *, test_fraction: float = 0.2, seed: int = 0, cap: int = OWN_CAP
) -> ImageData:
    """Load your own images from an .npz file.

    The arrays are `train_images`, `train_labels`, `test_images`, `test_labels` (or `x_train`, `y_train`, `x_test`,
    `y_test`), or only `images` and `labels`. `class_names` may name the classes. Pickled objects are never read.

    Args:
        path: the file.
        test_fraction: fraction of every class that is held out for testing, if the file has no test images.
        seed: seed of the split.
        cap: maximum size of the unpacked file, in bytes.

    Returns:
        Training and test images with their labels.

    Shape:
        - images: uint8 (N, H, W), (N, H, W, C) or (N, C, H, W) with 1 or 3 channels.
        - labels: (N) integers from 0.

    Raises:
        DataError: if arrays are missing or have the wrong type or shape.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     np.savez(f"{folder}/own.npz", images=np.zeros((10, 8, 8), np.uint8), labels=np.arange(10) % 2)
        ...     load_npz(f"{folder}/own.npz")
        ImageData(own: 8 + 2 images, 1x8x8, 2 classes)
    """
    path = Path(path)
    arrays = read_arrays(path, cap)
    for names in _ARRAYS:
        if all(name in arrays for name in names):
            x_train, y_train, x_test, y_test = (arrays[name] for name in names)
            train = as_images(x_train, f"{path}: {names[0]}"), _labels(y_train, f"{path}: {names[1]}")
            test = as_images(x_test, f"{path}: {names[2]}"), _labels(y_test, f"{path}: {names[3]}")
            break
    else:
        if not {"images", "labels"} <= arrays.keys():
            raise DataError(
                f"{path}: expected the arrays {', '.join(_ARRAYS[0])}, or images and labels, got "
                f"{', '.join(sorted(arrays)) or 'none'}; save them under these names with np.savez"
            )
        images, labels = as_images(arrays["images"], f"{path}: images"), _labels(arrays["labels"], f"{path}: labels")
        if len(images) != len(labels):
            raise DataError(f"{path}: expected one label for each image, got {len(images)} and {len(labels)}")
        split = stratified_split(torch.from_numpy(labels), test_fraction, seed)
        train, test = ((images[i.numpy()], labels[i.numpy()]) for i in split)
    class_names = _class_names(arrays.get("class_names"), train[1], test[1], path)
    return image_data_from_arrays(path.stem, train, test, class_names, str(path))


def as_images(array: np.ndarray, what: str) -> np.ndarray:
    """Images as (N, C, H, W)."""
    if array.dtype != np.uint8:
        raise DataError(
            f"{what}: expected uint8 images, got {array.dtype}; scale to 0..255 and save with .round().astype(np.uint8)"
        )
    if array.ndim == 3:
        return array[:, None]
    first, last = (array.ndim == 4 and array.shape[axis] in (1, 3) for axis in (1, 3))
    if first == last:  # neither, or both
        raise DataError(
            f"{what}: expected (N, H, W), (N, H, W, C) or (N, C, H, W) with 1 or 3 channels, got {array.shape}"
            f"{', which is ambiguous' if first else ''}"
        )
    return array if first else array.transpose(0, 3, 1, 2)


def _labels(array: np.ndarray, what: str) -> np.ndarray:
    if array.ndim == 2 and array.shape[1] == 1:  # as Keras and MedMNIST save them
        array = array[:, 0]
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise DataError(f"{what}: expected integers (N), got {array.dtype} {array.shape}")
    return array.astype(np.int64)


def _class_names(given: np.ndarray | None, train: np.ndarray, test: np.ndarray, path: Path) -> tuple[str, ...]:
    if given is not None:
        if given.ndim != 1 or given.dtype.kind != "U":
            raise DataError(f"{path}: expected class_names as a list of text, got {given.dtype} {given.shape}")
        return tuple(str(name) for name in given)
    top = int(max(train.max(initial=0), test.max(initial=0)))
    # Every number up to the largest label becomes a class; one huge label would create millions of empty classes.
    if top > len(train):
        raise DataError(f"{path}: expected labels numbered from 0 without gaps, got {top} with {len(train)} images")
    return tuple(str(i) for i in range(top + 1))


# Folders.


def load_folder(
    path: str | os.PathLike[str], *, test_fraction: float = 0.2, seed: int = 0, cap: int = OWN_CAP
) -> ImageData:
    """Load your own images from a folder with one subfolder per class. Needs pillow.

        images/train/cat/*.png   images/train/dog/*.png   images/test/cat/*.png   images/test/dog/*.png
    or  images/cat/*.png   images/dog/*.png               (test images are then held out)

    All images must have the same size. Classes are numbered in the alphabetical order of their folders, and images are
    ordered by name. If all images are grey there is one channel, else three.

    Args:
        path: the folder.
        test_fraction: fraction of every class that is held out for testing, if the folder has no test images.
        seed: seed of the split.
        cap: maximum size of all pixels, in bytes.

    Returns:
        Training and test images with their labels.

    Raises:
        DataError: if a file is not an 8-bit PNG or JPEG image, is transparent, or has another size.
    """
    path = Path(path)
    held = [name for name in _TEST_FOLDERS if (path / name).is_dir()]
    if (path / "train").is_dir() and held:
        classes = _classes(path / "train")
        if extra := sorted(set(_classes(path / held[0])) - set(classes)):
            raise DataError(f"{path / held[0]}: expected the classes of {path / 'train'}, got also {extra[0]!r}")
        train_files, test_files = (_files(path / part, classes) for part in ("train", held[0]))
        images, labels = _read_all([*train_files, *test_files], cap)
        train, test = np.arange(len(train_files)), np.arange(len(train_files), len(labels))
    else:
        classes = _classes(path)
        images, labels = _read_all(_files(path, classes), cap)
        train, test = (i.numpy() for i in stratified_split(torch.from_numpy(labels), test_fraction, seed))
    return image_data_from_arrays(
        path.resolve().name, (images[train], labels[train]), (images[test], labels[test]), classes, str(path)
    )


def _classes(path: Path) -> list[str]:
    classes = sorted(entry.name for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    if len(classes) < 2:
        raise DataError(
            f"{path}: expected a subfolder for each of at least two classes, or the files of an official data set, "
            f"got {classes or 'no subfolders'}"
        )
    return classes


def _files(path: Path, classes: list[str]) -> list[tuple[Path, int]]:
    files = []
    for label, name in enumerate(classes):
        folder = path / name
        found = []
        for entry in sorted(folder.iterdir()) if folder.is_dir() else []:
            if entry.name.startswith(".") or entry.name.lower() in IGNORED:
                continue
            if entry.suffix.lower() not in _ENDINGS:
                raise DataError(f"{entry}: expected only {', '.join(_ENDINGS)} files; convert or remove it")
            found.append((entry, label))
        if not found:
            raise DataError(f"{folder}: no images of class {name!r}; add some or remove the class")
        files += found
    return files


def _read_all(files: list[tuple[Path, int]], cap: int) -> tuple[np.ndarray, np.ndarray]:
    height, width = read_pixels(files[0][0]).shape[:2]
    if len(files) * 3 * height * width > cap:
        raise DataError(
            f"expected at most {cap / 2**20:.0f} MB of pixels, got {len(files)} images of {width}x{height}; reduce "
            "their size"
        )
    images = np.empty((len(files), 3, height, width), dtype=np.uint8)
    all_grey = True
    for row, (path, _) in zip(images, files, strict=True):
        image = read_pixels(path)  # (H, W) or (H, W, 3)
        if image.shape[:2] != (height, width):
            raise DataError(
                f"{path}: expected {width}x{height} pixels as {files[0][0].name}, got "
                f"{image.shape[1]}x{image.shape[0]}; resize all images to one size"
            )
        all_grey = all_grey and image.ndim == 2
        row[:] = image if image.ndim == 2 else image.transpose(2, 0, 1)
    labels = np.array([label for _, label in files], dtype=np.int64)
    return (images[:, :1].copy() if all_grey else images), labels
