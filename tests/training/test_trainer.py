"""The trainer: the files it writes, what it reports, and what it does when something goes wrong."""

import errno
import io
import json
import math
import os

import pytest
import torch
from _plain_training import train_plainly
from _runs import SMALL, same_bytes
from rich.console import Console

from onelip.core import files
from onelip.data import load_data, to_float
from onelip.training import (
    CheckpointError,
    Display,
    Diverged,
    RecipeError,
    RunDirectory,
    RunError,
    load_run,
    read_log,
    train,
)
from onelip.training.checkpoint import read_position
from onelip.training.display import results_table


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """One whole run, for several tests."""
    out = tmp_path_factory.mktemp("runs") / "whole"
    with torch.random.fork_rng():
        before = torch.get_rng_state()
        results = train(SMALL, out, display=Display(Console(file=io.StringIO())))
        assert torch.equal(torch.get_rng_state(), before)  # the caller's random numbers are unchanged
    return out, results


def steps_saved(out):
    """Steps in the checkpoint, of epochs of six."""
    at = read_position(out / "checkpoint.safetensors")
    return 6 * at.epoch + at.batch


def test_the_trainer_is_the_plain_algorithm(finished):
    """The same run written without checkpoints, display and processes ends with the same weights, bit for bit."""
    trained = load_run(finished[0]).model.state_dict()
    for name, tensor in train_plainly(SMALL).state_dict().items():
        assert torch.equal(tensor, trained[name]), name


def test_the_directory_holds_everything(finished):
    out, results = finished
    names = {path.name for path in out.iterdir()} - {".lock"}
    assert names == {
        *("config.json", "environment.json", "log.jsonl", "results.json"),
        *("checkpoint.safetensors", "weights.safetensors", "plain.safetensors"),
    }
    assert json.loads((out / "results.json").read_text()) == results
    session = json.loads((out / "environment.json").read_text())[0]
    assert session["torch"] == torch.__version__
    assert session["threads"] == torch.get_num_threads()
    log = read_log(RunDirectory(out))
    assert [line["epoch"] for line in log] == [1, 2, 3]
    assert log[-1]["split"] == "test"
    assert log[-1]["accuracy"] == results["test"]["accuracy"] > 0.2
    assert list(log[-1]["cra"]) == ["36/255", "72/255", "108/255", "1"]
    assert log[-1]["train_loss"] < log[0]["train_loss"]
    assert {"lr", "images_per_second", "mean_margin", "median_margin", "loss"} <= log[-1].keys()
    assert read_position(out / "checkpoint.safetensors").epoch == 3


def test_a_run_can_be_read_back(finished):
    out, results = finished
    run, data = load_run(out), load_data("digits")
    assert run.is_finished
    assert run.lipschitz == 1.0
    assert run.config.recipe == SMALL
    with torch.no_grad():
        scores = run.plain(to_float(data.test_images))
        torch.testing.assert_close(scores, run.model(to_float(data.test_images)))
    assert float((scores.argmax(1) == data.test_labels).double().mean()) == results["test"]["accuracy"]
    per_class = results["test"]["per_class"]
    assert sum(row["images"] for row in per_class) == len(data.test_labels)
    total = sum(row["images"] * row["accuracy"] for row in per_class) / len(data.test_labels)
    assert total == pytest.approx(results["test"]["accuracy"])


def test_a_finished_run_stays_as_it_is(finished, tmp_path):
    out, results = finished
    with pytest.raises(RunError, match=r"already contains a run; resume it with `onelip train --resume"):
        train(SMALL, out)
    before = (out / "weights.safetensors").read_bytes()
    assert train(SMALL, out, resume=True) == results
    assert (out / "weights.safetensors").read_bytes() == before


def test_seeds_differ_and_repeat(finished, tmp_path):
    train(SMALL, tmp_path / "again")
    train(SMALL.replace(seed=1), tmp_path / "other")
    assert same_bytes(finished[0], tmp_path / "again")
    assert not same_bytes(finished[0], tmp_path / "other")


def test_validation_is_for_choosing_and_test_for_reporting(tmp_path):
    recipe = SMALL.replace(validation=0.2, epochs=1)
    results = train(recipe, tmp_path / "run")
    assert [(name, part["images"]) for name, part in results.items()] == [("validation", 288), ("test", 355)]
    line = read_log(RunDirectory(tmp_path / "run"))[0]
    assert (line["split"], line["images"]) == ("validation", 288)
    assert line["accuracy"] == results["validation"]["accuracy"]


def test_a_network_without_a_proved_constant_gets_no_cra(tmp_path):
    results = train(SMALL.replace(method="none", epochs=1), tmp_path / "run")
    assert results["test"]["lipschitz"] is None
    assert set(results["test"]["cra"].values()) == {None}
    assert results["test"]["accuracy"] > 0.05


