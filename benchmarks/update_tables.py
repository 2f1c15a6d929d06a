"""Write the tables of the documents from results/*.json, between `<!-- name -->` and `<!-- end -->`."""

import json
import math
import re
import statistics
from collections.abc import Callable, Sequence
from typing import Any

from _harness import RESULTS

from onelip.core.paper import paper
from onelip.core.rounding import rounded_up
from onelip.methods.registry import FOOTNOTES, by_year, supported_layers

# Published by Prach and Lampert (2022), AOL-Small: accuracy, then CRA by radius.
_SMALL = next(row["values"] for row in paper()["tables"]["table-3"]["rows"] if row["name"] == "AOL-Small")
PAPER = (_SMALL[0] / 100, {name: v / 100 for name, v in zip(paper()["columns"][1:], _SMALL[1:], strict=True)})


def read(name: str) -> Any:
    """The content of results/NAME.json."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def value(name: str, column: str, **row: object) -> float:
    """One number of a benchmark: the row with these values."""
    (found,) = [r for r in read(name)["rows"] if all(r[key] == wanted for key, wanted in row.items())]
    return found[column]


_FAST_RUNS = (  # of results/fast_training.json, in the README
    "--budget 20s",
    "--budget 1m",
    "--budget 10m",
    "aol-fast-huge, 95 epochs, colours, mirrored average",
    "aol-fast-huge, 132 epochs, colours, mirrored average, teacher, generalised cross-entropy",
)


def _elapsed(row: dict[str, Any]) -> str:
    seconds, cores = row["wall_seconds"], row["threads"]
    time = f"{seconds:.0f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
    return f"{time}, {cores} core{'' if cores == 1 else 's'}"


def results() -> str:
    """Accuracy and certified robust accuracy of the published runs."""
    short, first = read("cifar10_paper_short"), read("cifar10_paper_first_epoch")["log"][0]
    sound = next(row["printed"] for row in read("cifar10_certificate")["rows"] if row["what"] == "certify")
    test = short["results"]["test"]
    links = "[log](results/cifar10_paper_short.json), [curves](results/cifar10_paper_short.png)"
    fast = {row["what"]: row for row in read("fast_training")["rows"]}
    rows = [(name, _elapsed(fast[name]), fast[name]["accuracy"], fast[name]["cra"]) for name in _FAST_RUNS]
    rows += [
        (f"AOL-Small, SGD, 5 epochs: `--preset paper-short` ({links})", "115 CPU min", test["accuracy"], test["cra"]),
        (
            "the same network with `onelip certify`, rounding included ([record](results/cifar10_certificate.json))",
            "",
            sound["accuracy"],
            sound["cra"],
        ),
        (
            "AOL-Small, first epoch of the recipe of the paper ([log](results/cifar10_paper_first_epoch.json))",
            "",
            first["accuracy"],
            first["cra"],
        ),
        ("AOL-Small, 1000 epochs, as published", "GPU", *PAPER),
    ]
    percent = [(name, time, *(f"{100 * share:.1f}" for share in (a, *cra.values()))) for name, time, a, cra in rows]
    return table(("CIFAR-10", "time", "accuracy", *PAPER[1]), percent)


def speed() -> str:
    """Cost relative to the plain network."""
    step = [
        (f"training step of AOL-Small, batch {n}", value("training_step", "ratio to plain", batch=n, network="aol"))
        for n in (250, 64, 32)
    ]
    rows = [
        *step,
        ("prediction, batch 250", value("inference", "ratio to plain", batch=250, network="baked")),
        ("`onelip certify`, to a float64 forward pass", value("certify_speed", "ratio to forward", what="sound")),
    ]
    return table(("", "time relative to the plain network"), [(what, f"{ratio:.2f}") for what, ratio in rows])


def table(heads: Sequence[object], rows: Sequence[Sequence[object]]) -> str:
    """Markdown."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def cost() -> str:
    """Cost of the parts of AOL."""
    dense, kernel = "dense 1024 -> 1024", "3x3, 192 -> 192"
    other = {"self-convolution": "a self-convolution", "matrix product": "a matrix product"}
    ways = [(kernel, "self-convolution"), (dense, "self-convolution"), (dense, "matrix product")]
    rescaling = [
        (
            f"{other[way]} with automatic differentiation, to the rescaling of onelip, {layer}",
            value("rescaling", "ratio to onelip", layer=layer, way=way),
        )
        for layer, way in ways
    ]
    maximum = value("activation", "ratio to onelip", layout="channels_last", way="maximum and minimum")
    rows = [
        (
            "an epoch with data and augmentation, to its training steps",
            value("epoch", "ratio to bare steps", what="epoch"),
        ),
        *rescaling,
        ("`torch.maximum` and `torch.minimum`, to MaxMin of onelip, channels last", maximum),
    ]
    return table(("time of", "ratio"), [(what, f"{ratio:.2f}") for what, ratio in rows])


