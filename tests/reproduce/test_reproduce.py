"""`onelip reproduce`: the paper's figures, plans, scaled runs and their labels, jobs, failures, figures."""

import csv
import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from _runs import ENVIRONMENT, call

from onelip.core.errors import Diverged, RecipeError, Stopped
from onelip.core.paper import paper
from onelip.data.image_data import image_data_from_arrays
from onelip.methods.registry import METHODS
from onelip.models import registry
from onelip.models.chain import Chain
from onelip.models.registry import register_model, takes_arguments_of
from onelip.reproduce import Row, find_experiment, list_experiments, reproduce, run as run_module
from onelip.reproduce.experiments import differences, narrower
from onelip.reproduce.tables import TextTable, orthogonality
from onelip.training import Cost, load_run, train, train_or_reuse

ROOT = Path(__file__).parents[2]
SETTINGS = {"model": "reproduce-test", "budget": "1ep", "threads": 1}
FLAGS = ["--model", "reproduce-test", "--budget", "1ep", "--threads", "1"]


@takes_arguments_of(Chain)
def reproduce_test(**common):
    """Three small convolutions and a dense layer."""
    net = Chain(**common)
    net.downsample(4, 8)
    net.conv(4, 3)
    net.conv(4, 3)
    net.flatten()
    net.head()
    return net.build()


