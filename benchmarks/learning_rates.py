"""Search the learning rate of each method: digits, held-out images, 8 epochs.

    python benchmarks/learning_rates.py                     # all methods; finished rows are kept
    python benchmarks/learning_rates.py --methods sll,cpl --rates 0.03 0.3

The `hyperparameters` of a method are from results/learning_rates.json: the best CRA at 36/255 on the held-out images.
The test images are not used.
"""

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from onelip.data import load_data
from onelip.methods.registry import METHODS
from onelip.training import Diverged, Stopped, preset, train
from onelip.training.objective import with_method

OUT = Path(__file__).parents[1] / "results" / "learning_rates.json"
RATES = (0.02, 0.1, 0.5)
EPOCHS = 8
VALIDATION = 0.2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--rates", type=float, nargs="+", default=RATES)
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--show", action="store_true", help="only print the table of what is there")
    args = parser.parse_args()
    if args.show:
        show(json.loads(args.out.read_text()))
        return
    record = json.loads(args.out.read_text()) if args.out.exists() else empty_record()
    data = load_data("digits")
    for method in args.methods.split(","):
        for rate in args.rates:
            if any((row["method"], row["lr"]) == (method, rate) for row in record["rows"]):
                continue
            row = {"method": method, "lr": rate, **held_out(method, rate, data)}
            record["rows"].append(row)
            args.out.write_text(json.dumps(record, indent=1) + "\n")
            print(row, flush=True)
    show(record)


def empty_record() -> dict:
    return {
        "what": f"digits, patchwise-tiny, {EPOCHS} epochs, {VALIDATION:.0%} held out; CRA at 36/255 of those",
        "command": "python " + " ".join(["benchmarks/learning_rates.py", *sys.argv[1:]]),
        "torch": torch.__version__,
        "rows": [],
    }


def held_out(method: str, rate: float, data) -> dict:
    recipe = with_method(preset("digits"), method).replace(lr=rate, epochs=EPOCHS, validation=VALIDATION)
    results: dict[str, Any]
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        try:
            results = train(recipe, Path(folder) / "run", data=data)["validation"]
        except Stopped:
            raise SystemExit("stopped; the same command goes on") from None
        except Diverged as error:  # that is an answer, too
            return {"failed": f"{type(error).__name__}: {error}"[:200]}
    taken = round(time.perf_counter() - began, 1)
    return {"accuracy": results["accuracy"], "cra": results["cra"], "mode": results["mode"], "seconds": taken}


def show(record: dict) -> None:
    """One line for each method: CRA at 36/255 of the images held out, by learning rate."""
    rates = sorted({row["lr"] for row in record["rows"]})
    print("method".ljust(24) + "".join(f"{rate:>8g}" for rate in rates))
    for method in dict.fromkeys(row["method"] for row in record["rows"]):
        found = {row["lr"]: row for row in record["rows"] if row["method"] == method}
        print(method.ljust(24) + "".join(cell(found.get(rate)).rjust(8) for rate in rates))


def cell(row: dict | None) -> str:
    if row is None:
        return "-"
    return "failed" if "failed" in row else f"{100 * (row['cra']['36/255'] or 0):.1f}"


if __name__ == "__main__":
    main()
