"""User data as folders of images; every problem is reported."""

import builtins
import struct
import warnings
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch

from onelip.data import DataError, load_data, load_folder

Image = pytest.importorskip("PIL.Image")


def pixels(count: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (count, *shape), dtype=np.uint8)


def write_images(folder: Path, images: np.ndarray, ending: str = "png") -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for i, image in enumerate(images):
        Image.fromarray(image).save(folder / f"{i:03}.{ending}")


def test_a_folder_with_its_own_split(tmp_path):
    images = {(part, name): pixels(3, 6, 4, 3) + i for i, part in enumerate(("train", "test")) for name in "ba"}
    for (part, name), content in images.items():
        write_images(tmp_path / part / name, content)
    (tmp_path / "train" / "a" / ".DS_Store").write_bytes(b"x")
    (tmp_path / "train" / "a" / "Thumbs.db").write_bytes(b"x")
    (tmp_path / "train" / ".git").mkdir()
    loaded = load_data(tmp_path)
    assert loaded.class_names == ("a", "b")
    assert loaded.shape == (3, 6, 4)
    assert loaded.train_labels.tolist() == [0, 0, 0, 1, 1, 1]
    np.testing.assert_array_equal(loaded.train_images[3:].permute(0, 2, 3, 1).numpy(), images["train", "b"])
    np.testing.assert_array_equal(loaded.test_images[:3].permute(0, 2, 3, 1).numpy(), images["test", "a"])


def test_training_images_without_test_images(tmp_path):
    for name in "ab":
        write_images(tmp_path / "train" / name, pixels(3, 6, 4, 3))
    with pytest.raises(DataError, match=r"there is a folder train/, but none of test/, val/, validation/; add one, or"):
        load_data(tmp_path)
    assert len(load_data(tmp_path / "train").test_labels) == 2
    vehicles = tmp_path / "vehicles"  # a class may have this name
    for name in ("train", "ship"):
        write_images(vehicles / name, pixels(3, 6, 4, 3))
    assert load_data(vehicles).class_names == ("ship", "train")


def test_a_folder_without_a_split_and_grey_images_and_jpeg(tmp_path):
    smooth = np.tile(np.arange(16, dtype=np.uint8) * 10, (16, 1))
    for name in ("x", "y"):
        write_images(tmp_path / name, np.stack([smooth] * 10), "jpg")
    loaded = load_folder(tmp_path)
    assert loaded.shape == (1, 16, 16)
    assert loaded.train_labels.bincount().tolist() == [8, 8]
    assert loaded.test_labels.bincount().tolist() == [2, 2]
    assert (loaded.train_images[0, 0].int() - torch.from_numpy(smooth).int()).abs().max() <= 6


def test_one_coloured_image_makes_all_coloured(tmp_path):
    write_images(tmp_path / "x", pixels(3, 4, 4))
    write_images(tmp_path / "y", pixels(3, 4, 4, 3))
    loaded = load_folder(tmp_path)
    assert loaded.shape == (3, 4, 4)
    grey = loaded.train_images[loaded.train_labels == 0]
    assert torch.equal(grey[:, 0], grey[:, 2])


def test_palettes_opaque_alpha_and_two_tones_are_read(tmp_path):
    for name in ("x", "y"):
        write_images(tmp_path / name, pixels(2, 4, 4, 3))
    colours = pixels(1, 4, 4, 3)[0]
    Image.fromarray(np.dstack([colours, np.full((4, 4), 255, np.uint8)])).save(tmp_path / "x" / "000.png")
    Image.fromarray(colours).quantize().save(tmp_path / "x" / "001.png")
    Image.fromarray(colours[..., 0]).convert("1").save(tmp_path / "y" / "000.png")
    loaded = load_folder(tmp_path, test_fraction=0.5)
    everything = torch.cat([loaded.train_images, loaded.test_images]).permute(0, 2, 3, 1)
    assert any(np.array_equal(image.numpy(), colours) for image in everything)


