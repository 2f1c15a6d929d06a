"""The known data sets: files, checksums, URLs, class names, and the directories in which they are searched.

Checksums are of the unpacked files, so that a repacked copy is still recognised: SHA-256 where the file itself was
available and had the published MD5, else the published MD5. Those of CIFAR-100's .bin files are not published; if they
do not match, the MD5 of the archive is checked instead.

To add a data set, add an `Official` to `OFFICIAL` (and, for a new file format, a reader in `formats.py`).
"""

import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from onelip.core.errors import DataError

DIGITS_FILE = Path(__file__).parent / "digits.npz"


@dataclass(frozen=True)
class File:
    """Name, digest and size of an unpacked file."""

    name: str
    digest: str  # "md5:…" or "sha256:…"
    size: int | None = None


@dataclass(frozen=True)
class Version:
    """One form in which a data set is distributed: files in a folder, or an archive of that folder."""

    kind: Literal["idx", "cifar-binary", "cifar-python"]
    folders: tuple[str, ...]  # where the files may be; the first is the one inside the archive
    train: tuple[File, ...]
    test: tuple[File, ...]
    archive: File | None = None

    @property
    def files(self) -> tuple[File, ...]:
        """All files, training first."""
        return self.train + self.test


@dataclass(frozen=True)
class Official:
    """A data set: its versions in the order in which they are searched, and the files to download."""

    name: str
    title: str
    class_names: tuple[str, ...]
    versions: tuple[Version, ...]
    urls: tuple[str, ...]  # folders on servers, tried in this order
    downloads: tuple[File, ...]
    download_folder: str  # below the root


DIGITS = tuple("0123456789")
# fmt: off
_CIFAR10 = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_FASHION = ("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot")
_CIFAR100 = (  # alphabetical, as the authors number them
    "apple", "aquarium_fish", "baby", "bear", "beaver", "bed", "bee", "beetle", "bicycle", "bottle", "bowl", "boy",
    "bridge", "bus", "butterfly", "camel", "can", "castle", "caterpillar", "cattle", "chair", "chimpanzee", "clock",
    "cloud", "cockroach", "couch", "crab", "crocodile", "cup", "dinosaur", "dolphin", "elephant", "flatfish", "forest",
    "fox", "girl", "hamster", "house", "kangaroo", "keyboard", "lamp", "lawn_mower", "leopard", "lion", "lizard",
    "lobster", "man", "maple_tree", "motorcycle", "mountain", "mouse", "mushroom", "oak_tree", "orange", "orchid",
    "otter", "palm_tree", "pear", "pickup_truck", "pine_tree", "plain", "plate", "poppy", "porcupine", "possum",
    "rabbit", "raccoon", "ray", "road", "rocket", "rose", "sea", "seal", "shark", "shrew", "skunk", "skyscraper",
    "snail", "snake", "spider", "squirrel", "streetcar", "sunflower", "sweet_pepper", "table", "tank", "telephone",
    "television", "tiger", "tractor", "train", "trout", "tulip", "turtle", "wardrobe", "whale", "willow_tree", "wolf",
    "woman", "worm",
)
# fmt: on


def _files(table: str) -> tuple[File, ...]:
    """Parse lines of name, digest and (if known) size."""
    rows = [line.split() for line in table.strip().splitlines()]
    return tuple(File(name, digest, int(size[0]) if size else None) for name, digest, *size in rows)


def _idx_data(
    name: str, title: str, classes: tuple[str, ...], folder: str, urls: tuple[str, ...], table: str
) -> Official:
    """MNIST and similar data sets: a table of four files, then of the four .gz files to download."""
    files = _files(table)
    version = Version("idx", (name, folder), train=files[:2], test=files[2:4])
    return Official(name, title, classes, (version,), urls, downloads=files[4:], download_folder=name)


def _cifar_data(name: str, title: str, classes: tuple[str, ...], binary: Version, python: Version) -> Official:
    assert binary.archive is not None
    urls = ("https://www.cs.toronto.edu/~kriz/",)
    return Official(name, title, classes, (binary, python), urls, downloads=(binary.archive,), download_folder="")


def _cifar_version(kind: Literal["cifar-binary", "cifar-python"], folder: str, table: str) -> Version:
    """A table of the archive, the training files and the test file."""
    archive, *train, test = _files(table)
    return Version(kind, (folder,), tuple(train), (test,), archive)


