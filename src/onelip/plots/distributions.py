"""Distributions: certified radii, decisions by class, and singular values of layers."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from onelip.certification.audit import Audit, audit
from onelip.certification.margins import PAPER_RADII
from onelip.certification.result import Certification
from onelip.core.rounding import rounded_up
from onelip.gram.spectrum import spectrum_of_network
from onelip.plots.canvas import INK, PAPER, SERIES, SOFT, drawing, new_figure, shade
from onelip.plots.sources import Run, certified, loaded, middle_image

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_CLASSES = 20  # to draw line by line
_NUMBERED = 12  # classes of a confusion matrix with numbers in it
_LAYERS = 40


@drawing
def radii(found: Certification | Run, class_names: Sequence[str] | None = None) -> "Figure":
    """Draw the distribution of the certified radii, for right and wrong decisions, and for each class.

    Of more than 20 classes, the lower part shows those with the smallest median radii.

    Args:
        found: a certification with labels, or a run.
        class_names: names of the classes; by default those of the run, or numbers.

    Returns:
        The figure.

    Raises:
        ImportError: if matplotlib is not installed.
        ValueError: if the certification has no labels.
    """
    source = certified(found, class_names=class_names)
    values, labels = source.certification.radii, _labels(source.certification)
    right = source.certification.classes == labels
    finite = values[values.isfinite()]
    end = max(1.05, float(torch.quantile(finite, 0.998)) if len(finite) else 0.0)
    values = values.clamp(max=end)
    parts = {int(label): values[labels == label] for label in torch.unique(labels)}
    chosen = sorted(parts, key=lambda label: float(parts[label].median()))[:_CLASSES]
    figure, (above, below) = new_figure(2.2 + 0.17 * len(chosen), 2, sharex=True, height_ratios=[9, 1 + len(chosen)])
    above.hist(
        [values[right].numpy(), values[~right].numpy()],
        bins=50,
        range=(0, end),
        stacked=True,
        color=[SERIES[0], SERIES[3]],
        label=["right class", "wrong class"],
    )
    for radius in PAPER_RADII:
        above.axvline(radius, color=SOFT, linewidth=0.8, linestyle=(0, (2, 2)))
    above.set_ylabel("images")
    above.legend(loc="upper right", bbox_to_anchor=(1.0, 0.97))
    for row, label in enumerate(sorted(chosen)):
        _strip(below, row, torch.quantile(parts[label], torch.tensor([0.05, 0.25, 0.5, 0.75, 0.95]).double()))
    below.set_yticks(range(len(chosen)), [source.name(label) for label in sorted(chosen)])
    below.set(
        xlabel="certified L2 radius; of each class: 5, 25, 50, 75 and 95 %",
        xlim=(0, end),
        ylim=(len(chosen) - 0.4, -0.6),
    )
    return figure


@drawing
def confusion(found: Certification | Run, class_names: Sequence[str] | None = None) -> "Figure":
    """Draw the confusion matrix: the share of the images of each class (rows) that get each decision (columns), in %.

    Args:
        found: a certification with labels, or a run.
        class_names: names of the classes; by default those of the run, or numbers.

    Returns:
        The figure.

    Raises:
        ImportError: if matplotlib is not installed.
        ValueError: if the certification has no labels.
    """
    source = certified(found, class_names=class_names)
    labels, count = _labels(source.certification), source.certification.logits.shape[1]
    counts = torch.bincount(labels * count + source.certification.classes, minlength=count**2).reshape(count, count)
    shares = counts / counts.sum(1, keepdim=True).clamp_min(1)
    figure, axes = new_figure(4.6)
    # At most 60 % opaque, so that the numbers can be read on light and dark paper.
    axes.imshow(shade(SERIES[0], 0.6 * shares.sqrt().numpy()))
    names = [source.name(label) for label in range(count)]
    if count <= _NUMBERED:
        for row, column in (shares >= 0.005).nonzero().tolist():
            percent = f"{100 * float(shares[row, column]):.0f}"
            axes.text(column, row, percent, ha="center", va="center", fontsize=7.5)
    if count <= _CLASSES:
        axes.set_xticks(range(count), names, rotation=45 if max(map(len, names)) > 2 else 0, rotation_mode="xtick")
        axes.set_yticks(range(count), names)
    axes.set(xlabel="decision", ylabel="class")
    axes.grid(visible=False)
    return figure


@drawing
def singular_values(source: Run | Mapping[str, Any], proved: Audit | None = None) -> "Figure":
    """Draw the singular values of each layer, and the proved constants of the layers.

    Args:
        source: a run; or singular values from `onelip.gram.spectrum.spectrum_of_network`.
        proved: the audit of the network. For a run it is computed if it is missing.

    Returns:
        The figure.

    Raises:
        ImportError: if matplotlib is not installed.
    """
    if isinstance(source, Mapping):
        layers = source["layers"]
    else:
        run = loaded(source)
        layers = spectrum_of_network(run.plain, middle_image(run))["layers"]
        proved = proved or audit(run.plain, middle_image(run), lower=False)
    bounds = {} if proved is None else {row.place: row.upper for row in proved.rows if row.upper is not None}
    shown = layers[:_LAYERS]
    figure, axes = new_figure(1.0 + 0.26 * len(shown))
    for row, layer in enumerate(shown):
        quantiles = layer["quantiles"]
        _strip(axes, row, torch.tensor([quantiles[q] for q in ("0", "0.25", "0.5", "0.75", "1")]))
        if (bound := bounds.get(layer["layer"])) is not None:
            axes.plot(bound, row, marker="|", color=SERIES[3], markersize=12, markeredgewidth=1.5)
            axes.text(1.02, row, f"≤ {rounded_up(bound)}", fontsize=8, va="center", transform=_right(axes))
    axes.set_yticks(range(len(shown)), [layer["layer"] for layer in shown])
    largest = max([1.0, *(layer["largest"] for layer in shown), *(b for b in bounds.values() if math.isfinite(b))])
    axes.set(xlim=(0, 1.05 * largest), ylim=(len(shown) - 0.4, -0.6))
    axes.set_xlabel("singular values: smallest, quartiles, largest" + ("; | proved bound" if bounds else ""))
    return figure


@drawing
def spectra(found: Mapping[str, Mapping[str, Any]]) -> "Figure":
    """Draw the distribution of the singular values of several networks; isometries have all of them at 1.

    Args:
        found: for each name, singular values from `onelip.gram.spectrum.spectrum_of_network`.

    Returns:
        The figure.

    Raises:
        ImportError: if matplotlib is not installed.
    """
    figure, axes = new_figure(0.7 + 0.3 * len(found))
    end = 1.0
    for row, part in enumerate(found.values()):
        edges, shares, above = (part["histogram"][key] for key in ("edges", "shares", "above"))
        end, highest = max(end, edges[-1]), max(*shares, 1e-12)
        heights = [row + 0.45 - 0.85 * share / highest for share in shares]
        axes.fill_between(edges, [*heights, heights[-1]], row + 0.45, step="post", color=SERIES[0], linewidth=0.4)
        if above > 0.0005:
            axes.text(1.01, row, f"{100 * above:.1f} % above", fontsize=8, va="center", transform=_right(axes))
    axes.axvline(1.0, color=SERIES[3], linestyle=(0, (4, 3)), linewidth=1)
    axes.set_yticks(range(len(found)), list(found))
    axes.set(xlim=(0, end), ylim=(len(found) - 0.4, -0.6), xlabel="singular values; each area is scaled to its maximum")
    return figure


def _labels(found: Certification) -> Tensor:
    if found.labels is None:
        raise ValueError("expected a certification with labels, got none; give them to certify(..., labels)")
    return found.labels


def _strip(axes: Any, row: int, values: Tensor) -> None:
    """Five quantiles as a thin line, a thick one and a dot."""
    lowest, low, middle, high, highest = values.tolist()
    axes.plot([lowest, highest], [row, row], color=SERIES[0], linewidth=1.2, solid_capstyle="butt")
    axes.plot([low, high], [row, row], color=SERIES[0], linewidth=5, solid_capstyle="butt", alpha=0.7)
    axes.plot(middle, row, marker="o", color=INK, markerfacecolor=PAPER, markersize=4)


def _right(axes: Any) -> Any:
    return axes.get_yaxis_transform()
