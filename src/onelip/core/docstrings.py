"""What docstrings say of arguments, for lists that people read: written once, where the code is."""

import inspect
import re
from collections.abc import Callable


def first_line(thing: object) -> str:
    """The first line of a docstring.

    Examples:
        >>> first_line(first_line)
        'The first line of a docstring.'
    """
    return (inspect.getdoc(thing) or "").partition("\n")[0]


def arguments_in(thing: Callable[..., object]) -> dict[str, str]:
    """The texts of the section Args of a docstring, by argument.

    Examples:
        >>> arguments_in(arguments_in)
        {'thing': 'what has the docstring.'}

    Args:
        thing: what has the docstring.
    """
    _, _, section = (inspect.getdoc(thing) or "").partition("\nArgs:\n")
    lines = re.split(r"\n(?! )", section)[0]  # until the next section
    found = re.findall(r"^    (\w+): (.*(?:\n     .*)*)", lines, re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in found}
