"""`onelip methods`: the list of methods; `onelip methods NAME`: everything about one."""

import json
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import tyro

from onelip.cli._columns import described, listing, output_width
from onelip.cli._parse import parse
from onelip.training._fields import suggestion
from onelip.training.errors import RecipeError

if TYPE_CHECKING:
    from onelip.methods._method import Method

_GUARANTEES = {
    "proved": "for every parameter, in real arithmetic",
    "at convergence": "in training once an iteration has converged; evaluation divides by a proved bound",
    "none": "no constant by construction; evaluation goes by proved bounds of the stored weights",
}
_MECHANISMS = {
    "parametrization": "the weight is computed from a parameter at each access",
    "projection": "the weight is moved after each step of the optimizer",
    "penalty": "a term is added to the loss",
    "loss": "the loss itself uses the network's constant",
}
_RADII = {
    "constant": "the Lipschitz constant of the network",
    "pairs": "the distances of the last layer's rows, per pair of classes",
}


@dataclass(frozen=True)
class Methods:
    """List the methods that --method takes, with what is guaranteed of each; or tell everything about one."""

    name: Annotated[str | None, tyro.conf.Positional] = None
    """One method."""
    json: bool = False
    """Print JSON: a list of all, or an object for one."""


def run(arguments: Sequence[str]) -> int:
    """Parse and list."""
    command = parse(Methods, "methods", arguments)

    from onelip.methods._about import about
    from onelip.methods._registry import METHODS
    from onelip.methods._table import served_layers

    if command.name is not None:
        if command.name not in METHODS:
            near = suggestion(command.name, METHODS)
            raise RecipeError(f"expected a method of {', '.join(sorted(METHODS))}, got {command.name!r}{near}")
        method = METHODS[command.name]
        print(json.dumps(about(method)) if command.json else _tell(method))
        return 0
    if command.json:
        print(json.dumps([about(method) for method in METHODS.values()]))
        return 0
    rows = [(m.name, m.guarantee, m.mechanism, served_layers(m), m.title) for m in METHODS.values()]
    width = output_width()
    print(listing(("name", "guarantee", "acts as", "layers", "method"), rows, 2, width))
    print(f"\nGuarantee:\n{described(_GUARANTEES.items(), width)}")
    print("\nMore of one, with its options and its paper: onelip methods NAME")
    return 0


def _tell(method: "Method") -> str:
    from onelip.methods._about import citation_of, options_of
    from onelip.methods._table import FOOTNOTES, served_layers

    width = output_width()
    row = method.paper
    marks = "" if row is None else ", ".join(f"{c} {getattr(row, c)}" for c in "EFGM")
    notes = "" if row is None else "; ".join(f"{c}: {FOOTNOTES[n]}" for c, n in row.notes.items())
    facts = [
        ("guarantee", f"{method.guarantee}: {_GUARANTEES[method.guarantee]}"),
        ("acts as", f"{method.mechanism}: {_MECHANISMS[method.mechanism]}"),
        ("layers", served_layers(method) + ("; replaced by modules of its own" if method.replaces else "")),
        ("image size", "must be known when the network is made" if method.needs_input_size else ""),
        ("train = eval", "yes" if method.train_equals_eval else "no; evaluation computes the sound function"),
        ("radii by", _RADII[method.certificate]),
        ("hyperparameters", ", ".join(f"{key} {_spoken(value)}" for key, value in method.hyperparameters.items())),
        ("note", method.note),
        ("paper's table", f"{marks} (efficiency, formal guarantee, generality, modularity)" if marks else ""),
        ("", notes),
        ("paper", citation_of(method)),
    ]
    options = [(f"{o.name}={_spoken(o.default)}", o.text) for o in options_of(method)]
    parts = [
        "\n".join(textwrap.wrap(f"{method.name}: {method.title}", width)),
        described(facts, width),
        f"--method-options, with the defaults:\n{described(options, width)}",
        f'onelip train --method {method.name}\nonelip.constrain(model, "{method.name}")',
    ]
    return "\n\n".join(parts)


def _spoken(value: object) -> str:
    """As --method-options and flags take it."""
    if value is None:
        return ""
    if isinstance(value, tuple):
        return " ".join(map(_spoken, value))
    return value if isinstance(value, str) else json.dumps(value)
