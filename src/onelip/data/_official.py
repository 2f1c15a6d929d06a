"""The table of official data sets: files, checksums, addresses, class names. Nothing here reads anything.

Checksums are of the unpacked files, so that a copy that somebody packed again is still recognised. SHA-256 where the
file itself was at hand and had the published MD5; else the published MD5. Those of CIFAR-100's .bin files are published
nowhere official and come from a public program that reads them: where they do not fit, the archive's own MD5 decides.
"""

from dataclasses import dataclass
from typing import Literal

from onelip.data._class_names import CIFAR10, CIFAR100, DIGITS, FASHION


@dataclass(frozen=True)
class File:
    """A file as it is when unpacked."""

    name: str
    digest: str  # "md5:…" or "sha256:…"
    size: int | None = None


@dataclass(frozen=True)
class Version:
    """One form in which a data set is distributed: its files in a folder, or an archive that holds that folder."""

    kind: Literal["idx", "cifar-binary", "cifar-python"]
    folders: tuple[str, ...]  # where the files may lie; the first is the one inside the archive
    train: tuple[File, ...]
    test: tuple[File, ...]
    archive: File | None = None

    @property
    def files(self) -> tuple[File, ...]:
        """All files, training first."""
        return self.train + self.test


@dataclass(frozen=True)
class Official:
    """A data set, its versions in the order in which they are looked for, and what to download."""

    name: str
    title: str
    class_names: tuple[str, ...]
    versions: tuple[Version, ...]
    urls: tuple[str, ...]  # folders on servers, tried in this order
    downloads: tuple[File, ...]
    download_folder: str  # below the root


def _cifar10_binary() -> Version:
    sums = (
        "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
        "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
        "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
        "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
        "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
    )
    test = "sha256:8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b"
    return Version(
        kind="cifar-binary",
        folders=("cifar-10-batches-bin",),
        train=tuple(File(f"data_batch_{i}.bin", f"sha256:{s}", 30_730_000) for i, s in enumerate(sums, 1)),
        test=(File("test_batch.bin", test, 30_730_000),),
        archive=File("cifar-10-binary.tar.gz", "md5:c32a1d4ab5d03f1284b67883e8d87530"),
    )


def _cifar10_python() -> Version:
    sums = (
        "c99cafc152244af753f735de768cd75f",
        "d4bba439e000b95fd0a9bffe97cbabec",
        "54ebc095f3ab1f0389bbae665268c751",
        "634d18415352ddfa80567beed471001a",
        "482c414d41f54cd18b22e5b47cb7c3cb",
    )
    return Version(
        kind="cifar-python",
        folders=("cifar-10-batches-py",),
        train=tuple(File(f"data_batch_{i}", f"md5:{s}") for i, s in enumerate(sums, 1)),
        test=(File("test_batch", "md5:40351d587109b95175f43aff81a1287e"),),
        archive=File("cifar-10-python.tar.gz", "md5:c58f30108f718f92721af3b95e74349a"),
    )


def _cifar100_binary() -> Version:
    return Version(
        kind="cifar-binary",
        folders=("cifar-100-binary",),
        train=(File("train.bin", "md5:6172c7755cfe09b2fe270c85cebc1b15", 153_700_000),),
        test=(File("test.bin", "md5:4499cfba6c016c1be1438163640a0898", 30_740_000),),
        archive=File("cifar-100-binary.tar.gz", "md5:03b5dce01913d631647c71ecec9e9cb8"),
    )


def _cifar100_python() -> Version:
    return Version(
        kind="cifar-python",
        folders=("cifar-100-python",),
        train=(File("train", "md5:16019d7e3df5f24257cddd939b257f8d"),),
        test=(File("test", "md5:f0ef6b0ae62326f3e7ffdfab6717acfc"),),
        archive=File("cifar-100-python.tar.gz", "md5:eb9058c3a382ffc7106e4002c42a8d85"),
    )


IDX_FILES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")


def _idx(folders: tuple[str, ...], *sums: str) -> Version:
    sizes = (47_040_016, 60_008, 7_840_016, 10_008)
    files = tuple(File(n, f"sha256:{s}", size) for n, s, size in zip(IDX_FILES, sums, sizes, strict=True))
    return Version(kind="idx", folders=folders, train=files[:2], test=files[2:])


def _idx_downloads(*sums: str) -> tuple[File, ...]:
    return tuple(File(f"{name}.gz", f"md5:{s}") for name, s in zip(IDX_FILES, sums, strict=True))


_MNIST = Official(
    name="mnist",
    title="MNIST: handwritten digits, 60000 + 10000 grey images 28x28",
    class_names=DIGITS,
    versions=(
        _idx(
            ("mnist", "MNIST/raw"),
            "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
            "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
            "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
            "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
        ),
    ),
    urls=(
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        "https://storage.googleapis.com/cvdf-datasets/mnist/",
        "http://yann.lecun.com/exdb/mnist/",
    ),
    downloads=_idx_downloads(
        "f68b3c2dcbeaaa9fbdd348bbdeb94873",
        "d53e105ee54ea40749a09fcbcd1e9432",
        "9fb629c4189551a2d022fa330f9573f3",
        "ec29112dd5afa0611ce80d1b7f02629c",
    ),
    download_folder="mnist",
)

_FASHION = Official(
    name="fashion-mnist",
    title="Fashion-MNIST: clothes, 60000 + 10000 grey images 28x28",
    class_names=FASHION,
    versions=(
        _idx(
            ("fashion-mnist", "FashionMNIST/raw"),
            "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888",
            "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9",
            "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b",
            "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34",
        ),
    ),
    urls=(
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
    ),
    downloads=_idx_downloads(
        "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
        "25c81989df183df01b3e8a0aad5dffbe",
        "bef4ecab320f06d8554ea6380940ec79",
        "bb300cfdad3c16e7a12a480ee83cd310",
    ),
    download_folder="fashion-mnist",
)

_TORONTO = ("https://www.cs.toronto.edu/~kriz/",)

_CIFAR10 = Official(
    name="cifar10",
    title="CIFAR-10: 50000 + 10000 colour images 32x32 of 10 classes",
    class_names=CIFAR10,
    versions=(_cifar10_binary(), _cifar10_python()),
    urls=_TORONTO,
    downloads=(File("cifar-10-binary.tar.gz", "md5:c32a1d4ab5d03f1284b67883e8d87530"),),
    download_folder="",
)

_CIFAR100 = Official(
    name="cifar100",
    title="CIFAR-100: 50000 + 10000 colour images 32x32 of 100 classes",
    class_names=CIFAR100,
    versions=(_cifar100_binary(), _cifar100_python()),
    urls=_TORONTO,
    downloads=(File("cifar-100-binary.tar.gz", "md5:03b5dce01913d631647c71ecec9e9cb8"),),
    download_folder="",
)

OFFICIAL = {official.name: official for official in (_MNIST, _FASHION, _CIFAR10, _CIFAR100)}