def test_other_ways_to_compute(tmp_path):
    """Memory layout and autocast change rounding, not the run."""
    train(SMALL.replace(epochs=1), tmp_path / "last")
    train(SMALL.replace(epochs=1, channels_last=False), tmp_path / "first")
    train(SMALL.replace(epochs=1, bf16=True), tmp_path / "bf16")
    states = [load_run(tmp_path / name).plain.state_dict() for name in ("last", "first", "bf16")]
    for name, tensor in states[0].items():
        torch.testing.assert_close(states[1][name], tensor, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(states[2][name], tensor, rtol=0.1, atol=0.05)
    assert not all(torch.equal(states[2][name], tensor) for name, tensor in states[0].items())


def test_what_a_person_sees(tmp_path):
    with (tmp_path / "seen").open("w") as file:
        display = Display(Console(file=file, width=120))
        results = train(SMALL.replace(epochs=2), tmp_path / "run", display=display)
        display.console.print(results_table(results["test"], per_class=True))
    seen = (tmp_path / "seen").read_text()
    assert "epoch 2/2  loss" in seen
    assert "CRA 36/255" in seen
    assert "median margin" in seen
    with (tmp_path / "terminal").open("w") as file:
        train(SMALL, tmp_path / "run2", display=Display(Console(file=file, width=120, force_terminal=True)))
    seen = (tmp_path / "terminal").read_text()
    assert "images/s" in seen
    assert "left" in seen


def test_a_diverging_run_stops_and_keeps_the_last_good_weights(tmp_path):
    """A plain network without any normalisation explodes under a huge learning rate."""
    recipe = SMALL.replace(method="none", lr=1e30, schedule="steps", epochs=2)
    with pytest.raises(Diverged, match=r"diverged: .*has the last good weights; try a lower --lr"):
        train(recipe, tmp_path / "run", save_steps=1)
    run = load_run(tmp_path / "run")
    assert all(p.isfinite().all() for p in run.model.parameters())


def test_weights_that_are_not_finite_are_never_saved(tmp_path, monkeypatch):
    """Here the loss is still finite when the last step of an epoch spoils a weight."""
    from onelip.training import trainer

    real, calls = trainer.learning_rate, []

    def spoiled(recipe, step, steps):
        calls.append(step)
        return math.nan if step == 11 else real(recipe, step, steps)  # the last of the second epoch's six

    monkeypatch.setattr(trainer, "learning_rate", spoiled)
    with pytest.raises(Diverged, match="in the weights after epoch 2"):
        train(SMALL, tmp_path / "run")
    assert steps_saved(tmp_path / "run") == 6  # the whole first epoch


@pytest.mark.parametrize("when", ["write", "replace"])
def test_a_full_disk_does_not_cost_the_last_good_checkpoint(tmp_path, monkeypatch, finished, when):
    real_sync, real_replace, count = os.fsync, os.replace, {"fsync": 0, "replace": 0}

    def failing(name, real, at):
        def call(*arguments):
            count[name] += 1
            # config, environment, log, first checkpoint; then that of epoch 1, then this one.
            if count[name] > at:
                raise OSError(errno.ENOSPC, "No space left on device")
            return real(*arguments)

        return call

    if when == "write":
        monkeypatch.setattr(files.os, "fsync", failing("fsync", real_sync, 10))
    else:
        monkeypatch.setattr(files.os, "replace", failing("replace", real_replace, 5))
    with pytest.raises(CheckpointError, match=r"the disk is full.*free some space; the last good one is kept"):
        train(SMALL, tmp_path / "run")
    monkeypatch.undo()
    assert not list((tmp_path / "run").glob("*.part"))
    assert steps_saved(tmp_path / "run") == 6  # the whole first epoch
    train(SMALL, tmp_path / "run", resume=True)
    assert same_bytes(tmp_path / "run", finished[0])
    assert [line["epoch"] for line in read_log(RunDirectory(tmp_path / "run"))] == [1, 2, 3]


def test_devices_that_are_not_there(tmp_path):
    for device in ("nonsense", "cuda", "mps", "meta"):
        if device == "cuda" and torch.cuda.is_available():
            continue
        with pytest.raises(RecipeError, match="device"):
            train(SMALL.replace(device=device), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_tensorboard_is_an_extra(tmp_path):
    try:
        import tensorboard  # noqa: F401  # pyright: ignore[reportMissingImports]
    except ImportError:
        with pytest.raises(RunError, match=r"pip install 'onelip\[tensorboard\]'"):
            train(SMALL.replace(epochs=1), tmp_path / "run", log=["tensorboard"])
        assert not (tmp_path / "run").exists()
    else:
        train(SMALL.replace(epochs=1), tmp_path / "run", log=["tensorboard"])
        assert list((tmp_path / "run" / "tensorboard").iterdir())
