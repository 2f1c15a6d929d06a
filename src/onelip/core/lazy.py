"""Names of a package that are loaded when they are first used, so that the command line answers without torch."""

import ast
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def lazy_names(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """`__getattr__`, `__dir__` and `__all__` of a package that lists its public names below `if TYPE_CHECKING:`.

    The list is there once, in the form that type checkers read: `from onelip.core.bake import bake as bake`.

    Args:
        package: `__name__` of the package.
        file: its `__file__`.
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
