"""Lists for people, on terminals of any width: what does not fit is left out whole, or wrapped; nothing is cut."""

import shutil
import textwrap
from collections.abc import Iterable, Sequence

_GAP = 2
_NARROWEST = 24  # of prose: below that it sticks out instead


def output_width() -> int:
    """Columns of the terminal, or COLUMNS; without bound into a file or a pipe, so that a line is an entry."""
    return shutil.get_terminal_size((10_000, 24)).columns


def listing(heads: Sequence[str], rows: Sequence[Sequence[str]], keep: int, width: int) -> str:
    """A line for each row, its last cell being prose.

    Columns between the first `keep` and the prose are left out, the last ones first, as long as more than one row in
    ten would have to wrap.

    Examples:
        >>> print(listing(("name", "kind", "what"), [("a", "k", "two words")], 1, 20))
        name  kind  what
        a     k     two words
        >>> print(listing(("name", "kind", "what"), [("a", "k", "two words")], 1, 15))
        name  what
        a     two words
    """
    table = [heads, *rows]
    widths = [max(map(len, column)) + _GAP for column in zip(*table, strict=True)]
    widths.pop()
    usual = sorted(len(row[-1]) for row in table)[(len(table) - 1) * 9 // 10]
    shown = len(widths)
    while shown > keep and sum(widths[:shown]) + usual > width:
        shown -= 1
    lines: list[str] = []
    for row in table:
        left = "".join(cell.ljust(wide) for cell, wide in zip(row[:shown], widths, strict=False))
        lines += _hanging(left, row[-1], width)
    return "\n".join(lines)


def described(facts: Iterable[tuple[str, str]], width: int) -> str:
    """What a thing is, line by line: a label, and prose beside it; empty prose is left out.

    Examples:
        >>> print(described([("guarantee", "proved"), ("note", "")], 80))
          guarantee  proved
    """
    told = [(label, text) for label, text in facts if text]
    wide = max((len(label) for label, _ in told), default=0) + 2 * _GAP
    lines: list[str] = []
    for label, text in told:
        lines += _hanging(f"{'':{_GAP}}{label}".ljust(wide), text, min(width, 120))
    return "\n".join(lines)


def _hanging(left: str, prose: str, width: int) -> list[str]:
    room = max(width - len(left), _NARROWEST)
    parts = textwrap.wrap(prose, room, break_long_words=False, break_on_hyphens=False) or [""]
    return [f"{' ' * len(left) if number else left}{part}".rstrip() for number, part in enumerate(parts)]
