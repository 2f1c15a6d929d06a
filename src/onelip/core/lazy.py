"""Lazy public names of a package: modules are imported on first use, so the command line starts without torch."""

import ast
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def lazy_names(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` for a package that lists its public names under `TYPE_CHECKING`.

    The names are written once, in the form that type checkers read: `from onelip.core.bake import bake as bake`.

    Args:
        package: `__name__` of the package.
        file: `__file__` of the package.
    """
    places = dict(_listed(Path(file).read_text(encoding="utf-8")))

    def get(name: str) -> Any:
        if name not in places:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module, original = places[name]
        if module == package:  # a package or module below this one
            value = importlib.import_module(f"{package}.{original}")
        else:
            value = getattr(importlib.import_module(module), original)
        setattr(sys.modules[package], name, value)
        return value

    return get, lambda: sorted(places), sorted(places)


def _listed(source: str) -> list[tuple[str, tuple[str, str]]]:
    blocks = [
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"
    ]
    return [
        (alias.asname or alias.name, (statement.module or "", alias.name))
        for block in blocks
        for statement in block.body
        if isinstance(statement, ast.ImportFrom)
        for alias in statement.names
    ]
