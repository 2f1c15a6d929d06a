"""Proofs of Lipschitz constants: of stored weights in float64 and in rational arithmetic, and of whole modules."""

import importlib
from typing import TYPE_CHECKING, Any

from onelip.bounds.exact import exact_bound
from onelip.bounds.fast import bound_weight
from onelip.bounds.linear import bound_layer, exact_bound_layer
from onelip.bounds.padding import padding_factor
from onelip.bounds.witness import Bound, ExactBound, ProofFailed, Witness
from onelip.core.errors import NonFiniteWeight

if TYPE_CHECKING:
    from onelip.bounds.graph import CannotTrace, trace
    from onelip.bounds.rules import register_rule

# These stand on the rest of the package, which stands on the bounds above: loaded when they are first used.
_LATER = {"CannotTrace": "graph", "register_rule": "rules", "trace": "graph"}

__all__ = [
    "Bound",
    "CannotTrace",
    "ExactBound",
    "NonFiniteWeight",
    "ProofFailed",
    "Witness",
    "bound_layer",
    "bound_weight",
    "exact_bound",
    "exact_bound_layer",
    "padding_factor",
    "register_rule",
    "trace",
]


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'onelip.bounds' has no attribute {name!r}")
    return getattr(importlib.import_module(f"onelip.bounds.{_LATER[name]}"), name)
