"""The tables and figures of a reproduction, from the run directories; tables of text, Markdown, CSV and LaTeX."""

import csv
import io
import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Table
from torch import Tensor, nn

from onelip.core.errors import RunError, reason
from onelip.core.files import read_json, write_whole
from onelip.methods.registry import FOOTNOTES, METHODS, supported_layers
from onelip.models.registry import create_model
from onelip.nn import MaxMin
from onelip.plots.pictures import crop_of_layer, described_layer, draw_crops, linear_layers
from onelip.reproduce.experiments import Experiment, Row, columns, differences
from onelip.training.build import load_run
from onelip.training.display import text_table
from onelip.training.run_directory import RunDirectory, read_config

# ---- Tables of text: for the terminal, and as Markdown, CSV and LaTeX


# CommonMark and LaTeX read these characters as markup.
_MARKDOWN = {character: f"\\{character}" for character in "\\|*_`<[]~"}
_LATEX = {character: f"\\{character}" for character in "%&_#$"} | {
    "×": "$\\times$",
    "√": "$\\sqrt{}$",
    "~": "$\\sim$",
    "−": "$-$",
    "ᵀ": "$^\\top$",
    "\\": "\\textbackslash{}",
    "{": "\\{",
    "}": "\\}",
    "^": "\\textasciicircum{}",
}


@dataclass(frozen=True)
class TextTable:
    """A table of text.

    Attributes:
        title: one line above it.
        heads: headings.
        rows: cells.
        notes: lines below it.
        left: number of columns that are text, aligned to the left; the others are numbers.

    Examples:
        >>> table = TextTable("A", ("name", "%"), [("AOL_1", "3")], ["a note"], 1)
        >>> print(table.to_markdown())
        **A**
        <BLANKLINE>
        | name | % |
        |---|--:|
        | AOL\\_1 | 3 |
        <BLANKLINE>
        a note
        <BLANKLINE>
    """

    title: str
    heads: tuple[str, ...]
    rows: list[tuple[str, ...]]
    notes: list[str]
    left: int

    def to_rich(self) -> Table:
        """The table for a terminal; a cell that repeats the one above it in the first column is empty."""
        before, rows = "", []
        for first, *rest in self.rows:
            rows.append(("" if first == before else first, *rest))
            before = first
        return text_table(self.title, self.heads, rows, self.left)

    def to_markdown(self) -> str:
        """The table as Markdown, with its title and notes."""

        def line(cells: tuple[str, ...]) -> str:
            return f"| {' | '.join(_replaced(cell, _MARKDOWN) for cell in cells)} |"

        rule = "|".join("---" if number < self.left else "--:" for number in range(len(self.heads)))
        table = "\n".join([line(self.heads), f"|{rule}|", *map(line, self.rows)])
        notes = "".join(f"\n{_replaced(note, _MARKDOWN)}\n" for note in self.notes)
        return f"**{_replaced(self.title, _MARKDOWN)}**\n\n{table}\n{notes}"

    def to_csv(self) -> str:
        """The table as CSV with a header line; title and notes are left out."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerows([self.heads, *self.rows])
        return text.getvalue()

    def to_latex(self) -> str:
        r"""The table as a LaTeX table, with the notes in the caption; needs no package."""
        lines = [" & ".join(_replaced(cell, _LATEX) for cell in row) + r" \\" for row in [self.heads, *self.rows]]
        caption = " ".join([f"{self.title}.", *self.notes])
        columns = "l" * self.left + "r" * (len(self.heads) - self.left)
        return "\n".join(
            [
                r"\begin{table}",
                rf"\caption{{{_replaced(caption, _LATEX)}}}",
                rf"\begin{{tabular}}{{{columns}}}",
                r"\hline",
                lines[0],
                r"\hline",
                *lines[1:],
                r"\hline",
                r"\end{tabular}",
                r"\end{table}",
                "",
            ]
        )


def _replaced(text: str, marks: dict[str, str]) -> str:
    return "".join(marks.get(character, character) for character in text)


# ---- The tables and figures of a reproduction


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
    if (missing := _missing(run, failed)) is not None:
        return {**found, **nothing, **missing}
    published = row.published(experiment.data)
    try:
        recipe, test = read_config(run).recipe, read_json(run.results)["test"]
        # Without a proved constant no image is certified.
        shares = [test["accuracy"], *(test["cra"].get(radius) or 0.0 for radius in columns()[1:])]
    except (RunError, KeyError, TypeError) as error:  # of another version, or damaged
        return {**found, **nothing, "run": FAILED, "label": reason(error)}
    ours = [100 * share for share in shares]
    scaled = differences(recipe, published)
    unproved = "no constant is proved, so nothing is certified" if test["lipschitz"] is None else ""
    return {
        **found,
        "ours": ours,
        "difference": [None if p is None else o - p for o, p in zip(ours, row.values, strict=True)],
        "run": SCALED if scaled else AS_PUBLISHED,
        "label": "; ".join(filter(None, (scaled, unproved))),
        "directory": name,
        "recipe": {**recipe.to_json(), "data": experiment.data},  # no path of this machine
        "images": test["images"],
        "mode": test["mode"],
    }


def _missing(run: RunDirectory, failed: Mapping[str, str]) -> dict[str, str] | None:
    """State and label of a run without results; None if it is finished."""
    if run.path.name in failed:
        return {"run": FAILED, "label": failed[run.path.name]}
    return None if run.results.exists() else {"run": UNFINISHED, "label": "the run is not finished"}


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
    for theirs, mine in itertools.zip_longest(paper, ours, fillvalue=("-", "-", 0)):
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
    x, found = torch.zeros(1, 3, 32, 32, device="meta"), list[tuple[str, str]]()
    for layer in network.children():
        x = layer(x)
        if isinstance(layer, MaxMin):
            name, output = found.pop()
            found.append((f"{name}, MaxMin", output))
        else:
            _, channels, *size = x.shape
            found.append((_layer_name(layer, prefix), " x ".join(map(str, [*size, channels]))))
    return [(*layer, len(list(equal))) for layer, equal in itertools.groupby(found)]


def _layer_name(layer: nn.Module, prefix: str) -> str:
    if isinstance(layer, nn.Linear):
        return f"{prefix}FC"
    if isinstance(layer, nn.Conv2d):
        stride = f", stride {layer.stride[0]}" if layer.stride[0] > 1 else ""
        return f"{prefix}Conv {layer.kernel_size[0]}x{layer.kernel_size[1]}{stride}"
    names = {"ConcatenationPool2d": "Concatenation Pooling", "FirstChannels": "First Channels", "Flatten": "Flatten"}
    return names.get(type(layer).__name__, type(layer).__name__)


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
        run = RunDirectory(out / row.run_name(experiment.data))
        if (missing := _missing(run, failed)) is not None:
            panel |= missing
            continue
        try:
            loaded = load_run(run.path)
            layer, size = list(linear_layers(loaded).values())[row.layer - 1]
            scaled = differences(loaded.config.recipe, row.published(experiment.data))
            where = f"layer {row.layer}, {described_layer(layer)}, on {' x '.join(map(str, size))} pixels"
            panel |= {
                "run": SCALED if scaled else AS_PUBLISHED,
                "label": "; ".join(filter(None, (scaled, where))),
                "crop": crop_of_layer(layer, size),
                "recipe": {**loaded.config.recipe.to_json(), "data": experiment.data},
            }
        except (RunError, ValueError) as error:  # of another version, or damaged
            panel |= {"run": FAILED, "label": reason(error)}
    return found


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
