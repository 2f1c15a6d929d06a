"""`--data` of evaluate and certify: all images that are given, and classes by name."""

import json

import numpy as np
import pytest
from _runs import call

from onelip.training import Recipe, train

Image = pytest.importorskip("PIL.Image")


def write(folder, seed=0, size=8, **counts):
    """Square images, with a folder for each class."""
    rng = np.random.default_rng(seed)
    for name, count in counts.items():
        (folder / name).mkdir(parents=True)
        for i in range(count):
            Image.fromarray(rng.integers(0, 256, (size, size, 3), np.uint8)).save(folder / name / f"{i}.png")
    return folder


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    root = tmp_path_factory.mktemp("places")
    data = write(root / "data", cat=10, dog=10, owl=10)
    options = ("channels=8", "width=2", "convs=1", "linears=1")
    recipe = Recipe(data=str(data), model="patchwise-tiny", model_options=options, epochs=1, batch_size=12, lr=0.05)
    train(recipe, root / "run")
    return root


def evaluated(capsys, places, data, command="evaluate", *more):
    code, out, err = call(capsys, command, places / "run", "--data", data, "--json", *more)
    assert code == 0, err
    return json.loads(out)


def test_all_images_of_a_folder_and_classes_by_name(capsys, places, tmp_path):
    # dog and owl have the labels 0 and 1 in the folder, and 1 and 2 in the run.
    other = write(tmp_path / "other", seed=1, dog=3, owl=4)
    found = evaluated(capsys, places, other)
    assert (found["images"], found["split"]) == (7, "all")
    assert {row["name"]: row["images"] for row in found["per_class"]} == {"dog": 3, "owl": 4}
    certified = evaluated(capsys, places, other, "certify", "--mode", "real-arithmetic")
    assert certified["images"] == 7
    assert certified["accuracy"] == found["accuracy"]
    # The same images as predict sees them.
    code, out, _ = call(capsys, "predict", places / "run", f"{other}/*/*.png", "--json", "--mode", "real-arithmetic")
    assert code == 0
    right = [row["class"] in row["image"] for row in json.loads(out)["predictions"]]
    assert sum(right) / 7 == pytest.approx(found["accuracy"])


def test_images_of_other_sizes(capsys, places, tmp_path):
    other = write(tmp_path / "other", cat=2, size=12)
    Image.fromarray(np.zeros((9, 7, 3), np.uint8)).save(other / "cat" / "9.png")
    code, _, err = call(capsys, "evaluate", places / "run", "--data", other)
    assert (code, "--resize" in err) == (1, True)
    assert evaluated(capsys, places, other, "evaluate", "--resize")["images"] == 3
    assert evaluated(capsys, places, other, "certify", "--resize", "--mode", "real-arithmetic")["images"] == 3
    (other / "cat" / "9.png").unlink()
    _, _, err = call(capsys, "certify", places / "run", "--data", other)
    assert "the network takes images of 3x8x8 pixels, got 3x12x12; resize them with --resize" in err
    code, out, err = call(capsys, "certify", places / "run", "--image", other / "cat" / "0.png", "--resize")
    assert (code, "resized from 12x12" in out) == (0, True), err


def test_one_image_of_one_class_is_enough(capsys, places, tmp_path):
    assert evaluated(capsys, places, write(tmp_path / "other", owl=1))["images"] == 1


def test_other_classes_are_refused_with_both_lists(capsys, places, tmp_path):
    other = write(tmp_path / "other", cat=2, cow=2)
    for command in ("evaluate", "certify"):
        code, out, err = call(capsys, command, places / "run", "--data", other)
        assert (code, out) == (1, "")
        assert "no class 'cow'" in err
        assert "cat, dog, owl" in err
        assert "classes of the data: cat, cow" in err


def test_the_data_of_the_run_keep_their_split(capsys, places, tmp_path):
    (tmp_path / "elsewhere").symlink_to(places / "data")
    for path in (places / "data", tmp_path / "elsewhere"):
        found = evaluated(capsys, places, path)
        assert (found["images"], found["split"]) == (6, "test")
    assert evaluated(capsys, places, places / "data", "certify", "--split", "train")["images"] == 24


def test_a_folder_with_a_split_has_its_test_images_evaluated(capsys, places, tmp_path):
    write(tmp_path / "train", cat=4, dog=4)
    write(tmp_path / "test", seed=2, cat=1, dog=2)
    assert evaluated(capsys, places, tmp_path)["images"] == 3
    assert evaluated(capsys, places, tmp_path, "certify", "--split", "train")["images"] == 8


def test_numbers_in_an_npz_file_are_numbers_of_classes(capsys, places, tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (3, 8, 8), np.uint8)  # grey, for a network of three channels
    np.savez(tmp_path / "a.npz", images=pixels, labels=np.array([2, 0, 2]))
    found = evaluated(capsys, places, tmp_path / "a.npz")
    assert {row["name"]: row["images"] for row in found["per_class"]} == {"cat": 1, "owl": 2}
    np.savez(tmp_path / "b.npz", images=pixels, labels=np.array([1, 0, 1]), class_names=["owl", "dog"])
    found = evaluated(capsys, places, tmp_path / "b.npz")
    assert {row["name"]: row["images"] for row in found["per_class"]} == {"dog": 2, "owl": 1}


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"images": np.zeros((2, 8, 8), np.uint8), "labels": np.array([0, -1])}, "labels 0 to"),
        ({"images": np.zeros((2, 9, 9), np.uint8), "labels": np.array([0, 1])}, "of 3x8x8 pixels, got 3x9x9"),
        ({"images": np.zeros((0, 8, 8), np.uint8), "labels": np.zeros(0, int)}, "at least one image"),
    ],
)
def test_unusable_arrays(capsys, places, tmp_path, arrays, message):
    np.savez(tmp_path / "bad.npz", **arrays)
    code, _, err = call(capsys, "evaluate", places / "run", "--data", tmp_path / "bad.npz")
    assert code == 1
    assert message in err


def test_split_train_needs_training_images(capsys, places, tmp_path):
    other = write(tmp_path / "other", seed=1, cat=2, dog=2)
    code, _, err = call(capsys, "certify", places / "run", "--data", other, "--split", "train")
    assert code == 2
    assert "no training images" in err
