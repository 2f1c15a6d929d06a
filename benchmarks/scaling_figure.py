"""Draw certified accuracy against CPU seconds from results/fast_training.json: docs/images/scaling.png.

python benchmarks/scaling_figure.py
"""

from pathlib import Path

import matplotlib as mpl
from _harness import RESULTS

from onelip.core.files import read_json

mpl.use("Agg")

from matplotlib import pyplot as plt

OUT = Path(__file__).resolve().parent.parent / "docs" / "images" / "scaling.png"
MARKS = {
    "aol-fast-small": ("o", "tab:blue"),
    "aol-fast-medium": ("s", "tab:orange"),
    "aol-fast-large": ("^", "tab:green"),
}
# CRA at 36/255 in % by others. Prach, Brau, Buttazzo and Lampert (2024) trained for two hours on an A100.
FIELD = {"AOL-M": 57.0, "BCOP-M": 57.9}
PAPER = {"AOL-Small, 1000 epochs (paper, GPU)": 62.0, "AOL-Large, 1000 epochs (paper, GPU)": 64.0}


def main() -> None:
    rows = [row for row in read_json(RESULTS / "fast_training.json")["rows"] if row["cpu_seconds"]]
    points = sorted((row["cpu_seconds"], 100 * row["cra"]["36/255"], row["model"]) for row in rows)
    figure, axes = plt.subplots(figsize=(7.2, 4.4), dpi=150)
    for model, (mark, colour) in MARKS.items():
        of_model = [(x, y) for x, y, name in points if name == model]
        if of_model:
            axes.scatter(*zip(*of_model, strict=True), marker=mark, color=colour, label=f"{model}, one core", zorder=3)
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
    axes.set_xlabel("seconds: CPU seconds of one core; for the diamonds, seconds of an A100")
    axes.set_ylabel("CRA at 36/255, test images, %")
    axes.set_title("CIFAR-10: certified accuracy against time", size=11)
    axes.grid(visible=True, color="0.92")
    axes.legend(loc="lower right", fontsize=8)
    figure.tight_layout()
    figure.savefig(OUT, metadata={"Software": None})
    print(f"-> docs/images/{OUT.name}")


if __name__ == "__main__":
    main()
