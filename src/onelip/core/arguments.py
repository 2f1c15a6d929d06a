"""Argument checks whose messages state the expected and the actual value."""

import difflib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from onelip.core.errors import RecipeError


def check_integer(name: str, value: Any, minimum: int = 1, maximum: int | None = None) -> int:
    """Return `value` if it is an integer from `minimum` to `maximum`; booleans do not count as integers.

    Raises:
        ValueError: for anything else.

    Examples:
        >>> check_integer("width", 3)
        3
    """
    if (
        isinstance(value, bool)
        or not isinstance(value, int)
        or value < minimum
        or (maximum is not None and value > maximum)
    ):
        wanted = f"of at least {minimum}" if maximum is None else f"from {minimum} to {maximum}"
        raise ValueError(f"expected {name} to be an integer {wanted}, got {value!r}")
    return value


def check_number(name: str, value: Any, low: float, high: float, *, open_low: bool = False) -> float:
    """Return `value` as a float if it is a number from `low` (excluded if `open_low`) to `high`; NaN is not.

    Raises:
        ValueError: for anything else.

    Examples:
        >>> check_number("rate", 1, 0, 2)
        1.0
    """
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (is_number and low <= value <= high and (value > low or not open_low)):
        wanted = f"above {low:g} and at most {high:.3g}" if open_low else f"from {low:g} to {high:.3g}"
        raise ValueError(f"expected {name} to be a number {wanted}, got {value!r}")
    return float(value)


def per_axis(name: str, value: int | Sequence[int], axes: int, minimum: int = 1) -> tuple[int, ...]:
    """Return one integer per axis; a single integer is repeated.

    Raises:
        ValueError: for anything else, and for integers below `minimum`.

    Examples:
        >>> per_axis("stride", 2, 3)
        (2, 2, 2)
    """
    sizes = (value,) * axes if isinstance(value, int) else tuple(value)
    if len(sizes) != axes or any(isinstance(n, bool) or not isinstance(n, int) or n < minimum for n in sizes):
        raise ValueError(f"expected {name} to be 1 or {axes} integers, each at least {minimum}, got {value!r}")
    return sizes


def check_name_free(name: str, new: Callable[..., object], registered: Mapping[str, Callable[..., object]]) -> None:
    """Check that no other function or class is registered under a name.

    The same one may be registered again: a notebook cell is run twice, or a module is reloaded.

    Raises:
        ValueError: if the name is taken.
    """
    known = registered.get(name)
    if known is not None and (taken := _qualified(known)) != _qualified(new):
        raise ValueError(f"the name {name!r} is taken by {taken}; choose another name")


def _qualified(function: Callable[..., object]) -> str:
    """Return the full name of a function or class; other callables have none."""
    return f"{function.__module__}.{getattr(function, '__qualname__', repr(function))}"


def check_known(kind: str, name: str, known: Iterable[str]) -> None:
    """Raise an error that lists the known names, and the closest one, for any other name.

    Raises:
        RecipeError: if the name is unknown.
    """
    names = list(known)
    if name not in names:
        raise RecipeError(f"unknown {kind} {name!r}; known: {', '.join(names)}{did_you_mean(name, names)}")


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """Return a hint with the closest known name, to append to an error message; empty if none is close.

    Examples:
        >>> did_you_mean("epoch", ["epochs", "lr"])
        "; did you mean 'epochs'?"
    """
    near = difflib.get_close_matches(given.lower(), list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""
