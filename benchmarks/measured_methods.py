"""Write what was measured of each method into docs/methods.md, from results/*.json.

    python benchmarks/measured_methods.py

Accuracy, the proved constant and singular values come from results/compare_digits.json (trained networks); times,
memory and train = eval from results/methods_batch*.json (AOL-Small).
"""

import json
import math
from pathlib import Path
from typing import Any

from _harness import RESULTS

from onelip.methods._registry import METHODS

DOCUMENT = RESULTS.parent / "docs" / "methods.md"
BEGIN, END = "<!-- measured -->\n", "<!-- end of measured -->\n"
HEADINGS = (
    "method",
    "step, limit = 1",
    "step, usual plain = 1",
    "memory, plain = 1",
    "train - eval",
    "largest s",
    "mean s",
    "proved L",
    "accuracy",
    "CRA 36/255",
)


def main() -> None:
    document = DOCUMENT.read_text()
    before, begin, rest = document.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SystemExit(f"expected {DOCUMENT} to have {BEGIN.strip()} and {END.strip()}")
    DOCUMENT.write_text(f"{before}{BEGIN}{table()}\n{END}{after}")
    print(table())


def table() -> str:
    costs = rows_of(RESULTS / "methods_batch32.json")
    trained = rows_of(RESULTS / "compare_digits.json")
    lines = ["| " + " | ".join(HEADINGS) + " |", "|" + "---|" * len(HEADINGS)]
    for name in METHODS:
        if name in costs or name in trained:
            cells = [*cost_cells(costs.get(name, {})), *trained_cells(trained.get(name, {}))]
            lines.append(f"| `{name}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def cost_cells(row: dict[str, Any]) -> list[str]:
    cells = [shown(row.get(key), "{:.2f}") for key in ("to limit", "to usual plain", "memory")]
    apart = row.get("train - eval")
    return [*cells, "equal" if apart == 0 else shown(apart, "{:.0e}")]


def trained_cells(row: dict[str, Any]) -> list[str]:
    values = row.get("singular_values") or {}
    test = (row.get("results") or {}).get("test") or {}
    return [
        shown(values.get("largest"), "{:.4f}"),
        shown(values.get("mean"), "{:.3f}"),
        shown((row.get("constant") or {}).get("proved"), "{:.4g}"),
        shown(test.get("accuracy"), "{:.1%}"),
        shown((test.get("cra") or {}).get("36/255"), "{:.1%}"),
    ]


def rows_of(path: Path) -> dict[str, dict[str, Any]]:
    return {row["method"]: row for row in json.loads(path.read_text())["rows"]} if path.exists() else {}


def shown(value: float | None, form: str) -> str:
    return "-" if value is None or math.isnan(value) else form.format(value).replace("%", " %")


if __name__ == "__main__":
    main()
