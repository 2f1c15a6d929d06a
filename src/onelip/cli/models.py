"""`onelip models`: list the architectures; `onelip models NAME`: describe one."""

import json
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated

import tyro

from onelip.cli._common import Flag, described, listing, option_text, output_width, parse, unset
from onelip.core.errors import check_known

if TYPE_CHECKING:
    from onelip.models import ModelDescription


@dataclass(frozen=True)
class Models:
    """List the architectures for --model, or describe one."""

    name: Annotated[str | None, tyro.conf.Positional, unset("[NAME]")] = None
    """Model to describe."""
    filter: str = "*"
    """List only names that match this pattern, such as 'aol-*'."""
    json: Flag = False
    """Print JSON: a list of names, or an object for one model."""


def run(arguments: Sequence[str]) -> int:
    """Run the command; returns the exit code."""
    command = parse(Models, "models", arguments)

    from onelip.models import describe_model, list_models

    if command.name is not None:
        check_known("model", command.name, list_models())
        found = describe_model(command.name)
        print(json.dumps(asdict(found)) if command.json else _describe(found))
        return 0
    names = list_models(command.filter)
    if command.json:
        print(json.dumps(names))
    elif not names:
        print(f"no model matches {command.filter!r}")
    else:
        rows = [(m.name, _options(m), m.title) for m in map(describe_model, names)]
        print(listing(("name", "options", "description"), rows, 1, output_width()))
        print("\nLayers and options of one model: onelip models NAME")
    return 0


def _options(model: "ModelDescription") -> str:
    return " ".join(f"{name}={option_text(value)}" for name, value in model.options.items())


def _describe(model: "ModelDescription") -> str:
    width = output_width()
    # Tables are indented and not wrapped.
    layers = [
        part if part.startswith(" ") else "\n".join(textwrap.wrap(part, min(width, 120), break_long_words=False))
        for part in model.layers.split("\n\n")
    ]
    options = [(f"{name}={option_text(value)}", model.texts.get(name, "-")) for name, value in model.options.items()]
    parts = [
        f"{model.name}: {model.title}",
        *filter(None, layers),
        f"default method: {model.method or 'none'}",
        f"--model-options, with the defaults:\n{described(options, width)}" if options else "",
        f'onelip train --model {model.name}\nonelip.create_model("{model.name}")',
    ]
    return "\n\n".join(filter(None, parts))
