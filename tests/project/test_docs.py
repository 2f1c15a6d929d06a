"""The documents are true: examples run, numbers are those of results/, generated tables are current."""

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def blocks(text):
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


@pytest.mark.parametrize(
    "document",
    [
        "README.md",
        "docs/index.md",
        "docs/tour.md",
        "docs/own-loop.md",
        "docs/training.md",
        "docs/certificates-explained.md",
        "docs/report.md",
        "docs/adding-a-method.md",
        "docs/adding-a-model.md",
        "docs/adding-an-operation.md",
    ],
)
def test_python_examples_run(document):
    """In a process of their own: some register methods, models and losses."""
    code = blocks((ROOT / document).read_text())
    assert code
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", "\n".join(code)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_tables_come_from_results(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    update = importlib.import_module("update_tables")
    for page, makers in update.PAGES.items():
        assert update.updated(page.read_text(), makers) == page.read_text(), "run python benchmarks/update_tables.py"


def test_results_contain_their_command():
    for path in (ROOT / "results").glob("*.json"):
        assert {"command", "torch"} <= set(json.loads(path.read_text())), path


def test_links_between_documents():
    for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+?)\)", path.read_text()):
            assert (path.parent / target).exists(), (path, target)
