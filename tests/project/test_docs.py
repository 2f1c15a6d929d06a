"""The documents are true: examples run, numbers are those of results/, generated tables are current."""

import json
import re
from pathlib import Path

import pytest

from onelip.methods.registry import markdown_table

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


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
    ],
)
def test_python_examples_run(document, capsys):
    names: dict[str, object] = {}
    for code in blocks((ROOT / document).read_text()):
        exec(compile(code, document, "exec"), names)
    assert names


def test_numbers_in_the_readme_come_from_results():
    """Each 1.23<!-- file.json: row, column --> in the README is the value in that file, rounded as it stands."""
    found = re.findall(r"([\d.]+)<!-- (\w+)\.json: (\{.*?\}), ([^>]+?) -->", README)
    assert found
    for text, name, row, column in found:
        rows = json.loads((ROOT / "results" / f"{name}.json").read_text())["rows"]
        wanted = json.loads(row)
        (match,) = [r for r in rows if all(r[key] == value for key, value in wanted.items())]
        digits = len(text.split(".")[1]) if "." in text else 0
        assert f"{match[column]:.{digits}f}" == text, (text, name, row, column)


def test_results_say_how_they_were_made():
    for path in (ROOT / "results").glob("*.json"):
        assert {"command", "torch"} <= set(json.loads(path.read_text())), path


def test_table_of_methods_is_generated():
    assert markdown_table() in (ROOT / "docs" / "methods.md").read_text()


def test_links_between_documents():
    for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+?)\)", path.read_text()):
            assert (path.parent / target).exists(), (path, target)