def soundness() -> str:
    """Audit, proof and check relative to an earlier version."""
    tasks = ("audit", "proof", "check")
    rows = [
        (model, *(f"{value('soundness_cost', 'ratio', model=model, task=task):.2f}" for task in tasks))
        for model in dict.fromkeys(row["model"] for row in read("soundness_cost")["rows"])
    ]
    return table(("model", *tasks), rows)


def layers() -> str:
    """Training of single layers relative to public implementations."""
    rows = [
        (f"`{row['method']}`", row["layer"], row["theirs"], shown(row["theirs / ours"], "{:.2f}"))
        for row in read("public_layers")["rows"]
    ]
    return table(("method", "layer", "theirs", "theirs / ours"), rows)


def steps() -> str:
    """Training steps of AOL-Small; methods that do not support it are left out."""
    rows = [
        (f"`{row['method']}`", *(shown(row[key], "{:.3g}") for key in ("to limit", "to usual plain", "memory")))
        for row in read("methods_batch32")["rows"]
        if not row["failed"]
    ]
    return table(("method", "to the limit", "to usual plain", "memory"), rows)


def measured() -> str:
    """All methods on the digits."""
    apart = {row["method"]: row["train - eval"] for row in read("train_eval")["rows"]}
    trained = {row["method"]: row for row in read("compare_digits")["rows"]}
    rows = []
    for name in [method.name for method in by_year()]:
        row = trained.get(name, {"status": "missing"})
        if row["status"] != "done":
            continue
        values, test, proved = row["singular_values"], row["results"]["test"], row["constant"]["proved"]
        difference = apart.get(name)
        cells = [
            shown(row["step"].get("ratio"), "{:.1f}"),
            shown(row["memory"].get("ratio"), "{:.1f}"),
            "equal" if difference == 0 else shown(difference, "{:.0e}"),
            shown(values.get("largest"), "{:.4f}"),
            shown(values.get("mean"), "{:.3f}"),
            "-" if proved is None else rounded_up(proved),
            shown(test["accuracy"], "{:.1%}"),
            shown(test["cra"]["36/255"], "{:.1%}"),
        ]
        rows.append((f"`{name}`", *cells))
    heads = ("method", "step", "memory", "train - eval", "largest s", "mean s", "proved L", "accuracy", "CRA 36/255")
    return table(heads, rows)


def one_epoch() -> str:
    """Some methods on CIFAR-10."""
    done = [row for row in read("compare_cifar10")["rows"] if row["status"] == "done"]
    rows = []
    for row in done:
        test = row["results"]["test"]
        shares = [shown(share, "{:.1%}") for share in (test["accuracy"], *test["cra"].values())]
        cost = [shown(row[key].get("ratio"), "{:.1f}") for key in ("step", "inference")]
        rows.append((f"`{row['method']}`", *shares, *cost))
    radii = [f"CRA {radius}" for radius in done[0]["results"]["test"]["cra"]]
    return table(("method", "accuracy", *radii, "step", "predict"), rows)


def fast() -> str:
    """Runs of the fast networks on CIFAR-10, by CPU seconds."""
    rows = [
        (row["what"], f"{row['passes']:g}", row["cpu_seconds"], row["wall_seconds"], row["accuracy"], row["cra"])
        for row in read("fast_training")["rows"]
    ]
    cells = [
        (what, passes, f"{cpu:.0f}", f"{wall:.0f}", *(f"{100 * share:.1f}" for share in (accuracy, *cra.values())))
        for what, passes, cpu, wall, accuracy, cra in sorted(rows, key=lambda row: row[2])
    ]
    return table(("run", "passes", "CPU s", "elapsed s", "accuracy", *PAPER[1]), cells)


def pairs() -> str:
    """Matched pairs of the fast networks."""
    rows = [
        (row["name"], f"{100 * row['cra_36']:.1f}", f"{100 * row['spread']:.1f}", f"{row['cpu_seconds']:.0f}")
        for row in read("fast_ablation")["rows"]
    ]
    return table(("one epoch of aol-fast-small", "CRA 36/255", "range", "CPU s"), rows)


