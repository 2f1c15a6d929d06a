"""The figures of the paper: crops of J^T J of trained layers, and numbers that say how orthogonal they are."""

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from onelip.core.errors import RunError, reason
from onelip.core.files import write_whole
from onelip.gram.jtj import center_crop, jtj
from onelip.reproduce.experiments import Experiment, differences
from onelip.reproduce.tables import AS_PUBLISHED, FAILED, SCALED, UNFINISHED, linear_layer
from onelip.reproduce.text import TextTable
from onelip.training.build import load_run
from onelip.training.run_directory import RunDirectory

_PIXELS, _CHANNELS = 3, 32  # of the centre crop: 288 x 288 as in the paper
_CENTRE, _BESIDE = 4, 5  # the pixels of the two further crops, of nine in three rows


def panels_of(experiment: Experiment, out: Path, failed: Mapping[str, str]) -> list[dict[str, Any]]:
    """The panels of a figure: the centre crop of J^T J, where the run is finished, and its numbers.

    Args:
        experiment: a figure.
        out: directory of the runs.
        failed: reasons by the name of the run.

    Returns:
        One dictionary for each panel, with the tensor `crop` or None.
    """
    found = []
    for row in experiment.rows:
        panel: dict[str, Any] = {"name": row.name, "source": row.source, "crop": None, "label": ""}
        found.append(panel)
        if row.model is None:
            panel |= {"run": "exact", "label": "the identity, which every orthogonal layer has"}
            channels = next((p["channels"] for p in found if p["crop"] is not None), _CHANNELS)
            panel |= {"crop": torch.eye(_PIXELS**2 * channels, dtype=torch.float64), "channels": channels}
            continue
        name = row.run_name(experiment.data)
        if name in failed:
            panel |= {"run": FAILED, "label": failed[name]}
            continue
        if not RunDirectory(out / name).results.exists():
            panel |= {"run": UNFINISHED, "label": "the run is not finished"}
            continue
        try:
            loaded = load_run(out / name)
            layer, size = linear_layer(loaded.plain.cpu(), row.layer, loaded.config.shape)
            label = differences(loaded.config.recipe, row.published(experiment.data))
            assert isinstance(layer, nn.Conv2d)
            channels = min(_CHANNELS, layer.in_channels)
            panel |= {
                "run": SCALED if label else AS_PUBLISHED,
                "label": "; ".join(filter(None, (label, f"layer {row.layer}, {_described(layer, size)}"))),
                "channels": channels,
                "crop": jtj(layer, size, rows=center_crop(size, _PIXELS, channels)),
                "recipe": {**loaded.config.recipe.to_json(), "data": experiment.data},
            }
        except (RunError, ValueError) as error:  # of another version, or damaged
            panel |= {"run": FAILED, "label": reason(error)}
    return found


def _described(layer: nn.Conv2d, size: tuple[int, ...]) -> str:
    kernel = "x".join(map(str, layer.kernel_size))
    shape = f"{layer.in_channels} to {layer.out_channels} channels"
    return f"a convolution {kernel}, {shape}, on {' x '.join(map(str, size))} pixels"


def orthogonality(crop: Tensor) -> dict[str, float]:
    """Numbers that say how near a symmetric crop of J^T J is to the identity.

    Examples:
        >>> orthogonality(torch.eye(3))["largest off-diagonal entry"]
        0.0
    """
    diagonal = crop.diagonal().double()
    others = crop.double()[~torch.eye(len(crop), dtype=torch.bool)].abs()
    return {
        "smallest diagonal entry": float(diagonal.min()),
        "median diagonal entry": float(diagonal.quantile(0.5)),
        "largest diagonal entry": float(diagonal.max()),
        "largest off-diagonal entry": float(others.max()),
        "mean off-diagonal entry": float(others.mean()),
        "off-diagonal below 0.01, %": 100 * float((others < 0.01).double().mean()),
    }


def figure_table(experiment: Experiment, panels: list[dict[str, Any]]) -> TextTable:
    """The numbers of the panels. The paper shows pictures only."""
    lines = [
        (panel["name"], panel["run"], measure, f"{value:.4f}")
        for panel in panels
        if panel["crop"] is not None
        for measure, value in orthogonality(panel["crop"]).items()
    ]
    lines += [(p["name"], p["run"], "-", "-") for p in panels if p["crop"] is None]
    number = experiment.name.replace("-", " ").capitalize()
    notes = [f"{panel['name']}: {panel['label']}." for panel in panels if panel["label"]]
    notes.append(
        "Entries of the centre crop of JᵀJ, without sign off the diagonal. The paper has the picture, and no numbers."
    )
    return TextTable(
        f"{number} of the paper: {experiment.title}", ("panel", "our run", "measure", "ours"), lines, notes, 3
    )


def draw_figure(experiment: Experiment, panels: list[dict[str, Any]], path: Path) -> None:
    """Draw the panels: a column for each, with the centre crop and two further crops, each with its own colours.

    Args:
        experiment: the figure.
        panels: from `panels_of`.
        path: file to write (.png, .svg or .pdf).

    Raises:
        ImportError: if matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure
        from matplotlib.patches import Rectangle
    except ImportError as error:
        raise ImportError("the figures need matplotlib: pip install 'onelip[plots]'") from error
    shown = [panel for panel in panels if panel["crop"] is not None]
    figure = Figure(figsize=(1.2 + 3.3 * len(shown), 9.6), layout="constrained")
    every = figure.subplots(3, len(shown), squeeze=False)
    for column, panel in enumerate(shown):
        crop, n = panel["crop"], panel["channels"]
        first = slice(_CENTRE * n, (_CENTRE + 1) * n)
        second = slice(_BESIDE * n, (_BESIDE + 1) * n)
        parts = {
            f"{panel['name']} ({panel['run']})": crop,
            "A: the centre pixel with itself": crop[first, first],
            "B: the centre pixel with the next": crop[first, second],
        }
        for axes, (title, part) in zip(every[:, column], parts.items(), strict=True):
            largest = max(float(part.abs().max()), 1e-12)
            image = axes.imshow(part.numpy(), cmap="RdBu_r", vmin=-largest, vmax=largest, interpolation="nearest")
            axes.set_title(title, fontsize="medium")
            axes.set_xticks([])
            axes.set_yticks([])
            figure.colorbar(image, ax=axes, shrink=0.8)
        for name, columns in (("A", first), ("B", second)):
            corner = (columns.start - 0.5, first.start - 0.5)
            every[0, column].add_patch(Rectangle(corner, n, n, fill=False, edgecolor="black", linewidth=1.2))
            every[0, column].text(corner[0] + n / 2, corner[1] - 3, name, ha="center", va="bottom", fontsize="small")
    number = experiment.name.replace("-", " ").capitalize()
    figure.suptitle(f"{number}: {experiment.title}")
    buffer = io.BytesIO()
    figure.savefig(buffer, format=path.suffix.lstrip("."), dpi=110)
    write_whole(path, buffer.getvalue())
