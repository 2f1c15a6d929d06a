"""Publish a run: its command, recipe, machine, log and table go to results/NAME.json, its curves to results/NAME.png.

python benchmarks/publish_run.py runs/cifar10-aol-small-1 cifar10_paper_short --what "AOL-Small, paper-short preset"
"""

import argparse
import json
from pathlib import Path

from _harness import RESULTS

from onelip.core.files import read_json, write_json
from onelip.plots import training_curves
from onelip.training.run_directory import RunDirectory, read_config, read_log


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="directory of the run")
    parser.add_argument("name", help="name of the files in results/")
    parser.add_argument("--what", required=True, help="one line that describes the run")
    args = parser.parse_args()
    run = RunDirectory(args.run)
    config, log, sessions = read_config(run), read_log(run), read_json(run.environment)
    finished = run.results.exists()
    command = " ".join(["onelip", *sessions[0].pop("command")[1:]])
    for session in sessions[1:]:
        session["command"] = " ".join(["onelip", *session["command"][1:]])
    record = {
        "what": args.what,
        "command": command,
        "torch": sessions[0]["torch"],
        "finished": finished,
        "sessions": sessions,
        "config": config.to_json(),
        "log": log,
        "results": {
            split: {key: value for key, value in table.items() if key != "per_class"}
            for split, table in (read_json(run.results) if finished else {}).items()
        },
    }
    write_json(RESULTS / f"{args.name}.json", record)
    figure = training_curves(log)
    figure.suptitle(args.what)
    figure.savefig(RESULTS / f"{args.name}.png", dpi=130)
    print(json.dumps(record["results"] or log[-1], indent=1))
    print(f"-> results/{args.name}.json, results/{args.name}.png")


if __name__ == "__main__":
    main()