def retraction() -> str:
    """The exact scale of AOL against a retraction after every k-th step."""
    return with_range("retract_every", "half an epoch of a narrow AOL-Small")


def with_range(file: str, what: str) -> str:
    """Accuracy and CRA of matched runs: means over seeds, and the range."""
    rows = [
        (row["name"], *(f"{100 * row[key]:.1f}" for key in ("accuracy", "cra_36", "spread")))
        for row in read(file)["rows"]
    ]
    return table((what, "accuracy", "CRA 36/255", "range"), rows)


def paper_optimizers() -> str:
    """AOL-Small with the optimizer of the paper and with those of onelip."""
    rows = [
        (row["name"], f"{100 * row['accuracy']:.1f}", f"{100 * row['cra_36']:.1f}", f"{row['cpu_seconds']:.0f}")
        for row in read("paper_optimizers")["rows"]
    ]
    return table(("three epochs of AOL-Small with 64 channels", "accuracy", "CRA 36/255", "CPU s"), rows)


def few_images() -> str:
    """Trials in which the training images are fitted far better than others."""
    rows = []
    for row in read("few_images")["rows"]:
        cra, trained = row["cra"], row["train_cra"]["36/255"]
        rows.append((row["name"], *(f"{n:.1f}" for n in (row["accuracy"], cra["36/255"], cra["108/255"], trained))))
    return table(("10,000 training images, 50 epochs", "accuracy", "36/255", "108/255", "36/255, training"), rows)


def teacher() -> str:
    """Labels by a teacher, with 10,000 training images."""
    rows = []
    for row in read("teacher")["rows"]:
        spread = f"{100 * row['range']['36/255']:.1f}" if row["seeds"] > 1 else ""
        rows.append(
            (row["name"], row["seeds"], *(f"{100 * n:.1f}" for n in (row["accuracy"], *row["cra"].values())), spread)
        )
    radii = "36/255", "72/255", "108/255", "1"
    return table(("10,000 training images, 50 epochs", "seeds", "accuracy", *radii, "range at 36/255"), rows)


def step_costs() -> str:
    """CPU time and memory of a training step, relative to the plain network."""
    found: dict[tuple[str, int], dict[str, tuple[float, float]]] = {}
    for row in read("step_cost")["rows"]:
        costs = row["ratio to plain"], row["peak to plain"]
        found.setdefault((row["network"], row["batch"]), {})[row["step"]] = costs
    steps = [step for step in dict.fromkeys(step for costs in found.values() for step in costs) if step != "plain"]
    cells = [
        (name, batch, *("{:.2f} ({:.2f})".format(*costs[step]) if step in costs else "" for step in steps))
        for (name, batch), costs in found.items()
    ]
    return table(("network", "batch", *steps), cells)


def by_time() -> str:
    """All methods with one budget of CPU seconds."""
    return best_first("methods_by_time", "method")


def other_optimizers() -> str:
    """AOL with optimizers of other libraries, with one budget of CPU seconds."""
    return best_first("other_optimizers", "optimizer")


def best_first(file: str, what: str) -> str:
    """The rows of a comparison with one budget of CPU seconds, each with its best rate."""
    found = sorted(read(file)["rows"], key=lambda row: row.get("cra_36") or -1, reverse=True)
    rows = [
        (
            row["name"],
            f"{row['lr']:g}",
            f"{statistics.mean(run['passes'] for run in row['runs'] if run['lr'] == row['lr']):.1f}",
            f"{100 * row['accuracy']:.1f}",
            f"{100 * row['cra_36']:.1f}",
            f"{100 * row['spread']:.1f}",
        )
        for row in found
        if row.get("cra_36") is not None
    ]
    return table((what, "rate", "passes", "accuracy", "CRA 36/255", "range"), rows)


def averaging() -> str:
    """Moving averages of weights, with falling and constant rates."""
    return with_range("weight_averaging", "five epochs of aol-fast-small")


def losses() -> str:
    """Losses with their offsets: means over seeds at each radius."""
    rows = []
    for row in read("fast_losses")["rows"]:
        means = [statistics.mean(run["cra"][radius] for run in row["runs"]) for radius in PAPER[1]]
        shares = (row["accuracy"], *means, row["spread"])
        rows.append((row["name"], *(f"{100 * share:.1f}" for share in shares)))
    return table(("ten epochs of aol-fast-small", "accuracy", *PAPER[1], "range at 36/255"), rows)


