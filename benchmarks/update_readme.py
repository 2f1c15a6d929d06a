"""Put the numbers of results/*.json where README.md names them: `1.23<!-- file.json: {row}, column -->`."""

import json
import re
from pathlib import Path

from _harness import RESULTS

README = RESULTS.parent / "README.md"
MARKED = re.compile(r"([\d.]+)(<!-- (\w+)\.json: (\{.*?\}), ([^>]+?) -->)")


def current(match: re.Match[str]) -> str:
    old, marker, name, row, column = match.groups()
    rows = json.loads(Path(RESULTS / f"{name}.json").read_text())["rows"]
    (found,) = [r for r in rows if all(r[key] == value for key, value in json.loads(row).items())]
    digits = len(old.split(".")[1]) if "." in old else 0
    return f"{found[column]:.{digits}f}{marker}"


if __name__ == "__main__":
    README.write_text(MARKED.sub(current, README.read_text()))
    print(f"-> {README.name}")
