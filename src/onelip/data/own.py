"""Load your own images from an .npz file, or from a folder of PNG and JPEG files with one subfolder per class."""

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from onelip.core.errors import DataError
from onelip.data.formats import OWN_CAP, read_arrays
from onelip.data.image_data import ImageData, image_data_from_arrays, stratified_split
from onelip.data.image_files import IGNORED, read_pixels, resize_images, resize_pixels

_ARRAYS = (
    ("train_images", "train_labels", "test_images", "test_labels"),
    ("x_train", "y_train", "x_test", "y_test"),
)
_ENDINGS = (".png", ".jpg", ".jpeg")
HELD_OUT = 0.2  # fraction of the images of data without a split that is held out for testing
LabelledArrays = tuple[np.ndarray, np.ndarray, Sequence[str]]  # (N, C, H, W), (N), class names
_TEST_FOLDERS = ("test", "val", "validation")


# Arrays.


def load_npz(
    path: str | os.PathLike[str],
    *,
    image_size: tuple[int, int] | None = None,
    test_fraction: float = HELD_OUT,
    seed: int = 0,
    cap: int = OWN_CAP,
) -> ImageData:
    """Load your own images from an .npz file.

    The arrays are `train_images`, `train_labels`, `test_images`, `test_labels` (or `x_train`, `y_train`, `x_test`,
    `y_test`), or only `images` and `labels`. `class_names` may name the classes. Pickled objects are never read.

    Args:
        path: the file.
        image_size: (height, width) to resize the images to, by Pillow; None to keep their size.
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
    if (everything := _unsplit(arrays, path)) is not None:
        images, labels, class_names = everything
        images = resize_images(images, image_size)
        train, test, how = _split(images, labels, class_names, test_fraction, seed, path)
        return image_data_from_arrays(path.stem, train, test, class_names, str(path), how)
    for names in _ARRAYS:
        if all(name in arrays for name in names):
            x_train, y_train, x_test, y_test = (arrays[name] for name in names)
            x_train, x_test = (
                resize_images(as_images(x, f"{path}: {name}"), image_size)
                for x, name in ((x_train, names[0]), (x_test, names[2]))
            )
            train = x_train, _labels(y_train, f"{path}: {names[1]}")
            test = x_test, _labels(y_test, f"{path}: {names[3]}")
            break
    else:
        raise DataError(
            f"{path}: expected the arrays {', '.join(_ARRAYS[0])}, or images and labels, got "
            f"{', '.join(sorted(arrays)) or 'none'}; save them under these names with np.savez"
        )
    class_names = _class_names(arrays.get("class_names"), np.concatenate((train[1], test[1])), len(train[1]), path)
    return image_data_from_arrays(path.stem, train, test, class_names, str(path), "by the arrays of the file")


def _split(
    images: np.ndarray, labels: np.ndarray, class_names: Sequence[str], fraction: float, seed: int, path: Path
) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray], str]:
    """Training and test images with their labels, and how they were split."""
    if len(labels) and not 0 <= labels.min() <= labels.max() < len(class_names):
        raise DataError(f"{path}: expected labels 0 to {len(class_names) - 1}, got {labels.min()} to {labels.max()}")
    try:
        parts = stratified_split(torch.from_numpy(labels), fraction, seed, class_names)
    except DataError as error:
        raise DataError(f"{path}: {error}") from error
    kept, held = ((images[i.numpy()], labels[i.numpy()]) for i in parts)
    return kept, held, f"{fraction:.0%} of each class held out for testing, seed {seed}"


def _unsplit(arrays: dict[str, np.ndarray], path: Path) -> LabelledArrays | None:
    """Images, labels and class names of a file without a split; None if it has training and test images."""
    if any(all(name in arrays for name in names) for names in _ARRAYS) or not {"images", "labels"} <= arrays.keys():
        return None
    images, labels = as_images(arrays["images"], f"{path}: images"), _labels(arrays["labels"], f"{path}: labels")
    if len(images) != len(labels):
        raise DataError(f"{path}: expected one label for each image, got {len(images)} and {len(labels)}")
    return images, labels, _class_names(arrays.get("class_names"), labels, len(labels), path)


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
        raise DataError(
            f"{what}: expected integers (N), got {array.dtype} {array.shape}; store class indices, one for each image"
        )
    return array.astype(np.int64)


def _class_names(given: np.ndarray | None, labels: np.ndarray, count: int, path: Path) -> tuple[str, ...]:
    """Names of the classes; by default the numbers from 0, of which there may be at most one more than `count`."""
    if given is not None:
        if given.ndim != 1 or given.dtype.kind != "U":
            raise DataError(
                f"{path}: expected class_names as a list of text, got {given.dtype} {given.shape}; "
                'store np.array(["cat", "dog"])'
            )
        return tuple(str(name) for name in given)
    top = int(labels.max(initial=0))
    # Every number up to the largest label becomes a class; one huge label would create millions of empty classes.
    if top > count:
        raise DataError(f"{path}: expected labels numbered from 0 without gaps, got {top} with {count} images")
    return tuple(str(i) for i in range(top + 1))


# Folders.


def load_folder(
    path: str | os.PathLike[str],
    *,
    image_size: tuple[int, int] | None = None,
    test_fraction: float = HELD_OUT,
    seed: int = 0,
    cap: int = OWN_CAP,
) -> ImageData:
    """Load your own images from a folder with one subfolder per class. Needs pillow.

        images/train/cat/*.png   images/train/dog/*.png   images/test/cat/*.png   images/test/dog/*.png
    or  images/cat/*.png   images/dog/*.png               (test images are then held out)

    The test images may also be in val/ or validation/, which are ignored if there is a folder test/. Without
    `image_size` all images must have the same size. Classes are numbered in the alphabetical order of their folders,
    and images are ordered by name. If all images are grey there is one channel, else three.

    Args:
        path: the folder.
        image_size: (height, width) to resize the images to, without keeping their aspect ratio; None to keep their
            size.
        test_fraction: fraction of every class that is held out for testing, if the folder has no test images.
        seed: seed of the split.
        cap: maximum size of all pixels, in bytes.

    Returns:
        Training and test images with their labels.

    Raises:
        DataError: if a file is not an 8-bit PNG or JPEG image, is transparent, or has another size.
    """
    path = Path(path)
    if held := _test_folders(path):
        classes = _classes(path / "train")
        if extra := sorted(set(_classes(path / held[0])) - set(classes)):
            raise DataError(f"{path / held[0]}: expected the classes of {path / 'train'}, got also {extra[0]!r}")
        train_files, test_files = (_files(path / part, classes) for part in ("train", held[0]))
        images, labels = _read_all([*train_files, *test_files], cap, image_size)
        count = len(train_files)
        train, test = (images[:count], labels[:count]), (images[count:], labels[count:])
        unused = f"; {held[1]}/ is not used" if held[1:] else ""
        how = f"by the folders train/ and {held[0]}/{unused}"
    else:
        images, labels, classes = _read_unsplit(path, cap, image_size)
        train, test, how = _split(images, labels, classes, test_fraction, seed, path)
    return image_data_from_arrays(path.resolve().name, train, test, classes, str(path), how)


def _test_folders(path: Path) -> list[str]:
    """Names of the folders of test images beside train/; none if the folder is not split."""
    return [name for name in _TEST_FOLDERS if (path / "train").is_dir() and (path / name).is_dir()]


def _read_unsplit(path: Path, cap: int, image_size: tuple[int, int] | None, least: int = 2) -> LabelledArrays:
    classes = _classes(path, least)
    return *_read_all(_files(path, classes), cap, image_size), classes


def load_unsplit(path: Path, cap: int = OWN_CAP, image_size: tuple[int, int] | None = None) -> LabelledArrays | None:
    """All images, labels and class names of a folder or an .npz file; None if it has training and test images.

    Unlike data for training, one image of one class is enough.
    """
    if path.is_dir():
        return None if _test_folders(path) else _read_unsplit(path, cap, image_size, least=1)
    if (found := _unsplit(read_arrays(path, cap), path)) is None:
        return None
    return resize_images(found[0], image_size), *found[1:]


def _classes(path: Path, least: int = 2) -> list[str]:
    classes = sorted(entry.name for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    if len(classes) < least:
        raise DataError(
            f"{path}: expected a subfolder for each class, {least} at least, or the files of an official data set, got "
            f"{classes or 'no subfolders'}"
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
            if entry.is_dir():
                raise DataError(
                    f"{entry}: expected an image, got a folder; one folder for each class, or train/ and test/ (or "
                    "val/) with one folder for each class"
                )
            if entry.suffix.lower() not in _ENDINGS:
                raise DataError(f"{entry}: expected only {', '.join(_ENDINGS)} files; convert or remove it")
            found.append((entry, label))
        if not found:
            raise DataError(f"{folder}: no images of class {name!r}; add some or remove the class")
        files += found
    return files


def _read_all(
    files: list[tuple[Path, int]], cap: int, image_size: tuple[int, int] | None
) -> tuple[np.ndarray, np.ndarray]:
    height, width = image_size or read_pixels(files[0][0]).shape[:2]
    if len(files) * 3 * height * width > cap:
        raise DataError(
            f"expected at most {cap / 2**20:.0f} MB of pixels, got {len(files)} images of {width}x{height}; reduce "
            "their size with --image-size"
        )
    images = np.empty((len(files), 3, height, width), dtype=np.uint8)
    all_grey = True
    for row, (path, _) in zip(images, files, strict=True):
        image = read_pixels(path)  # (H, W) or (H, W, 3)
        if image.shape[:2] != (height, width) and image_size is None:
            raise DataError(
                f"{path}: expected {width}x{height} pixels as {files[0][0].name}, got "
                f"{image.shape[1]}x{image.shape[0]}; resize all images on loading with --image-size, such as "
                f"--image-size 64 (in Python image_size=(64, 64))"
            )
        if image.shape[:2] != (height, width):
            image = resize_pixels(np.ascontiguousarray(image), width, height)
        all_grey = all_grey and image.ndim == 2
        row[:] = image if image.ndim == 2 else image.transpose(2, 0, 1)
    labels = np.array([label for _, label in files], dtype=np.int64)
    return (images[:, :1].copy() if all_grey else images), labels