def zoo() -> str:
    """The trained networks of the package."""
    rows = []
    for name, network in read("zoo")["networks"].items():
        shares = [f"{100 * share:.1f}" for share in (network["accuracy"], *network["cra"].values())]
        rows.append((f"`{name}`", *shares, f"{network['parameters'] / 1e6:.2f} M", network["seconds"]))
    radii = next(iter(read("zoo")["networks"].values()))["cra"]
    return table(("network", "accuracy", *(f"CRA {radius}" for radius in radii), "parameters", "seconds"), rows)


def reproduced() -> str:
    """The published tables and figures of `onelip reproduce`, theirs and ours."""
    parts = []
    for path in sorted(RESULTS.glob("reproduce_*.json"), reverse=True):
        content = json.loads(path.read_text())
        notes = "".join(f"\n\n{note}" for note in content["table"]["notes"])
        parts.append(f"### {content['experiment'].replace('-', ' ').capitalize()}: {content['title']}\n")
        parts.append(f"`{content['command']}`\n")
        parts.append((_panels(content) if "panels" in content else _beside(content)) + notes + "\n")
        if (RESULTS.parent / "docs" / "images" / f"{path.stem}.png").exists():
            parts.append(f"![{content['title']}](images/{path.stem}.png)\n")
    return "\n".join(parts)


def _beside(content: dict[str, Any]) -> str:
    rows = [
        (row["name"], row["run"], *(f"{shown(a, '{:.1f}')} / {shown(b, '{:.1f}')}" for a, b in pairs))
        for row in content["rows"]
        for pairs in [list(zip(row["paper"], row["ours"], strict=True))]
    ]
    return table(("paper / ours, %", "our run", *paper()["columns"]), rows)


def _panels(content: dict[str, Any]) -> str:
    panels = [panel for panel in content["panels"] if panel["crop"]]
    rows = [(panel["name"], panel["run"], *(f"{value:.4f}" for value in panel["crop"].values())) for panel in panels]
    return table(("layer", "our run", *panels[0]["crop"]), rows)


def registered_methods() -> str:
    """All methods, then the property table of the paper."""
    lines = ["| name | method | acts as | guarantee | train = eval | layers | note |", "|---|---|---|---|---|---|---|"]
    marks, methods = {"yes": "yes", "partly": "~", "no": "no"}, by_year()
    for method in methods:
        same = "yes" if method.train_equals_eval else "no"
        guarantee = method.guarantee or "none"
        cells = (method.title, method.mechanism, guarantee, same, supported_layers(method), method.note)
        lines.append(f"| `{method.name}` | " + " | ".join(cells) + " |")
    lines += ["", "| method | E | F | G | M |", "|---|---|---|---|---|"]
    for method in methods:
        if (row := method.paper) is not None:
            cells = [marks[getattr(row, c)] + (f" ({row.notes[c]})" if c in row.notes else "") for c in "EFGM"]
            lines.append(f"| `{method.name}` | " + " | ".join(cells) + " |")
    notes = "; ".join(f"({number}) {text}" for number, text in FOOTNOTES.items())
    return "\n".join([*lines, "", f"{notes}."])


def shown(number: float | None, form: str) -> str:
    """A number as text; - for none."""
    return "-" if number is None or math.isnan(number) else form.format(number).replace("%", " %")


PAGES = {
    RESULTS.parent / "README.md": (results, speed),
    RESULTS.parent / "docs" / "results.md": (cost, soundness),
    RESULTS.parent / "docs" / "training.md": (
        fast,
        pairs,
        few_images,
        teacher,
        step_costs,
        retraction,
        paper_optimizers,
        other_optimizers,
        averaging,
        losses,
    ),
    RESULTS.parent / "docs" / "methods.md": (registered_methods, measured, by_time, steps, layers),
    RESULTS.parent / "docs" / "compare.md": (one_epoch,),
    RESULTS.parent / "docs" / "zoo.md": (zoo,),
    RESULTS.parent / "docs" / "reproduce.md": (reproduced,),
}


def updated(text: str, makers: Sequence[Callable[[], str]]) -> str:
    """A document with current tables."""
    for make in makers:
        part = f"<!-- {make.__name__} -->\n{make()}\n<!-- end -->"
        text, count = re.subn(
            rf"<!-- {make.__name__} -->\n.*?<!-- end -->", lambda _, part=part: part, text, flags=re.S
        )
        assert count == 1, make.__name__
    return text


if __name__ == "__main__":
    for page, makers in PAGES.items():
        page.write_text(updated(page.read_text(), makers))
        print(f"-> {page.name}")
