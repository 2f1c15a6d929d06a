"""The tables and figures of the paper (onelip.core.paper), and the recipe of each row that is trained.

This module does not import torch.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

from onelip.core.errors import RecipeError, did_you_mean
from onelip.core.paper import paper
from onelip.training.recipe import Recipe, preset, recipe_for_budget

Style = Literal["paper", "fast"]

# The options that change with the width of a network; all of them are even.
_WIDTHS = ("width", "channels")


@dataclass(frozen=True)
class Row:
    """A row of a table, or a panel of a figure.

    Attributes:
        name: name in the paper.
        source: table and row of the paper.
        values: accuracy and certified robust accuracy in %, in the order of `COLUMNS`; None where the paper has none.
        model: network of the row in the paper; None if it is not trained here.
        u: offset of the loss, as a multiple of the root of 2.
        t: temperature of the loss.
        layer: number of the linear layer that a figure shows, from 1.
        network: network that is trained in place of `model`; None for that.
    """

    name: str
    source: str
    values: tuple[float | None, ...] = ()
    model: str | None = None
    u: float = 1.0
    t: float = 0.25
    layer: int = 0
    network: str | None = None

    def run_name(self, data: str) -> str:
        """Directory of the run; rows with the same recipe share it.

        Examples:
            >>> Row("", "", model="aol-small").run_name("cifar10"), Row("", "", model="aol-small", u=4).run_name("x")
            ('cifar10-aol-small', 'x-aol-small-u4')
        """
        loss = "" if self.u == 1 or self.model == "standard-cnn" else f"-u{self.u:g}"
        return f"{data}-{self.network or self.model}{loss}"

    def published(self, data: str) -> Recipe:
        """The recipe of the row as published."""
        assert self.model is not None
        loss = {"offset": self.u * math.sqrt(2), "temperature": self.t}
        return preset("paper").replace(data=data, model=self.model, **loss)

    def recipe(self, data: str, style: Style = "paper") -> Recipe:
        """The recipe of the row.

        Args:
            data: name or path of the data.
            style: "paper" for the recipe as published; "fast" for that of `onelip train --budget` (muon, one cycle).

        Examples:
            >>> Row("", "", model="aol-small", u=4, t=1).recipe("cifar10").temperature
            1.0
        """
        published = self.published(data).replace(model=self.network or self.model)
        if style == "paper":
            return published
        changes: dict[str, Any] = {
            name: getattr(published, name) for name in ("data", "model", "offset", "temperature")
        }
        if self.model == "standard-cnn":  # without AOL muon is SGD, which learns nothing in 25 plain layers
            changes |= {"optimizer": "adamw", "lr": 2e-3, "momentum": 0.9}
        elif not published.model.startswith("aol-fast"):
            changes["lr"] = 0.01  # deeper networks than aol-fast learn nothing with its rate
        return recipe_for_budget(60).replace(**changes)


@dataclass(frozen=True)
class Experiment:
    """A table or figure of the paper.

    Attributes:
        name: such as table-3.
        also: a second name, such as cifar10.
        kind: "results" (runs), "figure" (runs and crops of J^T J), "methods" (properties), "layers" (an architecture).
        title: one line.
        label: label in the LaTeX source of the paper.
        data: data set of the runs; empty without runs.
        rows: rows of the table.
        content: the entry of core/paper.json.
    """

    name: str
    also: str
    kind: Literal["results", "figure", "methods", "layers"]
    title: str
    label: str
    data: str
    rows: tuple[Row, ...]
    content: dict[str, Any]

    @property
    def trained(self) -> tuple[Row, ...]:
        """The rows with a run."""
        return tuple(row for row in self.rows if row.model is not None)

    def with_network(self, network: str) -> Self:
        """A table of one network, with another network.

        Raises:
            RecipeError: if the table has several networks, or the figure shows a layer of this one.
        """
        networks = sorted({row.model for row in self.rows if row.model is not None})
        if self.kind != "results" or len(networks) != 1:
            raise RecipeError(f"--model is for tables of one network; {self.name} has {', '.join(networks) or 'none'}")
        return replace(self, rows=tuple(replace(row, network=network) for row in self.rows))


def columns() -> list[str]:
    """The measures of the tables of results: accuracy, and radii of certified robust accuracy."""
    return paper()["columns"]


def list_experiments() -> list[Experiment]:
    """All tables and figures, in the order of the paper.

    Examples:
        >>> [experiment.name for experiment in list_experiments()][:3]
        ['table-1', 'table-2', 'table-3']
    """
    return [_experiment(name, content) for name, content in paper()["tables"].items()]


def find_experiment(name: str) -> Experiment:
    """A table or figure by one of its names.

    Raises:
        RecipeError: for an unknown name; the message lists the known ones.

    Examples:
        >>> find_experiment("trade-off").name, len(find_experiment("table 5").rows)
        ('table-5', 5)
    """
    every = list_experiments()
    wanted = name.strip().lower().replace(" ", "-").replace("_", "-")
    for experiment in every:
        if wanted in (experiment.name, experiment.also):
            return experiment
    names = [name for experiment in every for name in (experiment.name, experiment.also)]
    listed = ", ".join(f"{e.name} ({e.also})" for e in every)
    raise RecipeError(f"the paper has no {name!r}; known: {listed}{did_you_mean(wanted, names)}")


def _experiment(name: str, content: dict[str, Any]) -> Experiment:
    rows = [
        Row(
            row["name"],
            row["source"],
            tuple(row.get("values", ())),
            **({"u": 1.0, "t": 0.25} | row.get("run", {})),
            layer=row.get("layer", 0),
        )
        for row in content["rows"]
        if content["kind"] in ("results", "figure")
    ]
    return Experiment(
        name,
        content["also"],
        content["kind"],
        content["title"],
        content["label"],
        content.get("data", ""),
        tuple(rows),
        content,
    )


def narrower(options: dict[str, Any], part: float) -> tuple[str, ...]:
    """Options of a network with a part of its width, as key=value; even, at least 2.

    Args:
        options: arguments of the model with their defaults.
        part: 1 for the network as it is.

    Examples:
        >>> narrower({"width": 16, "channels": 192, "convs": 12}, 0.25)
        ('width=4', 'channels=48')
    """
    if part == 1:
        return ()
    return tuple(f"{key}={max(2, 2 * round(options[key] * part / 2))}" for key in _WIDTHS if key in options)


def differences(recipe: Recipe, published: Recipe) -> str:
    """How a recipe differs from that of the paper, in one line; empty if the result does not depend on it.

    Examples:
        >>> differences(Recipe(epochs=10, model_options=("width=4",)), Recipe())
        'scaled: 10 instead of 1000 epochs, width=4'
    """
    passes = recipe.epochs * recipe.epoch_part
    found = []
    if passes != published.epochs:
        found.append(f"{passes:.3g} instead of {published.epochs} epochs")
    if recipe.model != published.model:
        found.append(f"{recipe.model} instead of {published.model}")
    found += recipe.model_options
    if recipe.optimizer != published.optimizer:
        found.append(f"{recipe.optimizer} instead of {published.optimizer}")
    others = {
        "batch size": recipe.batch_size != published.batch_size,
        "learning rate": (recipe.lr, recipe.schedule) != (published.lr, published.schedule),
        "weight decay": recipe.weight_decay != published.weight_decay,
        "augmentation": _augmentation(recipe) != _augmentation(published),
        "loss": (recipe.offset, recipe.temperature) != (published.offset, published.temperature),
        "bfloat16": recipe.bf16 != published.bf16,
    }
    if changed := [name for name, is_other in others.items() if is_other]:
        found.append(f"other {', '.join(changed)}")
    return f"scaled: {', '.join(found)}" if found else ""


def _augmentation(recipe: Recipe) -> tuple[Any, ...]:
    names = ("augment", "hue", "saturation", "brightness", "contrast", "rotation", "translation", "flip")
    return (*(getattr(recipe, name) for name in names), recipe.interpolations)
