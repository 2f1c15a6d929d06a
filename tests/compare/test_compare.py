"""`onelip compare`: one budget for all, rows that are kept, failures that are rows, measures that are right."""

import dataclasses
import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from _comparisons import OPTIONS, SHARED, small_data
from _runs import FORKS, same_bytes
from rich.console import Console

from onelip.cli.compare import run as command
from onelip.compare import Budget, Plan, compare, comparison_tables, measures, run as run_module
from onelip.compare.run import choose_methods
from onelip.core import files
from onelip.core.files import locked
from onelip.methods.registry import METHODS
from onelip.report import comparison_page, write_report
from onelip.training import Diverged, RecipeError, RunError, Stopped, load_run, read_config
from onelip.training.run_directory import RunDirectory

INTERLEAVED = measures.interleaved
FAILS = "lln"  # serves dense layers only, and the network has convolutions


def plan_of(methods, budget="2ep", **changes):
    return Plan.make(methods, budget=budget, recipe=SHARED.replace(**changes))


def nothing_measured(*args, **settings):
    nothing = {"ratio": None, "proved": None, "why": "a test"}
    return dict.fromkeys(("step", "memory", "inference", "constant", "singular_values"), nothing)


@pytest.fixture
def quick(monkeypatch):
    """Measures that take no time, for tests of all else."""
    monkeypatch.setattr(run_module, "measure", nothing_measured)


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A comparison with all that there is, but memory: two methods that work and one that fails."""
    out = tmp_path_factory.mktemp("comparison") / "first"
    said = io.StringIO()
    display = run_module.Display(Console(file=said, width=200))
    with pytest.MonkeyPatch.context() as patch:  # as few rounds as there can be
        patch.setattr(measures, "interleaved", lambda one, other, _: INTERLEAVED(one, other, 0.0))
        plan = plan_of(f"none,{FAILS},aol")
        record = compare(plan, out, data=small_data(), display=display, memory=False, command="it")
    return out, record, said.getvalue()


# What is asked for.


@pytest.mark.parametrize(
    ("text", "epochs", "seconds"),
    [("20ep", 20, None), ("90s", None, 90), ("10m", None, 600), (" 1H30m ", None, 5400), ("0.5m", None, 30)],
)
def test_budgets(text, epochs, seconds):
    budget = Budget.parse(text)
    assert (budget.epochs, budget.seconds) == (epochs, seconds)


@pytest.mark.parametrize(
    "text", ["", "0ep", "0s", "-1m", "10", "ep", "10m5", "1.5ep", "nan", "inf", "infs", "10 years"]
)
def test_budgets_that_make_no_sense(text):
    with pytest.raises(RecipeError, match="expected a budget such as 20ep"):
        Budget.parse(text)


def test_names_of_methods():
    assert choose_methods("soc, aol,soc,none") == ("soc", "aol", "none")
    assert "aol" in choose_methods("all")
    assert "none" not in choose_methods("all")
    with pytest.raises(RecipeError, match=r"got 'bcopp'; did you mean 'bcop'\?"):
        choose_methods("aol,bcopp")
    with pytest.raises(RecipeError, match="expected methods such as"):
        choose_methods(" , ")


def test_recipes_differ_in_the_method_and_its_own_numbers_only():
    plan = plan_of("aol,clipping", seed=3)
    ours, theirs = (plan.recipe_for(name, 7).to_json() for name in plan.methods)
    assert {key for key in ours if ours[key] != theirs[key]} == {"method", "momentum", "nesterov", "weight_decay"}
    assert (theirs["epochs"], theirs["seed"], theirs["momentum"]) == (7, 3, 0.0)


def test_epochs_that_fit_into_a_time(monkeypatch):
    """A step of half a second, four batches an epoch: five epochs in 11 seconds, none in one."""
    monkeypatch.setattr(measures, "seconds_per_step", lambda *args: 0.5)
    assert measures.epochs_within(11.0, SHARED, small_data()) == 5
    assert measures.epochs_within(2.0, SHARED, small_data()) == 1
    with pytest.raises(
        RunError, match=r"one epoch takes about 2 s, more than the budget of 1\.9 s; give a longer --budget"
    ):
        measures.epochs_within(1.9, SHARED, small_data())
    # With three tenths held out three batches are left.
    assert measures.epochs_within(11.0, SHARED.replace(validation=0.3), small_data()) == 7


# The whole.


def test_rows_say_everything(finished):
    out, record, said = finished
    assert record == json.loads((out / "comparison.json").read_text())
    assert {"format", "command", "torch", "machine", "plan", "data", "split", "rows"} <= record.keys()
    assert [row["method"] for row in record["rows"]] == ["none", "aol", FAILS]  # the order of the registry
    plain, aol, failed = record["rows"]
    for row in (plain, aol):
        assert row["status"] == "done"
        assert row["epochs"] == 2
        assert row["seconds"] > 0
        assert len(row["results"]["test"]["cra"]) == 4
        assert row["results"]["test"]["images"] == 60
        assert "per_class" not in row["results"]["test"]
        for measured in ("step", "inference"):
            assert row[measured]["why"] is None
            assert row[measured]["ratio"] > 0
        assert row["memory"]["ratio"] is None
        assert row["singular_values"]["layers"]
        # Proved of the stored weights: no layer's product can be below the largest singular value of the network.
        bound = row["constant"]["proved"]
        network = load_run(out / row["run"]).plain
        x = small_data().test_images[:1].float() / 255
        jacobian = torch.autograd.functional.jacobian(network.double(), x.double()).reshape(10, 64)
        assert float(torch.linalg.matrix_norm(jacobian, 2)) <= bound
    assert aol["constant"]["proved"] <= 1 + 1e-6
    assert aol["guarantee"] == "proved"
    assert aol["singular_values"]["largest"] <= 1 + 1e-6
    assert set(plain["results"]["test"]["cra"].values()) == {None}  # no constant by construction
    assert failed["status"] == "failed"
    assert "supports Linear" in failed["why"]
    assert f"[2/3] {FAILS}: FAILED: the method 'lln' supports Linear, not Conv2d" in said
    assert read_config(RunDirectory(out / "aol")).recipe == plan_of("aol").recipe_for("aol", 2)


def test_table_and_page_have_a_row_for_each(finished):
    out, record, _ = finished
    console = Console(file=io.StringIO(), width=80)
    for table in comparison_tables(record):
        console.print(table)
    text = console.file.getvalue()
    assert max(map(len, text.splitlines())) <= 80
    for word in ("none", "aol", "failed", "epochs", "accuracy", "36/255", "step", "memory", "predict", "constant"):
        assert word in text
    page = (out / "index.html").read_text()
    assert page == comparison_page(record, out)
    assert page.count("<tr>") == 4
    assert page.count("<svg") == 3  # training, accuracies, singular values
    assert comparison_page(record).count("<svg") == 2  # without the logs
    for word in (
        "aol",
        "none",
        "supports Linear, not Conv2d",
        "CRA 36/255",
        "constant",
        "<li><code>it",
    ):
        assert word in page
    assert "http" not in page  # it needs nothing from elsewhere
    assert "src=" not in page


def test_a_report_of_a_comparison_adds_what_files_do_not_have(finished, tmp_path):
    out, _, _ = finished
    missing, _ = write_report([out], tmp_path / "page.html", attack_images=0)
    page = (tmp_path / "page.html").read_text()
    assert "<title>patchwise-tiny on digits: methods compared</title>" in page
    assert "failed: the method &#39;lln&#39; supports Linear" in page
    assert page.count("<h3>JᵀJ of a layer</h3>") == 2
    assert ">step</button>" in page
    # The images of this test are not those of the data set.
    assert [line.split(": ")[:2] for line in missing] == [["none", "test images"], ["aol", "test images"]]


def test_pages_escape_what_is_not_ours(finished):
    _, record, _ = finished
    row = {**record["rows"][-1], "why": "<script>alert(1)</script>"}
    page = comparison_page({**record, "rows": [*record["rows"][:-1], row], "commands": ["onelip compare --out '<b>'"]})
    assert "<script>alert" not in page
    assert "--out &#39;&lt;b&gt;" in page
    assert "No method has finished" in comparison_page({**record, "rows": []})


def test_what_is_done_is_not_done_again(finished, monkeypatch, quick):
    out, before, _ = finished
    trained = []
    real = run_module.train_or_reuse
    monkeypatch.setattr(
        run_module, "train_or_reuse", lambda recipe, *a, **k: trained.append(recipe.method) or real(recipe, *a, **k)
    )
    record = compare(plan_of(f"aol,{FAILS},clipping"), out, data=small_data(), memory=False, command="again")
    assert trained == ["clipping"]
    assert record["commands"] == ["it", "again"]
    rows = [row["method"] for row in record["rows"]]
    assert rows == [name for name in ("none", *METHODS) if name in ("clipping", "aol", FAILS, "none")]
    assert [row for row in record["rows"] if row["method"] != "clipping"] == before["rows"]


def test_failed_methods_are_tried_again_if_asked(tmp_path, monkeypatch, quick):
    tried = []

    def diverge(recipe, *args, **settings):
        tried.append(recipe.method)
        raise Diverged("expected a finite loss, got nan: the run has diverged")

    with monkeypatch.context() as patch:
        patch.setattr(run_module, "train_or_reuse", diverge)
        for retry in (False, False, True):
            record = compare(plan_of("aol"), tmp_path, data=small_data(), retry=retry, memory=False)
    assert tried == ["aol", "aol"]
    assert [(row["status"], row["why"].endswith("diverged")) for row in record["rows"]] == [("failed", True)]
    record = compare(plan_of("aol"), tmp_path, data=small_data(), retry=True, memory=False)
    assert [row["status"] for row in record["rows"]] == ["done"]


def test_a_real_divergence_is_a_row(tmp_path, monkeypatch):
    monkeypatch.setattr("onelip.compare.run._PLAIN_RATE", 1e30)
    record = compare(plan_of("none", lr=1e30), tmp_path, data=small_data(), memory=False)
    assert record["rows"][0]["status"] == "failed"
    assert "diverged" in record["rows"][0]["why"]


@pytest.mark.parametrize(
    ("changes", "budget", "message"),
    [
        ({"model": "aol-fc"}, "2ep", "has model 'patchwise-tiny', got 'aol-fc'"),
        ({"data": "cifar10"}, "2ep", "has data 'digits', got 'cifar10'"),
        ({"seed": 1}, "2ep", "has seed 0, got 1"),
        ({}, "3ep", "has budget '2ep', got '3ep'"),
        ({}, "3s", "has budget '2ep', got '3s'"),
    ],
)
def test_another_comparison_is_refused(finished, changes, budget, message):
    with pytest.raises(RecipeError, match=f"{message}.*choose another --out"):
        compare(plan_of("aol", budget, **changes), finished[0], data=small_data())


def test_directories_that_hold_other_things_are_refused(finished, tmp_path):
    (tmp_path / "thesis.txt").touch()
    for where, message in (
        (tmp_path, "contains files, but no comparison"),
        (tmp_path / "thesis.txt", "is a file"),
        (finished[0] / "aol", "but no comparison"),
    ):
        with pytest.raises(RecipeError, match=message):
            compare(plan_of("aol"), where, data=small_data())
    other = dataclasses.replace(small_data(), name="other", class_names=tuple("abcdefghij"))
    with pytest.raises(RecipeError, match="not the data of the comparison"):
        compare(plan_of("aol"), finished[0], data=other)
    (tmp_path / "comparison.json").write_text("[]")
    with pytest.raises(RecipeError, match="is not a comparison of onelip"):
        compare(plan_of("aol"), tmp_path, data=small_data())


def test_what_is_wrong_for_all_is_said_at_once(tmp_path):
    with pytest.raises(RecipeError, match="did you mean 'patchwise-tiny'"):
        compare(plan_of("aol,soc", model="patchwise-tny"), tmp_path / "new", data=small_data())
    assert not (tmp_path / "new").exists()


def test_two_at_once_are_refused(tmp_path):
    with locked(tmp_path, "busy"), pytest.raises(RunError, match="in use by another process"):
        compare(plan_of("aol"), tmp_path, data=small_data())


# Stopping, and going on.


def test_a_time_budget_is_cut_into_epochs_once(tmp_path, monkeypatch, quick):
    monkeypatch.setattr(run_module, "epochs_within", lambda seconds, recipe, data: 3)
    real = run_module.train_or_reuse

    def stop(recipe, out, **settings):
        real(recipe, out, **settings)
        (Path(out) / "results.json").unlink()
        raise Stopped("stopped", signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(run_module, "train_or_reuse", stop)
        with pytest.raises(Stopped):
            compare(plan_of("aol", "10m"), tmp_path, data=small_data(), memory=False)
    assert json.loads((tmp_path / "comparison.json").read_text())["rows"] == []  # stopped is not failed
    monkeypatch.setattr(run_module, "epochs_within", lambda *args: pytest.fail("measured again"))
    record = compare(plan_of("aol", "600s"), tmp_path, data=small_data(), memory=False)
    assert [row["epochs"] for row in record["rows"]] == [3]


def _killed_while_comparing(out: Path, at: int) -> None:
    """Dies by SIGKILL in the middle of writing its at-th file."""
    real, calls = os.replace, []

    def fatal(*arguments):
        calls.append(arguments)
        if len(calls) == at:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*arguments)

    files.os.replace = fatal  # the process is its own, and ends
    run_module.measure = nothing_measured
    torch.set_num_threads(1)
    compare(plan_of("clipping,aol"), out, data=small_data(), memory=False)


def test_a_killed_comparison_goes_on(finished, tmp_path, quick):
    """Killed within aol's second epoch: clipping's row is kept, aol goes on and ends as if nothing had been."""
    out = tmp_path / "killed"
    process = FORKS.Process(target=_killed_while_comparing, args=(out, 22))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    before = json.loads((out / "comparison.json").read_text())["rows"]
    assert [row["method"] for row in before] == ["clipping"]
    assert (out / "aol" / "checkpoint.safetensors").exists()
    assert not (out / "aol" / "results.json").exists()
    record = compare(plan_of("clipping,aol"), out, data=small_data(), memory=False)
    assert [row["status"] for row in record["rows"]] == ["done", "done"]
    assert before[0] in record["rows"]
    assert same_bytes(out / "aol", finished[0] / "aol")


# The command line.


@pytest.fixture
def archive(tmp_path):
    data = small_data()
    path = tmp_path / "small.npz"
    arrays = {
        name: getattr(data, name).numpy() for name in ("train_images", "train_labels", "test_images", "test_labels")
    }
    np.savez(path, **arrays)
    return path


def flags(archive, out, *more):
    options = ("--model", "patchwise-tiny", "--model-options", *OPTIONS, "--batch-size", "50", "--no-memory")
    return ["--data", str(archive), *options, "--out", str(out), *more]


def test_the_command(archive, tmp_path, capsys, quick):
    out = tmp_path / "out"
    assert (
        command(flags(archive, out, "--methods", f"aol,{FAILS}", "--budget", "1ep", "--validation", "0.2", "--json"))
        == 0
    )
    captured = capsys.readouterr()
    printed = json.loads(captured.out)
    assert printed["split"] == "validation"
    assert set(printed["rows"][0]["results"]) == {"validation", "test"}
    assert printed["command"].startswith("onelip compare --data ")
    assert "1 of 2 methods finished" in captured.err
    assert "[1/2] aol: 1 epoch\n" in captured.err
    more = flags(archive, out, "--methods", FAILS, "--budget", "1ep", "--validation", "0.2")
    assert command(more) == 1  # none of those asked for
    captured = capsys.readouterr()
    assert f"{FAILS} failed: the method 'lln' supports Linear, not Conv2d" in captured.out
    assert "0 of 1 methods finished" in captured.err


def test_stopping_the_command(archive, tmp_path, capsys, monkeypatch, quick):
    for error, code in ((Stopped("stopped and saved", signal.SIGTERM), 143), (KeyboardInterrupt(), 130)):

        def stop(*args, error=error, **settings):
            raise error

        monkeypatch.setattr(run_module, "train_or_reuse", stop)
        assert command(flags(archive, tmp_path / "out", "--methods", "aol", "--budget", "1ep")) == code
        assert "resume with\n  onelip compare --data" in capsys.readouterr().err


def test_help_needs_no_torch():
    code = "import sys, onelip.cli.compare; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True)
