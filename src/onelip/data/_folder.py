"""Own images as files: one folder for each class, PNG or JPEG, all of one size. Needs pillow.

    images/train/cat/*.png   images/train/dog/*.png   images/test/cat/*.png   images/test/dog/*.png
or  images/cat/*.png   images/dog/*.png               (a fifth of every class is then held out for testing)

Classes are numbered in the alphabetical order of their folders, images ordered by name. If all images are grey, there
is one channel, else three.
"""

import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from onelip.data._archives import OWN_CAP
from onelip.data._errors import DataError
from onelip.data._image_data import ImageData, image_data_from_arrays
from onelip.data._splits import stratified_split

if TYPE_CHECKING:
    from PIL import Image

_ENDINGS = (".png", ".jpg", ".jpeg")
_NOT_MEANT = ("thumbs.db", "desktop.ini")
_TEST_FOLDERS = ("test", "val", "validation")


def load_folder(
    path: str | os.PathLike[str], *, test_fraction: float = 0.2, seed: int = 0, cap: int = OWN_CAP
) -> ImageData:
    """Load own images from folders; `test_fraction` and `seed` are for folders without a split of their own."""
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
        kept, out = stratified_split(torch.from_numpy(labels), test_fraction, seed)
        train, test = kept.numpy(), out.numpy()
    return image_data_from_arrays(
        path.resolve().name, (images[train], labels[train]), (images[test], labels[test]), classes, str(path)
    )


def _classes(path: Path) -> list[str]:
    classes = sorted(entry.name for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith("."))
    if len(classes) < 2:
        raise DataError(
            f"{path}: expected a folder for each of at least two classes, got {classes or 'none'}; or, for an official "
            "data set, its files"
        )
    return classes


def _files(path: Path, classes: list[str]) -> list[tuple[Path, int]]:
    files = []
    for label, name in enumerate(classes):
        folder = path / name
        found = []
        for entry in sorted(folder.iterdir()) if folder.is_dir() else []:
            if entry.name.startswith(".") or entry.name.lower() in _NOT_MEANT:
                continue
            if entry.suffix.lower() not in _ENDINGS:
                raise DataError(f"{entry}: expected only {', '.join(_ENDINGS)} files, got this; convert or remove it")
            found.append((entry, label))
        if not found:
            raise DataError(f"{folder}: expected images of class {name!r}, got none; add some or remove the class")
        files += found
    return files


def _read_all(files: list[tuple[Path, int]], cap: int) -> tuple[np.ndarray, np.ndarray]:
    first = _read(files[0][0])
    shape = first.shape[:2]
    if len(files) * 3 * first.shape[0] * first.shape[1] > cap:
        raise DataError(
            f"expected at most {cap / 2**20:.0f} MB of pixels, got {len(files)} images of {shape}; make them smaller"
        )
    images = np.empty((len(files), 3, *shape), dtype=np.uint8)
    all_grey = True
    for row, (path, _) in zip(images, files, strict=True):
        image = _read(path)  # (H, W) or (H, W, 3)
        if image.shape[:2] != shape:
            raise DataError(
                f"{path}: expected {shape[1]}x{shape[0]} pixels as {files[0][0].name}, got "
                f"{image.shape[1]}x{image.shape[0]}; bring all images to one size first"
            )
        all_grey = all_grey and image.ndim == 2
        row[:] = image if image.ndim == 2 else image.transpose(2, 0, 1)
    labels = np.array([label for _, label in files], dtype=np.int64)
    return (images[:, :1].copy() if all_grey else images), labels


def _read(path: Path) -> np.ndarray:
    try:
        from PIL import Image, ImageOps, UnidentifiedImageError
    except ImportError as error:
        raise DataError("expected pillow, to read image files, got no such package; pip install pillow") from error
    try:
        with warnings.catch_warnings():
            # A small file that unpacks to a huge image: pillow only warns of it, up to a factor of two.
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(path, formats=("PNG", "JPEG")) as opened:
                opened.load()
                image = ImageOps.exif_transpose(opened)  # as a person sees it
    except (Image.DecompressionBombWarning, Image.DecompressionBombError) as error:
        raise DataError(f"{path}: expected an image of ordinary size, got {error}") from error
    except (UnidentifiedImageError, OSError, SyntaxError, ValueError) as error:
        raise DataError(f"{path}: expected a whole PNG or JPEG image, got {error}; replace or remove it") from error
    return _pixels(image, path)


def _pixels(image: "Image.Image", path: Path) -> np.ndarray:
    if image.mode not in ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr"):
        raise DataError(f"{path}: expected 8 bits for each channel, got mode {image.mode}; convert it")
    if image.mode in ("LA", "PA", "RGBA") or "transparency" in image.info:
        alpha = image.convert("RGBA").getchannel("A").getextrema()
        if alpha != (255, 255):
            raise DataError(f"{path}: expected an opaque image, got transparent pixels; put it on a background first")
    return np.asarray(image.convert("L" if image.mode in ("1", "L", "LA") else "RGB"))
