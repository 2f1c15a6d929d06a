"""Digits, MNIST, Fashion-MNIST, CIFAR: every official format is read and verified, and wrong files are reported."""

import gzip
import hashlib
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from _data_samples import IDX, CifarSample, IdxSample, idx, tar_gz

from onelip import data
from onelip.data.formats import read_file
from onelip.data.registry import OFFICIAL, split_digest

VERSIONS = [("cifar10", "binary"), ("cifar10", "python"), ("cifar100", "binary"), ("cifar100", "python")]
ARCHIVES = {
    ("cifar10", "binary"): "cifar-10-binary.tar.gz",
    ("cifar10", "python"): "cifar-10-python.tar.gz",
    ("cifar100", "binary"): "cifar-100-binary.tar.gz",
    ("cifar100", "python"): "cifar-100-python.tar.gz",
}


@pytest.fixture(autouse=True)
def _no_data_of_this_machine(monkeypatch, tmp_path):
    monkeypatch.setenv("ONELIP_DATA", str(tmp_path / "none"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def assert_holds(loaded: data.ImageData, sample: CifarSample | IdxSample) -> None:
    for part in ("train", "test"):
        images, labels = getattr(sample, f"{part}_images"), getattr(sample, f"{part}_labels")
        images = images[:, None] if images.ndim == 3 else images
        np.testing.assert_array_equal(getattr(loaded, f"{part}_images").numpy(), images)
        np.testing.assert_array_equal(getattr(loaded, f"{part}_labels").numpy(), labels)
    assert loaded.train_images.dtype == torch.uint8
    assert loaded.train_labels.dtype == torch.int64


def test_digits_are_there_split_by_class_and_white_is_255():
    digits = data.load_data("digits")
    assert digits.shape == (1, 8, 8)
    assert (len(digits.train_labels), len(digits.test_labels)) == (1442, 355)
    assert digits.train_labels.bincount().tolist() == [143, 146, 142, 147, 145, 146, 145, 144, 140, 144]
    assert digits.test_labels.bincount().tolist() == [35, 36, 35, 36, 36, 36, 36, 35, 34, 36]
    values = torch.unique(torch.cat([digits.train_images, digits.test_images]))
    assert values.tolist() == [round(v * 255 / 16 + 1e-9) for v in range(17)]
    # Mean and spread of scikit-learn's 1797 images: (images.mean(), images.std()) = (4.884165, 6.016788).
    all_images = (torch.cat([digits.train_images, digits.test_images]).double() * 16 / 255).round()
    assert all_images.mean().item() == pytest.approx(4.884165, abs=1e-6)
    assert all_images.std(correction=0).item() == pytest.approx(6.016788, abs=1e-6)
    assert digits.fingerprint == "deabe36f6b2f102913383e6cdf6a6ede23734f9071eca3352dc45ba0ce6bca36"


@pytest.mark.parametrize(("name", "version"), VERSIONS)
def test_cifar_as_folder_and_as_archive(tmp_path, name, version):
    sample = CifarSample(name, version)
    folder = sample.write_folder(tmp_path / "a")
    archive = tmp_path / "b" / ARCHIVES[name, version]
    archive.parent.mkdir()
    archive.write_bytes(sample.archive())
    loaded = [
        data.load_data(name, tmp_path / "a", digests=sample.digests),
        data.load_data(folder, digests=sample.digests),
        data.load_data(name, tmp_path / "b", digests=sample.digests),
        data.load_data(str(archive), digests=sample.digests),
    ]
    for one in loaded:
        assert_holds(one, sample)
        assert one.name == name
        assert one.num_classes == (10 if name == "cifar10" else 100)
    assert len({one.fingerprint for one in loaded}) == 1


def test_both_versions_of_cifar_give_the_same_data(tmp_path):
    fingerprints = set()
    for version in ("binary", "python"):
        sample = CifarSample("cifar10", version)
        fingerprints.add(data.load_data(sample.write_folder(tmp_path), digests=sample.digests).fingerprint)
    assert len(fingerprints) == 1


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("dotted", [True, False])
@pytest.mark.parametrize(
    ("name", "folder"), [("mnist", "mnist"), ("mnist", "MNIST/raw"), ("fashion-mnist", "FashionMNIST/raw")]
)
def test_idx_files_packed_or_not(tmp_path, name, folder, packed, dotted):
    sample = IdxSample()
    where = sample.write(tmp_path / folder, packed, dotted)
    assert_holds(data.load_data(name, tmp_path, digests=sample.digests), sample)
    assert_holds(data.load_data(name, where, digests=sample.digests), sample)
    assert_holds(data.load_data(where, digests=sample.digests), sample)


def test_names_are_read_kindly_and_the_environment_says_where(tmp_path, monkeypatch):
    sample = IdxSample()
    sample.write(tmp_path / "here" / "fashion-mnist")
    monkeypatch.setenv("ONELIP_DATA", str(tmp_path / "here"))
    for spelling in ("fashion-mnist", "FashionMNIST", "fashion_mnist"):
        assert data.load_data(spelling, digests=sample.digests).name == "fashion-mnist"
    sample.write(tmp_path / "cache" / "onelip" / "data" / "mnist")
    assert data.load_data("MNIST", digests=sample.digests).name == "mnist"
    status = {row.name: row for row in data.data_status()}
    assert list(status) == data.list_data()
    assert status["fashion-mnist"].found == tmp_path / "here" / "fashion-mnist"
    assert status["mnist"].looked_in == (tmp_path / "here", tmp_path / "cache" / "onelip" / "data")
    assert status["cifar10"].found is None
    assert status["digits"].found is not None


def test_a_data_set_that_is_not_found_is_reported_with_the_directories(tmp_path):
    with pytest.raises(
        data.DataNotFound, match=r"cifar-10-batches-bin.*not found in .*none or .*cache.*onelip data fetch cifar10"
    ):
        data.load_data("cifar10")
    with pytest.raises(data.DataNotFound, match=r"four IDX files.*elsewhere"):
        data.load_data("mnist", tmp_path / "elsewhere")


def test_an_unknown_name_is_answered_with_the_nearest():
    with pytest.raises(
        data.DataNotFound, match=r"'cifer10' is neither .* nor an existing file.*did you mean 'cifar10'"
    ):
        data.load_data("cifer10")
    with pytest.raises(data.DataNotFound, match=r"'./mnist' is neither"):
        data.load_data("./mnist")


def test_a_changed_or_truncated_file_is_named(tmp_path):
    sample = IdxSample()
    folder = sample.write(tmp_path / "mnist")
    with pytest.raises(data.ChecksumError, match=r"train-images.*only 416 of 47040016 bytes: it is truncated"):
        data.load_data("mnist", tmp_path)
    content = bytearray(sample.files[IDX[2]])
    content[-1] ^= 1
    (folder / IDX[2]).write_bytes(content)
    with pytest.raises(data.ChecksumError, match=r"t10k-images.*wrong checksum \(216 bytes\).*; delete it"):
        data.load_data("mnist", tmp_path, digests=sample.digests)
    (folder / IDX[2]).unlink()
    with pytest.raises(data.DataNotFound, match=f"{IDX[2]} of mnist is missing"):
        data.load_data("mnist", tmp_path, digests=sample.digests)


def test_a_truncated_gzip_file_is_named(tmp_path):
    sample = IdxSample()
    folder = sample.write(tmp_path / "mnist", packed=True)
    path = folder / f"{IDX[0]}.gz"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(data.DataError, match=r"train-images-idx3-ubyte.gz.*damaged or truncated"):
        data.load_data("mnist", tmp_path, digests=sample.digests)


def test_an_archive_that_is_truncated_or_lacks_a_member_is_named(tmp_path):
    sample = CifarSample("cifar10", "binary")
    path = tmp_path / "cifar-10-binary.tar.gz"
    path.write_bytes(sample.archive()[:-5000])
    with pytest.raises(data.DataError, match=r"cifar-10-binary.tar.gz.*damaged or truncated"):
        data.load_data("cifar10", tmp_path, digests=sample.digests)
    path.write_bytes(tar_gz({"cifar-10-batches-bin/test_batch.bin": sample.files["test_batch.bin"]}))
    with pytest.raises(data.DataError, match=r"the archive has no member cifar-10-batches-bin/data_batch_1.bin"):
        data.load_data("cifar10", tmp_path, digests=sample.digests)
    path.write_bytes(b"<html>404</html>")
    with pytest.raises(data.DataError, match="damaged or truncated"):
        data.load_data("cifar10", tmp_path, digests=sample.digests)


def test_a_file_without_a_digest_in_the_table_given_is_refused(tmp_path):
    sample = CifarSample("cifar10", "binary")
    folder = sample.write_folder(tmp_path)
    with pytest.raises(data.ChecksumError, match=r"digests has no entry for 'data_batch_1.bin'"):
        data.load_data(folder, digests={})
    with pytest.raises(data.DataError, match='expected a digest "md5:<32 hex digits>"'):
        data.load_data(folder, digests=dict.fromkeys(sample.files, "none"))


def test_the_digest_of_the_archive_covers_its_members(tmp_path, monkeypatch):
    sample = CifarSample("cifar100", "binary")
    path = tmp_path / "cifar-100-binary.tar.gz"
    path.write_bytes(sample.archive())
    with pytest.raises(data.ChecksumError):
        data.load_data("cifar100", tmp_path)
    digest = f"md5:{hashlib.md5(path.read_bytes(), usedforsecurity=False).hexdigest()}"
    archive = OFFICIAL["cifar100"].versions[0].archive
    assert archive is not None
    monkeypatch.setitem(archive.__dict__, "digest", digest)
    assert_holds(data.load_data("cifar100", tmp_path), sample)


def with_digests(folder: Path, files: dict[str, bytes]) -> dict[str, str]:
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return {name: f"md5:{hashlib.md5(c, usedforsecurity=False).hexdigest()}" for name, c in files.items()}


def test_idx_files_that_lie_are_refused(tmp_path):
    sample = IdxSample()
    folder = sample.write(tmp_path / "mnist")
    digests = with_digests(folder, {**sample.files, IDX[0]: sample.files[IDX[0]][:-3]})
    with pytest.raises(data.DataError, match=r"expected 400 bytes for the shape \(20, 4, 5\), got 397"):
        data.load_data(folder, digests=digests)
    digests = with_digests(folder, {**sample.files, IDX[0]: sample.files[IDX[1]]})
    with pytest.raises(data.DataError, match=r"IDX file of bytes with 3 axes, got one that starts with 00000801"):
        data.load_data(folder, digests=digests)
    digests = with_digests(folder, {**sample.files, IDX[1]: idx(np.full(20, 10, np.uint8))})
    with pytest.raises(data.DataError, match=r"labels 0 to 9 \(10 classes\), got 10 at index 0"):
        data.load_data(folder, digests=digests)
    digests = with_digests(folder, {**sample.files, IDX[1]: idx(np.zeros(19, np.uint8))})
    with pytest.raises(data.DataError, match="one label for each image, got 20 images, 19 labels"):
        data.load_data(folder, digests=digests)


def test_cifar_records_that_are_not_whole_are_refused(tmp_path):
    sample = CifarSample("cifar10", "binary")
    folder = sample.write_folder(tmp_path)
    digests = with_digests(folder, {**sample.files, "data_batch_2.bin": sample.files["data_batch_2.bin"][:-1]})
    with pytest.raises(data.DataError, match=r"data_batch_2.bin: expected records of 3073 bytes, got 33802 bytes"):
        data.load_data(folder, digests=digests)


def test_a_gzip_file_cannot_fill_the_memory(tmp_path):
    path = tmp_path / "bomb"
    path.write_bytes(gzip.compress(bytes(5_000_000)))
    with pytest.raises(data.DataError, match="the unpacked file is larger than 1 MB"):
        read_file(path, cap=2**20)
    assert len(read_file(path, cap=5_000_000)) == 5_000_000


def test_the_table_is_well_formed():
    for official in OFFICIAL.values():
        assert all(url.startswith(("http://", "https://")) and url.endswith("/") for url in official.urls)
        files = [f for v in official.versions for f in (*v.files, *([v.archive] if v.archive else []))]
        for file in (*files, *official.downloads):
            split_digest(file.digest)
        assert len(set(official.class_names)) in (10, 100)


def test_listing_needs_no_torch():
    program = "import sys, onelip.data as d; d.list_data(); d.data_status(); d.fetch; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


def test_all_public_names_exist():
    for name in data.__all__:
        assert getattr(data, name) is not None
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        data.nothing  # type: ignore[attr-defined]  # noqa: B018
