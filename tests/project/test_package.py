"""The package as a user sees it: lazy import, public names, docstring examples."""

import doctest
import importlib
import pkgutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import onelip


def modules_with_examples():
    names = [m.name for m in pkgutil.walk_packages(onelip.__path__, "onelip.")]
    origins = {name: find_spec(name).origin for name in sorted(names) if not name.endswith("__main__")}
    return [name for name, path in origins.items() if ">>> " in Path(path).read_text(encoding="utf-8")]


def test_import_does_not_load_torch():
    code = "import sys, onelip; assert 'torch' not in sys.modules; onelip.aol; assert 'torch' in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", [m.name for m in pkgutil.iter_modules(onelip.__path__, "onelip.") if m.ispkg])
def test_each_package_can_be_imported_first(name):
    subprocess.run([sys.executable, "-W", "error", "-c", f"import {name}"], check=True)


def test_public_names_exist():
    for name in onelip.__all__:
        assert getattr(onelip, name) is not None
    assert set(onelip.__all__) <= set(dir(onelip))
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        onelip.nonsense  # noqa: B018


@pytest.mark.parametrize("name", modules_with_examples())
def test_examples_in_docstrings(name):
    torch.manual_seed(0)
    results = doctest.testmod(
        importlib.import_module(name), optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    )
    assert results.attempted
    assert results.failed == 0