OFFICIAL = {
    "mnist": _idx_data(
        "mnist",
        "MNIST: handwritten digits, 60000 + 10000 grey images 28x28",
        DIGITS,
        "MNIST/raw",
        (
            "https://ossci-datasets.s3.amazonaws.com/mnist/",
            "https://storage.googleapis.com/cvdf-datasets/mnist/",
            "http://yann.lecun.com/exdb/mnist/",
        ),
        """
        train-images-idx3-ubyte sha256:ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db 47040016
        train-labels-idx1-ubyte sha256:65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5 60008
        t10k-images-idx3-ubyte sha256:0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7 7840016
        t10k-labels-idx1-ubyte sha256:ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2 10008
        train-images-idx3-ubyte.gz md5:f68b3c2dcbeaaa9fbdd348bbdeb94873
        train-labels-idx1-ubyte.gz md5:d53e105ee54ea40749a09fcbcd1e9432
        t10k-images-idx3-ubyte.gz md5:9fb629c4189551a2d022fa330f9573f3
        t10k-labels-idx1-ubyte.gz md5:ec29112dd5afa0611ce80d1b7f02629c
        """,
    ),
    "fashion-mnist": _idx_data(
        "fashion-mnist",
        "Fashion-MNIST: clothes, 60000 + 10000 grey images 28x28",
        _FASHION,
        "FashionMNIST/raw",
        (
            "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
            "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
        ),
        """
        train-images-idx3-ubyte sha256:c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888 47040016
        train-labels-idx1-ubyte sha256:bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9 60008
        t10k-images-idx3-ubyte sha256:5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b 7840016
        t10k-labels-idx1-ubyte sha256:0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34 10008
        train-images-idx3-ubyte.gz md5:8d4fb7e6c68d591d4c3dfef9ec88bf0d
        train-labels-idx1-ubyte.gz md5:25c81989df183df01b3e8a0aad5dffbe
        t10k-images-idx3-ubyte.gz md5:bef4ecab320f06d8554ea6380940ec79
        t10k-labels-idx1-ubyte.gz md5:bb300cfdad3c16e7a12a480ee83cd310
        """,
    ),
    "cifar10": _cifar_data(
        "cifar10",
        "CIFAR-10: 50000 + 10000 colour images 32x32 of 10 classes",
        _CIFAR10,
        _cifar_version(
            "cifar-binary",
            "cifar-10-batches-bin",
            """
            cifar-10-binary.tar.gz md5:c32a1d4ab5d03f1284b67883e8d87530
            data_batch_1.bin sha256:cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5 30730000
            data_batch_2.bin sha256:a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed 30730000
            data_batch_3.bin sha256:bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67 30730000
            data_batch_4.bin sha256:014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48 30730000
            data_batch_5.bin sha256:755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add 30730000
            test_batch.bin sha256:8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b 30730000
            """,
        ),
        _cifar_version(
            "cifar-python",
            "cifar-10-batches-py",
            """
            cifar-10-python.tar.gz md5:c58f30108f718f92721af3b95e74349a
            data_batch_1 md5:c99cafc152244af753f735de768cd75f
            data_batch_2 md5:d4bba439e000b95fd0a9bffe97cbabec
            data_batch_3 md5:54ebc095f3ab1f0389bbae665268c751
            data_batch_4 md5:634d18415352ddfa80567beed471001a
            data_batch_5 md5:482c414d41f54cd18b22e5b47cb7c3cb
            test_batch md5:40351d587109b95175f43aff81a1287e
            """,
        ),
    ),
    "cifar100": _cifar_data(
        "cifar100",
        "CIFAR-100: 50000 + 10000 colour images 32x32 of 100 classes",
        _CIFAR100,
        _cifar_version(
            "cifar-binary",
            "cifar-100-binary",
            """
            cifar-100-binary.tar.gz md5:03b5dce01913d631647c71ecec9e9cb8
            train.bin md5:6172c7755cfe09b2fe270c85cebc1b15 153700000
            test.bin md5:4499cfba6c016c1be1438163640a0898 30740000
            """,
        ),
        _cifar_version(
            "cifar-python",
            "cifar-100-python",
            """
            cifar-100-python.tar.gz md5:eb9058c3a382ffc7106e4002c42a8d85
            train md5:16019d7e3df5f24257cddd939b257f8d
            test md5:f0ef6b0ae62326f3e7ffdfab6717acfc
            """,
        ),
    ),
}


# Names and directories.


@dataclass(frozen=True)
class DataStatus:
    """Whether and where a data set was found.

    Attributes:
        name: name of the data set.
        title: one-line description.
        found: the folder or archive that would be read, not yet verified; None if there is none.
        looked_in: the searched directories.
        can_fetch: whether `fetch` can download it.
    """

    name: str
    title: str
    found: Path | None
    looked_in: tuple[Path, ...]
    can_fetch: bool


