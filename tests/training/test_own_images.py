"""`onelip train --data FOLDER`: images of any size, a network sized to them, and the block before it starts."""

import json
import re

import numpy as np
import pytest
import torch
from _runs import call

import onelip
from onelip.core.errors import RecipeError
from onelip.data import load_data
from onelip.training import Recipe, budget, read_config, train
from onelip.training.distributed import Process
from onelip.training.learner import Learner
from onelip.training.run_directory import RunDirectory

Image = pytest.importorskip("PIL.Image")
TINY = ("--model-options", "widths=[8,8,8]", "depths=[1,1,1]", "--threads", "1")
REAL = ("--mode", "real-arithmetic")
CPU = Process(torch.device("cpu"))


def write(folder, *sizes, count=6, mode="RGB", classes=("cat", "dog")):
    """A folder of images whose class is their brightness; their (height, width) takes turns."""
    rng = np.random.default_rng(0)
    for label, name in enumerate(classes):
        (folder / name).mkdir(parents=True)
        for i in range(count):
            pixels = rng.integers(0, 80, (*sizes[i % len(sizes)], 3), np.uint8) + np.uint8(150 * label)
            Image.fromarray(pixels).convert(mode).save(folder / name / f"{i}.png")
    return folder


@pytest.fixture
def quick(monkeypatch):
    """Pretend that steps and evaluations take these seconds."""
    monkeypatch.setattr(budget, "seconds_per_step", lambda *_: 0.05)
    monkeypatch.setattr(budget, "seconds_per_evaluation", lambda *_: 0.1)


@pytest.mark.parametrize(
    ("size", "mode"), [((64, 64), "RGB"), ((28, 28), "L"), ((20, 36), "RGB"), ((1, 1), "RGB"), ((3, 150), "L")]
)
def test_a_folder_without_more(capsys, tmp_path, quick, size, mode):
    data = write(tmp_path / "data", size, mode=mode)
    code, out, err = call(capsys, "train", "--data", data, "--budget", "2s", *TINY, "--out", tmp_path / "run")
    assert code == 0, err
    channels = 1 if mode == "L" else 3
    assert f"data      data: 2 classes, {channels}x{size[0]}x{size[1]} pixels\n" in out
    assert "images    10 training, 2 test (20% of each class held out for testing, seed 0)" in out
    assert re.search(r"memory +about \d+ MB for a step; .* free\ndevice +cpu, 1 thread\nsteps +\d+, .*\ntime +2s", out)
    results = json.loads((tmp_path / "run" / "results.json").read_text())["test"]
    assert results["lipschitz"] <= 1 + 1e-12  # the fixed weights of the patches are rounded


def test_the_default_is_ten_minutes_of_a_network_of_its_size(capsys, tmp_path):
    data = write(tmp_path / "data", (8, 8))
    _, out, _ = call(capsys, "train", "--data", data, "--help")
    assert "aol-fast-medium" in out
    assert "muon" in out
    _, out, _ = call(capsys, "train", "--data", data, "--preset", "paper", "--help")
    assert "aol-small" in out


def test_epochs_instead_of_a_budget(capsys, tmp_path):
    data = write(tmp_path / "data", (8, 8))
    code, out, err = call(capsys, "train", "--data", data, "--epochs", "2", *TINY, "--out", tmp_path / "run")
    assert code == 0, err
    assert re.search(r"time +about \d+s, from the speed of three steps", out)
    assert read_config(RunDirectory(tmp_path / "run")).recipe.epochs == 2


@pytest.mark.parametrize(("size", "patch"), [(8, 2), (28, 4), (64, 4), (127, 4), (128, 8), (224, 8), (512, 32)])
def test_patches_grow_with_the_image(size, patch):
    with torch.device("meta"):
        net = onelip.create_model("aol-fast-medium", image_size=size)
    assert next(m for m in net.modules() if isinstance(m, torch.nn.Conv2d)).stride == (patch, patch)
    assert sum(p.numel() for p in net.parameters()) < 6e6


