"""Charts: certified accuracy, training curves, radii, decisions by class, and singular values of layers."""

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from onelip.attacks.result import AttackResult
from onelip.certification.audit import Audit, audit
from onelip.certification.predict import Certification
from onelip.certification.radius import PAPER_RADII, certified_accuracy as cra_at, radius_name
from onelip.core.rounding import rounded_up
from onelip.gram.jacobian import spectrum_of_network
from onelip.plots.canvas import (
    DASHES,
    FAINT,
    INK,
    MARKERS,
    PAPER,
    SERIES,
    SOFT,
    Log,
    Run,
    by_name,
    certified,
    drawing,
    loaded,
    log_of,
    middle_image,
    new_figure,
    shade,
)

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_POINTS = 201  # of a curve
_CLASSES = 20  # to draw line by line
_NUMBERED = 12  # classes of a confusion matrix with numbers in it
_LAYERS = 40


@drawing
def certified_accuracy(
    found: Certification | Run | Mapping[str, Certification | Run],
    *,
    attacks: AttackResult | Mapping[str, AttackResult] | None = None,
    paper: Mapping[str, Mapping[float, float]] | None = None,
) -> "Figure":
    """Draw certified accuracy against the radius.

    The curve is a lower bound of the accuracy under every perturbation of that norm; an attack gives an upper bound.

    Args:
        found: a certification with labels, or a run; or several of them by name.
        attacks: results of `onelip.attack` on the first images of the certification, by the same names. The curve of a
            part of the images is drawn together with the certified accuracy of the same images.
        paper: published accuracies by name, each by radius; radius 0 is the accuracy.

    Returns:
        The figure.

    Raises:
        ImportError: if matplotlib is not installed.
        ValueError: if a certification has no labels.

    Examples:
        Not executed here:

            onelip.plots.certified_accuracy("runs/first").savefig("curve.svg")
    """
    sources = {name: certified(source).certification for name, source in by_name(found).items()}
    against = {} if attacks is None else by_name(attacks)
    figure, axes = new_figure(3.3)
    largest = max(1.05, *(_reach(source) for source in sources.values()))
    grid = [largest * i / (_POINTS - 1) for i in range(_POINTS)]
    for number, (name, source) in enumerate(sources.items()):
        colour, dash = SERIES[number % len(SERIES)], DASHES[number // len(SERIES) % len(DASHES)]
        label = name if len(sources) > 1 else f"certified ({source.mode})"
        axes.plot(grid, _shares(source, len(source.classes), grid), color=colour, linestyle=dash, label=label)
        attack = against.get(name)
        if attack is None:
            continue
        labels, count = _labels(source)[: len(attack)], len(attack)
        upper = [100 * attack.accuracy(labels, radius) for radius in grid]
        suffix = "" if count == len(source.classes) else f", first {count} images"
        what = f"attack: upper bound{suffix}" if len(sources) == 1 else f"{name}, attack{suffix}"
        axes.plot(grid, upper, color=colour, linestyle=(0, (1, 1.2)), linewidth=1.3, label=what)
        lower = _shares(source, count, grid)
        if suffix and len(sources) == 1:
            axes.plot(grid, lower, color=colour, linewidth=0.8, label="certified, the same images")
        axes.fill_between(grid, lower, upper, color=colour, alpha=0.12, linewidth=0)
    for number, (name, points) in enumerate((paper or {}).items()):
        axes.plot(
            list(points),
            [100 * share for share in points.values()],
            linestyle="",
            marker=MARKERS[(2 + number) % len(MARKERS)],
            color=INK,
            markerfacecolor=PAPER,
            markersize=5,
            label=name,
        )
    for radius in PAPER_RADII:
        axes.axvline(radius, color=FAINT, linewidth=0.7, zorder=0)
        axes.text(radius, 100, radius_name(radius), color=SOFT, fontsize=7, ha="center", va="bottom")
    axes.grid(axis="x", visible=False)
    axes.set(xlabel="L2 radius (pixels in [0, 1])", ylabel="% of test images", xlim=(0, largest), ylim=(0, 100))
    # Below the axes: a curve can be anywhere inside.
    _, labels = axes.get_legend_handles_labels()
    figure.set_figheight(3.1 + 0.17 * -(-len(labels) // 2))
    figure.legend(loc="outside lower left", ncols=2)
    return figure


def _shares(source: Certification, count: int, grid: list[float]) -> list[float]:
    """Certified accuracy in % of the first images at each radius."""
    right, radii = (source.classes == _labels(source))[:count], source.radii[:count]
    return [100 * cra_at(right, radii, radius, inclusive=source.mode == "sound") for radius in grid]


def _reach(source: Certification) -> float:
    """The radius that one image of a hundred exceeds."""
    finite = source.radii[source.radii.isfinite()]
    return float(torch.quantile(finite, 0.99)) if len(finite) else 0.0


@drawing
def training_curves(runs: Run | Log | Mapping[str, Run | Log]) -> "Figure":
    """Draw loss, accuracy and certified robust accuracy after each epoch.

    Args:
        runs: a run, or the lines of its log; or several of them by name, which are overlaid.

    Returns:
        The figure.

    Raises:
        ImportError: if matplotlib is not installed.
        ValueError: if no epoch is finished.
    """
    logs = {name: log_of(source) for name, source in by_name(runs).items()}
    figure, (above, below) = new_figure(4.3, 2, sharex=True)
    for number, (name, log) in enumerate(logs.items()):
        epochs = [line["epoch"] for line in log]
        style = {
            "marker": "o" if len(log) < 25 else "",  # points show single epochs
            "markersize": 3,
            "linestyle": DASHES[number // len(SERIES) % len(DASHES)],
        }
        colour = SERIES[number % len(SERIES)]
        split, radii = log[-1].get("split", "test"), list(log[-1].get("cra") or {})
        if len(logs) > 1:
            above.plot(epochs, _numbers(log, "train_loss"), color=colour, label=name, **style)
            below.plot(epochs, _percent(log, None), color=colour, **style)
            if radii:
                below.plot(epochs, _percent(log, radii[0]), color=colour, **{**style, "linestyle": DASHES[2]})
            below.set_ylabel(f"accuracy, CRA {radii[0]}\n(dotted), %" if radii else "accuracy, %")
            continue
        above.plot(epochs, _numbers(log, "train_loss"), color=SERIES[0], label="training", **style)
        above.plot(epochs, _numbers(log, "loss"), color=SERIES[1], label=split, **style)
        below.plot(epochs, _percent(log, None), color=INK, label="accuracy", **style)
        for place, radius in enumerate(radii):
            below.plot(epochs, _percent(log, radius), color=SERIES[place], label=f"CRA {radius}", **style)
        below.set_ylabel(f"% of {split} images")
    above.set_ylabel("training loss" if len(logs) > 1 else "loss")
    below.set(xlabel="epoch", ylim=(0, 100))
    below.xaxis.get_major_locator().set_params(integer=True)
    for axes in (above, below):
        if axes.get_legend_handles_labels()[1]:
            axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
    return figure


def _numbers(log: Log, key: str) -> list[float]:
    return [math.nan if line.get(key) is None else line[key] for line in log]


def _percent(log: Log, radius: str | None) -> list[float]:
    """Accuracy, or CRA at a radius; NaN (a gap) for an epoch without it."""
    found = [line.get("accuracy") if radius is None else (line.get("cra") or {}).get(radius) for line in log]
    return [math.nan if share is None else 100 * share for share in found]


@drawing
def accuracies(results: Mapping[str, Mapping[str, Any]]) -> "Figure":
    """Draw accuracy and certified robust accuracy of several networks as dots, one line for each.

    Args:
        results: for each name, an evaluation as in results.json: a dictionary with `accuracy` and `cra` by radius.

    Returns:
        The figure.

    Raises:
        ImportError: if matplotlib is not installed.

    Examples:
        >>> figure = accuracies({"aol": {"accuracy": 0.7, "cra": {"36/255": 0.6}}, "soc": {"accuracy": 0.6, "cra": {}}})
        >>> [label.get_text() for label in figure.axes[0].get_yticklabels()]
        ['aol', 'soc']
    """
    found = {name: {"accuracy": part["accuracy"], **_named(part["cra"])} for name, part in results.items()}
    figure, axes = new_figure(0.9 + 0.2 * len(found))
    titles = list(dict.fromkeys(title for part in found.values() for title in part))
    for row, part in enumerate(found.values()):
        known = [100 * share for share in part.values() if share is not None]
        axes.plot([min(known), max(known)], [row, row], color=SOFT, linewidth=1, zorder=1)
    for number, title in enumerate(titles):
        points = [(100 * part[title], row) for row, part in enumerate(found.values()) if part.get(title) is not None]
        axes.plot(
            *zip(*points, strict=True) if points else ([], []),
            linestyle="",
            marker=MARKERS[number % len(MARKERS)],
            color=INK if number == 0 else SERIES[number - 1],
            markerfacecolor=PAPER if number == 0 else SERIES[number - 1],
            markersize=5.5,
            label=title,
            zorder=10 - number,  # the accuracy is drawn on top
        )
    axes.set_yticks(range(len(found)), list(found))
    axes.set(xlim=(0, 100), ylim=(len(found) - 0.4, -0.6), xlabel="% of images")
    figure.legend(loc="outside upper center", ncols=3, handletextpad=0.3, columnspacing=1.2)
    return figure


def _named(cra: Mapping[str, float | None]) -> dict[str, float | None]:
    return {f"CRA {radius}": share for radius, share in cra.items()}


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
        source: a run; or singular values from `onelip.gram.jacobian.spectrum_of_network`.
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
        found: for each name, singular values from `onelip.gram.jacobian.spectrum_of_network`.

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
