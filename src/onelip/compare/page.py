"""The results of a comparison: tables for the terminal, and one HTML page with pictures that loads nothing else."""

import html
import math
from collections.abc import Callable
from dataclasses import dataclass
from decimal import ROUND_CEILING, Context, Decimal
from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined
from rich.table import Table

from onelip.training.display import simple_table

Row = dict[str, Any]

# The table.

_BASES = ("method", "weights", "pairs")


@dataclass(frozen=True)
class Column:
    """One column of the table.

    Attributes:
        title: heading.
        meaning: explanation on the page.
        value: the number of a finished row, or None.
        show: the number as text.
    """

    title: str
    meaning: str
    value: Callable[[Row], float | None]
    show: Callable[[float], str]

    def text(self, row: Row) -> str:
        """The cell of a row; "-" without a number."""
        number = self.key(row)
        return "-" if number is None or math.isnan(number) else self.show(number)

    def key(self, row: Row) -> float | None:
        """The number to sort by."""
        return self.value(row) if row["status"] == "done" else None


def columns(record: dict[str, Any]) -> list[Column]:
    """The columns of a comparison, after the name of the method."""
    split = record["split"]
    radii = next((list(row["results"][split]["cra"]) for row in record["rows"] if row["status"] == "done"), [])
    return [
        Column("epochs", "whole epochs of training", lambda row: row["epochs"], lambda n: f"{n:.0f}"),
        Column("seconds", "training steps only", lambda row: row["seconds"], lambda s: f"{s:.3g}"),
        Column("accuracy", f"% of {split} images", lambda row: row["results"][split]["accuracy"], _percent),
        *(_cra(split, radius) for radius in radii),
        Column(
            "CRA by",
            "basis of the CRA, in real arithmetic: the constant that the method proves (method), bounds of the stored "
            "weights (weights), or such bounds for each pair of classes (pairs), which give larger radii",
            lambda row: _basis(row["results"][split]),
            lambda number: _BASES[int(number)],
        ),
        Column("step", "time of a training step; baseline = 1", _ratio("step"), _times),
        Column("memory", "growth of the peak memory in training; baseline = 1", _ratio("memory"), _times),
        Column("predict", "time of a prediction by the baked network; baseline = 1", _ratio("inference"), _times),
        Column(
            "constant",
            "Lipschitz constant proved for the stored weights, rounded up; - if none is proved",
            lambda row: row["constant"]["proved"],
            rounded_up,
        ),
        Column(
            "mean |s-1|",
            "mean distance of the singular values of the layers from 1; 0 for isometries",
            lambda row: row["singular_values"].get("mean_distance_from_1"),
            lambda x: f"{x:.3f}",
        ),
    ]


def comparison_tables(record: dict[str, Any]) -> list[Table]:
    """Two tables for the terminal, accuracy and cost, each at most 80 characters wide.

    A failed method is a row without numbers; `failures` gives the reasons.
    """
    recipe, split = record["plan"]["recipe"], record["split"]
    shown = columns(record)
    first_cost = next(i for i, column in enumerate(shown) if column.title == "step")
    return [
        _table(
            f"{recipe['model']} on {record['data']['name']}, {record['plan']['budget']} each; % of {split} images",
            record["rows"],
            shown[:first_cost],
        ),
        _table("Cost relative to the network without a method", record["rows"], shown[first_cost:]),
    ]


def _table(title: str, rows: list[Row], shown: list[Column]) -> Table:
    table = simple_table(title)
    table.add_column("method", no_wrap=True)
    for column in shown:
        table.add_column(column.title, justify="right", min_width=max(map(len, column.title.split())))
    for row in rows:
        cells = [column.text(row) for column in shown]
        table.add_row(row["method"], *(cells if row["status"] == "done" else ["failed", *cells[1:]]))
    return table


def failures(record: dict[str, Any]) -> list[str]:
    """A line for each method that failed."""
    return [f"{row['method']} failed: {row['why']}" for row in record["rows"] if row["status"] != "done"]


def rounded_up(value: float) -> str:
    """Six digits, rounded up, so that the printed number is a bound as well.

    Examples:
        >>> rounded_up(1.0), rounded_up(1.0000000001), rounded_up(1234567.0)
        ('1', '1.00001', '1.23457e+6')
    """
    if not math.isfinite(value):
        return str(value)
    rounded = Context(prec=6, rounding=ROUND_CEILING).create_decimal(Decimal(value)).normalize()
    return f"{rounded:f}" if 1e-4 <= value < 1e6 or value == 0 else f"{rounded:e}"


def _basis(results: dict[str, Any]) -> int | None:
    """Index in _BASES of the mode of an evaluation (`onelip.training.evaluation`); None without a CRA."""
    if all(share is None for share in results["cra"].values()):
        return None
    mode = results.get("mode", "")
    return 2 if "pair" in mode else 1 if "stored weights" in mode else 0 if "construction" in mode else None


def _cra(split: str, radius: str) -> Column:
    meaning = f"certified robust accuracy at this L2 radius, % of {split} images, without rounding errors"
    return Column(f"CRA {radius}", meaning, lambda row: row["results"][split]["cra"].get(radius), _percent)


def _ratio(measure: str) -> Callable[[Row], float | None]:
    return lambda row: row[measure]["ratio"]


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"


