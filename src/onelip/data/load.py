"""`onelip.data.load_data`: load a data set by name, or your own data by path."""

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from onelip.core.errors import ChecksumError, DataError, DataNotFound, UnknownData, did_you_mean
from onelip.data.formats import damaged, parse, read_arrays, read_file, read_tar
from onelip.data.image_data import ImageData, image_data_from_arrays
from onelip.data.own import load_folder, load_npz, resize_images
from onelip.data.registry import (
    DIGITS,
    DIGITS_FILE,
    OFFICIAL,
    Official,
    Version,
    data_places,
    find_file,
    find_in,
    has_digest,
    known_name,
    list_data,
)

_DIGITS_DIGEST = "sha256:b3b9c8cc11d765ce4264d8748bf3edbafa5038d91c93cf713ddbd6ae8652b410"


def load_data(
    name_or_path: str | os.PathLike[str],
    root: str | os.PathLike[str] | None = None,
    *,
    image_size: tuple[int, int] | None = None,
    digests: Mapping[str, str] | None = None,
) -> ImageData:
    """Load a data set.

    Args:
        name_or_path: one of `list_data()`; or a path: an .npz file, a folder of images by class, or the files of an
            official data set, as a folder or an archive.
        root: directory in which a named data set is searched. Default: those of `data_places()`.
        image_size: (height, width) to resize the images to, by Pillow's bilinear filter, without keeping their aspect
            ratio; None to keep their size.
        digests: expected digests of the unpacked files by file name ("sha256:…", "md5:…"), instead of the official
            ones, for samples in the official formats. Files without a digest raise a ChecksumError.

    Returns:
        Training and test images with their labels.

    Raises:
        DataNotFound: if the data set is in none of the directories, or the name is unknown.
        ChecksumError: if a file is not the official one.
        DataError: if the data cannot be used.

    Examples:
        >>> load_data("digits")
        ImageData(digits: 1442 + 355 images, 1x8x8, 10 classes)
    """
    name, path = known_name(name_or_path), Path(name_or_path).expanduser()
    if name is not None:
        data = load_digits() if name == "digits" else _load_named(OFFICIAL[name], data_places(root), digests)
        return _resized(data, image_size)
    if path.is_file() and path.suffix == ".npz":
        return load_npz(path, image_size=image_size)
    if path.exists():
        found = _load_official(path, digests)
        return load_folder(path, image_size=image_size) if found is None else _resized(found, image_size)
    names, given = list_data(), str(name_or_path)
    raise UnknownData(
        f"{given!r} is neither one of {', '.join(names)} nor an existing file or folder{did_you_mean(given, names)}"
    )


