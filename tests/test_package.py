"""The package as a user sees it: lazy import, public names, docstring examples."""

import doctest
import importlib
import pkgutil
import subprocess
import sys

import pytest
import torch

import onelip

MODULES = sorted(m.name for m in pkgutil.walk_packages(onelip.__path__, "onelip.") if not m.name.endswith("__main__"))


def test_import_does_not_load_torch():
    code = "import sys, onelip; assert 'torch' not in sys.modules; onelip.aol; assert 'torch' in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", MODULES)
def test_every_module_can_be_imported_first(name):
    """Nothing fails at import."""
    importlib.import_module(name)


@pytest.mark.parametrize(
    "name", ["onelip.graph.modules", "onelip.methods.aol", "onelip.nn", "onelip.testing", "onelip.models"]
)
def test_entry_points_in_a_fresh_process(name):
    subprocess.run([sys.executable, "-W", "error", "-c", f"import {name}"], check=True)


def test_public_names_exist():
    for name in onelip.__all__:
        assert getattr(onelip, name) is not None
    assert set(onelip.__all__) <= set(dir(onelip))
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        onelip.nonsense  # noqa: B018


@pytest.mark.parametrize("name", MODULES)
def test_examples_in_docstrings(name):
    torch.manual_seed(0)
    module = importlib.import_module(name)
    results = doctest.testmod(module, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert results.failed == 0
