"""Tables of text: for the terminal, and as Markdown, CSV and LaTeX."""

import csv
import io
from dataclasses import dataclass

from rich.table import Table

from onelip.training.display import text_table

# CommonMark and LaTeX read these characters as markup.
_MARKDOWN = {character: f"\\{character}" for character in "\\|*_`<[]~"}
_LATEX = {character: f"\\{character}" for character in "%&_#$"} | {
    "×": "$\\times$",
    "√": "$\\sqrt{}$",
    "~": "$\\sim$",
    "−": "$-$",
    "ᵀ": "$^\\top$",
    "\\": "\\textbackslash{}",
    "{": "\\{",
    "}": "\\}",
    "^": "\\textasciicircum{}",
}


@dataclass(frozen=True)
class TextTable:
    """A table of text.

    Attributes:
        title: one line above it.
        heads: headings.
        rows: cells.
        notes: lines below it.
        left: number of columns that are text, aligned to the left; the others are numbers.

    Examples:
        >>> table = TextTable("A", ("name", "%"), [("AOL_1", "3")], ["a note"], 1)
        >>> print(table.to_markdown())
        **A**
        <BLANKLINE>
        | name | % |
        |---|--:|
        | AOL\\_1 | 3 |
        <BLANKLINE>
        a note
        <BLANKLINE>
    """

    title: str
    heads: tuple[str, ...]
    rows: list[tuple[str, ...]]
    notes: list[str]
    left: int

    def to_rich(self) -> Table:
        """The table for a terminal; a cell that repeats the one above it in the first column is empty."""
        before, rows = "", []
        for first, *rest in self.rows:
            rows.append(("" if first == before else first, *rest))
            before = first
        return text_table(self.title, self.heads, rows, self.left)

    def to_markdown(self) -> str:
        """The table as Markdown, with its title and notes."""

        def line(cells: tuple[str, ...]) -> str:
            return f"| {' | '.join(_replaced(cell, _MARKDOWN) for cell in cells)} |"

        rule = "|".join("---" if number < self.left else "--:" for number in range(len(self.heads)))
        table = "\n".join([line(self.heads), f"|{rule}|", *map(line, self.rows)])
        notes = "".join(f"\n{_replaced(note, _MARKDOWN)}\n" for note in self.notes)
        return f"**{_replaced(self.title, _MARKDOWN)}**\n\n{table}\n{notes}"

    def to_csv(self) -> str:
        """The table as CSV with a header line; title and notes are left out."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerows([self.heads, *self.rows])
        return text.getvalue()

    def to_latex(self) -> str:
        r"""The table as a LaTeX table, with the notes in the caption; needs no package."""
        lines = [" & ".join(_replaced(cell, _LATEX) for cell in row) + r" \\" for row in [self.heads, *self.rows]]
        caption = " ".join([f"{self.title}.", *self.notes])
        columns = "l" * self.left + "r" * (len(self.heads) - self.left)
        return "\n".join(
            [
                r"\begin{table}",
                rf"\caption{{{_replaced(caption, _LATEX)}}}",
                rf"\begin{{tabular}}{{{columns}}}",
                r"\hline",
                lines[0],
                r"\hline",
                *lines[1:],
                r"\hline",
                r"\end{tabular}",
                r"\end{table}",
                "",
            ]
        )


def _replaced(text: str, marks: dict[str, str]) -> str:
    return "".join(marks.get(character, character) for character in text)
