"""Own data as an .npz file of arrays; no pickles, no more bytes than the file's own arrays need.

Arrays `train_images`, `train_labels`, `test_images`, `test_labels` (or `x_train`, `y_train`, `x_test`, `y_test`), or
`images` and `labels`, of which a fifth is then held out for testing. Images are uint8 (N, H, W), (N, H, W, C) or
(N, C, H, W) with 1 or 3 channels; labels are whole numbers from 0. `class_names` may name the classes.
"""

import io
import math
import os
from pathlib import Path

import numpy as np
import torch

from onelip.data._archives import OWN_CAP, damaged, read_zip
from onelip.data._errors import DataError
from onelip.data._image_data import ImageData, image_data_from_arrays
from onelip.data._splits import stratified_split

_NAMES = (
    ("train_images", "train_labels", "test_images", "test_labels"),
    ("x_train", "y_train", "x_test", "y_test"),
)


def load_npz(
    path: str | os.PathLike[str], *, test_fraction: float = 0.2, seed: int = 0, cap: int = OWN_CAP
) -> ImageData:
    """Load own images from an .npz file; `test_fraction` and `seed` are for files without a split of their own."""
    path = Path(path)
    arrays = read_arrays(path, cap)
    for names in _NAMES:
        if all(name in arrays for name in names):
            x_train, y_train, x_test, y_test = (arrays[name] for name in names)
            train = _images(x_train, f"{path}: {names[0]}"), _labels(y_train, f"{path}: {names[1]}")
            test = _images(x_test, f"{path}: {names[2]}"), _labels(y_test, f"{path}: {names[3]}")
            break
    else:
        if not {"images", "labels"} <= arrays.keys():
            raise DataError(
                f"{path}: expected the arrays {', '.join(_NAMES[0])}, or images and labels, got "
                f"{', '.join(sorted(arrays)) or 'none'}; save them by these names with np.savez"
            )
        images, labels = _images(arrays["images"], f"{path}: images"), _labels(arrays["labels"], f"{path}: labels")
        if len(images) != len(labels):
            raise DataError(f"{path}: expected one label for each image, got {len(images)} and {len(labels)}")
        split = stratified_split(torch.from_numpy(labels), test_fraction, seed)
        train, test = ((images[i.numpy()], labels[i.numpy()]) for i in split)
    class_names = _class_names(arrays.get("class_names"), train[1], test[1], path)
    return image_data_from_arrays(path.stem, train, test, class_names, str(path))


def read_arrays(path: Path, cap: int = OWN_CAP) -> dict[str, np.ndarray]:
    """The arrays of an .npz file, by name; whole numbers and text only."""
    return {
        name.removesuffix(".npy"): _read_array(content, f"{path}: {name}", path)
        for name, content in read_zip(path, cap).items()
    }


def _read_array(content: bytes, what: str, path: Path) -> np.ndarray:
    # np.load would allocate what the header asks for before it has seen the data: the header is checked first.
    stream = io.BytesIO(content)
    try:
        version = np.lib.format.read_magic(stream)
        read_header = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
        shape, fortran, dtype = read_header[version](stream)
    except (ValueError, KeyError, TypeError) as error:
        raise damaged(path, f"{what} is not a numpy array: {error}") from error
    if dtype.hasobject:
        raise DataError(
            f"{what}: expected numbers or text, got Python objects, which are never read; save plain arrays"
        )
    rest = len(content) - stream.tell()
    if math.prod(shape) * dtype.itemsize != rest:
        raise damaged(path, f"{what} has {rest} bytes, its shape {shape} of {dtype} needs another number")
    array = np.frombuffer(content, dtype, offset=stream.tell())
    return array.reshape(shape, order="F" if fortran else "C")


def _images(array: np.ndarray, what: str) -> np.ndarray:
    """As (N, C, H, W)."""
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
            f"{', which can be read both ways' if first else ''}"
        )
    return array if first else array.transpose(0, 3, 1, 2)


def _labels(array: np.ndarray, what: str) -> np.ndarray:
    if array.ndim == 2 and array.shape[1] == 1:  # as Keras and MedMNIST save them
        array = array[:, 0]
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise DataError(f"{what}: expected whole numbers (N), got {array.dtype} {array.shape}")
    return array.astype(np.int64)


def _class_names(given: np.ndarray | None, train: np.ndarray, test: np.ndarray, path: Path) -> tuple[str, ...]:
    if given is not None:
        if given.ndim != 1 or given.dtype.kind != "U":
            raise DataError(f"{path}: expected class_names as a list of text, got {given.dtype} {given.shape}")
        return tuple(str(name) for name in given)
    top = int(max(train.max(initial=0), test.max(initial=0)))
    # Names are made up to the largest label; a label far beyond the images would make millions of empty classes.
    if top > len(train):
        raise DataError(f"{path}: expected labels numbered from 0 without gaps, got {top} with {len(train)} images")
    return tuple(str(i) for i in range(top + 1))
