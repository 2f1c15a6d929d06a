"""The structure of the tests: one folder for each package, unique names, no test module that imports another."""

import re
from collections import Counter
from pathlib import Path

TESTS = Path(__file__).parents[1]


def test_names_of_test_files_are_unique():
    counts = Counter(path.name for path in TESTS.rglob("*.py"))
    assert [name for name, count in counts.items() if count > 1] == []


def test_no_test_module_imports_another():
    importing = re.compile(r"^\s*(?:from|import) test_\w+", re.MULTILINE)
    assert [path.name for path in TESTS.rglob("*.py") if importing.search(path.read_text())] == []


def test_every_test_is_in_a_folder():
    assert [path.name for path in TESTS.glob("test_*.py")] == []


def test_folders_have_names_of_packages():
    packages = {path.name for path in (TESTS.parent / "src" / "onelip").iterdir() if path.is_dir()}
    folders = {path.name for path in TESTS.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders - packages == {"examples", "project"}
