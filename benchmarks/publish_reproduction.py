"""Publish tables and figures of `onelip reproduce`: results/reproduce_table_5.json, docs/images/reproduce_figure_2.png.

python benchmarks/publish_reproduction.py runs/reproduce table-5 figure-2 && python benchmarks/update_tables.py
"""

import re
import shutil
import sys
from pathlib import Path

from _harness import RESULTS

from onelip.core.files import read_json, write_json


def publish(out: Path, name: str) -> None:
    """Copy the files of a table, without paths of this machine."""
    content = read_json(out / f"{name}.json")
    content["command"] = re.sub(r"(--out|--data-root)[ =]\S+", r"\1 DIR", content["command"])
    content["command"] = re.sub(r" --plan\b", "", content["command"])  # of the session that wrote the table
    place = RESULTS / f"reproduce_{name.replace('-', '_')}.json"
    write_json(place, content)
    picture = out / f"{name}.png"
    if picture.exists():
        shutil.copyfile(picture, RESULTS.parent / "docs" / "images" / f"{place.stem}.png")
    print(f"-> {place.name}")


if __name__ == "__main__":
    for name in sys.argv[2:]:
        publish(Path(sys.argv[1]), name)
