"""Write tables of README.md and docs/results.md from results/*.json, between `<!-- name -->` and `<!-- end -->`."""

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from _harness import RESULTS

# Published by Prach and Lampert (2022), AOL-Small: accuracy, then CRA by radius.
PAPER = (0.698, {"36/255": 0.620, "72/255": 0.544, "108/255": 0.471, "1": 0.218})


def read(name: str) -> Any:
    """The content of results/NAME.json."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def value(name: str, column: str, **row: object) -> float:
    """One number of a benchmark: the row with these values."""
    (found,) = [r for r in read(name)["rows"] if all(r[key] == wanted for key, wanted in row.items())]
    return found[column]


def results() -> str:
    """Accuracy and certified robust accuracy of the published runs."""
    short, first = read("cifar10_short"), read("cifar10_paper_first_epoch")["log"][0]
    sound = next(row["printed"] for row in read("cifar10_certificate")["rows"] if row["what"] == "certify")
    test = short["results"]["test"]
    epochs = len(short["log"])
    links = "[log](results/cifar10_short.json), [curves](results/cifar10_short.png)"
    rows = [
        (f"`--preset short` ({links})", epochs, test["accuracy"], test["cra"]),
        (
            "the same network with `onelip certify`, rounding included ([record](results/cifar10_certificate.json))",
            epochs,
            sound["accuracy"],
            sound["cra"],
        ),
        (
            "first epoch of the recipe of the paper ([log](results/cifar10_paper_first_epoch.json))",
            1,
            first["accuracy"],
            first["cra"],
        ),
        ("the paper, as published", 1000, *PAPER),
    ]
    percent = [(name, n, *(f"{100 * share:.1f}" for share in (a, *cra.values()))) for name, n, a, cra in rows]
    return table(("AOL-Small on CIFAR-10", "epochs", "accuracy", *PAPER[1]), percent)


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


PAGES = {RESULTS.parent / "README.md": (results, speed), RESULTS.parent / "docs" / "results.md": (cost,)}


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