def png_of_size(width: int, height: int) -> bytes:
    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


def spoil_size(folder: Path) -> None:
    write_images(folder / "y", pixels(4, 5, 5, 3)[3:])


def spoil_corrupt(folder: Path) -> None:
    path = folder / "y" / "001.png"
    path.write_bytes(path.read_bytes()[:60])


def spoil_not_an_image(folder: Path) -> None:
    (folder / "y" / "001.png").write_bytes(b"GIF89a and more")


def spoil_bomb(folder: Path) -> None:
    (folder / "y" / "001.png").write_bytes(png_of_size(12_000, 12_000))


def spoil_huge_bomb(folder: Path) -> None:
    (folder / "y" / "001.png").write_bytes(png_of_size(60_000, 60_000))


def spoil_ending(folder: Path) -> None:
    (folder / "y" / "002.bmp").write_bytes(b"BM")


def spoil_empty_class(folder: Path) -> None:
    (folder / "z").mkdir()


def spoil_transparent(folder: Path) -> None:
    Image.fromarray(np.zeros((4, 4, 4), np.uint8)).save(folder / "y" / "000.png")


def spoil_sixteen_bits(folder: Path) -> None:
    Image.fromarray(np.zeros((4, 4), np.uint16)).save(folder / "y" / "000.png")


def spoil_only_one_class(folder: Path) -> None:
    for path in (folder / "y").iterdir():
        path.unlink()
    (folder / "y").rmdir()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            spoil_size,
            r"y.000.png: expected 4x4 pixels as 000.png, got 5x5; resize .*: --image-size 64 for",
        ),
        (spoil_corrupt, r"y.001.png: not a complete PNG or JPEG image .*; replace or remove it"),
        (spoil_not_an_image, r"y.001.png: not a complete PNG or JPEG image"),
        (spoil_bomb, r"y.001.png: the image is too large"),
        (spoil_huge_bomb, r"y.001.png: the image is too large"),
        (spoil_ending, r"002.bmp: expected only .png, .jpg, .jpeg files; convert or remove it"),
        (spoil_empty_class, r"z: no images of class 'z'; add some or remove the class"),
        (spoil_transparent, r"000.png: expected an opaque image, got transparent pixels"),
        (spoil_sixteen_bits, r"000.png: expected 8 bits for each channel, got mode I"),
        (spoil_only_one_class, r"expected a subfolder for each class, 2 at least.*got \['x'\]"),
    ],
)
def test_wrong_images_are_named(tmp_path, spoil, message):
    for name in ("x", "y"):
        write_images(tmp_path / name, pixels(3, 4, 4, 3))
    spoil(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # as outside of pytest: nothing may depend on warnings being errors here
        with pytest.raises(DataError, match=message):
            load_data(tmp_path)


def test_a_test_class_that_is_not_trained_and_too_many_pixels_are_refused(tmp_path):
    for name in ("x", "y"):
        write_images(tmp_path / "train" / name, pixels(2, 4, 4))
        write_images(tmp_path / "test" / name, pixels(2, 4, 4))
    with pytest.raises(DataError, match="expected at most 0 MB of pixels, got 8 images"):
        load_folder(tmp_path, cap=100)
    write_images(tmp_path / "test" / "z", pixels(2, 4, 4))
    with pytest.raises(DataError, match=r"expected the classes of .*train, got also 'z'"):
        load_folder(tmp_path)


def test_without_pillow_the_error_says_so(tmp_path, monkeypatch):
    for name in ("x", "y"):
        write_images(tmp_path / name, pixels(2, 4, 4))
    real = builtins.__import__

    def without(name: str, *rest: object) -> object:
        if name.startswith("PIL"):
            raise ImportError(name)
        return real(name, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(DataError, match="need pillow: pip install"):
        load_folder(tmp_path)
