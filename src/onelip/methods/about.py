"""All that the code says of a method, for `onelip methods`: nothing is written a second time for it."""

import functools
import inspect
import sys
from dataclasses import dataclass
from typing import Any

from onelip.core.docstrings import arguments_in
from onelip.methods.method import Method

_LAST_LAYER = "normalised gives the last layer rows of length 1, which are certified per pair of classes."


@dataclass(frozen=True)
class Option:
    """What --method-options takes."""

    name: str
    default: Any
    text: str


def options_of(method: Method) -> list[Option]:
    """The options of a method: those of its layers, and of every method. Options of its loss: `onelip.losses`.

    Examples:
        >>> from onelip.methods.orthogonal.oni import METHOD
        >>> [(option.name, option.default) for option in options_of(METHOD)]
        [('steps', 5), ('lipschitz', 1.0), ('last_layer', None)]
    """
    parameters = inspect.signature(method.apply).parameters.values()
    # input_size is the layer's own place in the network: the model gives it.
    of_layers = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.name != "input_size"]
    found = [_option(method.apply, name) for name in of_layers]
    return [*found, Option("last_layer", None, _LAST_LAYER)]


def _option(owner: Any, name: str) -> Option:
    documented = owner.func if isinstance(owner, functools.partial) else owner
    return Option(name, inspect.signature(owner).parameters[name].default, arguments_in(documented).get(name, ""))


def citation_of(method: Method) -> str:
    """The paper: the method's own field, or the paragraph "Citation:" in the docstring of its file.

    Examples:
        >>> from onelip.methods.orthogonal.oni import METHOD
        >>> citation_of(METHOD).endswith("CVPR 2020.")
        True
    """
    if method.citation:
        return method.citation
    homes = (module for name, module in sys.modules.items() if name.startswith("onelip.methods."))
    home = next((module for module in homes if _defines(module, method)), None)
    _, _, rest = (getattr(home, "__doc__", None) or "").partition("Citation: ")
    return " ".join(rest.partition("\n\n")[0].split())


def _defines(module: object, method: Method) -> bool:
    # Files import the METHOD of others by other names.
    return any(value is method for name, value in vars(module).items() if name in ("METHOD", "RESHAPED"))


def about(method: Method) -> dict[str, Any]:
    """Everything, as JSON has it."""
    return {
        "name": method.name,
        "title": method.title,
        "mechanism": method.mechanism,
        "guarantee": method.guarantee,
        "train_equals_eval": method.train_equals_eval,
        "paper": None if method.paper is None else {c: getattr(method.paper, c) for c in "EFGM"},
        "hyperparameters": dict(method.hyperparameters),
        "options": {option.name: option.default for option in options_of(method)},
        "loss": method.loss,
        "certificate": method.certificate,
        "needs_input_size": method.needs_input_size,
        "note": method.note,
        "layers": [layer.__name__ for layer in method.layers],
        "citation": citation_of(method),
    }
