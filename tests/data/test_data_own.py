"""User data as .npz arrays, and ImageData itself; every problem is reported."""

from pathlib import Path

import numpy as np
import pytest
import torch

from onelip import data
from onelip.data import DataError, ImageData, load_data, load_npz


def pixels(count: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (count, *shape), dtype=np.uint8)


def save(path: Path, **arrays: object) -> Path:
    np.savez(path, **arrays)  # type: ignore[arg-type]
    return path


def parts(images: np.ndarray, labels: np.ndarray, **more: object) -> dict[str, object]:
    return {"train_images": images, "train_labels": labels, "test_images": images, "test_labels": labels, **more}


@pytest.mark.parametrize(
    ("shape", "axes", "want"),
    [
        ((7, 5), (0, 1, 2), (1, 7, 5)),
        ((7, 5, 3), (0, 3, 1, 2), (3, 7, 5)),
        ((3, 7, 5), (0, 1, 2, 3), (3, 7, 5)),
        ((1, 7, 5), (0, 1, 2, 3), (1, 7, 5)),
    ],
)
def test_npz_in_every_layout(tmp_path, shape, axes, want):
    images, labels = pixels(6, *shape), np.array([0, 1, 2, 0, 1, 2], dtype=np.int32)
    loaded = load_data(save(tmp_path / "mine.npz", **parts(images, labels)))
    assert loaded.shape == want
    assert loaded.name == "mine"
    assert loaded.class_names == ("0", "1", "2")
    np.testing.assert_array_equal(loaded.train_images.numpy(), images.transpose(axes).reshape(6, *want))
    assert loaded.train_labels.tolist() == labels.tolist()


def test_npz_with_names_of_keras_columns_of_labels_and_class_names(tmp_path):
    images, labels = np.asfortranarray(pixels(4, 6, 6)), np.array([[0], [1], [0], [1]], dtype=np.uint8)
    path = tmp_path / "keras.npz"
    save(path, x_train=images, y_train=labels, x_test=images[:2], y_test=labels[:2], class_names=np.array(["a", "b"]))
    loaded = load_npz(path)
    assert loaded.class_names == ("a", "b")
    assert len(loaded.test_labels) == 2
    np.testing.assert_array_equal(loaded.train_images[:, 0].numpy(), images)


def test_npz_without_a_split_is_split(tmp_path):
    path = save(tmp_path / "mine.npz", images=pixels(50, 4, 4), labels=np.arange(50) % 5)
    loaded = load_npz(path)
    assert loaded.train_labels.bincount().tolist() == [8] * 5
    assert loaded.test_labels.bincount().tolist() == [2] * 5
    assert load_npz(path).fingerprint == loaded.fingerprint
    assert load_npz(path, seed=1).fingerprint != loaded.fingerprint


