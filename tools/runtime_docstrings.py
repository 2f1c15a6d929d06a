"""A griffe extension: docstrings that `onelip.core.docstrings.like` writes at import, for the API pages of the site."""

import importlib
import inspect
from typing import Any

from griffe import Class, Docstring, Extension


class RuntimeDocstrings(Extension):
    """Replaces the missing docstring of a decorated class by the one that it has at run time."""

    def on_class(self, *, cls: Class, **settings: Any) -> None:
        """Called for each class after its source was read."""
        if any(decorator.callable_path.endswith("like") for decorator in cls.decorators):
            made = getattr(importlib.import_module(cls.module.path), cls.name)
            cls.docstring = Docstring(inspect.getdoc(made) or "", parent=cls, parser="google")
