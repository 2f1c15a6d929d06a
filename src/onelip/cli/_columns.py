"""Lists and tables for terminals of any width: long text wraps, and columns that do not fit are left out."""

import shutil
import sys
import textwrap
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

_GAP = 2
_NARROWEST = 24  # of prose; narrower terminals wrap it themselves


def output_width() -> int:
    """Columns of the terminal, or COLUMNS; not limited in a file or a pipe, so that each entry is one line."""
    return shutil.get_terminal_size((10_000, 24)).columns


def make_console(stderr: bool = False) -> "Console":
    """A rich console as wide as the output."""
    from rich.console import Console

    return Console(stderr=stderr, width=None if sys.stdout.isatty() else min(output_width(), 160))


def listing(heads: Sequence[str], rows: Sequence[Sequence[str]], keep: int, width: int) -> str:
    """A line for each row; the last cell is prose.

    Columns between the first `keep` and the prose are left out from the right until nine of ten rows fit on a line.

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
    """Labels with prose beside them; empty prose is left out.

    Examples:
        >>> print(described([("guarantee", "proved"), ("note", "")], 80))
          guarantee  proved
    """
    shown = [(label, text) for label, text in facts if text]
    wide = max((len(label) for label, _ in shown), default=0) + 2 * _GAP
    lines: list[str] = []
    for label, text in shown:
        lines += _hanging(f"{'':{_GAP}}{label}".ljust(wide), text, min(width, 120))
    return "\n".join(lines)


def _hanging(left: str, prose: str, width: int) -> list[str]:
    room = max(width - len(left), _NARROWEST)
    parts = textwrap.wrap(prose, room, break_long_words=False, break_on_hyphens=False) or [""]
    return [f"{' ' * len(left) if number else left}{part}".rstrip() for number, part in enumerate(parts)]
