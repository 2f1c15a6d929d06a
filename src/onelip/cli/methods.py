"""`onelip methods`: the list of methods; `onelip methods NAME`: a description of one."""

import json
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from onelip.cli._common import Flag, described, listing, option_text, output_width, parse, unset
from onelip.core.errors import check_known

if TYPE_CHECKING:
    from onelip.methods.registry import Method

_GUARANTEES = {
    "proved": "for every parameter, in real arithmetic",
    "at convergence": "in training once an iteration has converged; evaluation divides by a proved bound",
    "none": "no constant by construction; evaluation uses proved bounds of the stored weights",
}
_MECHANISMS = {
    "parametrization": "the weight is computed from a parameter at each access",
    "projection": "the weight is projected after each step of the optimizer",
    "penalty": "a term is added to the loss",
    "loss": "the loss itself uses the network's constant",
}
_RADII = {
    "constant": "the Lipschitz constant of the network",
    "pairs": "the distances of the last layer's rows, per pair of classes",
}


@dataclass(frozen=True)
class Methods:
    """List the methods for --method with their guarantees, or describe one."""

    name: Annotated[str | None, tyro.conf.Positional, unset("[NAME]")] = None
    """Method to describe."""
    json: Flag = False
    """Print JSON: a list of all methods, or an object for one."""


def run(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    command = parse(Methods, "methods", arguments)

    from onelip.methods.registry import METHODS, by_year, supported_layers

    if command.name is not None:
        check_known("method", command.name, sorted(METHODS))
        method = METHODS[command.name]
        print(json.dumps(_about(method)) if command.json else _describe(method))
        return 0
    if command.json:
        print(json.dumps([_about(method) for method in by_year()]))
        return 0
    rows = [(m.name, m.guarantee or "none", m.mechanism, supported_layers(m), m.title) for m in by_year()]
    width = output_width()
    print(listing(("name", "guarantee", "acts as", "layers", "method"), rows, 2, width))
    print(f"\nGuarantee:\n{described(_GUARANTEES.items(), width)}")
    print("\nOptions and paper of a method: onelip methods NAME")
    return 0


def _about(method: "Method") -> dict[str, Any]:
    from onelip.methods.registry import about

    return about(method) | {"loss_options": _loss_options(method)}


def _loss_options(method: "Method") -> dict[str, Any]:
    from onelip.losses import loss_options

    return {} if method.loss is None else {**loss_options(method.loss), **method.loss_options}


def _describe(method: "Method") -> str:
    from onelip.core.docstrings import arguments_in
    from onelip.losses import find_loss
    from onelip.methods.registry import FOOTNOTES, options_of, supported_layers

    width = output_width()
    row = method.paper
    marks = "" if row is None else ", ".join(f"{c} {getattr(row, c)}" for c in "EFGM")
    notes = "" if row is None else "; ".join(f"{c}: {FOOTNOTES[n]}" for c, n in row.notes.items())
    guarantee = method.guarantee or "none"
    facts = [
        ("guarantee", f"{guarantee}: {_GUARANTEES[guarantee]}"),
        ("acts as", f"{method.mechanism}: {_MECHANISMS[method.mechanism]}"),
        ("layers", supported_layers(method) + ("; replaced by modules of its own" if method.replaces else "")),
        ("image size", "must be known when the network is made" if method.needs_input_size else ""),
        ("train = eval", "yes" if method.train_equals_eval else "no; evaluation computes the sound function"),
        ("loss", method.loss or ""),
        ("radii by", _RADII[method.certificate]),
        ("hyperparameters", ", ".join(f"{key} {option_text(value)}" for key, value in method.hyperparameters.items())),
        ("with --budget", "" if method.fast_lr is None else f"SGD, lr {method.fast_lr:g} for aol-fast networks"),
        ("note", method.note),
        ("paper's table", f"{marks} (efficiency, formal guarantee, generality, modularity)" if marks else ""),
        ("", notes),
        ("paper", method.citation),
    ]
    options = [(f"{o.name}={option_text(o.default)}", o.text) for o in options_of(method)]
    loss = []
    if method.loss is not None:
        texts = arguments_in(find_loss(method.loss))
        listed = [(f"{name}={option_text(value)}", texts[name]) for name, value in _loss_options(method).items()]
        loss = [f"--loss-options, with the defaults:\n{described(listed, width)}"]
    parts = [
        "\n".join(textwrap.wrap(f"{method.name}: {method.title}", width)),
        described(facts, width),
        f"--method-options, with the defaults:\n{described(options, width)}",
        *loss,
        f'onelip train --method {method.name}\nonelip.constrain(model, "{method.name}")',
    ]
    return "\n\n".join(parts)
