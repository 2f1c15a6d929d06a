"""Options of models and methods as a recipe keeps them: texts of the form key=value."""

import json
from typing import Any


def parse_options(options: tuple[str, ...]) -> dict[str, Any]:
    """key=value pairs; a value is JSON where it can be, else a text.

    Example:
        >>> parse_options(("width=8", "side=auto", "learn_weights=true"))
        {'width': 8, 'side': 'auto', 'learn_weights': True}
    """
    found: dict[str, Any] = {}
    for option in options:
        key, _, text = option.partition("=")
        try:
            found[key] = json.loads(text)
        except ValueError:
            found[key] = text
    return found