LABELS = np.array([0, 1, 0, 1])


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        (
            {"pictures": pixels(4, 5, 5)},
            "expected the arrays train_images.*, got pictures; save them under these names",
        ),
        ({}, "got none"),
        (parts(pixels(4, 5, 5) / 255, LABELS), r"expected uint8 images, got float64; scale to 0..255"),
        (parts(pixels(4, 5, 5, 4), LABELS), r"with 1 or 3 channels, got \(4, 5, 5, 4\)"),
        (parts(pixels(4, 3, 5, 3), LABELS), "which is ambiguous"),
        (parts(pixels(4, 5), LABELS), r"got \(4, 5\)"),
        (parts(pixels(4, 5, 5), LABELS.astype(float)), r"expected integers \(N\), got float64"),
        (parts(pixels(4, 5, 5), LABELS[:3]), "one label for each image, got 4 images, 3 labels"),
        ({"images": pixels(4, 5, 5), "labels": LABELS[:3]}, "one label for each image, got 4 images, 3 labels"),
        (parts(pixels(4, 5, 5), LABELS - 1), r"labels 0 to 0|at least two classes"),
        (parts(pixels(4, 5, 5), LABELS * 2), "there are no training images of 1"),
        (parts(pixels(4, 5, 5), LABELS * 10**9), "numbered from 0 without gaps, got 1000000000"),
        (parts(pixels(4, 5, 5), LABELS, class_names=np.array(["a"])), "at least two classes with distinct names"),
        (parts(pixels(4, 5, 5), LABELS, class_names=np.array(["a", "a"])), "at least two classes with distinct names"),
        (parts(pixels(4, 5, 5), LABELS, class_names=np.array([1, 2])), "class_names as a list of text"),
        (parts(pixels(4, 5, 5), LABELS + 1, class_names=np.array(["a", "b"])), r"labels 0 to 1 .*, got 2 at index 1"),
        (parts(pixels(0, 5, 5), LABELS[:0], class_names=np.array(["a", "b"])), "expected at least one image"),
        (
            {**parts(pixels(4, 5, 5), LABELS), "test_images": pixels(4, 5, 6)},
            "test images of the same shape",
        ),
        ({"images": pixels(3, 5, 5), "labels": np.array([0, 0, 1])}, "at least two images of each class"),
    ],
)
def test_wrong_arrays_are_refused(tmp_path, arrays, message):
    with pytest.raises(DataError, match=message):
        load_npz(save(tmp_path / "wrong.npz", **arrays))


def test_other_paths_are_refused(tmp_path):
    (tmp_path / "data.csv").write_text("1,2")
    with pytest.raises(DataError, match=r"data.csv: expected an .npz file or one of cifar-10-binary.tar.gz"):
        load_data(tmp_path / "data.csv")
    with pytest.raises(DataError, match=r"expected a subfolder for each class, 2 at least.*got no subfolders"):
        load_data(tmp_path)


def record(**changes: object) -> ImageData:
    fields: dict[str, object] = {
        "name": "mine",
        "train_images": torch.from_numpy(pixels(4, 1, 2, 2)),
        "train_labels": torch.tensor([0, 1, 0, 1]),
        "test_images": torch.from_numpy(pixels(2, 1, 2, 2)),
        "test_labels": torch.tensor([0, 1]),
        "class_names": ("a", "b"),
    }
    return ImageData(**{**fields, **changes})  # type: ignore[arg-type]


def test_the_fingerprint_is_of_the_content_alone():
    one = record()
    assert one.fingerprint == record(name="other", source="elsewhere").fingerprint
    assert len(one.fingerprint) == 64
    for name in ("train_images", "test_images"):
        changed = getattr(one, name).clone()
        changed[1, 0, 0, 0] ^= 1
        assert record(**{name: changed}).fingerprint != one.fingerprint
    assert record(train_labels=torch.tensor([1, 0, 0, 1])).fingerprint != one.fingerprint
    assert record(class_names=("a", "c")).fingerprint != one.fingerprint
    assert repr(one) == "ImageData(mine: 4 + 2 images, 1x2x2, 2 classes)"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train_images": torch.zeros(4, 1, 2, 2)}, r"expected uint8 images \(N, C, H, W\), got torch.float32"),
        ({"train_images": torch.zeros(4, 2, 2, dtype=torch.uint8)}, r"got torch.uint8 \(4, 2, 2\)"),
        ({"train_labels": torch.zeros(4)}, r"expected int64 labels \(N\), got torch.float32"),
        ({"test_labels": torch.tensor([0, -1])}, "labels 0 to 1 .*, got -1 at index 1"),
    ],
)
def test_a_wrong_record_is_refused(changes, message):
    with pytest.raises(DataError, match=message):
        record(**changes)


def test_to_float_is_x_over_255():
    x = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16)
    want = np.arange(256, dtype=np.float32) / np.float32(255)
    np.testing.assert_array_equal(data.to_float(x).flatten().numpy(), want)
    assert data.to_float(torch.ones(1)) == 1  # floats are in [0, 1] already
