"""The record of a certificate: what `onelip certify`, `check` and `attack` printed with --json.

    onelip certify RUN --out cert.json --json > certify.out
    onelip check cert.json --json > check.out
    onelip attack RUN --certificate cert.json --start 0 --limit 1000 --json --out flips0.npz > attack0.out   (and so on)
    python benchmarks/publish_certificate.py FOLDER NAME --what "..." --seconds seconds.json

Attacks are joined from parts, which must follow each other from the first image on; the median of ratios needs the
distances themselves, which the parts' --out has.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from _harness import RESULTS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("name")
    parser.add_argument("--what", required=True)
    parser.add_argument("--attack", required=True, help="the command of a part")
    parser.add_argument("--seconds", type=Path, required=True, help="JSON: seconds by certify, check, attack")
    given = parser.parse_args()
    seconds = json.loads(given.seconds.read_text())
    commands = {
        "certify": "onelip certify RUN --out cert.json --json",
        "check": "onelip check cert.json --json",
        "attack": given.attack,
    }
    printed = {what: json.loads((given.folder / f"{what}.out").read_text()) for what in ("certify", "check")}
    printed["attack"] = joined(given.folder)
    rows = [
        {"what": what, "command": command, "seconds on one core": seconds[what], "printed": printed[what]}
        for what, command in commands.items()
    ]
    record = {"what": given.what, "command": "; ".join(commands.values()), "torch": torch.__version__, "rows": rows}
    path = RESULTS / f"{given.name}.json"
    path.write_text(json.dumps(record, indent=1) + "\n")
    print(f"{path}: {printed['attack']['attacked']} attacked, {printed['attack']['broken']} broken")


def joined(folder: Path) -> dict[str, Any]:
    """One attack of all its parts, in their order."""
    parts = sorted(
        (json.loads(path.read_text()) for path in folder.glob("attack*.out")), key=lambda part: part["start"]
    )
    starts = np.cumsum([0, *(part["images"] for part in parts)]).tolist()
    if [part["start"] for part in parts] != starts[:-1]:
        raise SystemExit(f"expected parts that follow each other, got starts {[part['start'] for part in parts]}")
    ratios = np.concatenate([ratios_of(folder / part["flips_file"]) for part in parts])
    found: dict[str, Any] = {key: parts[0][key] for key in ("data", "split", "attack")}
    found |= {key: sum(part[key] for part in parts) for key in ("images", "flips_found", "attacked", "broken")}
    found |= {"smallest_ratio": float(ratios.min()), "median_ratio": float(np.median(ratios)), "parts": len(parts)}

    def mean(values: list[float]) -> float:
        return sum(v * part["images"] for v, part in zip(values, parts, strict=True)) / found["images"]

    found["accuracy"] = mean([part["accuracy"] for part in parts])
    found["radii"] = {
        radius: {key: mean([part["radii"][radius][key] for part in parts]) for key in row}
        for radius, row in parts[0]["radii"].items()
    }
    return found


def ratios_of(flips: Path) -> np.ndarray:
    """Distance over certified radius, of the images with both."""
    with np.load(flips) as stored:
        distances, radii = stored["distances"], stored["radii"]
    there = np.isfinite(distances) & (radii > 0)
    return distances[there] / radii[there]


if __name__ == "__main__":
    main()
