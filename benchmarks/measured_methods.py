"""Write what was measured of each method into docs/methods.md, from results/*.json.

    python benchmarks/measured_methods.py

Cost, accuracy, the proved constant and singular values come from results/compare_digits.json (trained networks),
train = eval from results/train_eval.json; steps of AOL-Small from results/methods_batch32.json, layers against public
ones from results/public_layers.json.
"""

import json
import math
from pathlib import Path
from typing import Any

from _harness import RESULTS

from onelip.compare.page import rounded_up
from onelip.methods.registry import METHODS

DOCUMENT = RESULTS.parent / "docs" / "methods.md"
HEADINGS = ("method", "step", "memory", "train - eval", "largest s", "mean s", "proved L", "accuracy", "CRA 36/255")


def main() -> None:
    document = DOCUMENT.read_text()
    for name, table in (("measured", measured()), ("steps", steps()), ("layers", layers())):
        begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->\n"
        if document.count(begin) != 1 or document.count(end) != 1:
            raise SystemExit(f"expected {DOCUMENT} to have {begin.strip()} and {end.strip()} once each")
        before, _, rest = document.partition(begin)
        document = before + begin + table + "\n" + end + rest.partition(end)[2]
        print(table)
    DOCUMENT.write_text(document)


def layers() -> str:
    """Layers of ours against public ones."""
    lines = ["| method | layer | theirs | theirs / ours |", "|---|---|---|---|"]
    for row in json.loads((RESULTS / "public_layers.json").read_text())["rows"]:
        ratio = shown(row["theirs / ours"], "{:.2f}")
        lines.append(f"| `{row['method']}` | {row['layer']} | {row['theirs']} | {ratio} |")
    return "\n".join(lines)


def steps() -> str:
    """Training steps of AOL-Small."""
    lines = ["| method | to the limit | to usual plain | memory |", "|---|---|---|---|"]
    for name, row in rows_of(RESULTS / "methods_batch32.json").items():
        cells = [shown(row[key], "{:.3g}") for key in ("to limit", "to usual plain", "memory")]
        lines.append(f"| `{name}` | " + (row["failed"].partition(":")[2].strip() or " | ".join(cells)) + " |")
    return "\n".join(lines)


def measured() -> str:
    """The small network of the digits."""
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
