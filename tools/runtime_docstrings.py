"""A griffe extension for the API pages of the site: public names, and docstrings that are written at import."""

import ast
import importlib
import inspect
from typing import Any

from griffe import Class, Docstring, Extension, Module


class RuntimeDocstrings(Extension):
    """Lists the public names of packages, and reads the docstrings of `onelip.core.docstrings.like`."""

    def on_module_members(self, *, node: ast.AST | Any, mod: Module, **settings: Any) -> None:
        """Called after the source of a module was read: `from a import b as b` makes b public, as for type checkers."""
        if mod.is_init_module and isinstance(node, ast.Module):
            imports = [statement for statement in ast.walk(node) if isinstance(statement, ast.ImportFrom)]
            public = [alias.name for statement in imports for alias in statement.names if alias.asname == alias.name]
            mod.exports = [*(mod.exports or []), *public]

    def on_class(self, *, cls: Class, **settings: Any) -> None:
        """Called for each class after its source was read: the docstring that it has at run time replaces it."""
        if any(decorator.callable_path.endswith("like") for decorator in cls.decorators):
            made = getattr(importlib.import_module(cls.module.path), cls.name)
            cls.docstring = Docstring(inspect.getdoc(made) or "", parent=cls, parser="google")
