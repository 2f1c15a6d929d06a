"""The course of a run as a picture: the loss, and accuracy with certified robust accuracy, epoch by epoch."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from onelip.core.files import write_whole

_WIDTH, _HEIGHT = 9.0, 3.6  # inches; as wide as a page of text


def draw_curves(log: Sequence[dict[str, Any]], path: str | Path, title: str = "") -> None:
    """Draw the lines of a run's log.jsonl into a file (.png, .svg or .pdf), which is written whole or not at all.

    Raises:
        ImportError: if matplotlib is not installed, with the way to get it.
        ValueError: if the log has no epoch yet, or matplotlib does not know the kind of file.
    """
    if not log:
        raise ValueError("expected a log of at least one epoch, got an empty one; let the run finish an epoch")
    try:
        # The object interface: no backend, no window and no global state.
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("matplotlib draws the curves; pip install 'onelip[plots]'") from error
    path = Path(path)
    figure = Figure(figsize=(_WIDTH, _HEIGHT), layout="constrained")
    left, right = figure.subplots(1, 2)
    split = log[-1]["split"]
    epochs = [line["epoch"] for line in log]
    marker = "o" if len(log) < 25 else ""  # few epochs are points, many are a curve

    left.plot(epochs, [line["train_loss"] for line in log], marker=marker, markersize=3, label="training")
    left.plot(epochs, [line["loss"] for line in log], marker=marker, markersize=3, label=split)
    left.set(xlabel="epoch", ylabel="loss")
    left.legend()

    right.plot(epochs, _percent(log, None), marker=marker, markersize=3, color="black", label="accuracy")
    for radius in log[-1].get("cra") or {}:
        right.plot(epochs, _percent(log, radius), marker=marker, markersize=3, label=f"CRA at {radius}")
    right.set(xlabel="epoch", ylabel=f"% of {split} images", ylim=(0, 100))
    right.legend(fontsize="small")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
        axes.xaxis.get_major_locator().set_params(integer=True)
    figure.suptitle(title)
    buffer = io.BytesIO()
    figure.savefig(buffer, format=path.suffix.lstrip(".") or "png", dpi=130)
    write_whole(path, buffer.getvalue())


def _percent(log: Sequence[dict[str, Any]], radius: str | None) -> list[float]:
    """Accuracy, or CRA at a radius; NaN, which leaves a gap, in an epoch without CRA."""
    if radius is None:
        return [100 * line["accuracy"] for line in log]
    return [100 * (line.get("cra") or {}).get(radius, float("nan")) for line in log]
