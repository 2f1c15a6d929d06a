"""Scripts beside the package: examples, and tools of the documentation."""

import subprocess
import sys
from pathlib import Path

import pytest

from onelip.cli import COMMANDS

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
    ],
)
def test_pages_that_load_from_elsewhere_are_found(tmp_path, text, code):
    (tmp_path / "page.html").write_text(text)
    assert run("tools/check_site.py", tmp_path).returncode == code