@pytest.fixture(autouse=True, scope="module")
def small_model():
    """Registered while these tests run."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "_MODELS", dict(registry._MODELS))
        register_model(reproduce_test)
        yield


@pytest.fixture(autouse=True)
def no_measurements(monkeypatch):
    """Times of steps are measured in tests/training/test_budget.py."""
    monkeypatch.setattr(run_module, "measure_cost", lambda *a: Cost(1.0, 10.0, 7, 2))


def small_images(classes=10):
    random = np.random.default_rng(0)

    def part(count):
        return random.integers(0, 256, (count, 3, 32, 32), dtype=np.uint8), np.arange(count) % classes

    return image_data_from_arrays("cifar10", part(60), part(20), tuple(map(str, range(classes))), "memory")


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """The trade-off table with a small network, on random images."""
    out = tmp_path_factory.mktemp("reproduce")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_module, "measure_cost", lambda *a: Cost(1.0, 10.0, 7, 2))
        return out, reproduce("table-5", out, data=small_images(), command="it", **SETTINGS)


def copy_of(finished, tmp_path):
    return Path(shutil.copytree(finished[0], tmp_path / "out"))


def rows_of(out):
    return list(csv.DictReader((out / "table-5.csv").read_text().splitlines()))


# The paper.


def test_every_table_and_figure_of_the_paper_is_there():
    names = [experiment.name for experiment in list_experiments()]
    assert names == [*(f"table-{n}" for n in range(1, 10)), "figure-1", "figure-2"]
    also = [experiment.also for experiment in list_experiments()]
    assert {"methods", "cifar10", "cifar100", "trade-off", "architectures", "orthogonality"} <= set(also)
    assert len({*names, *also}) == 2 * len(names)


def test_figures_of_the_paper():
    """Some figures, read from the paper once more."""
    rows = {(table, row["name"]): row for table, t in paper()["tables"].items() for row in t["rows"] if "name" in row}
    assert rows["table-3", "AOL-Large"]["values"] == [71.6, 64.0, 56.4, 49.0, 23.7]
    assert rows["table-4", "AOL-Medium"]["values"] == [43.2, 33.7, 26.0, 20.2, 7.2]
    assert rows["table-5", "u = 16√2, t = 4"]["values"] == [48.2, 45.2, 42.2, 39.4, 28.6]
    assert rows["table-6", "AOL-DIL"]["values"] == [62.7, 54.2, 46.0, 38.3, 14.9]
    for (table, _), row in rows.items():
        assert row["source"].startswith((table.replace("-", " ").capitalize(), "Table 3"))


def test_the_rows_of_the_methods_table_are_those_of_the_registry():
    known = [row["method"] for row in paper()["tables"]["table-1"]["rows"]]
    with_row = [m.name for m in METHODS.values() if m.paper is not None and m.name != "spectral-norm-reshaped"]
    assert sorted(known) == sorted(with_row)


def test_recipes_of_the_trade_off():
    rows = find_experiment("trade-off").rows
    offsets = [row.recipe("cifar10").offset for row in rows]
    assert offsets == pytest.approx([2**0.5 * u for u in (1 / 16, 1 / 4, 1, 4, 16)])
    assert [row.recipe("cifar10").temperature for row in rows] == [1 / 64, 1 / 16, 1 / 4, 1, 4]
    assert all(row.recipe("cifar10").epochs == 1000 for row in rows)
    # u and t of the paper's main result: the same run as in the table of CIFAR-10.
    assert rows[2].run_name("cifar10") == find_experiment("table-3").trained[1].run_name("cifar10")
    assert rows[2].recipe("cifar10") == find_experiment("table-3").trained[1].recipe("cifar10")


def test_unknown_names_get_the_list(capsys, tmp_path):
    code, _, err = call(capsys, "reproduce", "tabel-5", "--out", tmp_path / "x")
    assert code == 2
    assert "table-1 (methods)" in err
    assert "did you mean 'table-5'?" in err
    assert not (tmp_path / "x").exists()


def test_list(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "140")
    code, out, _ = call(capsys, "reproduce")
    assert code == 0
    assert re.search(r"table-5 +trade-off +5 ", out)
    code, out, _ = call(capsys, "reproduce", "list", "--json")
    assert [row["runs"] for row in json.loads(out)] == [0, 0, 4, 3, 5, 5, 0, 0, 0, 1, 2]


@pytest.mark.parametrize("name", ["table-1", "table-2", "table-7", "table-8", "table-9"])
def test_tables_without_runs(name, tmp_path):
    found = reproduce(name, tmp_path)
    assert sorted(path.suffix for path in found.files) == [".csv", ".json", ".md", ".tex"]
    if name != "table-1":
        assert {row[-1] for row in found.table.rows} == {"none"}  # the networks are those of the paper


# A table of runs.


def test_the_table(finished):
    out, found = finished
    assert found.failed == {}
    rows = rows_of(out)
    assert len(rows) == 25
    test = json.loads((out / "cifar10-reproduce-test-u4" / "results.json").read_text())["test"]
    first = rows[15]
    assert (first["row"], first["measure"], first["paper"]) == ("u = 4√2, t = 1", "accuracy", "59.8")
    assert float(first["ours"]) == pytest.approx(100 * test["accuracy"], abs=0.051)
    assert float(first["difference"]) == pytest.approx(100 * test["accuracy"] - 59.8, abs=0.051)
    assert rows[19]["measure"] == "CRA at 1"
    assert float(rows[19]["ours"]) == pytest.approx(100 * test["cra"]["1"], abs=0.051)


def test_scaled_runs_are_labelled_in_every_file(finished):
    out, found = finished
    assert {row["our run"] for row in rows_of(out)} == {"scaled"}
    for suffix in ("md", "tex"):
        text = (out / f"table-5.{suffix}").read_text()
        assert text.count("scaled") >= 25
        assert "1 instead of 1000 epochs, reproduce-test instead of aol-small, muon instead of sgd" in text
    content = json.loads((out / "table-5.json").read_text())
    assert {row["run"] for row in content["rows"]} == {"scaled"}
    assert content["command"] == "it"
    assert content["torch"] == torch.__version__
    assert found.plan.rows[0][:3] == ("cifar10-reproduce-test-u0.0625", "reproduce-test", "1")


def test_the_recipe_as_published_has_no_label():
    row = find_experiment("table-3").trained[1]
    assert differences(row.recipe("cifar10"), row.published("cifar10")) == ""
    other = row.recipe("cifar10").replace(device="cuda", threads=3, seed=1, channels_last=False)
    assert differences(other, row.published("cifar10")) == ""
    assert "bfloat16" in differences(other.replace(bf16=True), row.published("cifar10"))


def test_finished_runs_are_used(finished, tmp_path, monkeypatch):
    out = copy_of(finished, tmp_path)
    monkeypatch.setattr("onelip.training.trainer.train", lambda *a, **k: pytest.fail("trained again"))
    monkeypatch.setattr(run_module, "measure_cost", lambda *a: pytest.fail("measured again"))
    found = reproduce("table-5", out, data=small_images(), **SETTINGS)
    assert found.table.rows == finished[1].table.rows
    assert found.plan.notes == ["All runs are finished."]


def test_other_options_are_refused(finished, tmp_path):
    out = copy_of(finished, tmp_path)
    with pytest.raises(RecipeError, match="has runs with --budget 1ep, got 2ep; use the same, or choose another --out"):
        reproduce("table-5", out, data=small_images(), **{**SETTINGS, "budget": "2ep"})
    (out / "plan.json").write_text("{}")
    with pytest.raises(RecipeError, match="is not a plan of onelip reproduce"):
        reproduce("table-5", out, data=small_images(), **SETTINGS)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["table-5", "--only", "6/5"], "expected --only N/M"),
        (["table-5", "--budget", "soon"], "expected a budget"),
        (["table-5", "--model", "nonsense"], "unknown model 'nonsense'"),
        (["table-6", "--model", "aol-small"], "--model is for tables of one network"),
    ],
)
def test_bad_options(capsys, tmp_path, arguments, message):
    code, _, err = call(capsys, "reproduce", *arguments, "--out", tmp_path / "x")
    assert code == 2
    assert message in err
    assert err.count("\n") == 1
    assert not (tmp_path / "x").exists()


def test_a_failed_run_costs_its_row_only(tmp_path, monkeypatch, capsys):
    def fails(recipe, out, **settings):
        if recipe.temperature == 1:
            raise Diverged("the loss is nan")
        return train_or_reuse(recipe, out, **settings)

    monkeypatch.setattr(run_module, "train_or_reuse", fails)
    monkeypatch.setattr(run_module, "load_data", lambda *a: small_images())
    flags = [*FLAGS, "--only", "2/2", "--out", tmp_path]
    code, out, err = call(capsys, "reproduce", "table-5", *flags)
    assert code == 1
    assert "failed: cifar10-reproduce-test-u4; the same command tries again" in err
    rows = rows_of(tmp_path)
    assert [row["our run"] for row in rows[::5]] == ["not finished", "scaled", "not finished", "failed", "not finished"]
    assert "the loss is nan" in (tmp_path / "table-5.md").read_text()
    monkeypatch.setattr(run_module, "train_or_reuse", train_or_reuse)
    code, out, _ = call(capsys, "reproduce", "table-5", *flags, "--json")
    assert code == 0
    assert [row["run"] for row in json.loads(out)["rows"]][1::2] == ["scaled", "scaled"]


def test_stop_and_resume(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(run_module, "load_data", lambda *a: small_images())
    count, flags = [], [*FLAGS, "--only", "2/2", "--out", tmp_path]

    def stops(recipe, out, **settings):
        count.append(recipe)
        if len(count) == 2:
            settings["stop"](signal.SIGINT)
        return train(recipe, out, **settings)

    with monkeypatch.context() as patch:
        patch.setattr("onelip.training.trainer.train", stops)
        code, _, err = call(capsys, "reproduce", "table-5", *flags)
    assert code == 130
    assert "finished runs are kept; resume with\n  onelip reproduce table-5" in err
    assert [path.parent.name for path in tmp_path.glob("*/results.json")] == ["cifar10-reproduce-test-u0.25"]
    code, _, _ = call(capsys, "reproduce", "table-5", *flags)
    assert code == 0
    assert len(list(tmp_path.glob("*/results.json"))) == 2


def test_jobs_share_a_directory(finished, tmp_path):
    out = copy_of(finished, tmp_path)
    for name in ("u0.25", "u4", "u16"):
        shutil.rmtree(out / f"cifar10-reproduce-test-{name}")
    reproduce("table-5", out, data=small_images(), only="2/2", **SETTINGS)
    assert len(list(out.glob("*/results.json"))) == 4
    reproduce("table-5", out, data=small_images(), only="1/2", **SETTINGS)
    assert (out / "table-5.md").read_text() == (finished[0] / "table-5.md").read_text()


# Plans and budgets.


def test_a_plan_trains_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(run_module, "load_data", lambda *a: small_images())
    code, out, _ = call(capsys, "reproduce", "table-5", *FLAGS, "--out", tmp_path, "--plan")
    assert code == 0
    assert out.index("All together about") < out.index("not finished")
    assert not list(tmp_path.glob("*/config.json"))


def test_a_budget_of_time_scales_width_and_epochs(tmp_path, monkeypatch):
    tried = []

    def fit(recipe, seconds, data, process):
        tried.append((recipe.model, recipe.model_options))
        width = int(recipe.model_options[0].partition("=")[2]) if recipe.model_options else 32
        return recipe.replace(epochs=max(1, int(seconds / width)), evaluate_every=2)

    monkeypatch.setattr(run_module, "fit_to_budget", fit)
    plan = {"data": small_images(), "budget": "100s", "plan_only": True, "threads": 1}
    found = reproduce("table-6", tmp_path, **plan)
    networks = {row[0]: row[1:4] for row in found.plan.rows}
    assert networks["cifar10-aol-std"] == ("aol-std width=16", "6", "1m40s")  # 32 would see the images three times
    assert networks["cifar10-aol-fc"] == ("aol-fc width=128", "1", "1m40s")  # the narrowest, whatever it can see
    # Another table in the same directory keeps what is decided, and measures nothing again.
    del tried[:]
    found = reproduce("figure-2", tmp_path, **plan)
    assert not tried
    assert [row[1] for row in found.plan.rows] == ["standard-cnn width=16", "aol-std width=16"]


def test_narrow_networks_can_be_built():
    from onelip.models.registry import create_model, model_options

    for experiment in list_experiments():
        for row in experiment.trained:
            options = dict(option.split("=") for option in narrower(model_options(row.model), 1 / 8))
            with torch.device("meta"):
                narrow = create_model(row.model, num_classes=100, **{key: int(value) for key, value in options.items()})
                full = create_model(row.model, num_classes=100)
            sizes = [sum(p.numel() for p in model.parameters()) for model in (narrow, full)]
            assert sizes[0] < sizes[1] / 16, row.model


# Several processes, and the file for a queue.


def test_torchrun(finished, tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        f"import sys\nsys.path.insert(0, {str(Path(__file__).parents[1])!r})\n"
        f"sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "from test_reproduce import SETTINGS, register_model, reproduce_test, small_images\n"
        "from onelip.reproduce import reproduce\nregister_model(reproduce_test)\n"
        f"found = reproduce('table-5', {str(tmp_path / 'out')!r}, data=small_images(), only='1/2', **SETTINGS)\n"
        "assert not found.failed, found.failed\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    environment = {key: value for key, value in ENVIRONMENT.items() if key != "PYTHONWARNINGS"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(list((tmp_path / "out").glob("*/results.json"))) == 3
    assert '"processes": 2' in (tmp_path / "out" / "cifar10-reproduce-test" / "environment.json").read_text()


def test_the_file_for_slurm_runs_in_a_shell(tmp_path):
    """Its lines for the shell, with a program that prints its arguments in place of onelip."""
    program = tmp_path / "onelip"
    program.write_text('#!/bin/sh\necho "$@"\n')
    program.chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_ARRAY_TASK_ID": "2"}
    script = ROOT / "examples" / "reproduce.sbatch"
    done = subprocess.run(
        ["bash", str(script)], env=environment, capture_output=True, text=True, cwd=tmp_path, check=True
    )
    assert done.stdout.split("\n")[0] == "reproduce table-5 --only 2/5 --out runs/reproduce"
    runs = len(find_experiment("table-5").trained)
    assert f"#SBATCH --array=1-{runs}" in script.read_text()


# Figures.


def test_figures(finished, tmp_path, monkeypatch):
    figure = find_experiment("figure-2")
    rows = (
        Row("STD", "", model="standard-cnn", layer=3),
        Row("TEST", "", model="reproduce-test", layer=2),
        figure.rows[2],
    )
    monkeypatch.setattr(run_module, "find_experiment", lambda name: dataclasses.replace(figure, rows=rows))
    out = copy_of(finished, tmp_path)
    settings = {**SETTINGS, "model": None, "only": "2/2"}
    found = reproduce("figure-2", out, data=small_images(), **settings)
    assert {"figure-2.png", "figure-2.svg", "figure-2.md"} <= {path.name for path in found.files}
    assert [row[:3] for row in found.table.rows if row[0] == "STD"] == [("STD", "not finished", "-")]
    numbers = {(row[0], row[2]): float(row[3]) for row in found.table.rows if row[0] != "STD"}
    assert numbers["ORTH", "largest off-diagonal entry"] == 0
    kernel = load_run(out / "cifar10-reproduce-test").plain.conv2.weight.detach().double()
    largest = float(kernel.square().sum((0, 2, 3)).max())  # the centre pixel reaches all taps
    assert numbers["TEST", "largest diagonal entry"] == pytest.approx(largest, abs=1e-4)
    assert numbers["TEST", "largest diagonal entry"] <= 1.0001
    assert {row[1] for row in found.table.rows} == {"not finished", "scaled", "exact"}


def test_orthogonality_of_a_matrix():
    numbers = orthogonality(torch.tensor([[1.0, -0.5], [-0.5, 0.8]]))
    assert numbers["smallest diagonal entry"] == pytest.approx(0.8)
    assert numbers["largest off-diagonal entry"] == 0.5
    assert numbers["off-diagonal below 0.01, %"] == 0


# Text.


def test_formats_escape_what_they_read_as_markup():
    table = TextTable("50 % of a_b", ("x|y", "n"), [("1|2 & 3_4 √2 ~", "5")], ["a # note"], 1)
    assert r"1\|2 & 3\_4 √2 \~" in table.to_markdown()
    assert r"1|2 \& 3\_4 $\sqrt{}$2 $\sim$ & 5 \\" in table.to_latex()
    assert r"\caption{50 \% of a\_b. a \# note}" in table.to_latex()
    assert table.to_csv() == "x|y,n\n1|2 & 3_4 √2 ~,5\n"


def test_stopped_is_not_failed(tmp_path, monkeypatch):
    def stop(*args, **settings):
        raise Stopped("stopped", signal.SIGTERM)

    monkeypatch.setattr(run_module, "train_or_reuse", stop)
    with pytest.raises(Stopped):
        reproduce("table-5", tmp_path, data=small_images(), **SETTINGS)


def test_a_damaged_run_costs_its_row_only(finished, tmp_path):
    out = copy_of(finished, tmp_path)
    (out / "cifar10-reproduce-test-u4" / "results.json").write_text("{")
    found = reproduce("table-5", out, data=small_images(), plan_only=True, **SETTINGS)
    assert [row[1] for row in found.table.rows[::5]] == ["scaled", "scaled", "scaled", "failed", "scaled"]
    assert "the file is damaged" in found.table.notes[-1]


def test_a_budget_that_is_too_small_costs_its_rows_only(tmp_path, monkeypatch):
    def fit(recipe, *args):
        if recipe.model == "aol-fc":
            raise RecipeError("a budget of 1m is too small")
        return recipe.replace(epochs=1)

    monkeypatch.setattr(run_module, "fit_to_budget", fit)
    found = reproduce("table-6", tmp_path, data=small_images(), budget="1m", plan_only=True)
    assert found.failed == {"cifar10-aol-fc": "a budget of 1m is too small"}
    assert [row[1] for row in found.table.rows[::5]] == ["failed", *["not finished"] * 4]


def test_a_part_of_the_width(tmp_path):
    settings = {"data": small_images(), "budget": "1ep", "plan_only": True}
    found = reproduce("table-6", tmp_path, width=1 / 8, **settings)
    assert [row[1] for row in found.plan.rows][:2] == ["aol-fc width=512", "aol-std width=4"]
    with pytest.raises(RecipeError, match="has runs with --width"):
        reproduce("table-6", tmp_path, **settings)
    with pytest.raises(RecipeError, match="without a budget of time"):
        reproduce("table-6", tmp_path, width=1 / 8, **{**settings, "budget": "1m"})
