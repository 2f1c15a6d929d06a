"""Paths that a command names, looked at before the work that they are for."""

from pathlib import Path

from onelip.core.errors import RecipeError


def need_file(flag: str, path: Path | None) -> None:
    """Refuse a file to read that is not there; None, no file, is fine."""
    if path is not None and not path.is_file():
        raise RecipeError(f"{path}: expected a file for {flag}, got {'a directory' if path.is_dir() else 'none there'}")


def need_place(flag: str, path: Path | None) -> None:
    """Refuse a file to write that could not be written."""
    if path is not None and (path.is_dir() or not path.parent.is_dir()):
        raise RecipeError(
            f"{path}: expected a file name in a directory that is there for {flag}, got none; make it, or choose"
        )