def data_places(root: str | os.PathLike[str] | None = None) -> tuple[Path, ...]:
    """Return the directories in which data sets are searched, in this order. Downloads go to the first.

    Args:
        root: the only directory to search. Default: $ONELIP_DATA if it is set, then $XDG_CACHE_HOME/onelip/data
            (~/.cache/onelip/data if XDG_CACHE_HOME is not set).

    Returns:
        The directories; they need not exist.

    Examples:
        >>> [str(place) for place in data_places("downloads")]
        ['downloads']
    """
    if root is not None:
        return (Path(root).expanduser(),)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "onelip" / "data"
    own = os.environ.get("ONELIP_DATA")
    return (Path(own).expanduser(), cache) if own else (cache,)


def list_data() -> list[str]:
    """Return the names of the data sets that `load_data` can load.

    Examples:
        >>> "cifar10" in list_data()
        True
    """
    return ["digits", *OFFICIAL]


def known_name(given: str | os.PathLike[str]) -> str | None:
    """Return the official spelling of the name of a data set, or None if it is unknown.

    Examples:
        >>> known_name("CIFAR-10"), known_name("fashion_mnist"), known_name("./mnist")
        ('cifar10', 'fashion-mnist', None)
    """
    if not isinstance(given, str):
        return None

    def plain(text: str) -> str:
        return text.lower().replace("-", "").replace("_", "")

    return {plain(name): name for name in list_data()}.get(plain(given))


def absolute_source(given: str) -> str:
    """Make the path of a data set absolute; names of data sets are unchanged.

    Examples:
        >>> absolute_source("digits"), absolute_source("/images/../own.npz")
        ('digits', '/own.npz')
    """
    return given if known_name(given) else os.path.abspath(os.path.expanduser(given))


def data_status(root: str | os.PathLike[str] | None = None) -> list[DataStatus]:
    """Return the status of every known data set: whether and where it was found.

    Args:
        root: the only directory to search; see `data_places`.

    Returns:
        One entry per data set, in the order of `list_data`.

    Examples:
        >>> [(status.name, status.can_fetch) for status in data_status()][:2]
        [('digits', False), ('mnist', True)]
    """
    places = data_places(root)
    title = "Handwritten digits, 1442 + 355 grey images 8x8; part of this package"
    rows = [DataStatus("digits", title, DIGITS_FILE, (), False)]
    for official in OFFICIAL.values():
        found = next((where for place in places for _, where in find_in(official, place)), None)
        rows.append(DataStatus(official.name, official.title, found, places, True))
    return rows


def find_in(official: Official, place: Path) -> Iterator[tuple[Version, Path]]:
    """Yield the versions of a data set in a directory: the folder of the files, or the archive."""
    for version in official.versions:
        # A folder is found if any of its files exists, so that a missing file is reported.
        for folder in (*version.folders, *(f"{official.name}/{f}" for f in version.folders), official.name, "."):
            if any(find_file(place / folder, file.name) for file in version.files):
                yield version, place / folder
        for folder in ("", official.name):
            if version.archive and (place / folder / version.archive.name).is_file():
                yield version, place / folder / version.archive.name


def find_file(folder: Path, name: str) -> Path | None:
    """Return the file in the folder, gzipped or not; IDX files may also be named "train-images.idx3-ubyte"."""
    dotted = name.replace("-idx", ".idx")
    for candidate in dict.fromkeys((name, f"{name}.gz", dotted, f"{dotted}.gz")):
        if (folder / candidate).is_file():
            return folder / candidate
    return None


# Checksums.


def split_digest(digest: str) -> tuple[str, str]:
    """Split "sha256:ab12…" into ("sha256", "ab12…").

    Raises:
        DataError: if the text is not a digest.
    """
    algorithm, _, value = digest.partition(":")
    lengths = {"md5": 32, "sha256": 64}
    if lengths.get(algorithm) != len(value) or not set(value) <= set("0123456789abcdef"):
        raise DataError(f'expected a digest "md5:<32 hex digits>" or "sha256:<64 hex digits>", got {digest!r}')
    return algorithm, value


def has_digest(content: bytes | Path, digest: str) -> bool:
    """Whether bytes, or the stored bytes of a file, have this digest."""
    algorithm, value = split_digest(digest)
    if isinstance(content, bytes):
        return hashlib.new(algorithm, content, usedforsecurity=False).hexdigest() == value
    with content.open("rb") as stream:
        return hashlib.file_digest(stream, lambda: hashlib.new(algorithm, usedforsecurity=False)).hexdigest() == value
