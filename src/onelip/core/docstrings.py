"""Docstrings as data: summaries and arguments for lists and documents, one text for layers of 1 to 3 dimensions."""

import inspect
import re
from collections.abc import Callable
from typing import TypeVar

Class = TypeVar("Class", bound=type)


def first_line(thing: object) -> str:
    """Return the first line of a docstring, or an empty string.

    Examples:
        >>> first_line(first_line)
        'Return the first line of a docstring, or an empty string.'
    """
    return (inspect.getdoc(thing) or "").partition("\n")[0]


def arguments_in(thing: Callable[..., object]) -> dict[str, str]:
    r"""Return the descriptions in the `Args` section of a docstring, by argument name.

    Symbols in LaTeX become words: `$\lambda$` is returned as "lambda".

    Args:
        thing: function or class with the docstring.

    Examples:
        >>> arguments_in(arguments_in)
        {'thing': 'function or class with the docstring.'}
    """
    _, _, section = (inspect.getdoc(thing) or "").partition("\nArgs:\n")
    lines = re.split(r"\n(?! )", section)[0]  # until the next section
    found = re.findall(r"^    (\w+): (.*(?:\n     .*)*)", lines, re.MULTILINE)
    return {name: re.sub(r"\$\\?(\w+)\$", r"\1", " ".join(text.split())) for name, text in found}


def like(original: type, axes: int) -> Callable[[Class], Class]:
    """Return a decorator: the class gets the docstring of its sibling for two spatial axes, rewritten for `axes`.

    Names with `2d`, the axes `H, W`, powers `k^2`, and sizes at the end of a shape, such as `8, 8)`, are rewritten. The
    documentation uses the result too, by tools/runtime_docstrings.py.

    Args:
        original: the class with the docstring.
        axes: number of spatial axes.

    Examples:
        >>> class Flip2d:
        ...     "Take (N, H, W), such as (3, 8, 8)."
        >>> @like(Flip2d, axes=1)
        ... class Flip1d:
        ...     pass
        >>> Flip1d.__doc__
        'Take (N, L), such as (3, 8).'
    """
    letters = {1: "L", 3: "DHW"}[axes]
    text = (original.__doc__ or "").replace("2d", f"{axes}d").replace("k^2", f"k^{axes}" if axes > 1 else "k")
    text = re.sub(r"\bH([^\s,]*), W\1", lambda found: ", ".join(letter + found[1] for letter in letters), text)
    text = re.sub(r"\b(\d+), \1(?=[)\]])", lambda found: ", ".join([found[1]] * axes), text)

    def decorate(made: Class) -> Class:
        made.__doc__ = text
        return made

    return decorate
