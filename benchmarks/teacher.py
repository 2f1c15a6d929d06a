"""Labels by a teacher, on CIFAR-10 with 10,000 training images: results/teacher.json.

python benchmarks/teacher.py --data-root DIR --runs runs/teacher --seeds 2

The other 40,000 training images are the validation images, and all figures are theirs. A run that is in the folder
already is not run again. 2 to 8 minutes of one core for each run.
"""

import argparse
import statistics
from pathlib import Path
from typing import Any

import torch
from _harness import RESULTS

from onelip.core.files import write_json
from onelip.training import Recipe, preset, train_or_reuse

FEW: dict[str, Any] = {"data": "cifar10", "validation": 0.8, "bf16": True, "threads": 1, "evaluate_every": 10}
TEACHER = preset("teacher").replace(epochs=60, **FEW)
STUDENT = preset("short").replace(model="aol-fast-medium", epochs=50, batch_size=250, lr=0.05, **FEW)
LARGE_RADIUS: dict[str, Any] = {"offset": 5.657, "temperature": 1.0}

# What is changed; None for the temperature of the teacher: the labels of the data.
STUDENTS: dict[str, tuple[float | None, dict[str, Any]]] = {
    "labels of the data": (None, {}),
    "labels of the data, offset 1.5": (None, {"offset": 1.5}),
    "teacher, temperature 1": (1.0, {}),
    "teacher, temperature 3": (3.0, {}),
    "teacher, temperature 3, offset 1.5": (3.0, {"offset": 1.5}),
    "teacher, temperature 5, offset 2": (5.0, {"offset": 2.0}),
    "labels of the data, offset 5.66, temperature 1": (None, LARGE_RADIUS),
    "teacher, temperature 3, offset 5.66, temperature 1": (3.0, LARGE_RADIUS),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", type=Path, required=True)
    parser.add_argument("--runs", type=Path, required=True, help="folder for the runs")
    parser.add_argument("--seeds", type=int, default=2)
    args = parser.parse_args()

    def run(recipe: Recipe, name: str) -> dict[str, Any]:
        return train_or_reuse(recipe, args.runs / name, data_root=args.data_root)["validation"]

    teacher = run(TEACHER, "teacher")
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in STUDENTS}
    for seed in range(args.seeds):
        for name, (temperature, changes) in STUDENTS.items():
            recipe = STUDENT.replace(seed=seed, **changes)
            if temperature is not None:
                recipe = recipe.replace(teacher=str(args.runs / "teacher"), teacher_temperature=temperature)
            found[name].append(run(recipe, f"{name.replace(' ', '-').replace(',', '')}-{seed}"))
            record = {
                "what": "Labels by a teacher, on CIFAR-10 with 10,000 training images; figures of 40,000 others",
                "command": f"python benchmarks/teacher.py --data-root DIR --runs RUNS --seeds {args.seeds}",
                "torch": torch.__version__,
                "recipe": STUDENT.to_json(),
                "teacher": {"accuracy": teacher["accuracy"], "recipe": TEACHER.to_json()},
                "rows": [_row(name, runs) for name, runs in found.items() if runs],
            }
            write_json(RESULTS / "teacher.json", record)
            print(name, seed, {key: round(100 * value, 1) for key, value in found[name][-1]["cra"].items()}, flush=True)


def _row(name: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
    temperature, changes = STUDENTS[name]
    radii = runs[0]["cra"]
    return {
        "name": name,
        "changes": {**changes, "teacher_temperature": temperature},
        "seeds": len(runs),
        "accuracy": statistics.mean(run["accuracy"] for run in runs),
        "cra": {radius: statistics.mean(run["cra"][radius] for run in runs) for radius in radii},
        "range": {
            radius: max(values) - min(values) for radius in radii for values in [[r["cra"][radius] for r in runs]]
        },
    }


if __name__ == "__main__":
    main()
