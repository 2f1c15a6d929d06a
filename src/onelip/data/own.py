"""Your own images: an .npz file or a folder with one subfolder per class, and new images without labels."""

import glob
import os
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from onelip.core.errors import DataError, UsageError
from onelip.core.images import check_labels
from onelip.data.formats import OWN_CAP, Part, read_arrays
from onelip.data.image_data import ImageData, check_images_and_labels, image_data_from_arrays, stratified_split
from onelip.data.registry import OFFICIAL, find_in, known_name

if TYPE_CHECKING:
    from PIL import Image

IGNORED = ("thumbs.db", "desktop.ini")  # files that file managers create
TRAINING_FORMATS = ("PNG", "JPEG")
_NEEDS_PILLOW = "image files and --image-size need pillow: pip install 'onelip[images]'"
FORMATS = (*TRAINING_FORMATS, "BMP", "GIF", "PPM", "TIFF", "WEBP")


def read_pixels(path: Path, formats: tuple[str, ...] = TRAINING_FORMATS) -> np.ndarray:
    """Return the pixels of an image file: uint8, (H, W) if it is grey, else (H, W, 3).

    Raises:
        DataError: if the file is no complete image in one of the formats, has several frames or transparent pixels, or
            does not have 8 bits for each channel.
    """
    try:
        from PIL import Image, ImageOps, UnidentifiedImageError
    except ImportError as error:
        raise DataError(_NEEDS_PILLOW) from error
    named = " or ".join((", ".join(formats[:-1]), formats[-1]))
    try:
        with warnings.catch_warnings():
            # Small files can unpack to huge images; pillow only warns up to twice its limit.
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(path, formats=formats) as opened:
                if (frames := getattr(opened, "n_frames", 1)) > 1 and formats == FORMATS:
                    raise DataError(f"{path}: expected one image, got {frames} frames; save the frames as files")
                opened.load()
                image = ImageOps.exif_transpose(opened)  # as image viewers show it
    except DataError:
        raise
    except (Image.DecompressionBombWarning, Image.DecompressionBombError) as error:
        raise DataError(f"{path}: the image is too large: {error}") from error
    except (UnidentifiedImageError, OSError, SyntaxError, ValueError) as error:
        raise DataError(f"{path}: not a complete {named} image ({error}); replace or remove it") from error
    return _pixels(image, path)


def _pixels(image: "Image.Image", path: Path) -> np.ndarray:
    if image.mode not in ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr"):
        raise DataError(f"{path}: expected 8 bits for each channel, got mode {image.mode}; convert it")
    if image.mode in ("LA", "PA", "RGBA") or "transparency" in image.info:
        alpha = image.convert("RGBA").getchannel("A").getextrema()
        if alpha != (255, 255):
            raise DataError(f"{path}: expected an opaque image, got transparent pixels; add a background")
    return np.asarray(image.convert("L" if image.mode in ("1", "L", "LA") else "RGB"))


def resize_pixels(pixels: np.ndarray, width: int, height: int) -> np.ndarray:
    """Return uint8 pixels, (H, W) or (H, W, 3), resized with Pillow's bilinear filter; it averages when it shrinks."""
    try:
        from PIL import Image
    except ImportError as error:
        raise DataError(_NEEDS_PILLOW) from error

    return np.asarray(Image.fromarray(pixels).resize((width, height), Image.Resampling.BILINEAR))


def resize_images(images: np.ndarray, size: tuple[int, int] | None) -> np.ndarray:
    """Return images (N, C, H, W) with 1 or 3 channels, each resized to (height, width); None leaves them unchanged."""
    if size is None or images.shape[2:] == size or not len(images):
        return images
    resized = np.empty((*images.shape[:2], *size), dtype=np.uint8)
    for row, image in zip(resized, images, strict=True):
        pixels = np.ascontiguousarray(image[0] if len(image) == 1 else image.transpose(1, 2, 0))
        found = resize_pixels(pixels, size[1], size[0])
        row[:] = found if found.ndim == 2 else found.transpose(2, 0, 1)
    return resized


def to_grey(pixels: np.ndarray) -> np.ndarray:
    """Return (H, W, 3) pixels as grey (H, W), weighted by luminance (ITU-R 601); grey pixels keep their values."""
    from PIL import Image

    return np.asarray(Image.fromarray(pixels).convert("L"))


