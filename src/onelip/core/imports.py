"""Imports on demand: lazy public names of a package, so the command line starts without torch, and plugins."""

import ast
import functools
import importlib
import os
import sys
import warnings
from collections.abc import Callable, Iterable
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

from onelip.core.errors import RecipeError


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


# ---- Models and methods that other packages register: by `--import`, by entry points, and those that a run needs


def import_modules(names: Iterable[str]) -> None:
    """Import modules that register models, methods or losses; the current directory is searched too.

    Raises:
        RecipeError: if a module cannot be imported.
    """
    for name in names:
        if os.getcwd() not in sys.path and "" not in sys.path:
            sys.path.insert(0, os.getcwd())
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise RecipeError(
                f"the module {name!r} cannot be imported ({error}); run the command in its directory, or add the "
                "directory to PYTHONPATH"
            ) from error


@functools.cache
def load_entry_points(group: str) -> None:
    """Load the entry points of a group, once; a module or function that is loaded registers itself.

    An entry point that fails is reported with a warning: a broken package must not disable onelip.
    """
    for point in entry_points(group=group):
        try:
            point.load()
        except Exception as error:
            warnings.warn(f"the entry point {point.name!r} of {group} failed: {error}", stacklevel=2)


def defining_modules(*objects: object) -> tuple[str, ...]:
    """Return the modules outside of onelip that define the objects, for `import_modules`; not `__main__`."""
    names = dict.fromkeys(str(getattr(thing, "__module__", "__main__")) for thing in objects)
    return tuple(name for name in names if name != "__main__" and name.partition(".")[0] != "onelip")
