"""The rows of a comparison as a table: which columns there are, for the terminal and for the page alike."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from decimal import ROUND_CEILING, Context, Decimal
from typing import Any

from rich import box
from rich.table import Table

Row = dict[str, Any]
_BASES = ("method", "weights", "pairs")


@dataclass(frozen=True)
class Column:
    """One column.

    Attributes:
        title: its head.
        meaning: a sentence for the page.
        value: the number of a row that worked; None where there is none.
        show: the number as text.
    """

    title: str
    meaning: str
    value: Callable[[Row], float | None]
    show: Callable[[float], str]

    def text(self, row: Row) -> str:
        """The cell of a row; "-" where there is no number."""
        number = self.value(row) if row["status"] == "done" else None
        return "-" if number is None or math.isnan(number) else self.show(number)

    def key(self, row: Row) -> float | None:
        """What the row is sorted by."""
        return self.value(row) if row["status"] == "done" else None


def columns(record: dict[str, Any]) -> list[Column]:
    """The columns of a comparison, after the method's name."""
    split = record["split"]
    radii = next((list(row["results"][split]["cra"]) for row in record["rows"] if row["status"] == "done"), [])
    return [
        Column("epochs", "whole epochs of training", lambda row: row["epochs"], lambda n: f"{n:.0f}"),
        Column("seconds", "training steps only", lambda row: row["seconds"], lambda s: f"{s:.3g}"),
        Column("accuracy", f"clean, % of {split} images", lambda row: row["results"][split]["accuracy"], _percent),
        *(_cra(split, radius) for radius in radii),
        Column(
            "CRA by",
            "real arithmetic; what CRA rests on: the constant that the method proves (method), bounds of the stored "
            "weights (weights), or such bounds for each pair of classes (pairs), which give larger radii",
            lambda row: _basis(row["results"][split].get("mode", "")),
            lambda number: _BASES[int(number)],
        ),
        Column("step", "time of a training step, plain network = 1", _ratio("step"), _times),
        Column("memory", "growth of the peak memory in training, plain network = 1", _ratio("memory"), _times),
        Column("predict", "time of the baked network, plain network = 1", _ratio("inference"), _times),
        Column(
            "constant",
            "Lipschitz constant proved of the stored weights, rounded up; - where it is unproved",
            lambda row: row["constant"]["proved"],
            rounded_up,
        ),
        Column(
            "mean |s-1|",
            "mean distance of the layers' singular values from 1; 0 for isometries",
            lambda row: row["singular_values"].get("mean_distance_from_1"),
            lambda x: f"{x:.3f}",
        ),
    ]


def comparison_tables(record: dict[str, Any]) -> list[Table]:
    """Two tables for the terminal, what it learned and what it costs, since one would be wider than 80 characters.

    Failed methods are rows without numbers; `failures` says why.
    """
    recipe, split = record["plan"]["recipe"], record["split"]
    shown = columns(record)
    first_cost = next(i for i, column in enumerate(shown) if column.title == "step")
    return [
        _table(
            f"{recipe['model']} on {record['data']['name']}, {record['plan']['budget']} each; in % of {split} images",
            record["rows"],
            shown[:first_cost],
        ),
        _table("step, memory and predict: the plain network = 1", record["rows"], shown[first_cost:]),
    ]


def _table(title: str, rows: list[Row], shown: list[Column]) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE, pad_edge=False, padding=(0, 1, 0, 0))
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
    """Six digits, rounded up: what is printed is a bound, too.

    Examples:
        >>> rounded_up(1.0), rounded_up(1.0000000001), rounded_up(1234567.0)
        ('1', '1.00001', '1.23457e+6')
    """
    if not math.isfinite(value):
        return str(value)
    rounded = Context(prec=6, rounding=ROUND_CEILING).create_decimal(Decimal(value)).normalize()
    return f"{rounded:f}" if 1e-4 <= value < 1e6 or value == 0 else f"{rounded:e}"


def _basis(mode: str) -> int | None:
    """The number in _BASES of what an evaluation says of itself (`onelip.training.evaluation`)."""
    return 2 if "pair" in mode else 1 if "stored weights" in mode else 0 if "construction" in mode else None


def _cra(split: str, radius: str) -> Column:
    meaning = f"certified robust accuracy at this L2 radius, % of {split} images; rounding is not in it"
    return Column(f"CRA {radius}", meaning, lambda row: row["results"][split]["cra"].get(radius), _percent)


def _ratio(measure: str) -> Callable[[Row], float | None]:
    return lambda row: row[measure]["ratio"]


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"


def _times(ratio: float) -> str:
    return f"{ratio:.2f}" if ratio < 100 else f"{ratio:.0f}"
