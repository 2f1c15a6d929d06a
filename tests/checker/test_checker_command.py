"""The checker as a program: standalone, as a module, as a command of onelip; exit codes and output."""

import ast
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from _certified_networks import change, files, report, small

from onelip import checker

SOURCE = Path(checker.__file__).parent


def test_stands_alone():
    """Standard library, numpy, flint: no torch, nothing of onelip."""
    parts = [node for file in SOURCE.glob("*.py") for node in ast.walk(ast.parse(file.read_text()))]
    names = {a.name for node in parts if isinstance(node, ast.Import) for a in node.names}
    names |= {str(node.module) for node in parts if isinstance(node, ast.ImportFrom) and node.level == 0}
    assert all(node.level <= 1 for node in parts if isinstance(node, ast.ImportFrom))
    assert {n.split(".")[0] for n in names} - sys.stdlib_module_names == {"numpy", "flint"}


def test_as_a_file_and_as_a_module(tmp_path):
    path = files(small(), tmp_path)

    def run(*command):
        return subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True, cwd=tmp_path)

    shutil.copytree(SOURCE, tmp_path / "checker")
    done = run("-W", "error", "-m", "checker", path, "--images", tmp_path / "images.npy")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["accepted"]
    assert "node 3" in done.stderr
    done = run("-W", "error", "-m", "onelip.checker", path)
    assert done.returncode == 3
    assert json.loads(done.stdout)["logits_checked"] is False
    assert "that the logits in the file are those of the images" in done.stdout
    code = (
        "import sys, pathlib, onelip.checker as c; c.check(pathlib.Path(sys.argv[1])); sys.exit('torch' in sys.modules)"
    )
    done = run("-c", code, path)
    assert done.returncode == 0, done.stderr
    assert run("-m", "onelip.checker").returncode == 2


def test_verb(tmp_path, capsys):
    from onelip.cli.check import run

    path = files(small(), tmp_path)
    assert run([str(path), "--images", str(tmp_path / "images.npy")]) == 0
    printed = capsys.readouterr()
    assert "ACCEPTED: 3 of 3" in printed.out
    assert re.fullmatch(r"estimated work .* min of one core, memory .* GB\n", printed.err)
    assert run([str(path), "--images", str(tmp_path / "images.npy"), "--verbose"]) == 0
    assert "node 2 (sort)" in capsys.readouterr().err
    assert run([str(path), "--quiet"]) == 3
    assert not capsys.readouterr().err
    assert run([str(path), "--json", "--quiet"]) == 3
    assert json.loads(capsys.readouterr().out)["logits_checked"] is False
    assert run([str(tmp_path / "none.json"), "--quiet"]) == 2
    assert "NOT CHECKED: cannot read" in capsys.readouterr().out
    path.write_text("{")
    assert run([str(path), "--quiet", "--json"]) == 1
    assert not json.loads(capsys.readouterr().out)["accepted"]


@pytest.mark.parametrize("lie", ["x\nACCEPTED: 3 of 3", "\x1b[2J", "\ud800", "\r"])
@pytest.mark.parametrize("place", [("nodes", 2, "op"), ("weights", "file"), ("preprocessing", "x"), ("config", "file")])
def test_a_file_cannot_print_a_verdict(lie, place, tmp_path):
    path = files(small(), tmp_path, edit=change(*place, to=lie))
    for name in ("plain.safetensors", "config.json"):  # else names do not matter: files are found by their hashes
        if place[-1] == "file":
            (tmp_path / name).unlink()
    said, code = report(path)
    assert code in (1, 2)
    assert said.startswith(("REJECTED", "NOT CHECKED"))
    assert said.isprintable()
    done = subprocess.run([sys.executable, "-m", "onelip.checker", str(path)], capture_output=True, text=True)
    assert done.returncode == code
    assert not json.loads(done.stdout)["accepted"]
    assert done.stdout.isascii()
    assert not {"\x1b", "\r"} & {*done.stdout, *done.stderr}


def test_without_flint(tmp_path, monkeypatch):
    path = files(small(), tmp_path)
    monkeypatch.setitem(sys.modules, "flint", None)
    said, code = report(path)
    assert code == 2
    assert "pip install python-flint" in said
