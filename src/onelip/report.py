"""Training curves of a run: loss, accuracy and certified robust accuracy of each epoch. Needs matplotlib."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from onelip.core.files import write_whole

_WIDTH, _HEIGHT = 9.0, 3.6  # inches


def draw_curves(log: Sequence[dict[str, Any]], path: str | Path, title: str = "") -> None:
    """Draw the training curves of a run into a file.

    Args:
        log: lines of log.jsonl; see `onelip.training.run_directory.read_log`.
        path: file to write (.png, .svg or .pdf).
        title: title of the figure.

    Raises:
        ImportError: if matplotlib is not installed.
        ValueError: if the log is empty, or matplotlib does not support the file type.
    """
    if not log:
        raise ValueError("the log is empty: no epoch is finished yet")
    try:
        # The object interface: no backend, no window and no global state.
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("draw_curves needs matplotlib: pip install 'onelip[plots]'") from error
    path = Path(path)
    figure = Figure(figsize=(_WIDTH, _HEIGHT), layout="constrained")
    left, right = figure.subplots(1, 2)
    split = log[-1]["split"]
    epochs = [line["epoch"] for line in log]
    marker = "o" if len(log) < 25 else ""  # points show single epochs

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
    """Accuracy, or CRA at a radius; NaN (a gap) for an epoch without CRA."""
    if radius is None:
        return [100 * line["accuracy"] for line in log]
    return [100 * (line.get("cra") or {}).get(radius, float("nan")) for line in log]
