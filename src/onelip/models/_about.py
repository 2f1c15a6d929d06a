"""All that the code says of a model, for `onelip models`: nothing is written a second time for it."""

import inspect
import sys
from dataclasses import dataclass
from typing import Any

from onelip._docstrings import arguments_in, first_line
from onelip.models._registry import builder_of, options_of


@dataclass(frozen=True)
class ModelDescription:
    """A model in words.

    Attributes:
        name: as `create_model` takes it.
        title: one line.
        method: of its layers, unless another is named; None for plain ones.
        options: what else it takes, with the defaults.
        texts: what each of them means.
        layers: the table of its layers, or what else its file says.
    """

    name: str
    title: str
    method: str | None
    options: dict[str, Any]
    texts: dict[str, str]
    layers: str


def describe_model(name: str) -> ModelDescription:
    """Read it off the builder's signature and docstrings.

    Example:
        >>> found = describe_model("aol-fc")
        >>> found.title, found.options, found.texts["width"]
        ('Nine fully connected layers (AOL-FC).', {'width': 4096, 'depth': 9}, 'features of every layer; even.')
    """
    builder, base = builder_of(name)
    options = options_of(name)
    method = options.pop("method", None)
    options.pop("method_options", None)
    texts = arguments_in(builder) if base is None else arguments_in(base) | arguments_in(builder)
    home = sys.modules.get(builder.__module__)
    return ModelDescription(name, first_line(builder), method, options, texts, inspect.getdoc(home) or "")
