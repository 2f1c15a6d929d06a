"""The word list of `make lint` finds the words to avoid, and only these."""

import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).parents[2] / "tools" / "words.py"


def run(path):
    return subprocess.run([sys.executable, TOOL, path], capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "text", ["Nobody proves it.", "def not_vouched(): ...", "an error of some 1e-7", "a run that was gone on with"]
)
def test_words_to_avoid_are_reported_with_their_line(tmp_path, text):
    (tmp_path / "page.md").write_text(f"First line.\n{text}\n")
    found = run(tmp_path)
    assert found.returncode == 1
    assert "page.md:2:" in found.stdout


def test_plain_english_passes(tmp_path):
    (tmp_path / "page.md").write_text("The amendment has an error of about 1e-7; use verbose=True.\n")
    assert run(tmp_path).returncode == 0
