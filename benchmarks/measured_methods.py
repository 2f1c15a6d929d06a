"""Write what was measured of each method into docs/methods.md, from results/*.json.

    python benchmarks/measured_methods.py

Cost, accuracy, the proved constant and singular values come from results/compare_digits.json (trained networks),
train = eval from results/train_eval.json.
"""

import json
import math
from pathlib import Path
from typing import Any

from _harness import RESULTS

from onelip.compare.table import rounded_up
from onelip.methods._registry import METHODS

DOCUMENT = RESULTS.parent / "docs" / "methods.md"
BEGIN, END = "<!-- measured -->\n", "<!-- end of measured -->\n"
HEADINGS = ("method", "step", "memory", "train - eval", "largest s", "mean s", "proved L", "accuracy", "CRA 36/255")


def main() -> None:
    document = DOCUMENT.read_text()
    before, begin, rest = document.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"expected {DOCUMENT} to have {BEGIN.strip()} and {END.strip()}")
    DOCUMENT.write_text(f"{before}{BEGIN}{table()}\n{END}{after}")
    print(table())


def table() -> str:
    apart, trained = rows_of(RESULTS / "train_eval.json"), rows_of(RESULTS / "compare_digits.json")
    lines = ["| " + " | ".join(HEADINGS) + " |", "|" + "---|" * len(HEADINGS)]
    for name in METHODS:
        if trained.get(name, {}).get("status") == "done":
            cells = cells_of(trained[name], apart.get(name, {}).get("train - eval"))
            lines.append(f"| `{name}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def cells_of(row: dict[str, Any], apart: float | None) -> list[str]:
    values, test = row["singular_values"], row["results"]["test"]
    return [
        shown(row["step"].get("ratio"), "{:.1f}"),
        shown(row["memory"].get("ratio"), "{:.1f}"),
        "equal" if apart == 0 else shown(apart, "{:.0e}"),
        shown(values.get("largest"), "{:.4f}"),
        shown(values.get("mean"), "{:.3f}"),
        "-" if row["constant"]["proved"] is None else rounded_up(row["constant"]["proved"]),
        shown(test["accuracy"], "{:.1%}"),
        shown(test["cra"]["36/255"], "{:.1%}"),
    ]


def rows_of(path: Path) -> dict[str, dict[str, Any]]:
    return {row["method"]: row for row in json.loads(path.read_text())["rows"]} if path.exists() else {}


def shown(value: float | None, form: str) -> str:
    return "-" if value is None or math.isnan(value) else form.format(value).replace("%", " %")


if __name__ == "__main__":
    main()
