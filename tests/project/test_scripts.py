"""Scripts beside the package: examples, and tools of the documentation."""

import argparse
import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from onelip.cli import COMMANDS
from onelip.core.errors import Diverged
from onelip.training.build import build_model
from onelip.training.learner import Learner

ROOT = Path(__file__).parents[2]


def run(*command):
    return subprocess.run([sys.executable, *map(str, command)], cwd=ROOT, capture_output=True, text=True, check=False)


def test_layers_at_work():
    done = run("examples/layers_at_work.py")
    assert done.returncode == 0, done.stderr
    assert "Largest difference of its outputs: 0.0" in done.stdout


def test_the_command_reference_has_every_command(tmp_path):
    done = run("tools/cli_reference.py", tmp_path / "page.md")
    assert done.returncode == 0, done.stderr
    page = (tmp_path / "page.md").read_text()
    assert all(f"\n## onelip {name}" in page for name in COMMANDS)
    assert page.count("\nusage: onelip ") == page.count("\n## ")
    assert page.count("\noptions:\n") == page.count("\n## ")


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ('<script src="assets/a.js"></script><a href="https://arxiv.org">paper</a>', 0),
        ('<script src="https://cdn.example.org/a.js"></script>', 1),
        ('<link rel="stylesheet" href="//fonts.example.org/a.css">', 1),
        ("<style>@import 'https://example.org/a.css'</style>", 1),
        ('<img alt="" src="page.html"><img src="data:image/png;base64,AA==">', 0),
        ('<img alt="" src="../page.png">', 1),
        ('<img alt="" src="missing.png">', 1),
        ("<p>Arguments:</p>", 0),
        ("<p>Args:\n x: a number</p>", 1),
    ],
)
def test_wrong_pages_are_found(tmp_path, text, code):
    (tmp_path / "page.html").write_text(text)
    assert run("tools/check_site.py", tmp_path).returncode == code


class FakeTrials:
    """Runs whose certified accuracy is a function of the learning rate; above a rate of 1 they diverge."""

    def __init__(self):
        self.asked = []

    def run(self, recipe, seconds):
        self.asked.append((recipe.method, recipe.lr, recipe.seed))
        if recipe.method == "lln":
            raise ValueError("not supported")
        if recipe.lr > 1:
            raise Diverged("the loss is nan")
        cra = {"36/255": 0.5 - abs(recipe.lr - 0.9) / 10 + recipe.seed / 100}
        return {"accuracy": 0.6, "cra": cra, "test_accuracy": 0.6, "test_cra": cra, "passes": 1, "cpu_seconds": seconds}


def test_comparison_by_time_searches_rates_and_resumes(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    fast_trials = importlib.import_module("fast_trials")
    args = argparse.Namespace(command="fast_trials.py methods", seeds=3, seconds=1.0, only=["aol", "lln"], out=tmp_path)
    first = FakeTrials()
    fast_trials.methods(first, args)
    assert [run[1:] for run in first.asked if run[0] == "aol"] == [(0.3, 0), (0.9, 0), (2.7, 0), (0.9, 1), (0.9, 2)]
    content = json.loads((tmp_path / "methods_by_time.json").read_text())
    found = {row["name"]: row for row in content["rows"]}
    assert (found["aol"]["lr"], found["aol"]["cra_36"], found["aol"]["spread"]) == (0.9, 0.51, 0.02)
    assert found["lln"]["failed"] == "not supported"

    found["aol"]["runs"].pop()  # a session that was killed before its last run
    (tmp_path / "methods_by_time.json").write_text(json.dumps(content))
    args.only = ["aol"]
    again = FakeTrials()
    fast_trials.methods(again, args)
    assert again.asked == [("aol", 0.9, 2)]

    args.seconds = 2.0
    with pytest.raises(SystemExit, match="budget_cpu_seconds"):
        fast_trials.methods(again, args)


def test_every_row_of_the_comparison_by_time_is_a_recipe(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    fast_trials = importlib.import_module("fast_trials")
    for method, changes in fast_trials.INGREDIENTS.values():
        recipe = fast_trials.method_recipe(method, changes)
        recipe = recipe.replace(model_options=(*recipe.model_options, "widths=[4, 4, 4, 4]"))
        Learner(recipe, build_model(recipe, 10, (3, 32, 32)))
    assert fast_trials.search(lambda rate: float(rate < 0.02), 0.1) == 0.0111