def test_windows_are_never_larger_than_the_image():
    # oneDNN leaves the gradient of taps that only see padding uninitialised.
    net = onelip.create_model("aol-fast-small", image_size=(1, 40), num_classes=3)
    kernels = [m.kernel_size for m in net.modules() if isinstance(m, torch.nn.Conv2d)]
    assert all(kernel[0] == 1 for kernel in kernels)
    assert net(torch.rand(2, 3, 1, 40)).shape == (2, 3)


def test_resized_images_in_every_command(capsys, tmp_path, quick):
    data = write(tmp_path / "data", (9, 12), (16, 8))
    run = tmp_path / "run"
    code, _, err = call(capsys, "train", "--data", data, "--budget", "2s", *TINY, "--out", run)
    assert code == 1
    assert "--image-size" in err
    assert not run.exists()
    flags = ("--image-size", "10x12", "--budget", "2s", *TINY)
    code, out, err = call(capsys, "train", "--data", data, *flags, "--out", run)
    assert code == 0, err
    assert "3x10x12 pixels, resized" in out
    assert read_config(RunDirectory(run)).shape == (3, 10, 12)
    results = json.loads((run / "results.json").read_text())["test"]
    code, out, err = call(capsys, "evaluate", run, "--json")
    assert code == 0, err
    assert json.loads(out)["accuracy"] == results["accuracy"]
    other = write(tmp_path / "other", (30, 30), (5, 7), count=2)
    code, out, err = call(capsys, "evaluate", run, "--data", other, "--json")
    assert (code, json.loads(out)["images"]) == (0, 4), err
    code, out, err = call(capsys, "predict", run, f"{other}/*/*.png", "--json", *REAL)
    assert code == 0, err
    changes = [row["change"] for row in json.loads(out)["predictions"]]
    assert changes == ["resized from 30x30", "resized from 7x5"] * 2
    # Files and data sets are resized alike.
    code, out, err = call(capsys, "predict", run, f"{data}/*/*.png", "--json", *REAL)
    loaded = load_data(data, image_size=(10, 12))
    found = onelip.load_run(run).predict(torch.cat([loaded.train_images, loaded.test_images]), mode="real-arithmetic")
    assert sorted(r["radius"] for r in json.loads(out)["predictions"]) == sorted(p.radius for p in found)


@pytest.mark.parametrize("text", ["0", "64x", "x", "64x0", "-3", "big", "6.5", "123456"])
def test_image_sizes_that_are_none(text):
    with pytest.raises(RecipeError, match="expected image_size"):
        Recipe(image_size=text)


def test_named_data_and_arrays_are_resized(tmp_path):
    assert load_data("digits", image_size=(5, 7)).shape == (1, 5, 7)
    np.savez(tmp_path / "own.npz", images=np.zeros((10, 8, 8, 3), np.uint8), labels=np.arange(10) % 2)
    assert load_data(tmp_path / "own.npz", image_size=(4, 6)).shape == (3, 4, 6)


# Memory.


