"""Draw the figures of the documents from results/*.json into docs/images/.

python benchmarks/figures.py
"""

from pathlib import Path

import matplotlib as mpl
from _harness import RESULTS

from onelip import plots
from onelip.core.files import read_json

mpl.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.figure import Figure

OUT = Path(__file__).resolve().parent.parent / "docs" / "images"
MARKS = {
    "aol-fast-small": ("o", "tab:blue"),
    "aol-fast-medium": ("s", "tab:orange"),
    "aol-fast-large": ("^", "tab:green"),
    "aol-fast-huge": ("v", "tab:red"),
}
# CRA at 36/255 in % by others. Prach, Brau, Buttazzo and Lampert (2024) trained for two hours on an A100.
FIELD = {"AOL-M": 57.0, "BCOP-M": 57.9}
PAPER = {"AOL-Small, 1000 epochs (paper, GPU)": 62.0, "AOL-Large, 1000 epochs (paper, GPU)": 64.0}


def scaling() -> Figure:
    """Certified accuracy against CPU seconds."""
    rows = [row for row in read_json(RESULTS / "fast_training.json")["rows"] if row["cpu_seconds"]]
    # A model can be trained by the name of another one, with its widths as options.
    named = [next((name for name in MARKS if name in row["what"]), row["model"]) for row in rows]
    points = sorted(
        (row["cpu_seconds"], 100 * row["cra"]["36/255"], name) for row, name in zip(rows, named, strict=True)
    )
    figure, axes = plt.subplots(figsize=(7.2, 4.4), layout="constrained")
    for model, (mark, colour) in MARKS.items():
        of_model = [(x, y) for x, y, name in points if name == model]
        if of_model:
            axes.scatter(*zip(*of_model, strict=True), marker=mark, color=colour, label=model, zorder=3)
    front: list[tuple[float, float]] = []
    for x, y, _ in points:
        if not front or y > front[-1][1]:
            front.append((x, y))
    axes.step(*zip(*front, strict=True), where="post", color="0.6", linewidth=1, label="best so far")
    axes.scatter([7200] * len(FIELD), list(FIELD.values()), marker="D", facecolors="none", edgecolors="k", zorder=3)
    for name, value in FIELD.items():
        axes.annotate(
            f"{name}, A100", (7200, value), (-6, 0), textcoords="offset points", ha="right", va="center", size=8
        )
    for name, value in PAPER.items():
        axes.axhline(value, color="k", linewidth=0.7, linestyle=":")
        axes.annotate(name, (points[0][0], value), (0, 2), textcoords="offset points", va="bottom", size=8)
    axes.set_xscale("log")
    axes.set_xlabel("CPU seconds of all cores; for the diamonds, seconds of an A100")
    axes.set_ylabel("CRA at 36/255, test images, %")
    axes.set_title("CIFAR-10: certified accuracy against time", size=11)
    axes.grid(visible=True, color="0.92")
    axes.legend(loc="lower right", fontsize=8)
    return figure


def methods_by_time() -> Figure:
    """Certified accuracy of all methods with one budget of CPU seconds, each seed a dot."""
    content = read_json(RESULTS / "methods_by_time.json")
    rows = sorted((row for row in content["rows"] if row.get("cra_36") is not None), key=lambda row: row["cra_36"])
    figure, axes = plt.subplots(figsize=(7.2, 0.8 + 0.21 * len(rows)), layout="constrained")
    for height, row in enumerate(rows):
        colour = "tab:orange" if row["method"] == "aol" else "tab:blue"
        seeds = [100 * (run["test_cra"]["36/255"] or 0) for run in row["runs"] if run["lr"] == row["lr"]]
        axes.plot([0, 100 * row["cra_36"]], [height, height], color=colour, linewidth=4, alpha=0.25)
        axes.scatter(seeds, [height] * len(seeds), s=12, color=colour, zorder=3)
    axes.set_yticks(range(len(rows)), [row["name"] for row in rows], fontsize=8)
    axes.set_ylim(-0.7, len(rows) - 0.3)
    axes.set_xlim(left=0)
    axes.set_xlabel(f"CRA at 36/255, test images, %; {content['budget_cpu_seconds']:g} CPU seconds each, three seeds")
    axes.set_title("CIFAR-10, one network, all methods (AOL in orange)", size=11)
    axes.grid(visible=True, axis="x", color="0.92")
    return figure


def paper_optimizers() -> Figure:
    """Certified accuracy of AOL-Small after each half epoch, by optimizer."""
    content = read_json(RESULTS / "paper_optimizers.json")
    figure, axes = plt.subplots(figsize=(7.2, 3.8), layout="constrained")
    for row in content["rows"]:
        curve = row["runs"][0]["curve"]
        axes.plot([p["epoch"] for p in curve], [100 * p["cra_36"] for p in curve], marker="o", label=row["name"])
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("epochs")
    axes.set_ylabel("CRA at 36/255, held-out images, %")
    axes.set_title("CIFAR-10, AOL-Small with 64 channels, loss and augmentation of the paper", size=11)
    axes.grid(visible=True, color="0.92")
    axes.legend(loc="upper left", fontsize=8)
    return figure


def compare_digits() -> Figure:
    """Accuracy and CRA of all methods on the digits."""
    rows = [row for row in read_json(RESULTS / "compare_digits.json")["rows"] if row["status"] == "done"]
    return plots.accuracies({row["method"]: row["results"]["test"] for row in rows})


def main() -> None:
    for draw in (scaling, methods_by_time, paper_optimizers, compare_digits):
        figure = draw()
        figure.savefig(OUT / f"{draw.__name__}.png", dpi=150, metadata={"Software": None})
        print(f"-> docs/images/{draw.__name__}.png")


if __name__ == "__main__":
    main()
