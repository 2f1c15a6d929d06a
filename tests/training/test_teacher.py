"""Runs whose training images are labelled by another network."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from _process_pairs import assert_close, finish_pair
from _runs import SMALL, SMALL_FLAGS, call, stop_after

from onelip.core.errors import RecipeError, Stopped
from onelip.data import load_data
from onelip.models import create_model
from onelip.training import RunDirectory, load_run, preset, read_config, read_log, train, train_or_reuse
from onelip.training.teacher import Teacher, load_teacher

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    """A plain network with batch normalisation, trained for two epochs on digits."""
    out = tmp_path_factory.mktemp("runs") / "teacher"
    train(preset("teacher").replace(data="digits", model_options=("width=4",), epochs=2, translation=0.0), out)
    return out


def test_labels_are_the_probabilities_of_the_teacher(teacher):
    data = load_data("digits")
    network = load_run(teacher).model
    for factor in (1.0, 4.0):
        found = load_teacher(SMALL.replace(teacher=str(teacher), teacher_temperature=factor), data, CPU)
        assert isinstance(found, Teacher)
        images = data.test_images[:9].float() / 255
        # That of its training is 1.
        torch.testing.assert_close(found(images), (network(images) / factor).softmax(1), atol=1e-5, rtol=1e-5)
        assert not found(images).requires_grad
    assert load_teacher(SMALL, data, CPU) is None


@pytest.mark.parametrize(("loss", "temperature"), [("default", 0.25), ("gloro", 1.0)])
def test_logits_are_divided_by_the_temperature_of_the_teachers_own_loss(loss, temperature, tmp_path):
    """That of the recipe, unless the loss of the teacher has none."""
    train(SMALL.replace(epochs=1, loss=loss), tmp_path / "teacher")
    recipe = SMALL.replace(teacher=str(tmp_path / "teacher"), teacher_temperature=2.0)
    found = load_teacher(recipe, load_data("digits"), CPU)
    assert found is not None
    assert found.temperature == 2 * temperature


def test_a_run_learns_the_labels_of_its_teacher(teacher, tmp_path, monkeypatch):
    """A teacher that calls everything a three."""

    def threes(self, images):
        return torch.eye(10)[3].expand(len(images), 10)

    monkeypatch.setattr(Teacher, "__call__", threes)
    run = tmp_path / "run"
    train(SMALL.replace(epochs=3, teacher=str(teacher)), run)
    data = load_data("digits")
    found = load_run(run).predict(data.test_images[:100])
    assert {prediction.class_name for prediction in found} == {data.class_names[3]}


def test_a_run_with_a_teacher_resumes_without_it(teacher, tmp_path, monkeypatch):
    """To the last bit, because the run contains a copy."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(teacher, "moved")
    recipe = SMALL.replace(epochs=2, teacher="moved", accumulate=2, ema=0.9, bf16=True)
    train(recipe, "whole")
    with monkeypatch.context() as patched, pytest.raises(Stopped):
        train(recipe, "parts", stop=stop_after(patched, 3))
    shutil.rmtree("moved")
    train_or_reuse(recipe, "parts")  # with the path as it was given
    whole, parts = [Path(name, "plain.safetensors").read_bytes() for name in ("whole", "parts")]
    assert whole == parts
    train(recipe.replace(teacher=""), "plain")
    assert Path("plain", "plain.safetensors").read_bytes() != whole


def test_a_run_further_with_its_teacher_or_without(teacher, tmp_path, capsys):
    train(SMALL.replace(epochs=1, teacher=str(teacher)), tmp_path / "first")
    for name, flags, expected in (("same", (), str(teacher)), ("none", ("--teacher", ""), "")):
        out = tmp_path / name
        code, _, err = call(capsys, "train", "--start-from", tmp_path / "first", "--epochs", "1", *flags, "--out", out)
        assert code == 0, err
        assert read_config(RunDirectory(out)).recipe.teacher == expected
        assert (out / "teacher").exists() == bool(expected)


def test_two_processes_label_their_own_parts(teacher, tmp_path):
    flags = ["train", *SMALL_FLAGS, "--batch-size", "241", "--epochs", "1", "--teacher", teacher]
    finish_pair(tmp_path / "log", *flags, "--out", tmp_path / "two")
    recipe = preset("digits").replace(augment=True, batch_size=241, epochs=1, model_options=SMALL.model_options)
    train(recipe.replace(teacher=str(teacher)), tmp_path / "one")
    assert_close(tmp_path / "two", tmp_path / "one")


