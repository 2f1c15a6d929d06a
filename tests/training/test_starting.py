"""Starts that fail, signals outside of steps, and what a run remembers."""

import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
from _runs import SMALL, SMALL_FLAGS, call, finish, start

import onelip
from onelip.core import imports
from onelip.core.errors import RunError, Stopped
from onelip.training import RunDirectory, StopRequest, distributed, read_config, stop_on_signals, train
from onelip.training.learner import Learner

MODULE = """
import math
import onelip
from torch import nn

@onelip.register_model
def from_elsewhere(*, num_classes=10, image_size=(32, 32), in_channels=3, method="aol"):
    "One layer."
    model = nn.Sequential(nn.Flatten(), nn.Linear(in_channels * math.prod(image_size), num_classes))
    return model if method is None else onelip.constrain(model, method)
"""


def test_a_start_that_fails_can_be_repeated(tmp_path, monkeypatch):
    out = tmp_path / "new" / "run"
    with monkeypatch.context() as patched:
        patched.setattr(Learner, "step", lambda *_, **__: (_ for _ in ()).throw(RuntimeError("out of memory")))
        with pytest.raises(RuntimeError, match="out of memory"):
            train(SMALL.replace(epochs=1), out)
    assert not (tmp_path / "new").exists()
    train(SMALL.replace(epochs=1), out)