_ARRAYS = (  # images and labels: for training and testing, or without a split
    (("train_images", "train_labels"), ("test_images", "test_labels")),
    (("x_train", "y_train"), ("x_test", "y_test")),
    (("images", "labels"),),
)
_ENDINGS = (".png", ".jpg", ".jpeg")
HELD_OUT = 0.2  # fraction of the images of data without a split that is held out for testing
_TEST_FOLDERS = ("test", "val", "validation")


class _Parts(NamedTuple):
    """Training and test images with their labels, or all images of data without a split."""

    parts: list[Part]
    class_names: Sequence[str]
    how: str  # they were split

    def split(self, name: str, path: Path, fraction: float, seed: int) -> ImageData:
        """The data; without a split, a fraction of each class is held out for testing."""
        if len(self.parts) == 2:
            train, test = self.parts
            return image_data_from_arrays(name, train, test, self.class_names, str(path), self.how)
        [(images, labels)] = self.parts
        check_labels(torch.from_numpy(labels), len(self.class_names), f"{path}: ", DataError)
        try:
            chosen = stratified_split(torch.from_numpy(labels), fraction, seed, self.class_names)
        except DataError as error:
            raise DataError(f"{path}: {error}") from error
        train, test = ((images[i.numpy()], labels[i.numpy()]) for i in chosen)
        how = f"{fraction:.0%} of each class held out for testing, seed {seed}"
        return image_data_from_arrays(name, train, test, self.class_names, str(path), how)


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
    return _read_npz(path, image_size, cap).split(path.stem, path, test_fraction, seed)


def _read_npz(path: Path, image_size: tuple[int, int] | None, cap: int) -> _Parts:
    arrays = read_arrays(path, cap)
    chosen = next((names for names in _ARRAYS if all(name in arrays for pair in names for name in pair)), None)
    if chosen is None:
        wanted = ", ".join(name for pair in _ARRAYS[0] for name in pair)
        raise DataError(
            f"{path}: expected the arrays {wanted}, or images and labels, got {', '.join(sorted(arrays)) or 'none'}; "
            "save them under these names with np.savez"
        )
    parts = []
    for pair in chosen:
        images, labels = (read(arrays[n], f"{path}: {n}") for read, n in zip((as_images, _labels), pair, strict=True))
        if len(images) != len(labels):
            raise DataError(
                f"{path}: expected one label for each image, got {len(images)} images, {len(labels)} labels"
            )
        parts.append((resize_images(images, image_size), labels))
    every = np.concatenate([labels for _, labels in parts])
    class_names = _class_names(arrays.get("class_names"), every, len(parts[0][1]), path)
    return _Parts(parts, class_names, "by the arrays of the file")


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
    """Names of the classes. Default: the numbers from 0 to the largest label, which must be at most `count`."""
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
    return _read_folder(path, image_size, cap).split(path.resolve().name, path, test_fraction, seed)


def _read_folder(path: Path, image_size: tuple[int, int] | None, cap: int, least: int = 2) -> _Parts:
    held = _test_folders(path)
    if not held and (path / "train").is_dir() and any(entry.is_dir() for entry in (path / "train").iterdir()):
        raise DataError(
            f"{path}: there is a folder train/, but none of {', '.join(f'{name}/' for name in _TEST_FOLDERS)}; add "
            f"one, or use {path / 'train'}: a part of each class is then held out for testing"
        )
    folders = [path / "train", path / held[0]] if held else [path]
    classes = _classes(folders[0], least)
    if held and (extra := sorted(set(_classes(folders[1])) - set(classes))):
        raise DataError(f"{folders[1]}: expected the classes of {folders[0]}, got also {extra[0]!r}")
    files = [_files(folder, classes) for folder in folders]
    images, labels = _read_all([file for part in files for file in part], cap, image_size)
    count = len(files[0])
    parts = [(images[:count], labels[:count]), (images[count:], labels[count:])][: len(files)]
    unused = f"; {held[1]}/ is not used" if held[1:] else ""
    return _Parts(parts, classes, f"by the folders train/ and {held[0]}/{unused}" if held else "")


