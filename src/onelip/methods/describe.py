"""Descriptions of methods, from the registry and the docstrings: for `onelip methods` and docs/methods.md.

`python -m onelip.methods.describe docs/methods.md` rewrites the tables of that page.
"""

import inspect
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onelip.core.docstrings import arguments_in
from onelip.core.geometry import LINEAR_LAYERS
from onelip.methods.registry import METHODS, Method

_LAST_LAYER = "rows of the last layer have norm 1, and radii are certified per pair of classes."
_MARKS = {"yes": "yes", "partly": "~", "no": "no"}
_BEGIN, _END = "<!-- generated from the registry -->\n", "<!-- end -->\n"

FOOTNOTES = {
    1: "requires a regularisation loss",
    2: "internal methods would have to be run to convergence",
    3: "iterative procedure that can be split between training steps",
    4: "requires matrix orthogonalisation",
    5: "requires inversion of an input-sized matrix",
    6: "requires circular padding and full-image kernel size",
    7: "requires large kernel sizes to ensure orthogonality",
}


@dataclass(frozen=True)
class Option:
    """An option of a method: a keyword of its function, and a key of --method-options.

    Attributes:
        name: name of the keyword.
        default: its default.
        text: its description.
    """

    name: str
    default: Any
    text: str


def options_of(method: Method) -> list[Option]:
    """Return the options of a method, without those of its loss.

    Args:
        method: a method.

    Examples:
        >>> [(option.name, option.default) for option in options_of(METHODS["oni"])]
        [('steps', 5), ('lipschitz', 1.0), ('normalise_last_layer', False)]
    """
    texts = arguments_in(method.function)
    parameters = inspect.signature(method.apply).parameters.values()
    # input_size is given by the model, layer by layer.
    keywords = [p for p in parameters if p.kind is p.KEYWORD_ONLY and p.name != "input_size"]
    options = [Option(p.name, p.default, texts.get(p.name, "")) for p in keywords]
    return [*options, Option("normalise_last_layer", False, _LAST_LAYER)]


def about(method: Method) -> dict[str, Any]:
    """Return a method as a JSON object.

    Args:
        method: a method.

    Examples:
        >>> about(METHODS["aol"])["guarantee"]
        'proved'
    """
    return {
        "name": method.name,
        "title": method.title,
        "mechanism": method.mechanism,
        "guarantee": method.guarantee,
        "train_equals_eval": method.train_equals_eval,
        "paper": None if method.paper is None else {c: getattr(method.paper, c) for c in "EFGM"},
        "hyperparameters": dict(method.hyperparameters),
        "options": {option.name: option.default for option in options_of(method)},
        "loss": method.loss,
        "certificate": method.certificate,
        "needs_input_size": method.needs_input_size,
        "note": method.note,
        "layers": [layer.__name__ for layer in method.layers],
        "citation": method.citation,
    }


def supported_layers(method: Method) -> str:
    """Return the names of the layers that a method supports.

    Examples:
        >>> supported_layers(METHODS["aol"]), supported_layers(METHODS["lln"])
        ('all linear layers', 'Linear')
    """
    if set(method.layers) == set(LINEAR_LAYERS):
        return "all linear layers"
    return ", ".join(layer.__name__ for layer in method.layers)


def by_year() -> list[Method]:
    """Return all methods, the oldest paper first; those without a year in their citation come last.

    Examples:
        >>> [method.name for method in by_year()][:2]
        ['clipping', 'gradient-penalty']
    """
    years = {name: re.findall(r"\b(?:19|20)\d\d\b", method.citation) for name, method in METHODS.items()}
    return sorted(METHODS.values(), key=lambda method: (max(years[method.name], default="9999"), method.name))


def markdown_tables() -> str:
    """Return the tables of docs/methods.md: all methods, then the property table of the paper."""
    lines = ["| name | method | acts as | guarantee | train = eval | layers | note |", "|---|---|---|---|---|---|---|"]
    methods = by_year()
    for method in methods:
        same = "yes" if method.train_equals_eval else "no"
        guarantee = method.guarantee or "none"
        cells = (method.title, method.mechanism, guarantee, same, supported_layers(method), method.note)
        lines.append(f"| `{method.name}` | " + " | ".join(cells) + " |")
    lines += ["", "| method | E | F | G | M |", "|---|---|---|---|---|"]
    for method in methods:
        if (row := method.paper) is not None:
            cells = [_MARKS[getattr(row, c)] + (f" ({row.notes[c]})" if c in row.notes else "") for c in "EFGM"]
            lines.append(f"| `{method.name}` | " + " | ".join(cells) + " |")
    notes = "; ".join(f"({number}) {text}" for number, text in FOOTNOTES.items())
    return "\n".join([*lines, "", f"{notes}."])


def rewritten(document: str, tables: str) -> str:
    """Return the document with the text between its two marks replaced.

    Raises:
        ValueError: if a mark is missing.
    """
    before, begin, rest = document.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not begin or not end:
        raise ValueError(f"the document lacks {_BEGIN.strip()} or {_END.strip()}")
    return f"{before}{_BEGIN}{tables}\n{_END}{after}"


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(rewritten(path.read_text(), markdown_tables()))
