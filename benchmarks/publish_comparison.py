"""Publish a comparison: results/NAME.json without the layers' own histograms.

python benchmarks/publish_comparison.py comparisons/digits compare_digits
python benchmarks/update_tables.py && python benchmarks/figures.py
"""

import argparse
import json
from pathlib import Path

from _harness import RESULTS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="what `onelip compare --out` wrote")
    parser.add_argument("name", help="name of the files in results/")
    args = parser.parse_args()
    record = json.loads((args.directory / "comparison.json").read_text())
    # Do not publish local paths.
    text = json.dumps(record).replace(str(args.directory.resolve()), args.directory.name)
    record = json.loads(text)
    for row in record["rows"]:
        for layer in (row.get("singular_values") or {}).get("layers", ()):
            layer.pop("histogram", None)
            layer.pop("quantiles", None)
    (RESULTS / f"{args.name}.json").write_text(json.dumps(record, indent=1) + "\n")
    for row in record["rows"]:
        test = (row.get("results") or {}).get("test")
        cra = test["cra"]["36/255"] if test else None
        shown = f"{test['accuracy']:.1%}  CRA 36/255 {'-' if cra is None else f'{cra:.1%}'}" if test else row["why"]
        print(f"{row['method']:24}{shown}")
    print(f"-> results/{args.name}.json")


if __name__ == "__main__":
    main()
