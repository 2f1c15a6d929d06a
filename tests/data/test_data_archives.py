"""Malicious archives: none writes to disk, none fills memory."""

import gzip
import io
import struct
import tarfile
import warnings
import zipfile
from pathlib import Path

import numpy as np
import pytest

from onelip.data import DataError, load_npz
from onelip.data.formats import read_arrays, read_tar

WANTED = "folder/wanted.bin"


def tar_with(*members: tuple[tarfile.TarInfo, bytes], fmt: int = tarfile.PAX_FORMAT) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=fmt) as archive:
        for info, content in members:
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return out.getvalue()


def member(name: str, kind: bytes = tarfile.REGTYPE, link: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, link
    return info


GOOD = (member(WANTED), b"content")


def write(tmp_path: Path, content: bytes) -> Path:
    path = tmp_path / "archive.tar.gz"
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("pack", [gzip.compress, bytes])
def test_wanted_members_are_read_and_others_passed_over(tmp_path, pack):
    path = write(
        tmp_path, pack(tar_with((member("folder", tarfile.DIRTYPE), b""), (member("folder/other"), b"x"), GOOD))
    )
    assert read_tar(path, [WANTED]) == {WANTED: b"content"}
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (member("/etc/cron.d/x"), "outside the archive"),
        (member("../../outside"), "outside the archive"),
        (member("folder/../../outside"), "outside the archive"),
        (member("C:/windows/x"), "outside the archive"),
        (member("..\\outside"), "outside the archive"),
        (member("folder/link", tarfile.SYMTYPE, "/etc/passwd"), "a link"),
        (member(WANTED, tarfile.SYMTYPE, "/etc/passwd"), "a link"),
        (member(WANTED, tarfile.LNKTYPE, "/etc/passwd"), "a link"),
        (member("folder/device", tarfile.CHRTYPE), "a device"),
        (member("folder/disk", tarfile.BLKTYPE), "a device"),
        (member("folder/pipe", tarfile.FIFOTYPE), "a device"),
    ],
)
def test_links_devices_and_ways_out_are_refused(tmp_path, bad, message):
    path = write(tmp_path, gzip.compress(tar_with((bad, b""), GOOD)))
    with pytest.raises(DataError, match=f"expected an archive of plain files, got .*{message}"):
        read_tar(path, [WANTED])
    assert list(tmp_path.iterdir()) == [path]


def test_a_member_twice_is_refused(tmp_path):
    path = write(tmp_path, tar_with(GOOD, (member(WANTED), b"other")))
    with pytest.raises(DataError, match="is duplicated or not a regular file"):
        read_tar(path, [WANTED])


def test_a_directory_of_the_wanted_name_is_refused(tmp_path):
    path = write(tmp_path, tar_with((member(WANTED, tarfile.DIRTYPE), b"")))
    with pytest.raises(DataError, match="is duplicated or not a regular file"):
        read_tar(path, [WANTED])


@pytest.mark.parametrize("name", [WANTED, "folder/other"])
def test_a_bomb_is_stopped_at_the_cap_whether_wanted_or_passed_over(tmp_path, name):
    path = write(tmp_path, gzip.compress(tar_with((member(name), bytes(20_000_000)), GOOD)))
    assert path.stat().st_size < 30_000
    with pytest.raises(DataError, match="the unpacked file is larger than 1 MB"):
        read_tar(path, [WANTED], cap=2**20)


def test_a_size_that_is_only_stated_makes_no_memory(tmp_path):
    content = bytearray(tar_with(GOOD))
    header = content[:512]
    header[124:136] = b"\x80" + (2**50).to_bytes(11, "big")  # a petabyte
    header[148:156] = b" " * 8
    header[148:156] = f"{sum(header):06o}\0 ".encode()
    path = write(tmp_path, bytes(header) + bytes(content[512:]))
    with pytest.raises(DataError, match="damaged or truncated"):
        read_tar(path, [WANTED])


def test_sparse_members_which_stand_for_endless_zeros_are_refused(tmp_path):
    info = member(WANTED)
    info.pax_headers = {"GNU.sparse.major": "0", "GNU.sparse.map": "0,7", "GNU.sparse.size": str(2**50)}
    path = write(tmp_path, tar_with((info, b"content")))
    with pytest.raises(DataError, match="got a sparse file"):
        read_tar(path, [WANTED])


def test_random_damage_is_an_error_of_ours_or_harmless(tmp_path):
    good = tar_with(GOOD, (member("folder/other"), b"y" * 2000))
    rng = np.random.default_rng(0)
    refused = 0
    for _ in range(200):
        content = bytearray(good)
        for position in rng.integers(0, 1024, 3):
            content[position] = rng.integers(0, 256)
        path = write(tmp_path, bytes(content))
        try:
            found = read_tar(path, [WANTED])
        except DataError:
            refused += 1
        else:
            assert found.keys() == {WANTED}
    assert 50 < refused < 200


def npz(path: Path, **arrays: np.ndarray) -> Path:
    np.savez_compressed(path, **arrays)  # type: ignore[arg-type]
    return path


def test_a_zip_bomb_is_stopped_before_it_is_unpacked(tmp_path):
    path = npz(tmp_path / "bomb.npz", images=np.zeros((2000, 100, 100), np.uint8), labels=np.arange(2000) % 2)
    assert path.stat().st_size < 60_000
    with pytest.raises(DataError, match="the unpacked file is larger than 1 MB"):
        load_npz(path, cap=2**20)


def test_a_zip_that_lies_about_its_sizes_gives_no_more_than_it_says(tmp_path):
    path = tmp_path / "liar.zip"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("images.npy", bytes(10_000_000))
    content = bytearray(path.read_bytes())
    for signature, offset in ((b"PK\x03\x04", 22), (b"PK\x01\x02", 24)):
        at = content.index(signature) + offset
        content[at : at + 4] = struct.pack("<I", 100)
    path.write_bytes(content)
    with pytest.raises(DataError, match="damaged or truncated"):
        read_arrays(path, cap=1000)


def test_a_zip_with_a_member_twice_or_cut_is_refused(tmp_path):
    path = tmp_path / "twice.npz"
    with zipfile.ZipFile(path, "w") as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # zipfile warns about the duplicate, which is intended
        archive.writestr("images.npy", b"1")
        archive.writestr("images.npy", b"2")
    with pytest.raises(DataError, match="a member is duplicated"):
        load_npz(path)
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(DataError, match="damaged or truncated"):
        load_npz(path)


def test_an_array_header_that_asks_for_more_than_there_is_makes_no_memory(tmp_path):
    header = b"{'descr': '|u1', 'fortran_order': False, 'shape': (1000000000000, 28, 28), }"
    path = tmp_path / "huge.npz"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("images.npy", b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + b"123")
    with pytest.raises(DataError, match=r"has 3 bytes, which do not match the shape"):
        load_npz(path)


def test_python_objects_in_npz_are_never_read(tmp_path):
    path = tmp_path / "objects.npz"
    np.savez(path, images=np.array([{"a": 1}], dtype=object), labels=np.zeros(1, np.int64))
    with pytest.raises(DataError, match="got Python objects"):
        load_npz(path)


def test_a_file_that_is_no_array_is_refused(tmp_path):
    path = tmp_path / "text.npz"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("images.npy", b"hello, this is not an array")
    with pytest.raises(DataError, match="is not a numpy array"):
        load_npz(path)
