"""The tables and figures of a reproduction: the paper's numbers, ours and the difference, from the run directories."""

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from onelip.core.errors import RunError, reason
from onelip.core.files import read_json, write_whole
from onelip.core.geometry import LINEAR_LAYERS
from onelip.methods.describe import FOOTNOTES, supported_layers
from onelip.methods.registry import METHODS
from onelip.models.registry import create_model
from onelip.nn import MaxMin
from onelip.plots.pictures import crop_of_layer, draw_crops
from onelip.reproduce.experiments import Experiment, Row, columns, differences
from onelip.reproduce.text import TextTable
from onelip.training.build import load_run
from onelip.training.run_directory import RunDirectory, read_config

AS_PUBLISHED, SCALED, UNFINISHED, FAILED, ELSEWHERE = "as published", "scaled", "not finished", "failed", "not run here"


def results_of(experiment: Experiment, out: Path, failed: Mapping[str, str]) -> list[dict[str, Any]]:
    """The rows of a table: the paper's numbers, and ours where the run is finished.

    Args:
        experiment: a table of results.
        out: directory of the runs.
        failed: reasons by the name of the run.

    Returns:
        One dictionary for each row; `ours` and `difference` are None where there is no number. `run` is one of "as
        published", "scaled", "not finished", "failed", "not run here"; `label` states how the recipe differs.
    """
    return [_result(experiment, row, out, failed) for row in experiment.rows]


def _result(experiment: Experiment, row: Row, out: Path, failed: Mapping[str, str]) -> dict[str, Any]:
    found: dict[str, Any] = {"name": row.name, "source": row.source, "paper": list(row.values)}
    nothing = {"ours": [None] * len(row.values), "difference": [None] * len(row.values)}
    if row.model is None:
        return {**found, **nothing, "run": ELSEWHERE, "label": "from the literature, as the paper cites it"}
    name = row.run_name(experiment.data)
    run = RunDirectory(out / name)
    if name in failed:
        return {**found, **nothing, "run": FAILED, "label": failed[name]}
    if not run.results.exists():
        return {**found, **nothing, "run": UNFINISHED, "label": "the run is not finished"}
    try:
        recipe, test = read_config(run).recipe, read_json(run.results)["test"]
        # Without a proved constant no image is certified.
        shares = [test["accuracy"], *(test["cra"].get(radius) or 0.0 for radius in columns()[1:])]
    except (RunError, KeyError, TypeError) as error:  # of another version, or damaged
        return {**found, **nothing, "run": FAILED, "label": reason(error)}
    ours = [100 * share for share in shares]
    label = differences(recipe, row.published(experiment.data))
    if test["lipschitz"] is None:
        label = "; ".join(filter(None, (label, "no constant is proved, so nothing is certified")))
    return {
        **found,
        "ours": ours,
        "difference": [None if p is None else o - p for o, p in zip(ours, row.values, strict=True)],
        "run": SCALED if differences(recipe, row.published(experiment.data)) else AS_PUBLISHED,
        "label": label,
        "directory": name,
        "recipe": {**recipe.to_json(), "data": experiment.data},  # no path of this machine
        "images": test["images"],
        "mode": test["mode"],
    }


def results_table(experiment: Experiment, rows: list[dict[str, Any]]) -> TextTable:
    """The table of `results_of`: one line for each row and measure."""
    lines = [
        (
            row["name"],
            row["run"],
            measure if measure == "accuracy" else f"CRA at {measure}",
            _number(paper),
            _number(ours),
            "-" if difference is None else f"{difference:+.1f}",
        )
        for row in rows
        for measure, paper, ours, difference in zip(
            columns(), row["paper"], row["ours"], row["difference"], strict=True
        )
        if paper is not None or ours is not None
    ]
    labels: dict[str, list[str]] = {}
    for row in rows:
        if row["label"]:
            labels.setdefault(row["label"], []).append(row["name"])
    notes = [f"{'; '.join(names)}: {label}." for label, names in labels.items()]
    heads = ("row", "our run", "measure", "paper", "ours", "difference")
    return TextTable(f"{_title(experiment)}, in %", heads, lines, notes, 3)


def _title(experiment: Experiment) -> str:
    number = experiment.name.replace("-", " ").capitalize()
    return f"{number} of the paper: {experiment.title}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.1f}"


def methods_table(experiment: Experiment) -> TextTable:
    """The properties of methods: the marks of the paper, and the guarantee and layers of this package."""
    marks = {"yes": "yes", "partly": "~", "no": "no"}
    lines, used = [], set()
    for row in experiment.content["rows"]:
        method = METHODS[row["method"]]
        assert method.paper is not None
        used |= set(method.paper.notes.values())
        cells = [
            marks[getattr(method.paper, key)] + (f" ({note})" if (note := method.paper.notes.get(key)) else "")
            for key in "EFGM"
        ]
        ours = method.guarantee or "none"
        lines.append((row["name"], *cells, method.name, ours, method.mechanism, supported_layers(method)))
    heads = ("method", "E", "F", "G", "M", "here", "guarantee", "acts as", "layers")
    notes = [
        "Paper: E efficiency, F formal guarantee, G generality, M modularity; ~ partly. "
        + " ".join(f"({number}) {FOOTNOTES[number]}." for number in sorted(used)),
        "Here: name, guarantee, mechanism and layers of the implementation; evaluation bounds the stored weights where "
        "a method guarantees nothing. onelip methods describes them; onelip compare measures their cost.",
    ]
    return TextTable(_title(experiment), heads, lines, notes, len(heads))


