"""The command line as a person or a script meets it."""

import errno
import json
import os
import re
import subprocess
import sys

import numpy as np
import pytest
from _runs import ENVIRONMENT, SMALL_FLAGS, call, onelip

from onelip._version import __version__
from onelip.cli import COMMANDS, main
from onelip.core.errors import RecipeError
from onelip.training import RunDirectory, load_run, preset, read_config

FLAGS = ["train", *SMALL_FLAGS, "--epochs", "1"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of one epoch, by `python -m onelip`, with the answer as JSON."""
    out = tmp_path_factory.mktemp("runs") / "first"
    done = onelip(*FLAGS, "--out", out, "--json")
    assert done.returncode == 0, done.stderr
    return out, done


# Help, names, versions.


@pytest.mark.parametrize("arguments", ["", "--help", *(f"{name} --help" for name in COMMANDS), "data fetch --help"])
def test_help_does_not_load_torch(arguments):
    code = (
        "import sys; from onelip.cli import main\n"
        "try: code = main(sys.argv[1:])\n"
        "except SystemExit as exit: code = exit.code\n"
        "assert not code and 'torch' not in sys.modules and 'numpy' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments.split()], env=ENVIRONMENT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "usage: onelip" in done.stdout


def test_data_needs_no_torch():
    code = "import sys; from onelip.cli import main; main(['data', '--json']); assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code], env=ENVIRONMENT, capture_output=True, text=True, check=True)
    assert "digits" in [row["name"] for row in json.loads(done.stdout)["data"]]


def test_help_shows_the_defaults_of_the_preset(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    paper = call(capsys, "train", "--data", "cifar10", "--model", "aol-small", "--help")[1]
    assert re.search(r"--epochs INT.*?default: 1000", paper, re.DOTALL)
    fast = call(capsys, "train", "--data", "cifar10", "--help")[1]
    assert re.search(r"--model STR.*?default: aol-fast-medium", fast, re.DOTALL)
    short = call(capsys, "train", "--preset", "short", "--help")[1]
    assert re.search(rf"--epochs INT.*?default: {preset('short').epochs}\)", short, re.DOTALL)


def test_help_is_broken_at_the_width_of_the_terminal_only(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "400")
    assert "without a split, else its --split images. Classes" in call(capsys, "certify", "--help")[1]
    text = call(capsys, "train", "--help")[1]
    assert "Other options take precedence. Default: 10m, unless a preset, epochs or an architecture" in text
    assert '48x64, without keeping their aspect ratio; "original" keeps their size. The run' in text  # of the recipe
    assert "changes the time. With --preset paper, or --model" in text


def test_lists(capsys):
    assert call(capsys, "--version")[1] == f"onelip {__version__}\n"
    assert "aol-small" in json.loads(call(capsys, "models", "--json")[1])
    assert json.loads(call(capsys, "models", "--filter", "aol-s*", "--json")[1]) == ["aol-small", "aol-std"]
    assert "no model matches" in call(capsys, "models", "--filter", "nothing*")[1]
    assert json.loads(call(capsys, "methods", "--json")[1])[0]["guarantee"]
    listed = call(capsys, "data", "list", "--root", "/nowhere")[1]
    assert "onelip data fetch cifar10" in listed
    assert "/nowhere" in listed


def test_fetch_says_what_went_wrong(capsys, tmp_path):
    code, _, err = call(capsys, "data", "fetch", "mnist", "--root", tmp_path, "--url", "http://127.0.0.1:9")
    assert code == 1
    assert "no connection" in err


# Training and evaluating.


def test_json_is_all_that_standard_output_holds(run):
    out, done = run
    results = json.loads(done.stdout)
    assert results["run"] == str(out)
    assert results["test"]["images"] == 355
    assert "epoch 1/1" in done.stderr


def test_the_run_has_the_recipe_of_the_flags(run):
    recipe = read_config(RunDirectory(run[0])).recipe
    options = ("channels=8", "width=2", "convs=1", "linears=1")
    assert recipe == preset("digits").replace(model_options=options, batch_size=250, augment=True, epochs=1)


def test_evaluate(run, capsys):
    out, done = run
    code, text, _ = call(capsys, "evaluate", out, "--json")
    assert code == 0
    results, expected = json.loads(text), json.loads(done.stdout)["test"]
    assert results["finished"]
    del expected["weights_sha256"]  # which file the results of a run belong to
    assert {key: results[key] for key in expected} == expected
    assert results["mode"] == "by construction (real arithmetic)"
    text = call(capsys, "evaluate", out)[1]
    assert "by construction (real arithmetic)" in text
    assert all(re.search(rf"^ *{name} ", text, re.MULTILINE) for name in [*range(10), "all"])


def test_a_run_keeps_its_recipe(run, capsys):
    out, _ = run
    code, _, err = call(capsys, "train", "--resume", out, "--lr", "0.7")
    assert code == 2
    assert re.search(r"the run has --lr [\d.]+, got 0.7", err)
    assert call(capsys, "train", "--resume", out, "--out", out)[0] == 2
    assert call(capsys, "train", "--resume", out, "--device", "cpu")[0] == 0
    code, _, err = call(capsys, *FLAGS, "--out", out)
    assert code == 2
    assert f"onelip train --resume {out}" in err


def test_runs_get_names_of_their_own(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for number in (1, 2):
        code, text, _ = call(capsys, *FLAGS)
        assert code == 0
        assert f"Run: runs/digits-patchwise-tiny-{number}" in text
        assert "accuracy" in text


@pytest.mark.parametrize(
    ("number", "message"), [(errno.EROFS, "read-only"), (errno.EACCES, "read-only"), (errno.ENOSPC, "full")]
)
def test_directories_that_cannot_be_written(capsys, tmp_path, monkeypatch, number, message):
    def refuse(self, *arguments, **settings):
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr("pathlib.Path.mkdir", refuse)
    code, _, err = call(capsys, *FLAGS, "--out", tmp_path / "new")
    assert code == 1
    assert message in err
    assert err.count("\n") == 1


# Own data that do not fit.


def npz(path, size=8, channels=1, classes=2, seed=0):
    rng = np.random.default_rng(seed)
    arrays = {}
    for part, count in (("train", 40), ("test", 10)):
        arrays[f"{part}_images"] = rng.integers(0, 256, (count, channels, size, size), dtype=np.uint8)
        arrays[f"{part}_labels"] = np.arange(count) % classes
    np.savez(path, **arrays)
    return path


def test_own_images(capsys, tmp_path):
    path = npz(tmp_path / "own.npz", channels=3)
    out = tmp_path / "run"
    small = ["--model", "patchwise-tiny", "--epochs", "1", "--batch-size", "20"]
    code, _, err = call(capsys, "train", "--data", path, *small, "--out", out)
    assert code == 0, err
    assert load_run(out).config.shape == (3, 8, 8)
    npz(path, channels=3, seed=1)
    code, _, err = call(capsys, "evaluate", out)
    assert code == 1
    assert "these are not the data of the run" in err
    assert call(capsys, "evaluate", out, "--data", path)[0] == 0
    code, _, err = call(capsys, "evaluate", out, "--data", "digits")
    assert code == 1
    assert "the network has no class '2'; classes of the network: 0, 1; classes of the data: 0, 1, 2" in err


def test_own_images_that_went_elsewhere(capsys, tmp_path, monkeypatch):
    """A run goes on from every directory, and with data that were moved; their content decides, not their path."""
    monkeypatch.chdir(tmp_path)
    npz(tmp_path / "own.npz")
    small = ["--model", "patchwise-tiny", "--epochs", "2", "--batch-size", "20"]
    assert call(capsys, "train", "--data", "own.npz", *small, "--out", "run")[0] == 0
    assert read_config(RunDirectory(tmp_path / "run")).recipe.data == str(tmp_path / "own.npz")
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert call(capsys, "train", "--resume", "../run")[0] == 0
    assert call(capsys, "evaluate", "../run")[0] == 0

    (tmp_path / "own.npz").rename("moved.npz")
    code, _, err = call(capsys, "train", "--resume", "../run")
    assert code == 1
    assert "onelip train --resume ../run --data PATH" in err
    npz(tmp_path / "other.npz", seed=1)
    code, _, err = call(capsys, "train", "--resume", "../run", "--data", "../other.npz")
    assert code == 1
    assert "not the data that the run started with" in err
    (tmp_path / "run" / "checkpoint.safetensors").rename("checkpoint")  # as if killed before the first one
    code, _, err = call(capsys, "train", "--resume", "../run", "--data", "../other.npz")
    assert code == 1
    assert "not the data that the run started with" in err
    (tmp_path / "elsewhere" / "checkpoint").rename(tmp_path / "run" / "checkpoint.safetensors")
    code, _, err = call(capsys, "train", "--resume", "../run", "--data", "moved.npz")
    assert code == 0, err
    assert read_config(RunDirectory(tmp_path / "run")).recipe.data == str(tmp_path / "elsewhere" / "moved.npz")
    code, _, err = call(capsys, "train", "--resume", "../run", "--data", "cifar10")
    assert code == 2
    assert "the run has --data" in err


def test_commands_to_paste(monkeypatch, tmp_path):
    run = RunDirectory(tmp_path / "my run")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert run.resume_command == f"onelip train --resume '{run.path}'"
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert run.resume_command == f"torchrun --nproc-per-node 2 -m onelip train --resume '{run.path}'"
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")  # two machines
    assert "--nproc-per-node 4 " in run.resume_command


def test_images_whose_size_does_not_divide(capsys, tmp_path):
    path = npz(tmp_path / "own.npz", size=30)
    code, _, err = call(capsys, "train", "--data", path, "--model", "aol-small", "--out", tmp_path / "run")
    assert code == 2
    assert "multiple of 4" in err
    assert err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["own.npz"]  # no directory of a run that never was
    (tmp_path / "there").mkdir()
    assert call(capsys, "train", "--data", path, "--model", "aol-small", "--out", tmp_path / "there")[0] == 2
    assert not list((tmp_path / "there").iterdir())  # ours to clear, not to remove


def test_bugs_are_not_hidden(monkeypatch):
    def broken(arguments):
        raise KeyError("ours")

    monkeypatch.setattr("onelip.cli.models.run", broken)
    with pytest.raises(KeyError):
        main(["models"])
    monkeypatch.setattr("onelip.cli.models.run", lambda arguments: json.loads("{"))  # a ValueError of another package
    with pytest.raises(ValueError):
        main(["models"])


def test_a_traceback_on_request(monkeypatch):
    assert main(["models", "nonsense"]) == 2
    monkeypatch.setenv("ONELIP_TRACEBACK", "1")
    with pytest.raises(RecipeError):
        main(["models", "nonsense"])


def test_help_shows_no_none(capsys):
    for command in COMMANDS:
        text = call(capsys, command, "--help")[1]
        assert "None" not in text, command
