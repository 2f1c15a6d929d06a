"""Stop and resume: a run that is killed at any point ends with the same weights as one that was not, bit for bit."""

import json
import shutil
import signal

import pytest
import torch
from _runs import SMALL, SMALL_FLAGS, finish, same_bytes, start
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import onelip
from onelip.training import (
    CheckpointError,
    Display,
    RecipeError,
    RunDirectory,
    RunError,
    Stopped,
    StopRequest,
    load_run,
    read_log,
    train,
)
from onelip.training.checkpoint import read_position
from onelip.training.distributed import stop_on_signals
from onelip.training.run_directory import open_run

EPOCHS, STEPS = 12, 6  # STEPS in each epoch
FLAGS = ["train", *SMALL_FLAGS, "--epochs", str(EPOCHS)]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An uninterrupted run."""
    out = tmp_path_factory.mktemp("runs") / "whole"
    finish(out.parent / "log", *FLAGS, "--out", out)
    return out


def position(out):
    path = out / "checkpoint.safetensors"
    if not path.exists():
        return None
    at = read_position(path)
    return at.epoch, at.batch


def log_without_times(out):
    return [
        {key: value for key, value in line.items() if key not in ("seconds", "images_per_second")}
        for line in read_log(RunDirectory(out))
    ]


STEP, EVALUATION = "onelip.training.trainer.learning_rate", "onelip.training.trainer.evaluate"
KILL = signal.SIGKILL


def test_killed_again_and_again(whole, tmp_path):
    """Killed in steps, evaluations and writes; each session resumes the previous one."""
    out, log, seen = tmp_path / "run", tmp_path / "log", []
    arguments = [*FLAGS, "--out", out]
    for call, at in [(STEP, 4), ("os.replace", 5), ("os.fsync", 9), (EVALUATION, 1), ("os.replace", 2), (STEP, 12)]:
        process = start(log, *arguments, "--save-steps", "2", interrupt=(call, at, KILL))
        process.join(600)
        assert process.exitcode == -KILL, log.read_text()
        seen.append(position(out))
        arguments = ["train", "--resume", out]
    assert len(set(seen)) >= 4
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
    process = start(log, *FLAGS, "--save-steps", "3", "--out", out, interrupt=(call, at, KILL))
    process.join(600)
    assert process.exitcode == -KILL, log.read_text()
    # If there is no config yet, the same command starts again.
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
    """Only the evaluation is repeated, no step: the checkpoint contains the whole epoch."""
    out, log = tmp_path / "run", tmp_path / "log"
    process = start(log, *FLAGS, "--out", out, interrupt=(EVALUATION, at, KILL))
    process.join(600)
    assert process.exitcode == -KILL, log.read_text()
    assert position(out) == kept
    finish(log, "train", "--resume", out)
    assert same_bytes(out, whole)
    assert log_without_times(out) == log_without_times(whole)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_save_and_print_how_to_resume(whole, tmp_path, number, code):
    out, log = tmp_path / "run", tmp_path / "log"
    process = start(log, *FLAGS, "--out", out, interrupt=(STEP, 10, number))
    process.join(600)
    text = log.read_text()
    assert process.exitcode == code, text
    assert f"resume with\n  onelip train --resume {out}" in text
    assert "Traceback" not in text
    assert position(out) == (1, 3)  # call 7 was the log of the first epoch
    finish(log, "train", "--resume", out)
    assert same_bytes(out, whole)


def test_a_second_ctrl_c_ends_at_once_unless_torchrun_forwards_it(monkeypatch):
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    with stop_on_signals() as stop:
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "any")
    with stop_on_signals() as stop:
        for number in (signal.SIGINT, signal.SIGINT, signal.SIGTERM):
            signal.raise_signal(number)
        assert stop.signal_number == signal.SIGINT
        stop.requested_at -= 6  # seconds later it is a person again
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


class SignalWatcher(Display):
    """Notes the signal handlers during a run, and requests a stop after some steps."""

    def __init__(self, stop=None, after=0):
        super().__init__(None)
        self.handlers, self.stop_request, self.left = set(), stop, after

    def step(self, *args):
        self.handlers.add((signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)))
        self.left -= 1
        if self.stop_request is not None and self.left == 0:
            self.stop_request()


def test_training_from_python_keeps_the_signal_handlers_of_the_caller(tmp_path):
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    watcher = SignalWatcher()
    train(SMALL.replace(epochs=1), tmp_path / "run", display=watcher)
    assert watcher.handlers == {before}


def test_a_run_can_be_stopped_from_python(tmp_path):
    stop = StopRequest()
    with pytest.raises(Stopped, match="saved after step 4 of 6") as stopped:
        train(SMALL.replace(epochs=1), tmp_path / "run", display=SignalWatcher(stop, after=4), stop=stop)
    assert stopped.value.signal_number == signal.SIGTERM
    assert position(tmp_path / "run") == (0, 4)
    train(SMALL.replace(epochs=1), tmp_path / "run", resume=True)
    train(SMALL.replace(epochs=1), tmp_path / "whole")
    assert same_bytes(tmp_path / "run", tmp_path / "whole")


def test_a_second_process_is_kept_away(tmp_path):
    with open_run(RunDirectory(tmp_path), SMALL, resume=False), pytest.raises(RunError, match="in use by another"):
        train(SMALL, tmp_path)


def test_a_disk_that_is_really_full(whole, tmp_path):
    """The system refuses a checkpoint that has grown: the first one has no momentum, so it is smaller."""
    out, log = tmp_path / "run", tmp_path / "log"
    process = start(log, *FLAGS, "--out", out, limit=(whole / "checkpoint.safetensors").stat().st_size - 1)
    process.join(600)
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
        patch.setattr("onelip.training.trainer.RunLog.write", _fail_in_epoch_two)
        with pytest.raises(ZeroDivisionError):
            train(SMALL, out)
    assert position(out) == (1, STEPS)
    return out


def _fail_in_epoch_two(self, line):
    if line["epoch"] == 2:
        raise ZeroDivisionError
    with self.path.open("a") as file:
        file.write(json.dumps(line) + "\n")


def test_a_run_that_has_not_ended_can_be_loaded(half):
    assert not load_run(half).is_finished


def test_the_log_is_trimmed_to_the_checkpoint(half, tmp_path):
    """Lines logged after the checkpoint are repeated; an incomplete line is dropped."""
    with (half / "log.jsonl").open("a") as file:
        file.write('{"epoch": 2, "accuracy": 0}\n{"epoch": 3, "accu')
    train(SMALL, half, resume=True)
    train(SMALL, tmp_path / "whole")
    assert same_bytes(half, tmp_path / "whole")
    log = read_log(RunDirectory(half))
    assert [line["epoch"] for line in log] == [1, 2, 3]
    assert log[1]["accuracy"] > 0


def test_bad_checkpoints_are_reported_and_kept(half):
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
    save_file(tensors, path, {"format": "onelip checkpoint 1"})
    refused("expected the format 'onelip checkpoint 2', got 'onelip checkpoint 1'")
    facts = {"format": "onelip checkpoint 2", "position": "{}", "data": "x", "optimizer": "{}"}
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
    save_file({**tensors, "optimizer.more.momentum_buffer": torch.zeros(1)}, path, facts)
    refused("belongs to no parameter")
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


def test_a_checkpoint_of_another_method(half):
    path = half / "checkpoint.safetensors"
    tensors, facts = load_file(path), dict(safe_open(path, "pt").metadata())
    name = next(name for name in tensors if name.startswith("model.") and name.endswith("_extra_state"))
    other = bytes(tensors[name].tolist()).replace(b'"lipschitz": 1.0', b'"lipschitz": 0.5')
    save_file({**tensors, name: torch.tensor(list(other), dtype=torch.uint8)}, path, facts)
    with pytest.raises(CheckpointError, match=r"of AOL with lipschitz=0\.5, and this is AOL with lipschitz=1\.0"):
        load_run(half)


def test_data_that_have_changed(half):
    from dataclasses import replace

    data = onelip.data.load_data("digits")
    changed = replace(data, train_images=data.train_images.flip(0), train_labels=data.train_labels.flip(0))
    with pytest.raises(CheckpointError, match="not the data that the run started with"):
        train(SMALL, half, resume=True, data=changed)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.update(version=2), "config of version 1, got version 2"),
        (lambda c: c["recipe"].update(version=7), "recipe of version 1, got version 7"),
        (lambda c: c["recipe"].update(epochz=7), "did you mean 'epochs'"),
        (lambda c: c.pop("data"), "fingerprint, class_names or shape"),
        (lambda c: c["data"].update(shape=[1, 8]), "fingerprint, class_names or shape"),
    ],
)
def test_configs_that_cannot_be_read(half, change, message):
    content = json.loads((half / "config.json").read_text())
    change(content)
    (half / "config.json").write_text(json.dumps(content))
    with pytest.raises(RunError, match=message):
        load_run(half)


def test_directories_that_are_no_runs(tmp_path):
    with pytest.raises(RunError, match=r"has no config\.json"):
        load_run(tmp_path)
    with pytest.raises(RunError, match="no such directory"):
        load_run(tmp_path / "nothing")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(RunError, match="damaged"):
        load_run(tmp_path)


def test_a_run_keeps_its_recipe(half):
    with pytest.raises(RecipeError, match=r"the run has --lr 0\.05, got 0\.1"):
        train(SMALL.replace(lr=0.1), half, resume=True)
    train(SMALL.replace(channels_last=False), half, resume=True)  # a field of the machine


def test_a_run_can_be_moved(half, tmp_path):
    shutil.move(half, tmp_path / "moved")
    train(SMALL, tmp_path / "moved", resume=True)
    assert load_run(tmp_path / "moved").is_finished