def _test_folders(path: Path) -> list[str]:
    """Names of the folders of test images beside train/; none if the folder is not split."""
    return [name for name in _TEST_FOLDERS if (path / "train").is_dir() and (path / name).is_dir()]


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
                f"{image.shape[1]}x{image.shape[0]}; resize all images on loading: --image-size 64 for a new run, "
                "--resize for the network of a run (in Python image_size=(64, 64))"
            )
        if image.shape[:2] != (height, width):
            image = resize_pixels(np.ascontiguousarray(image), width, height)
        all_grey = all_grey and image.ndim == 2
        row[:] = image if image.ndim == 2 else image.transpose(2, 0, 1)
    labels = np.array([label for _, label in files], dtype=np.int64)
    return (images[:, :1].copy() if all_grey else images), labels


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
            hint = "; resize them with --resize" if images.shape[1] == shape[0] else ""
            raise DataError(f"{self.source}: the network takes images of {sizes[0]} pixels, got {sizes[1]}{hint}")
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
    if is_folder and _test_folders(place):
        return None
    # Unlike data for training, one image of one class is enough.
    found = _read_folder(place, image_size, OWN_CAP, 1) if is_folder else _read_npz(place, image_size, OWN_CAP)
    if len(found.parts) == 2:
        return None
    class_names = tuple(found.class_names)
    images, labels = (torch.from_numpy(np.require(array, requirements=["C", "W"])) for array in found.parts[0])
    check_images_and_labels(images, labels, str(place))
    check_labels(labels, len(class_names), f"{place}: ", DataError)
    return LabelledImages(place.resolve().stem, "all", images, labels, class_names, str(place))


def part_of(data: ImageData, split: Literal["test", "train"]) -> LabelledImages:
    """Return the test or the training images of a data set."""
    images, labels = (data.test_images, data.test_labels) if split == "test" else (data.train_images, data.train_labels)
    return LabelledImages(data.name, split, images, labels, data.class_names, data.source or data.name)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:20]) + (f", ... ({len(names)})" if len(names) > 20 else "")


# ---- Load new images without labels, for prediction: files, folders, patterns and .npz files


T = TypeVar("T")


class NoImages(UsageError, DataError):
    """A path or pattern names no file, or nothing was named."""


@dataclass(frozen=True, eq=False)
class NewImages:
    """Images without labels, from `load_images`.

    Attributes:
        images: (N, C, H, W), uint8 from files.
        names: path of each image; for an .npz file with the index, as "file.npz[3]".
        changes: how each image was changed to fit the network, such as "resized from 640x480"; None if it was not.
        skipped: an error message for each input that was skipped.
    """

    images: Tensor
    names: tuple[str, ...]
    changes: tuple[str | None, ...]
    skipped: tuple[str, ...] = ()


def load_images(
    sources: str | os.PathLike[str] | Iterable[str | os.PathLike[str]],
    shape: Sequence[int],
    *,
    resize: bool = False,
    skip_bad: bool = False,
    cap: int = OWN_CAP,
) -> NewImages:
    """Load images for a network from files.

    Grey images are repeated for a network that takes three channels. Coloured images are converted to grey for a
    network that takes one, which `changes` reports.

    Args:
        sources: one or several paths: image files (PNG, JPEG, BMP, GIF, PPM, TIFF, WebP), folders that contain only
            such files, glob patterns, and .npz files with the uint8 array `images` (or only one array).
        shape: (channels, height, width) that the network takes.
        resize: resize images of another size, without keeping their aspect ratio, instead of raising an error.
        skip_bad: skip unusable files instead of raising an error for the first one.
        cap: maximum size of all pixels, in bytes.

    Returns:
        The images in the order of the sources; those of a folder or pattern in the order of their names.

    Raises:
        DataError: if a file is not an image, has another size, or no images are left.
    """
    channels, height, width = shape
    if channels not in (1, 3):
        raise DataError(
            f"the network takes images with {channels} channels, and image files have 1 or 3; pass a tensor to predict "
            "in Python"
        )
    given = [sources] if isinstance(sources, str | os.PathLike) else list(sources)
    if not given:
        raise NoImages("no images were named")
    found: list[tuple[str, np.ndarray, str | None]] = []
    skipped: list[str] = []
    size = 0

    def attempt(work: Callable[..., Iterable[T]], *arguments: Any) -> list[T]:
        """The results of `work`; an empty list if it fails and bad input is skipped."""
        try:
            return list(work(*arguments))
        except (DataError, OSError) as error:
            named = error if isinstance(error, DataError) else DataError(f"{arguments[0]}: {error.strerror}")
            if not skip_bad:
                raise named from error
            skipped.append(str(named))
            return []

    for source in given:
        for path in attempt(_expand, source):
            new = attempt(_read, path, (channels, height, width), resize, cap)
            found += new
            size += sum(image.size for _, image, _ in new)
            if size > cap:
                raise DataError(f"{path}: more than {cap / 2**20:.0f} MB of pixels; predict fewer images at a time")
    if not found:
        raise DataError(f"no image can be used ({len(skipped)} skipped); {skipped[0]}")
    names, images, changes = zip(*found, strict=True)
    return NewImages(torch.from_numpy(np.stack(images)), names, changes, tuple(skipped))