def test_a_network_that_cannot_fit_is_refused_before_it_is_built(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(budget, "free_memory", lambda *_: 16e9)
    data = write(tmp_path / "data", (224, 224), count=2)
    flags = ("--data", data, "--model", "aol-small", "--out", tmp_path / "run")
    code, _, err = call(capsys, "train", *flags, "--epochs", "1")
    assert code == 2
    assert re.search(r"35,251\.\d M parameters for images of 224x224 .* about 42\d\.\d GB.*--image-size 64", err)
    assert len(err.splitlines()) == 1
    assert not (tmp_path / "run").exists()
    monkeypatch.setattr(budget, "free_memory", lambda *_: 2e9)  # 64x64 pixels do not fit either
    assert "--image-size" not in call(capsys, "train", *flags, "--epochs", "1")[2]


def test_a_batch_that_cannot_fit_is_refused_with_one_that_does(monkeypatch):
    recipe = Recipe(data="digits", model="patchwise-tiny", batch_size=500)
    need, _ = budget.require_memory(recipe, 10, (1, 8, 8), CPU)
    free = (need.fixed + need.least) / 2
    monkeypatch.setattr(budget, "free_memory", lambda *_: free)
    with pytest.raises(RecipeError, match="memory are free; use --batch-size") as error:
        budget.require_memory(recipe, 10, (1, 8, 8), CPU)
    smaller = int(re.search(r"--batch-size (\d+)", str(error.value)).group(1))
    budget.require_memory(recipe.replace(batch_size=smaller), 10, (1, 8, 8), CPU)


def test_the_estimate_grows_with_the_batch_and_the_optimizer():
    recipe = Recipe(model="aol-fast-small", batch_size=100)

    def need(**changes):
        changed = recipe.replace(**changes)
        return budget.step_memory(changed, 10, (3, 32, 32), float("inf"), changed.batch_size)

    parameters = sum(p.numel() for p in onelip.create_model("aol-fast-small").parameters())
    assert need().parameters == parameters
    assert need().fixed == 12 * parameters
    assert need(optimizer="adamw").fixed == 16 * parameters
    # At least the output of the first layer, which every later step of the backward pass needs.
    first = 64 * 8 * 8 * 4
    assert need(batch_size=200).saved - need().saved > 100 * first


def test_a_budget_shrinks_the_batch_to_the_memory(monkeypatch, quick):
    digits = load_data("digits")
    recipe = onelip.training.recipe_for_budget(20).replace(data="digits")
    usual = onelip.training.fit_to_budget(recipe, 20, digits, CPU).batch_size
    need, _ = budget.require_memory(recipe.replace(batch_size=usual), 10, (1, 8, 8), CPU)
    monkeypatch.setattr(budget, "free_memory", lambda *_: need.estimate)
    fitted = onelip.training.fit_to_budget(recipe, 20, digits, CPU)
    assert 20 <= fitted.batch_size < usual
    assert fitted.lr == pytest.approx(recipe.lr * (fitted.batch_size / 500) ** 0.5)
    parts = onelip.training.fit_to_budget(recipe.replace(accumulate=25), 20, digits, CPU)
    assert parts.batch_size >= parts.accumulate == 25


def test_free_memory_is_a_number():
    assert budget.free_memory(torch.device("cpu")) > 2**20


def test_nothing_is_shown_or_timed_without_a_display(tmp_path, monkeypatch, capsys):
    calls, step = [], Learner.step
    monkeypatch.setattr(Learner, "step", lambda *a, **b: (calls.append(1), step(*a, **b))[1])
    recipe = Recipe(data="digits", model="patchwise-tiny", batch_size=500, epochs=1, augment=False, lr=0.01)
    train(recipe, tmp_path / "run")
    assert len(calls) == 3
    assert capsys.readouterr().out == ""


# Folders that cannot be used.


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda p: (p / "dog" / "0.png").write_bytes(b"no image"), "not a complete PNG or JPEG image"),
        (lambda p: (p / "dog" / "notes.txt").write_text("x"), "expected only .png, .jpg, .jpeg files"),
        (lambda p: [f.unlink() for f in (p / "dog").iterdir()], "no images of class 'dog'"),
        (lambda p: [f.unlink() for f in list((p / "dog").iterdir())[1:]], "got one of class 'dog'"),
        (lambda p: (p / "dog" / "more").mkdir(), "expected an image, got a folder"),
        (lambda p: (p / "dog").rename(p / "cat" / "dog"), "expected a subfolder for each class"),
        (lambda p: Image.new("I;16", (8, 8)).save(p / "dog" / "0.png"), "expected 8 bits for each channel"),
        (lambda p: Image.new("RGBA", (8, 8), (1, 2, 3, 9)).save(p / "dog" / "0.png"), "transparent pixels"),
    ],
)
def test_bad_folders_leave_nothing(capsys, tmp_path, spoil, message):
    spoil(data := write(tmp_path / "data", (8, 8), count=3))
    code, _, err = call(capsys, "train", "--data", data, "--out", tmp_path / "run")
    assert code == 1
    assert message in err
    assert len(err.splitlines()) == 1
    assert not (tmp_path / "run").exists()
