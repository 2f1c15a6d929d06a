"""Stop and go on: a run that is killed, wherever, ends with the weights of one that never was, bit for bit."""

import json
import os
import random
import shutil
import signal
import time

import pytest
import torch
from _runs import SMALL, SMALL_FLAGS, finish, same_bytes, start
from safetensors.torch import load_file, save_file

import onelip
from onelip.training import CheckpointError, RecipeError, RunDirectory, RunError, load_run, read_log, train
from onelip.training.checkpoint import read_position
from onelip.training.run_directory import open_run
from onelip.training.stop import listen

EPOCHS, STEPS = 12, 6  # STEPS in each epoch
FLAGS = ["train", *SMALL_FLAGS, "--epochs", str(EPOCHS)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nothing stopped."""
    out = tmp_path_factory.mktemp("runs") / "whole"
    finish(out.parent / "log", *FLAGS, "--out", out)
    return out


def position(out):
    path = out / "checkpoint.safetensors"
    if not path.exists():
        return None
    at = read_position(path)
    return at.epoch, at.batch


def moving_position(out, otherwise):
    """The position of a run that is being written: its file may be replaced while it is opened."""
    try:
        return position(out) or otherwise
    except CheckpointError:
        return otherwise


def log_without_times(out):
    return [
        {key: value for key, value in line.items() if key not in ("seconds", "images_per_second")}
        for line in read_log(RunDirectory(out))
    ]


def test_killed_at_random_moments(whole, tmp_path):
    """Steps, evaluations and checkpoints take turns within milliseconds; the kill comes into any of them."""
    rng = random.Random(0)
    out, log, seen = tmp_path / "run", tmp_path / "log", []
    arguments = [*FLAGS, "--out", out]
    for _ in range(12):
        before = position(out)
        process = start(log, *arguments, "--save-steps", "2")
        while process.is_alive() and moving_position(out, before) == before:
            time.sleep(0.002)
        time.sleep(rng.uniform(0.0, 0.05))
        process.kill()
        process.join()
        if process.exitcode == 0:  # it was faster
            break
        seen.append(position(out))
        arguments = ["train", "--resume", out]
    assert len(set(seen)) >= 3
    finish(log, "train", "--resume", out)
    assert same_bytes(out, whole)
    assert log_without_times(out) == log_without_times(whole)


@pytest.mark.parametrize(
    ("call", "at"),
    [
        ("os.replace", 1),  # before there is a config
        ("os.replace", 4),  # the first checkpoint, written but not in its place
        ("os.fsync", 11),  # a later one, half on its way
        ("os.replace", 14),
    ],
)
def test_killed_in_the_middle_of_a_write(whole, tmp_path, call, at):
    out, log = tmp_path / "run", tmp_path / "log"
    process = start(log, *FLAGS, "--save-steps", "3", "--out", out, die_in=(call, at))
    process.join(60)
    assert process.exitcode == -signal.SIGKILL, log.read_text()
    # Where nothing was begun the same command begins again.
    finish(log, *(FLAGS if at == 1 else ["train"]), "--out" if at == 1 else "--resume", out)
    assert same_bytes(out, whole)
    assert not list(out.glob("*.part"))


@pytest.mark.parametrize(
    ("at", "kept"),
    [
        (1, (0, STEPS)),
        (5, (4, STEPS)),
        (EPOCHS, (EPOCHS - 1, STEPS)),
        (EPOCHS + 1, (EPOCHS, 0)),  # the one at the end, of the finished weights
    ],
)
def test_killed_in_an_evaluation(whole, tmp_path, at, kept):
    """It costs the evaluation, and no step: the checkpoint has the whole epoch."""
    out, log = tmp_path / "run", tmp_path / "log"
    process = start(log, *FLAGS, "--out", out, die_in=("onelip.training.loop.evaluate_with", at))
    process.join(60)
    assert process.exitcode == -signal.SIGKILL, log.read_text()
    assert position(out) == kept
    finish(log, "train", "--resume", out)
    assert same_bytes(out, whole)
    assert log_without_times(out) == log_without_times(whole)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_save_and_tell_how_to_go_on(whole, tmp_path, number, code):
    out, log = tmp_path / "run", tmp_path / "log"
    process = start(log, *FLAGS, "--out", out)
    while process.is_alive() and moving_position(out, (0, 0)) < (1, 0):
        time.sleep(0.002)
    assert process.pid is not None
    os.kill(process.pid, number)
    process.join(60)
    text = log.read_text()
    assert process.exitcode == code, text
    assert f"go on with\n  onelip train --resume {out}" in text
    assert "Traceback" not in text
    assert position(out) != (EPOCHS, 0)
    finish(log, "train", "--resume", out)
    assert same_bytes(out, whole)


def test_a_second_ctrl_c_ends_at_once_but_for_the_echo_of_torchrun(monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    with listen() as wish:
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "any")
    with listen() as wish:
        for number in (signal.SIGINT, signal.SIGINT, signal.SIGTERM):
            signal.raise_signal(number)
        assert wish.signal_number == signal.SIGINT
        wish.heard_at -= 6  # seconds later it is a person again
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_a_second_process_is_kept_away(tmp_path):
    with open_run(RunDirectory(tmp_path), SMALL, resume=False), pytest.raises(RunError, match="another process writes"):
        train(SMALL, tmp_path)


def test_a_disk_that_is_really_full(whole, tmp_path):
    """The system refuses a checkpoint that has grown: the first one has no momentum, so it is smaller."""
    out, log = tmp_path / "run", tmp_path / "log"
    process = start(log, *FLAGS, "--out", out, limit=(whole / "checkpoint.safetensors").stat().st_size - 1)
    process.join(60)
    text = log.read_text()
    assert process.exitcode == 1, text
    assert "the disk is full" in text
    assert "the last good one is kept" in text
    assert "Traceback" not in text
    assert position(out) == (0, 0)
    finish(log, "train", "--resume", out)
    assert same_bytes(out, whole)


@pytest.fixture
def half(tmp_path):
    """A run of two epochs of three, as a kill in the second evaluation leaves it."""
    out = tmp_path / "half"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("onelip.training.loop.RunLog.write", _fail_in_epoch_two)
        with pytest.raises(ZeroDivisionError):
            train(SMALL, out)
    assert position(out) == (1, STEPS)
    return out


def _fail_in_epoch_two(self, line):
    if line["epoch"] == 2:
        raise ZeroDivisionError
    with self.path.open("a") as file:
        file.write(json.dumps(line) + "\n")


def test_a_run_that_has_not_ended_can_be_looked_at(half):
    assert not load_run(half).is_finished


def test_the_log_is_trimmed_to_the_checkpoint(half, tmp_path):
    """What was logged after the checkpoint comes again; a line that was cut short is dropped."""
    with (half / "log.jsonl").open("a") as file:
        file.write('{"epoch": 2, "accuracy": 0}\n{"epoch": 3, "accu')
    train(SMALL, half, resume=True)
    train(SMALL, tmp_path / "whole")
    assert same_bytes(half, tmp_path / "whole")
    log = read_log(RunDirectory(half))
    assert [line["epoch"] for line in log] == [1, 2, 3]
    assert log[1]["accuracy"] > 0


def test_bad_checkpoints_are_named_and_left_alone(half):
    path = half / "checkpoint.safetensors"
    good = path.read_bytes()

    def refused(message):
        bad = path.read_bytes()
        with pytest.raises(CheckpointError, match=message):
            train(SMALL, half, resume=True)
        assert path.read_bytes() == bad
        path.write_bytes(good)

    path.write_bytes(good[: len(good) // 2])
    refused("damaged or truncated")
    path.write_bytes(b"")
    refused("damaged or truncated")
    path.write_bytes(b"not a checkpoint at all, but long enough to be one")
    refused("damaged or truncated")
    tensors = load_file(path)
    save_file(tensors, path, {"format": "onelip checkpoint 2"})
    refused("expected the format 'onelip checkpoint 1', got 'onelip checkpoint 2'")
    facts = {"format": "onelip checkpoint 1", "position": "{}", "data": "x"}
    save_file(tensors, path, facts)
    refused("position")
    name = next(n for n in tensors if n.startswith("model."))
    rest = {key: tensor for key, tensor in tensors.items() if key != name}
    facts["position"] = json.dumps({"epoch": 1, "batch": 0, "loss_sum": 0.0, "images": 0, "seconds": 0.0})
    facts["data"] = onelip.data.load_data("digits").fingerprint
    save_file(rest, path, facts)
    refused("another architecture")
    save_file({**tensors, "model.more": torch.zeros(1)}, path, facts)
    refused("another architecture")
    save_file({**rest, name: torch.zeros(1, 2)}, path, facts)
    refused(f"'{name}' of shape .* got shape 1x2")
    save_file({**rest, name: torch.full_like(tensors[name], float("nan"))}, path, facts)
    refused("NaN or infinity")
    train(SMALL, half, resume=True)


def test_a_checkpoint_of_another_architecture(half):
    content = json.loads((half / "config.json").read_text())
    content["recipe"]["model_options"][0] = "channels=16"
    (half / "config.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="another architecture"):
        load_run(half)


def test_data_that_have_changed(half):
    from dataclasses import replace

    data = onelip.data.load_data("digits")
    changed = replace(data, train_images=data.train_images.flip(0), train_labels=data.train_labels.flip(0))
    with pytest.raises(CheckpointError, match="expected the data that the run began with"):
        train(SMALL, half, resume=True, data=changed)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.update(version=2), "config of version 1, got version 2"),
        (lambda c: c["recipe"].update(version=7), "recipe of version 1, got version 7"),
        (lambda c: c["recipe"].update(epochz=7), "did you mean 'epochs'"),
        (lambda c: c.pop("data"), "fingerprint, class_names and shape"),
        (lambda c: c["data"].update(shape=[1, 8]), "fingerprint, class_names and shape"),
    ],
)
def test_configs_that_cannot_be_read(half, change, message):
    content = json.loads((half / "config.json").read_text())
    change(content)
    (half / "config.json").write_text(json.dumps(content))
    with pytest.raises(RunError, match=message):
        load_run(half)


def test_directories_that_are_no_runs(tmp_path):
    with pytest.raises(RunError, match=r"without config\.json"):
        load_run(tmp_path)
    with pytest.raises(RunError, match="no directory"):
        load_run(tmp_path / "nothing")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(RunError, match="damaged"):
        load_run(tmp_path)


def test_a_run_keeps_its_recipe(half):
    with pytest.raises(RecipeError, match=r"expected the run's own --lr 0\.05, got 0\.1"):
        train(SMALL.replace(lr=0.1), half, resume=True)
    train(SMALL.replace(channels_last=False), half, resume=True)  # only the machine's ways


def test_a_run_can_be_moved(half, tmp_path):
    shutil.move(half, tmp_path / "moved")
    train(SMALL, tmp_path / "moved", resume=True)
    assert load_run(tmp_path / "moved").is_finished
