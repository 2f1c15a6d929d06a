"""The table of results: one row for each run or basis of its numbers, for the terminal and for the page."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from onelip.core.rounding import rounded_up
from onelip.training.display import text_table

Row = dict[str, Any]

# The basis of an accuracy; the first three are the modes of `onelip.training.evaluation`.
_BASES = ("method", "weights", "pairs", "sound", "attack", "paper")


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


def columns(rows: Sequence[Row], split: str = "test") -> list[Column]:
    """The columns of a table, after the name of the row.

    Args:
        rows: dictionaries with `name` and `status`, and for the status "done" some of `epochs`, `seconds`, `results`
            (evaluations by split, as in results.json), `constant` (`proved`), `singular_values`, and the measurements
            `step`, `memory` and `inference` (`ratio`) of `onelip compare`.
        split: which images.
    """
    radii = dict.fromkeys(radius for row in rows for radius in _at(row, "results", split, "cra") or ())
    return [
        Column("accuracy", f"% of {split} images", _get("results", split, "accuracy"), _percent),
        *(_cra(split, radius) for radius in radii),
        Column(
            "CRA by",
            "basis of the CRA: the constant that the method proves (method), bounds of the stored weights (weights), "
            "or such bounds for each pair of classes (pairs), which give larger radii, all in real arithmetic; "
            "the same with all rounding errors of the float64 program included (sound). In a row with attack, the "
            "numbers are not certified but upper bounds: the accuracy under an attack",
            lambda row: _basis(_at(row, "results", split)),
            lambda number: _BASES[int(number)],
        ),
        Column("images", f"number of {split} images", _get("results", split, "images"), lambda n: f"{n:.0f}"),
        Column("epochs", "epochs of training", _get("epochs"), lambda n: f"{n:.0f}"),
        Column("seconds", "training steps only", _get("seconds"), lambda s: f"{s:.3g}"),
        Column("step", "time of a training step; baseline = 1", _get("step", "ratio"), _times),
        Column("memory", "growth of the peak memory in training; baseline = 1", _get("memory", "ratio"), _times),
        Column(
            "predict", "time of a prediction by the baked network; baseline = 1", _get("inference", "ratio"), _times
        ),
        Column(
            "constant",
            "Lipschitz constant proved for the stored weights, rounded up; - if none is proved",
            _get("constant", "proved"),
            rounded_up,
        ),
        Column(
            "mean |s-1|",
            "mean distance of the singular values of the layers from 1; 0 for isometries",
            _get("singular_values", "mean_distance_from_1"),
            lambda x: f"{x:.3f}",
        ),
    ]


def terminal_table(title: str, name: str, rows: Sequence[Row], shown: Sequence[Column]) -> Table:
    """A table for the terminal; a failed row has no numbers."""
    lines = [[row["name"], *(column.text(row) for column in shown)] for row in rows]
    for row, line in zip(rows, lines, strict=True):
        line[1] = line[1] if row["status"] == "done" else "failed"
    table = text_table(title, [name, *(column.title for column in shown)], lines)
    table.columns[0].no_wrap = True
    return table


def _at(row: Any, *keys: str) -> Any:
    """A value in nested dictionaries; None if one of them has no such key."""
    for key in keys:
        row = row.get(key) if isinstance(row, dict) else None
    return row


def _get(*keys: str) -> Callable[[Row], float | None]:
    return lambda row: _at(row, *keys)


def _basis(results: dict[str, Any] | None) -> int | None:
    """Index in _BASES of the mode of an evaluation; None without a CRA."""
    if results is None or all(share is None for share in (results.get("cra") or {}).values()):
        return None
    mode = results.get("mode", "")
    if mode in _BASES:
        return _BASES.index(mode)
    return 2 if "pair" in mode else 1 if "stored weights" in mode else 0 if "construction" in mode else None


def _cra(split: str, radius: str) -> Column:
    meaning = f"certified robust accuracy at this L2 radius, % of {split} images"
    return Column(f"CRA {radius}", meaning, lambda row: (_at(row, "results", split, "cra") or {}).get(radius), _percent)


def _percent(share: float) -> str:
    return f"{100 * share:.1f}"


def _times(ratio: float) -> str:
    return f"{ratio:.2f}" if ratio < 100 else f"{ratio:.0f}"
