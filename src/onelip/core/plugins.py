"""Models and methods that other packages register: by `--import`, by entry points, and those that a run needs."""

import functools
import importlib
import os
import sys
import warnings
from collections.abc import Iterable
from importlib.metadata import entry_points

from onelip.core.errors import RecipeError


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