def test_the_command(teacher, tmp_path, capsys, monkeypatch):
    """The path of the teacher is remembered from the working directory."""
    monkeypatch.chdir(teacher.parent)
    code, out, err = call(
        capsys, "train", *SMALL_FLAGS, "--epochs", "1", "--teacher", "teacher", "--out", tmp_path / "run"
    )
    assert code == 0, err
    assert f"labels by {teacher}" in out
    assert read_config(RunDirectory(tmp_path / "run")).recipe.teacher == str(teacher)
    assert len(read_log(RunDirectory(tmp_path / "run"))) == 1
    monkeypatch.chdir(tmp_path)
    code, _, err = call(capsys, "evaluate", tmp_path / "run")
    assert code == 0, err


def test_teachers_that_do_not_fit_are_refused(teacher, tmp_path, capsys):
    def refused(*flags):
        code, _, err = call(capsys, "train", *SMALL_FLAGS, "--epochs", "1", "--out", tmp_path / "run", *flags)
        assert code == 2
        assert len(err.splitlines()) == 1
        assert not (tmp_path / "run").exists()
        return err

    assert "is not a run" in refused("--teacher", tmp_path / "nothing")
    assert "images of 1x8x8 pixels, and digits of 1x6x6; --image-size 8x8" in refused(
        "--teacher", teacher, "--image-size", "6"
    )
    assert "trained on validation images of this one; train it with --validation 0.1" in refused(
        "--teacher", teacher, "--validation", "0.1"
    )
    assert "teacher_temperature" in refused("--teacher", teacher, "--teacher-temperature", "0")
    for loss in ("emma", "kr", "logit-annealing"):
        assert "does not take the probabilities of a teacher" in refused("--teacher", teacher, "--loss", loss)
    # Other classes.
    config = json.loads((teacher / "config.json").read_text())
    config["data"]["class_names"][0] = "other"
    other = tmp_path / "other"
    other.mkdir()
    for path in teacher.iterdir():
        if path.is_file():
            (other / path.name).write_bytes(path.read_bytes())
    (other / "config.json").write_text(json.dumps(config))
    assert "a class other where digits has 0" in refused("--teacher", other)


def test_a_teacher_that_is_not_finished_is_refused(tmp_path, monkeypatch):
    with monkeypatch.context() as patched, pytest.raises(Stopped):
        train(SMALL, tmp_path / "half", stop=stop_after(patched, 1))
    with pytest.raises(RecipeError, match=r"not finished; finish it with `onelip train --resume"):
        train(SMALL.replace(teacher=str(tmp_path / "half")), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_folder_that_is_in_the_way_is_left_alone(teacher, tmp_path, capsys):
    """The teacher itself: its folder has the name of the copy."""
    runs = tmp_path / "runs"
    shutil.copytree(teacher, runs / "teacher")
    (runs / "wandb").mkdir()
    (runs / "wandb" / "mine").touch()
    before = {path: path.read_bytes() for path in runs.rglob("*") if path.is_file() and path.name != ".lock"}
    flags = ("--epochs", "1", "--teacher", runs / "teacher", "--out", runs)
    code, _, err = call(capsys, "train", *SMALL_FLAGS, *flags)
    assert (code, "exists already" in err, len(err.splitlines())) == (2, True, 1)
    after = {path: path.read_bytes() for path in runs.rglob("*") if path.is_file() and path.name != ".lock"}
    assert after == before


@pytest.mark.parametrize(("size", "halved"), [(4, 1), (8, 1), (16, 2), (28, 3), ((20, 64), 4)])
def test_sizes_of_the_plain_network(size, halved):
    model = create_model("cnn-teacher", num_classes=7, image_size=size, in_channels=1, width=4, depth=0)
    height, width = size if isinstance(size, tuple) else (size, size)
    assert model(torch.rand(2, 1, height, width)).shape == (2, 7)
    assert sum(isinstance(module, torch.nn.Conv2d) for module in model.modules()) == halved
    with pytest.raises(ValueError, match="cnn-teacher has plain layers"):
        create_model("cnn-teacher", method="aol")
