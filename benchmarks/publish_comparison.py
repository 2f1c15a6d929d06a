"""Publish a comparison: results/NAME.json without the layers' own histograms, and the page as results/NAME.html.

python benchmarks/publish_comparison.py comparisons/digits compare_digits
"""

import argparse
import json
from pathlib import Path

from _harness import RESULTS

from onelip.report import comparison_page


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path, help="what `onelip compare --out` wrote")
    parser.add_argument("name", help="name of the files in results/")
    args = parser.parse_args()
    record = json.loads((args.directory / "comparison.json").read_text())
    # Do not publish local paths.
    text = json.dumps(record).replace(str(args.directory.resolve()), args.directory.name)
    record = json.loads(text)
    (RESULTS / f"{args.name}.html").write_text(comparison_page(record, args.directory))
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
    print(f"-> results/{args.name}.json, results/{args.name}.html")


if __name__ == "__main__":
    main()
