"""Types of the fields of a recipe, checked when one is made: JSON files and callers alike get a clear answer."""

import difflib
from collections.abc import Iterable
from typing import Any, Literal, get_args, get_origin

from onelip.training.errors import RecipeError


def check_type(name: str, value: object, expected: Any) -> object:
    """The value, as its type has it (an int becomes a float, a list a tuple), or an error.

    Example:
        >>> check_type("lr", 1, float)
        1.0
    """
    if expected is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if expected is int and isinstance(value, int) and not isinstance(value, bool):
        return value
    if expected in (bool, str) and isinstance(value, expected):
        return value
    if get_origin(expected) is Literal:
        choices = get_args(expected)
        if value in choices:
            return value
        listed = " or ".join(map(repr, choices))
        raise RecipeError(f"expected {name} to be {listed}, got {value!r}{suggestion(str(value), choices)}")
    if get_origin(expected) is tuple and isinstance(value, list | tuple):
        item, rest = get_args(expected)
        if rest is Ellipsis or len(value) == len(get_args(expected)):
            return tuple(check_type(f"{name}[{i}]", v, item) for i, v in enumerate(value))
    raise RecipeError(f"expected {name} to be {_spoken(expected)}, got {value!r}")


def _spoken(expected: Any) -> str:
    if get_origin(expected) is tuple:
        item, rest = get_args(expected)
        count = "" if rest is Ellipsis else f"{len(get_args(expected))} "
        return f"a list of {count}values, each {_spoken(item)}"
    return {float: "a number", int: "a whole number", bool: "true or false", str: "a text"}[expected]


def suggestion(given: str, known: Iterable[str]) -> str:
    """ "; did you mean ...?" if a known name is near, else nothing."""
    near = difflib.get_close_matches(given.lower(), list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""
