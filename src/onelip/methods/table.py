"""The registry as tables of docs/methods.md; `python -m onelip.methods.table docs/methods.md` writes them anew."""

import sys
from collections.abc import Iterable
from pathlib import Path

from onelip.core.geometry import LINEAR_LAYERS
from onelip.methods.method import Method

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


def markdown_tables(methods: Iterable[Method]) -> str:
    """What each method is and guarantees here, then its properties as the paper has them."""
    listed = list(methods)
    return "\n".join([*_what_it_is(listed), "", *_properties(listed)])


def served_layers(method: Method) -> str:
    """The layers a method serves, in few words."""
    if set(method.layers) == set(LINEAR_LAYERS):
        return "all linear layers"
    return ", ".join(layer.__name__ for layer in method.layers)


def _what_it_is(methods: list[Method]) -> list[str]:
    lines = ["| name | method | acts as | guarantee | train = eval | layers | note |", "|---|---|---|---|---|---|---|"]
    for method in methods:
        same = "yes" if method.train_equals_eval else "no"
        cells = (method.title, method.mechanism, method.guarantee, same, served_layers(method), method.note)
        lines.append(f"| `{method.name}` | " + " | ".join(cells) + " |")
    return lines


def _properties(methods: list[Method]) -> list[str]:
    lines = ["| method | E | F | G | M |", "|---|---|---|---|---|"]
    for method in methods:
        row = method.paper
        if row is None:
            continue
        cells = [_MARKS[getattr(row, c)] + (f" ({row.notes[c]})" if c in row.notes else "") for c in "EFGM"]
        lines.append(f"| `{method.name}` | " + " | ".join(cells) + " |")
    notes = "; ".join(f"({number}) {text}" for number, text in FOOTNOTES.items())
    return [*lines, "", f"{notes}."]


def rewritten(document: str, tables: str) -> str:
    """The document with the text between its marks replaced."""
    before, begin, rest = document.partition(_BEGIN)
    _, end, after = rest.partition(_END)
    if not begin or not end:
        raise ValueError(f"expected a document with {_BEGIN.strip()} and {_END.strip()}, got one without")
    return f"{before}{_BEGIN}{tables}\n{_END}{after}"


if __name__ == "__main__":
    from onelip.methods.registry import METHODS

    path = Path(sys.argv[1])
    path.write_text(rewritten(path.read_text(), markdown_tables(METHODS.values())))
