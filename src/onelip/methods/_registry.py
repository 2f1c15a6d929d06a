"""The one table of methods, read by `onelip.constrain`, the documentation and the contract test."""

import difflib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from torch import nn

from onelip.geometry import LINEAR_LAYERS
from onelip.methods.aol import aol

Guarantee = Literal["proved", "at convergence", "none"]
Mechanism = Literal["parametrization", "projection", "penalty", "loss"]


@dataclass(frozen=True)
class Method:
    """One method of the literature.

    Attributes:
        name: how users call it.
        title: the method's own name, and the paper it is from.
        mechanism: what it acts on: the weight at each access, the weight after each step, or the loss.
        guarantee: what is known of the constant it claims: proved for every weight, true only once an iteration has
            converged, or nothing. The contract test proves "proved".
        layers: the torch layers it serves.
        apply: verb (layer, **options) -> layer, in place.
        options: keyword settings that the contract test runs besides the defaults.
    """

    name: str
    title: str
    mechanism: Mechanism
    guarantee: Guarantee
    layers: tuple[type[nn.Module], ...]
    apply: Callable[..., nn.Module]
    options: tuple[dict[str, object], ...] = ()


_METHODS = (
    Method(
        name="aol",
        title="AOL, almost-orthogonal layers (Prach and Lampert, 2022)",
        mechanism="parametrization",
        guarantee="proved",
        layers=LINEAR_LAYERS,
        apply=aol,
        options=(
            {"side": "outputs"},
            {"side": "auto"},
            {"steps": 2},
            {"steps": 3, "side": "outputs"},
            {"learn_weights": True},
            {"learn_weights": True, "steps": 2},
            {"lipschitz": 0.5},
        ),
    ),
)

METHODS: dict[str, Method] = {method.name: method for method in _METHODS}


def list_methods() -> list[str]:
    """Names of all methods, for `onelip.constrain`."""
    return sorted(METHODS)


def get_method(name: str) -> Method:
    """Look a method up.

    Example:
        >>> get_method("aol").guarantee
        'proved'
    """
    if name not in METHODS:
        near = difflib.get_close_matches(name, METHODS, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"expected one of the methods {', '.join(list_methods())}, got {name!r}{hint}")
    return METHODS[name]


def markdown_table() -> str:
    """The registry as the table of docs/methods.md."""
    lines = ["| name | method | acts as | guarantee | layers |", "|---|---|---|---|---|"]
    for name in list_methods():
        method = METHODS[name]
        layers = ", ".join(layer.__name__ for layer in method.layers)
        lines.append(f"| `{name}` | {method.title} | {method.mechanism} | {method.guarantee} | {layers} |")
    return "\n".join(lines)