def test_files_of_others_are_kept(tmp_path, monkeypatch):
    (tmp_path / "notes.txt").write_text("mine")
    monkeypatch.setattr(Learner, "step", lambda *_, **__: (_ for _ in ()).throw(RuntimeError("out of memory")))
    with pytest.raises(RuntimeError, match="out of memory"):
        train(SMALL.replace(epochs=1), tmp_path)
    assert not (tmp_path / "config.json").exists()
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_a_run_that_has_made_steps_is_kept(tmp_path, monkeypatch):
    real, calls = Learner.step, []

    def fail(*arguments, **settings):
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("out of memory")
        return real(*arguments, **settings)

    monkeypatch.setattr(Learner, "step", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        train(SMALL.replace(epochs=1), tmp_path / "run")
    assert RunDirectory(tmp_path / "run").checkpoint.exists()


# Signals.


@pytest.mark.parametrize(
    ("function", "number", "remains"),
    [
        ("onelip.training.trainer.load_data", 1, False),
        ("onelip.training.trainer.build_model", 1, False),
        ("onelip.training.trainer.evaluate", 1, True),
        ("onelip.training.trainer.save_checkpoint", 2, True),  # at the end of the first epoch
    ],
)
def test_sigterm_outside_of_steps_ends_at_once(tmp_path, function, number, remains):
    out, log = tmp_path / "run", tmp_path / "log"
    flags = ["train", *SMALL_FLAGS, "--epochs", "2", "--save-minutes", "0", "--out", str(out)]
    process = start(log, *flags, interrupt=(function, number, signal.SIGTERM))
    process.join(100)
    assert process.exitcode == 143, log.read_text()
    assert out.exists() == remains
    assert "Traceback" not in log.read_text()
    if remains:
        assert "resume with" in log.read_text()
        assert not (out / "log.jsonl").read_text()  # not even the first epoch was evaluated to its end
        finish(tmp_path / "more", "train", "--resume", out)
    else:
        assert "nothing was written" in log.read_text()


def test_a_blocked_process_is_ended():
    """One call of a library, for longer than a signal may wait: no Python handler can interrupt it."""
    code = (
        "import hashlib, os, signal, threading\n"
        "from onelip.training.distributed import stop_on_signals\n"
        "with stop_on_signals(at_once=True):\n"
        "    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGTERM)).start()\n"
        "    hashlib.pbkdf2_hmac('sha256', b'', b'', 2**31 - 1)\n"  # minutes on any machine, without the interpreter
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stderr) == (143, "onelip: stopped\n")


def test_a_process_that_catches_the_exception_is_ended():
    code = (
        "import signal, time\n"
        "from onelip.training.distributed import stop_on_signals\n"
        "with stop_on_signals(at_once=True):\n"
        "    try: signal.raise_signal(signal.SIGTERM)\n"
        "    except RuntimeError: pass\n"
        "    while True: time.sleep(1)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False)
    assert (done.returncode, done.stderr) == (143, "onelip: stopped\n")


def test_a_signal_in_a_step_is_only_a_request():
    with stop_on_signals(at_once=True) as stop:
        with stop.deferred():
            signal.raise_signal(signal.SIGTERM)
            assert stop.signal_number == signal.SIGTERM
        with pytest.raises(Stopped):
            stop.raise_if_at_once()
    with pytest.raises(Stopped), stop_on_signals(at_once=True):
        signal.raise_signal(signal.SIGTERM)
    stop = StopRequest()  # of a program that uses the library
    stop()
    stop.raise_if_at_once()
    assert distributed.signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


# What a run remembers.


def test_the_data_root_is_remembered(tmp_path, capsys, monkeypatch):
    seen = []
    real = onelip.data.load_data

    def load(name, root=None, **_):
        seen.append(None if root is None else str(root))
        return real(name)

    monkeypatch.setattr("onelip.training.trainer.load_data", load)
    monkeypatch.setattr("onelip.training.build.load_data", load)
    monkeypatch.chdir(tmp_path)
    train(SMALL.replace(epochs=1), tmp_path / "run", data_root="images")
    root = str(tmp_path / "images")
    assert read_config(RunDirectory(tmp_path / "run")).data_root == root
    train(SMALL.replace(epochs=1), tmp_path / "run", resume=True)
    assert call(capsys, "evaluate", tmp_path / "run", "--json")[0] == 0
    assert call(capsys, "evaluate", tmp_path / "run", "--json", "--data-root", "other")[0] == 0
    assert seen == ["images", root, root, "other"]


def test_a_run_remembers_the_module_of_its_model(tmp_path, capsys, monkeypatch):
    from onelip.models import registry

    (tmp_path / "models_of_mine.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p not in ("", str(tmp_path))])
    options = ["--data", "digits", "--model", "from-elsewhere", "--epochs", "1", "--out", "run"]
    code, _, err = call(capsys, "train", *options)
    assert code == 2
    assert "unknown model 'from-elsewhere'" in err
    assert call(capsys, "train", *options, "--import", "models_of_mine")[0] == 0
    assert read_config(RunDirectory("run")).imports == ("models_of_mine",)

    def forget():
        registry._MODELS.pop("from-elsewhere", None)
        sys.modules.pop("models_of_mine", None)

    np.savez("new.npz", images=np.zeros((1, 8, 8), np.uint8))
    for command in (["evaluate", "run"], ["predict", "run", "new.npz"], ["audit", "run"], ["train", "--resume", "run"]):
        forget()
        assert call(capsys, *command)[0] == 0, command
    forget()
    (tmp_path / "models_of_mine.py").unlink()
    with pytest.raises(RunError, match="'models_of_mine' cannot be imported"):
        onelip.load_run("run")
    assert call(capsys, "models", "--import")[0] == 2
    code, _, err = call(capsys, "models", "--import=no_such_module")
    assert code == 2
    assert "'no_such_module' cannot be imported" in err


def test_a_run_remembers_the_module_of_its_loss(tmp_path, capsys, monkeypatch):
    from onelip.losses import registry

    (tmp_path / "losses_of_mine.py").write_text(
        "from onelip.losses import register_loss\nimport torch.nn.functional as F\n\n"
        "@register_loss('loss-of-mine')\ndef loss(scores, labels):\n    return F.cross_entropy(scores, labels)\n"
    )
    monkeypatch.chdir(tmp_path)
    options = [*SMALL_FLAGS, "--epochs", "1", "--loss", "loss-of-mine", "--out", "run"]
    code, _, err = call(capsys, "train", *options)
    assert code == 2
    assert "name its module with --import" in err
    assert call(capsys, "train", *options, "--import", "losses_of_mine")[0] == 0
    assert read_config(RunDirectory("run")).imports == ("losses_of_mine",)
    for file in ("results.json", "plain.safetensors"):
        (tmp_path / "run" / file).unlink()
    registry._LOSSES.pop("loss-of-mine")
    sys.modules.pop("losses_of_mine")
    assert call(capsys, "train", "--resume", "run")[0] == 0
    registry._LOSSES.pop("loss-of-mine")


def test_entry_points(tmp_path, monkeypatch):
    """An installed package registers its model without --import; a broken one is reported."""
    from onelip.models import registry

    info = tmp_path / "theirs-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[onelip.models]\nours = entry_models\nbroken = no_such_module\n")
    (tmp_path / "entry_models.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    imports.load_entry_points.cache_clear()
    try:
        with pytest.warns(UserWarning, match="the entry point 'broken' of onelip.models failed"):
            model = onelip.create_model("from-elsewhere", image_size=8, in_channels=1)
        assert model(torch.zeros(1, 1, 8, 8)).shape == (1, 10)
    finally:
        registry._MODELS.pop("from-elsewhere", None)
        sys.modules.pop("entry_models", None)
        imports.load_entry_points.cache_clear()