def load_digits() -> ImageData:
    """Load the handwritten digits included in the package: 1442 training and 355 test images, (1, 8, 8).

    From "Optical Recognition of Handwritten Digits" (E. Alpaydin, C. Kaynak, UCI Machine Learning Repository, 1998, CC
    BY 4.0), as in scikit-learn (`sklearn.datasets.load_digits`). Their values 0 to 16 are scaled to 0 to 255. The split
    is fixed: in each class every fifth image is a test image.

    Returns:
        Training and test images with their labels.

    Examples:
        >>> load_digits()
        ImageData(digits: 1442 + 355 images, 1x8x8, 10 classes)
    """
    if not has_digest(DIGITS_FILE, _DIGITS_DIGEST):
        raise damaged(DIGITS_FILE, "wrong checksum", "reinstall onelip")
    arrays = read_arrays(DIGITS_FILE)
    values, labels = arrays["images"].astype(np.int64), arrays["labels"]  # (1797, 8, 8) of 0..16, (1797)
    images = ((values * 255 + 8) // 16).astype(np.uint8)[:, None]
    test = np.zeros(len(labels), dtype=bool)
    for digit in range(10):
        test[np.flatnonzero(labels == digit)[4::5]] = True
    return image_data_from_arrays(
        "digits", (images[~test], labels[~test]), (images[test], labels[test]), DIGITS, str(DIGITS_FILE)
    )


def _load_named(official: Official, places: tuple[Path, ...], digests: Mapping[str, str] | None) -> ImageData:
    for place in places:
        for version, where in find_in(official, place):
            return _load_version(official, version, where, digests)
    forms = ", ".join(
        f"{v.folders[0]}{f' or {v.archive.name}' if v.archive else ' with the four IDX files'}"
        for v in official.versions
    )
    raise DataNotFound(
        f"{official.name} ({forms}) was not found in {' or '.join(map(str, places))}; download it with "
        f"`onelip data fetch {official.name}`, or set ONELIP_DATA to the directory that contains it"
    )


def _resized(data: ImageData, size: tuple[int, int] | None) -> ImageData:
    if size is None:
        return data
    train, test = (resize_images(images.numpy(), size) for images in (data.train_images, data.test_images))
    return replace(data, train_images=torch.from_numpy(train), test_images=torch.from_numpy(test))


def _load_official(path: Path, digests: Mapping[str, str] | None) -> ImageData | None:
    """The official data set in an archive or a folder; None if the folder has none of its files."""
    if path.is_file():
        archives = {v.archive.name: (o, v) for o in OFFICIAL.values() for v in o.versions if v.archive}
        if path.name not in archives:
            raise DataError(f"{path}: expected an .npz file or one of {', '.join(archives)}")
        return _load_version(*archives[path.name], path, digests)
    candidates = [
        (official, version, where) for official in OFFICIAL.values() for version, where in find_in(official, path)
    ]
    # MNIST and Fashion-MNIST have files with the same names; their checksums differ.
    mismatches = []
    for official, version, where in candidates:
        try:
            return _load_version(official, version, where, digests)
        except ChecksumError as error:
            mismatches.append(error)
    if mismatches:
        raise mismatches[0]
    return None


def _load_version(official: Official, version: Version, where: Path, digests: Mapping[str, str] | None) -> ImageData:
    contents = _read_verified(official, version, where, digests)
    classes = len(official.class_names)
    train, test = (
        parse(version.kind, [contents[f.name] for f in files], [f"{where}: {f.name}" for f in files], classes)
        for files in (version.train, version.test)
    )
    return image_data_from_arrays(official.name, train, test, official.class_names, str(where))


def _read_verified(
    official: Official, version: Version, where: Path, digests: Mapping[str, str] | None
) -> dict[str, bytes]:
    """Read the unpacked files by name and check their digests."""
    contents, paths = _read(official, version, where)
    for file in version.files:
        content, path = contents[file.name], paths[file.name]
        expected = file.digest if digests is None else digests.get(file.name)
        if expected is None:
            raise ChecksumError(f"{path}: digests has no entry for {file.name!r}")
        if has_digest(content, expected):
            continue
        # The published MD5 of the archive covers all of its members.
        if digests is None and version.archive and where.is_file() and has_digest(where, version.archive.digest):
            break
        size = f"{len(content)} bytes"
        if digests is None and file.size is not None and len(content) < file.size:
            size = f"only {len(content)} of {file.size} bytes: it is truncated"
        raise ChecksumError(
            f"{path}: {file.name} of {official.name} has the wrong checksum ({size}), expected {expected}; "
            f"delete it and download it again: onelip data fetch {official.name}"
        )
    return contents


def _read(official: Official, version: Version, where: Path) -> tuple[dict[str, bytes], dict[str, Path]]:
    names = [file.name for file in version.files]
    if where.is_file():
        members = read_tar(where, [f"{version.folders[0]}/{name}" for name in names])
        return {name: members[f"{version.folders[0]}/{name}"] for name in names}, dict.fromkeys(names, where)
    paths = {}
    for name in names:
        path = find_file(where, name)
        if path is None:
            raise DataNotFound(
                f"{where}: {name} of {official.name} is missing; download it: onelip data fetch {official.name}"
            )
        paths[name] = path
    return {name: read_file(path) for name, path in paths.items()}, paths
