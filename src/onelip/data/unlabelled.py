"""Load new images without labels, for prediction: files, folders, patterns and .npz files."""

import glob
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from onelip.core.errors import DataError, UsageError
from onelip.data.formats import OWN_CAP, read_arrays
from onelip.data.own import FORMATS, IGNORED, as_images, read_pixels, resize_pixels, to_grey

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