def _times(ratio: float) -> str:
    return f"{ratio:.2f}" if ratio < 100 else f"{ratio:.0f}"


# The page.


def render_page(record: dict[str, Any]) -> str:
    """The HTML page of a comparison, from the content of comparison.json."""
    # autoescape: names of data sets and messages of errors may contain HTML.
    page = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    template = page.from_string(files("onelip.compare").joinpath("page.html.j2").read_text(encoding="utf-8"))
    done = [row for row in record["rows"] if row["status"] == "done"]
    measured = [row for row in done if "histogram" in row["singular_values"]]
    titles: dict[str, list[str]] = {}
    for column in columns(record):
        titles.setdefault(column.meaning, []).append(column.title)
    return template.render(
        record=record,
        recipe=record["plan"]["recipe"],
        columns=columns(record),
        meanings={", ".join(names): meaning for meaning, names in titles.items()},
        unproved=[row for row in done if row["constant"]["proved"] is None],
        dots=_dots(done, record["split"]) if done else None,
        spectra=_spectra(measured) if measured else None,
        ways=sorted({layer["how"] for row in measured for layer in row["singular_values"]["layers"]}),
    )


# The pictures: SVG, with the colours of the page (CSS).

_LEFT, _WIDTH, _LINE = 190, 760, 26  # space for names, whole width, height of a row
# Accuracy, then growing radii: shapes around the origin, so that colour is not the only difference.
_MARKS = (
    '<circle class="clean" r="5" fill="none" stroke-width="2"/>',
    '<rect x="-4" y="-4" width="8" height="8" fill="#1b6ca8"/>',
    '<rect x="-4" y="-4" width="8" height="8" fill="#2a9d6f" transform="rotate(45)"/>',
    '<polygon points="-5,4 5,4 0,-5" fill="#d08c12"/>',
    '<polygon points="-5,-4 5,-4 0,5" fill="#b3402a"/>',
)


def _dots(rows: list[Row], split: str) -> str:
    """Accuracy and CRA of each method as dots on a line from 0 to 100 %."""
    names = ["accuracy", *(f"CRA {radius}" for radius in rows[0]["results"][split]["cra"])]
    top, bottom = 34, 34 + _LINE * len(rows)
    parts = []
    for place, name in enumerate(names):
        x = _LEFT + 108 * place
        parts.append(_mark(place, x, 12) + _text(x + 10, 16, name))
    for percent in range(0, 101, 20):
        x = _across(percent / 100)
        parts.append(_line(x, top, x, bottom, "grid") + _text(x, bottom + 18, f"{percent} %", "middle"))
    for number, row in enumerate(rows):
        y = top + _LINE * (number + 0.5)
        found = [row["results"][split]["accuracy"], *row["results"][split]["cra"].values()]
        known = [value for value in found if value is not None]
        parts.append(_text(_LEFT - 12, y + 4, row["method"], "end"))
        parts.append(_line(_across(min(known)), y, _across(max(known)), y, "span"))
        # The largest radius first, so that the accuracy is drawn on top.
        parts += [_mark(i, _across(v), y) for i, v in reversed(list(enumerate(found))) if v is not None]
    return _picture(parts, bottom + 28, f"Accuracy and certified robust accuracy of {len(rows)} methods")


def _spectra(rows: list[Row]) -> str:
    """The histogram of the singular values of each method, with a line at 1."""
    edges = rows[0]["singular_values"]["histogram"]["edges"]
    line, parts, top = 44, [], 8
    bottom = top + line * len(rows)

    def across(s: float) -> float:
        return _LEFT + (_WIDTH - _LEFT - 90) * s / edges[-1]

    for tick in (0.0, 0.25, 0.5, 0.75, 1.0):
        parts.append(_line(across(tick), top, across(tick), bottom, "one" if tick == 1 else "grid"))
        parts.append(_text(across(tick), bottom + 18, f"{tick:g}", "middle"))
    for number, row in enumerate(rows):
        found = row["singular_values"]["histogram"]
        base = top + line * (number + 1) - 4
        highest = max(*found["shares"], 1e-12)
        steps = [f"M{across(edges[0]):.1f} {base:.1f}"]
        for share, left, right in zip(found["shares"], edges, edges[1:], strict=False):
            y = base - (line - 10) * share / highest
            steps.append(f"L{across(left):.1f} {y:.1f}L{across(right):.1f} {y:.1f}")
        parts.append(f'<path class="area" d="{"".join(steps)}L{across(edges[-1]):.1f} {base:.1f}Z"/>')
        parts.append(_text(_LEFT - 12, base - 6, row["method"], "end"))
        if found["above"] > 0.0005:
            parts.append(_text(across(edges[-1]) + 8, base - 6, f"{100 * found['above']:.1f} % above"))
    return _picture(parts, bottom + 28, f"Singular values of the layers of {len(rows)} methods")


def _across(share: float) -> float:
    return _LEFT + (_WIDTH - _LEFT - 30) * share


def _mark(place: int, x: float, y: float) -> str:
    return f'<g transform="translate({x:.1f} {y:.1f})">{_MARKS[place % len(_MARKS)]}</g>'


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{html.escape(text)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _picture(parts: list[str], height: float, label: str) -> str:
    head = f'<svg viewBox="0 0 {_WIDTH} {height:.0f}" role="img" aria-label="{html.escape(label)}">'
    return head + "".join(parts) + "</svg>"