def _expand(source: str | os.PathLike[str]) -> list[Path]:
    """The files that a source names."""
    path = Path(source).expanduser()
    if path.is_dir():
        found = [e for e in sorted(path.iterdir()) if not e.name.startswith(".") and e.name.lower() not in IGNORED]
        if not found:
            raise NoImages(f"{path}: the folder is empty")
        return found
    if path.exists():
        return [path]
    if not glob.has_magic(str(path)):
        raise NoImages(f"{path}: no such file or folder")
    matches = [Path(name) for name in sorted(glob.glob(str(path), recursive=True))]
    if not matches:
        raise NoImages(f"{source}: no file matches this pattern")
    return matches


def _read(
    path: Path, shape: tuple[int, int, int], resize: bool, cap: int
) -> Iterator[tuple[str, np.ndarray, str | None]]:
    """Names, images (C, H, W) and changes of the images of a file."""
    for name, pixels in _pixels_of(path, cap):
        yield name, *_fit(pixels, *shape, name, resize)


def _pixels_of(path: Path, cap: int) -> Iterator[tuple[str, np.ndarray]]:
    """Names and pixels, (H, W) or (H, W, 3), of the images of a file."""
    if path.is_dir():
        raise DataError(
            f"{path}: expected an image, got a folder; pass the folder itself, or a pattern: '{path.parent}/**/*.png'"
        )
    if path.suffix.lower() != ".npz":
        yield str(path), read_pixels(path, FORMATS)
        return
    arrays = read_arrays(path, cap)
    name = "images" if "images" in arrays else next(iter(arrays)) if len(arrays) == 1 else None
    if name is None:
        raise DataError(
            f"{path}: expected an array `images`, got {', '.join(sorted(arrays)) or 'none'}; save it with "
            "np.savez(path, images=images)"
        )
    images = as_images(arrays[name], f"{path}: {name}")
    if 0 in images.shape:
        raise DataError(f"{path}: {name}: expected at least one image of at least one pixel, got shape {images.shape}")
    for index, image in enumerate(images):  # (C, H, W)
        yield f"{path}[{index}]", image[0] if len(image) == 1 else image.transpose(1, 2, 0)


def _fit(
    pixels: np.ndarray, channels: int, height: int, width: int, name: str, resize: bool
) -> tuple[np.ndarray, str | None]:
    """The image as (C, H, W), and a note on each change of it."""
    changes = []
    if pixels.ndim == 3 and channels == 1:
        grey = to_grey(np.ascontiguousarray(pixels))
        if not (pixels == grey[..., None]).all():
            changes.append("converted to grey")
        pixels = grey
    if pixels.shape[:2] != (height, width):
        size = f"{pixels.shape[1]}x{pixels.shape[0]}"
        if not resize:
            raise DataError(
                f"{name}: the network takes images of {width}x{height} pixels, got {size}; resize the image, or add "
                "--resize (in Python resize=True): the radius is then for the resized image"
            )
        pixels = resize_pixels(np.ascontiguousarray(pixels), width, height)
        changes.append(f"resized from {size}")
    planes = pixels[None] if pixels.ndim == 2 else pixels.transpose(2, 0, 1)
    return np.broadcast_to(planes, (channels, height, width)).copy(), ", ".join(changes) or None
