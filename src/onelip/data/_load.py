"""`load_data`: a data set by its name, or own data by their path."""

import difflib
import os
from collections.abc import Mapping
from pathlib import Path

from onelip.data._archives import read_file, read_tar
from onelip.data._checksums import bytes_match, file_matches
from onelip.data._digits import load_digits
from onelip.data._errors import ChecksumError, DataError, DataNotFound, UnknownData
from onelip.data._folder import load_folder
from onelip.data._formats import parse
from onelip.data._image_data import ImageData, image_data_from_arrays
from onelip.data._npz import load_npz
from onelip.data._official import OFFICIAL, Official, Version
from onelip.data._places import data_places, find_file, find_in, known_name, list_data


def load_data(
    name_or_path: str | os.PathLike[str],
    root: str | os.PathLike[str] | None = None,
    *,
    digests: Mapping[str, str] | None = None,
) -> ImageData:
    """Load a data set.

    Args:
        name_or_path: one of `list_data()`; or a path: an .npz file, a folder of images by class, or the files of one of
            the official data sets, as a folder or an archive.
        root: where to look for a data set named; see `data_places` for where without it.
        digests: expected digests of the unpacked files by file name ("sha256:…", "md5:…") in place of the official
            ones, for samples in the official formats. A file that is not in this table is refused.

    Example:
        >>> load_data("digits")
        ImageData(digits: 1442 + 355 images, 1x8x8, 10 classes)
    """
    name = known_name(name_or_path)
    if name == "digits":
        return load_digits()
    if name is not None:
        return _load_named(OFFICIAL[name], data_places(root), digests)
    path = Path(name_or_path).expanduser()
    if path.exists():
        return _load_path(path, digests)
    names = list_data()
    near = difflib.get_close_matches(str(name_or_path).lower(), names, n=1)
    raise UnknownData(
        f"expected one of {', '.join(names)} or a path, got {str(name_or_path)!r}, and there is no such file or folder"
        f"{f'; did you mean {near[0]!r}?' if near else ''}"
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
        f"expected {official.name} ({forms}) in {' or '.join(map(str, places))}, got nothing there; fetch it with "
        f"`onelip data fetch {official.name}`, or set ONELIP_DATA to the directory that has it"
    )


def _load_path(path: Path, digests: Mapping[str, str] | None) -> ImageData:
    if path.is_file() and path.suffix == ".npz":
        return load_npz(path)
    if path.is_file():
        for official in OFFICIAL.values():
            for version in official.versions:
                if version.archive and version.archive.name == path.name:
                    return _load_version(official, version, path, digests)
        archives = ", ".join(v.archive.name for o in OFFICIAL.values() for v in o.versions if v.archive)
        raise DataError(f"{path}: expected an .npz file or one of {archives}, got a file of another name")
    candidates = [
        (official, version, where) for official in OFFICIAL.values() for version, where in find_in(official, path)
    ]
    if not candidates:
        return load_folder(path)
    # MNIST and Fashion-MNIST have files of the same names: the checksum tells which it is.
    mismatch: ChecksumError | None = None
    for official, version, where in candidates:
        try:
            return _load_version(official, version, where, digests)
        except ChecksumError as error:
            mismatch = mismatch or error
    assert mismatch is not None
    raise mismatch


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
    """The unpacked files by name, each with the digest that it should have."""
    contents, paths = _read(official, version, where)
    for file in version.files:
        content, path = contents[file.name], paths[file.name]
        expected = file.digest if digests is None else digests.get(file.name)
        if expected is None:
            raise ChecksumError(f"{path}: expected a digest of {file.name} in the table given, got none")
        if bytes_match(content, expected):
            continue
        # The archive's own, well-known MD5 vouches for all that is in it.
        if digests is None and version.archive and where.is_file() and file_matches(where, version.archive.digest):
            break
        size = f"{len(content)} bytes"
        if digests is None and file.size is not None and len(content) < file.size:
            size = f"only {len(content)} of {file.size} bytes: it is truncated"
        raise ChecksumError(
            f"{path}: expected the file {file.name} of {official.name} with {expected}, got another one ({size}); "
            f"delete it and get it again (`onelip data fetch {official.name}`)"
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
                f"{where}: expected all files of {official.name}, got no {name}; get it again "
                f"(`onelip data fetch {official.name}`)"
            )
        paths[name] = path
    return {name: read_file(path) for name, path in paths.items()}, paths
