"""The tables of a comparison for the terminal."""

from typing import Any

from rich.table import Table

from onelip.report.table import columns, terminal_table


def comparison_tables(record: dict[str, Any]) -> list[Table]:
    """Two tables for the terminal, accuracy and cost, each at most 80 characters wide.

    A failed method is a row without numbers; `failures` gives the reasons.
    """
    recipe, split = record["plan"]["recipe"], record["split"]
    rows = [{"name": row["method"], **row} for row in record["rows"]]
    shown = [column for column in columns(rows, split) if column.title != "images"]  # the same for all
    first_cost = next(i for i, column in enumerate(shown) if column.title == "step")
    title = f"{recipe['model']} on {record['data']['name']}, {record['plan']['budget']} each; % of {split} images"
    return [
        terminal_table(title, "method", rows, shown[:first_cost]),
        terminal_table("Cost relative to the network without a method", "method", rows, shown[first_cost:]),
    ]


def failures(record: dict[str, Any]) -> list[str]:
    """A line for each method that failed."""
    return [f"{row['method']} failed: {row['why']}" for row in record["rows"] if row["status"] != "done"]
