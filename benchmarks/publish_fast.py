"""Add a run of a fast network to results/fast_training.json, evaluated on the test images in real arithmetic.

python benchmarks/publish_fast.py runs/cifar10-1m --what "aol-fast-small, 14 epochs" --cpu-seconds 112 --wall-seconds 9
"""

import argparse
import json
from pathlib import Path

from _harness import RESULTS

from onelip.core.files import read_json, write_json
from onelip.data import load_data
from onelip.training.build import load_run
from onelip.training.evaluation import evaluate


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="directory of the run")
    parser.add_argument("--what", required=True, help="one line that describes the run")
    parser.add_argument("--cpu-seconds", type=float, help="of the process; omit if not measured")
    parser.add_argument("--wall-seconds", type=float, required=True)
    parser.add_argument("--note", help="what else a reader must know")
    args = parser.parse_args()
    run = load_run(args.run)
    recipe, data = run.config.recipe, load_data(run.config.recipe.data, run.config.data_root)
    found = evaluate(run.plain, data.test_images, data.test_labels, run.constants).total
    session = read_json(run.directory.environment)[0]
    words = session["command"][1:]
    for option, placeholder in (("--out", "RUN"), ("--data-root", "DIR"), ("--teacher", "TEACHER")):
        if option in words:
            words[words.index(option) + 1] = placeholder
    row = {
        "what": args.what,
        "command": " ".join(["onelip", *words]),
        "model": recipe.model,
        "threads": session["threads"],
        "passes": round(recipe.epochs * recipe.epoch_part, 2),
        "cpu_seconds": args.cpu_seconds,
        "wall_seconds": args.wall_seconds,
        "accuracy": found.accuracy,
        "cra": found.cra,
        "recipe": recipe.replace(teacher="TEACHER" if recipe.teacher else "").to_json(),
        **({"note": args.note} if args.note else {}),
    }
    path = RESULTS / "fast_training.json"
    record = read_json(path)
    record["rows"] = [old for old in record["rows"] if old["what"] != args.what] + [row]
    write_json(path, record)
    print(json.dumps({key: value for key, value in row.items() if key != "recipe"}, indent=1))


if __name__ == "__main__":
    main()
