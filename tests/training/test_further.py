"""Starting from a finished run, accumulated gradients, averaged weights, and logs for other programs."""

import csv
import json
import sys
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch
from _runs import SMALL, SMALL_FLAGS, call, stop_after

import onelip
from onelip.core.errors import RecipeError, RunError, Stopped
from onelip.data import load_data
from onelip.training import Recipe, RunDirectory, build_model, load_run, read_config, read_log, train
from onelip.training.learner import Learner, WeightAverage

FAST = SMALL.replace(
    model="aol-fast-small", model_options=("widths=[8,8,8]", "depths=[1,1,1]"), optimizer="muon", products="float32"
)


def weights(path):
    return load_run(path).model.state_dict()


# Starting from a run.


def test_more_epochs_for_a_finished_run(capsys, tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    train(SMALL.replace(epochs=2), first)
    before = {path.name: path.read_bytes() for path in first.iterdir() if path.is_file()}
    code, _, err = call(capsys, "train", "--start-from", first, "--epochs", "1", "--lr", "1e-9", "--out", second)
    assert code == 0, err
    assert {path.name: path.read_bytes() for path in first.iterdir() if path.is_file()} == before
    config = read_config(RunDirectory(second)).recipe
    assert config == SMALL.replace(epochs=1, lr=1e-9, start_from=str(first))
    # With so small a rate nothing changes: it started from the final weights.
    torch.testing.assert_close(weights(second), weights(first))


def test_a_run_that_started_from_another_resumes_without_it(tmp_path, monkeypatch):
    train(SMALL.replace(epochs=1), tmp_path / "first")
    recipe = SMALL.replace(epochs=2, start_from=str(tmp_path / "first"))
    train(recipe, tmp_path / "whole")
    with monkeypatch.context() as patched, pytest.raises(Stopped):
        train(recipe, tmp_path / "parts", stop=stop_after(patched, 3))
    (tmp_path / "first").rename(tmp_path / "elsewhere")
    train(read_config(RunDirectory(tmp_path / "parts")).recipe, tmp_path / "parts", resume=True)
    plain = [(tmp_path / name / "plain.safetensors").read_bytes() for name in ("whole", "parts")]
    assert plain[0] == plain[1]


def test_weights_of_another_network_are_refused(capsys, tmp_path):
    train(SMALL.replace(epochs=1), tmp_path / "first")
    flags = ("--start-from", tmp_path / "first", "--out", tmp_path / "run")
    code, _, err = call(capsys, "train", *flags, "--model-options", "channels=8", "width=4", "convs=1", "linears=1")
    assert code == 2
    assert "do not fit this network" in err
    assert len(err.splitlines()) == 1
    assert not (tmp_path / "run").exists()
    images, labels = torch.zeros(4, 8, 8, dtype=torch.uint8), torch.tensor([0, 1, 0, 1])
    np.savez(tmp_path / "two.npz", images=images, labels=labels)
    code, _, err = call(capsys, "train", *flags, "--data", tmp_path / "two.npz")
    assert (code, "that run has 10 classes, and two has 2" in err) == (2, True)
    code, _, err = call(capsys, "train", *flags, "--image-size", "6")
    assert (code, "images of 1x8x8 pixels, and digits of 1x6x6; --image-size 8x8" in err) == (2, True)
    assert not (tmp_path / "run").exists()
    code, _, err = call(capsys, "train", *flags, "--validation", "0.1")
    assert (code, "--start-from: that run was trained on validation images of this one" in err) == (2, True)
    assert not (tmp_path / "run").exists()
    assert call(capsys, "train", "--start-from", tmp_path / "none", "--out", tmp_path / "run")[0] == 2
    code, _, err = call(capsys, "train", *flags, "--preset", "paper")
    assert (code, "--start-from and --preset" in err) == (2, True)


def test_resume_points_to_start_from(capsys, tmp_path):
    train(SMALL.replace(epochs=1), tmp_path / "run")
    for more in (("--epochs", "5"), ("--budget", "1m")):
        code, _, err = call(capsys, "train", "--resume", tmp_path / "run", *more)
        assert code == 2
        assert "--start-from" in err


# Accumulated gradients.


def gradients(recipe, images, labels):
    torch.manual_seed(0)
    model = build_model(recipe, 10, (1, 8, 8)).double()
    learner = Learner(recipe, model.train())
    learner.step(images, labels, batch_size=len(labels), progress=0.0, lr=0.0)
    return {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("parts", [2, 3, 50])
@pytest.mark.parametrize("method", ["aol", "soc"])
def test_the_gradient_of_the_whole_batch(parts, method):
    data = load_data("digits")
    images, labels = data.train_images[:50].double() / 255, data.train_labels[:50]
    recipe = SMALL.replace(method=method, batch_size=50, augment=False, momentum=0.0, nesterov=False)
    whole = gradients(recipe, images, labels)
    for name, gradient in gradients(recipe.replace(accumulate=parts), images, labels).items():
        torch.testing.assert_close(gradient, whole[name], rtol=1e-9, atol=1e-12)


def test_a_run_with_parts(tmp_path):
    train(SMALL.replace(epochs=1), tmp_path / "whole")
    train(SMALL.replace(epochs=1, accumulate=4), tmp_path / "parts")
    torch.testing.assert_close(weights(tmp_path / "parts"), weights(tmp_path / "whole"), rtol=1e-3, atol=1e-4)


def test_parts_that_are_none():
    for wrong in (0, -1, 251):
        with pytest.raises(RecipeError, match="accumulate"):
            SMALL.replace(accumulate=wrong)


# Averaged weights.


def test_the_average_by_hand():
    model = torch.nn.Linear(1, 1, bias=False)
    average = WeightAverage(model, 0.3)
    expected = model.weight.item()
    for step in range(5):
        with torch.no_grad():
            model.weight.fill_(float(step))
        average.update(model)
        decay = min(0.3, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * step
        assert float(average.model.weight) == pytest.approx(expected)


@pytest.mark.parametrize("recipe", [SMALL, FAST], ids=["sgd", "muon"])
def test_averages_are_evaluated_and_saved_and_resumed(tmp_path, monkeypatch, recipe):
    recipe = recipe.replace(ema=0.9, epochs=2)
    whole = train(recipe, tmp_path / "whole")
    plain = train(recipe.replace(ema=0.0), tmp_path / "plain")
    assert whole != plain
    with monkeypatch.context() as patched, pytest.raises(Stopped):
        train(recipe, tmp_path / "parts", stop=stop_after(patched, 8))
    early = load_run(tmp_path / "parts").plain.state_dict()  # of the checkpoint
    assert train(recipe, tmp_path / "parts", resume=True) == whole
    files = [(tmp_path / name / "plain.safetensors").read_bytes() for name in ("whole", "parts")]
    assert files[0] == files[1]
    late = load_run(tmp_path / "parts").plain.state_dict()
    assert early.keys() == late.keys()
    assert load_run(tmp_path / "whole").lipschitz <= 1


def test_an_average_stays_certified(tmp_path):
    recipe = FAST.replace(ema=0.9, epochs=1)
    train(recipe, tmp_path / "run")
    images = load_data("digits").test_images[:5]
    found = onelip.certify(load_run(tmp_path / "run").plain.double(), images)
    assert found.mode == "sound"
    assert found.constant <= 1 + 1e-4


@pytest.mark.parametrize("wrong", [-0.1, 1.0, 2.0])
def test_decays_that_are_none(wrong):
    with pytest.raises(RecipeError, match="ema"):
        Recipe(ema=wrong)


# Logs.


def test_csv(tmp_path, monkeypatch):
    recipe = SMALL.replace(epochs=3)
    with monkeypatch.context() as patched, pytest.raises(Stopped):
        train(recipe, tmp_path / "run", log=["csv"], stop=stop_after(patched, 8))
    train(recipe, tmp_path / "run", resume=True, log=["csv"])
    with (tmp_path / "run" / "log.csv").open() as file:
        rows = list(csv.DictReader(file))
    lines = read_log(RunDirectory(tmp_path / "run"))
    assert [int(row["epoch"]) for row in rows] == [1, 2, 3]
    for row, line in zip(rows, lines, strict=True):
        assert float(row["train_loss"]) == line["train_loss"]
        assert float(row["cra/36/255"]) == line["cra"]["36/255"]
    # A log that is asked for later has all epochs.
    train(recipe, tmp_path / "later")
    train(recipe, tmp_path / "later", resume=True, log=["csv"])
    assert len((tmp_path / "later" / "log.csv").read_text().splitlines()) == 4


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_services(tmp_path, monkeypatch, capsys, name):
    """The calls, with a package that records them; the packages themselves are not installed for tests."""
    calls = []

    def init(**settings):
        print("a message of the package")
        calls.append(settings)

    module = ModuleType(name)
    module.__spec__ = SimpleNamespace()  # what find_spec looks for
    module.init = init
    module.log = lambda numbers, step: calls.append((step, numbers))
    module.finish = lambda: calls.append("end")
    monkeypatch.setitem(sys.modules, name, module)
    recipe = SMALL.replace(epochs=2)
    train(recipe, tmp_path / "run", log=[name])
    settings, first, second, end = calls
    assert settings["config"]["epochs"] == 2
    assert settings["resume"] == "allow"
    assert (first[0], second[0], end) == (1, 2, "end")
    assert "step" not in second[1]  # which trackio reserves
    assert "message" not in capsys.readouterr().out
    assert second[1]["accuracy"] == read_log(RunDirectory(tmp_path / "run"))[1]["accuracy"]
    train(recipe, tmp_path / "run", resume=True, log=[name])
    key = "id" if name == "wandb" else "name"
    assert calls[4][key] == settings[key]

    def refuse(**settings):
        raise ValueError("no API key\nand more")

    module.init = refuse
    with pytest.raises(RunError, match=f"--log {name} failed: no API key$"):
        train(recipe, tmp_path / "new", log=[name])
    assert not (tmp_path / "new").exists()


def test_missing_packages_and_unknown_logs_leave_nothing(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("onelip.training.loggers.find_spec", lambda name: None)
    for name in ("tensorboard", "wandb", "trackio"):
        with pytest.raises(RunError, match=rf"pip install 'onelip\[{name}\]'"):
            train(SMALL, tmp_path / "run", log=[name])
    with pytest.raises(RecipeError, match="did you mean 'tensorboard'"):
        train(SMALL, tmp_path / "run", log=["tensorbord"])
    code, _, err = call(capsys, "train", *SMALL_FLAGS, "--log", "wandb", "--out", tmp_path / "run")
    assert (code, "onelip[wandb]" in err) == (1, True)
    assert not (tmp_path / "run").exists()


def test_log_options(capsys, tmp_path):
    flags = ("train", *SMALL_FLAGS, "--epochs", "1", "--log", "csv", "--json", "--out", tmp_path / "run")
    code, out, err = call(capsys, *flags)
    assert code == 0, err
    assert json.loads(out)["run"] == str(tmp_path / "run")
    assert (tmp_path / "run" / "log.csv").exists()
