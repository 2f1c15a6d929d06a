"""Read summaries and argument descriptions from docstrings, so that lists and documents do not repeat them."""

import inspect
import re
from collections.abc import Callable


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