def layers_table(experiment: Experiment) -> TextTable:
    """An architecture: layers, output size and number in the paper, and those of the network that is built here."""
    paper = [(row["layer"], row["output"], row["amount"]) for row in experiment.content["rows"]]
    ours = network_layers(experiment.content["model"])
    lines = []
    for number in range(max(len(paper), len(ours))):
        theirs = paper[number] if number < len(paper) else ("-", "-", 0)
        mine = ours[number] if number < len(ours) else ("-", "-", 0)
        cells = [f"{amount} × {layer}: {output}" if amount else "-" for layer, output, amount in (theirs, mine)]
        lines.append((*cells, "none" if theirs == mine else "differs"))
    note = f"Ours: onelip models {experiment.content['model']}, for images of 3 x 32 x 32 and 10 classes."
    return TextTable(_title(experiment), ("paper", "ours", "difference"), lines, [note], 3)


def network_layers(model: str) -> list[tuple[str, str, int]]:
    """Layers of a network for CIFAR-10 as the paper lists them: name, output size, number of equal ones in a row.

    Examples:
        >>> network_layers("aol-fc")[0]
        ('Flatten', '3072', 1)
    """
    with torch.device("meta"), torch.random.fork_rng(devices=[]):  # no memory for the weights
        network = create_model(model)
    prefix = "" if model == "standard-cnn" else "AOL "
    found: list[tuple[str, str, int]] = []
    for module, shape in _outputs(network):
        if isinstance(module, MaxMin):
            name, output, amount = found.pop()
            found.append((f"{name}, MaxMin", output, amount))
        else:
            channels, *size = shape
            found.append((f"{_layer_name(module, prefix)}", " x ".join(map(str, [*size, channels])), 1))
            continue
        if len(found) > 1 and found[-2][:2] == found[-1][:2]:
            name, output, amount = found.pop()
            found[-1] = (name, output, found[-1][2] + 1)
    return found


def _outputs(network: nn.Module) -> list[tuple[nn.Module, list[int]]]:
    """The layers of a chain with the shape of their output."""
    x, found = torch.zeros(1, 3, 32, 32, device="meta"), []
    for layer in network.children():
        x = layer(x)
        found.append((layer, list(x.shape[1:])))
    return found


def _layer_name(layer: nn.Module, prefix: str) -> str:
    if isinstance(layer, nn.Linear):
        return f"{prefix}FC"
    if isinstance(layer, nn.Conv2d):
        stride = f", stride {layer.stride[0]}" if layer.stride[0] > 1 else ""
        return f"{prefix}Conv {layer.kernel_size[0]}x{layer.kernel_size[1]}{stride}"
    names = {"ConcatenationPool2d": "Concatenation Pooling", "FirstChannels": "First Channels", "Flatten": "Flatten"}
    return names.get(type(layer).__name__, type(layer).__name__)


def linear_layer(plain: nn.Module, number: int, shape: tuple[int, ...]) -> tuple[nn.Module, tuple[int, ...]]:
    """The linear layer of a network with a number, counted from 1 in the order of execution, and its input size."""
    seen: list[tuple[nn.Module, tuple[int, ...]]] = []

    def hook(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        seen.append((module, tuple(inputs[0].shape[2:])))

    handles = [m.register_forward_pre_hook(hook) for m in plain.modules() if isinstance(m, LINEAR_LAYERS)]
    try:
        with torch.no_grad():
            plain(torch.zeros(1, *shape))
    finally:
        for handle in handles:
            handle.remove()
    return seen[number - 1]


# Figures: crops of J^T J of trained layers, and numbers that state how orthogonal they are.


def panels_of(experiment: Experiment, out: Path, failed: Mapping[str, str]) -> list[dict[str, Any]]:
    """The panels of a figure: the centre crop of J^T J, where the run is finished, and its numbers.

    Args:
        experiment: a figure.
        out: directory of the runs.
        failed: reasons by the name of the run.

    Returns:
        One dictionary for each panel, with its `crop` (`onelip.plots.pictures.Crop`) or None.
    """
    found = []
    for row in experiment.rows:
        panel: dict[str, Any] = {"name": row.name, "source": row.source, "crop": None, "label": ""}
        found.append(panel)
        if row.model is None:
            panel |= {"run": "exact", "label": "the identity, which every orthogonal layer has"}
            if other := next((p["crop"] for p in found if p["crop"] is not None), None):
                panel["crop"] = other._replace(matrix=torch.eye(len(other.matrix), dtype=torch.float64))
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
            panel |= {
                "run": SCALED if label else AS_PUBLISHED,
                "label": "; ".join(filter(None, (label, f"layer {row.layer}, {_described(layer, size)}"))),
                "crop": crop_of_layer(layer, size),
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
    """Numbers that measure how near a symmetric crop of J^T J is to the identity.

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
        for measure, value in orthogonality(panel["crop"].matrix).items()
    ]
    lines += [(p["name"], p["run"], "-", "-") for p in panels if p["crop"] is None]
    notes = [f"{panel['name']}: {panel['label']}." for panel in panels if panel["label"]]
    notes.append(
        "Entries of the centre crop of JᵀJ, without sign off the diagonal. The paper has the picture, and no numbers."
    )
    return TextTable(_title(experiment), ("panel", "our run", "measure", "ours"), lines, notes, 3)


def draw_figure(panels: list[dict[str, Any]], path: Path) -> None:
    """Draw the panels that have a crop, one in each row.

    Args:
        panels: from `panels_of`.
        path: file to write (.png, .svg or .pdf).

    Raises:
        ImportError: if matplotlib is not installed.
    """
    shown = {f"{panel['name']} ({panel['run']})": panel["crop"] for panel in panels if panel["crop"] is not None}
    buffer = io.BytesIO()
    draw_crops(shown).savefig(buffer, format=path.suffix.lstrip("."), dpi=160)
    write_whole(path, buffer.getvalue())
