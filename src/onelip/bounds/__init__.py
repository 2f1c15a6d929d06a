"""Proved bounds of the norms of stored weights, in float64 and in rational arithmetic."""

from onelip.bounds.exact import exact_bound
from onelip.bounds.fast import ExactBound, ProofFailed, WeightBound, Witness, bound_weight
from onelip.bounds.linear import bound_layer, exact_bound_layer, padding_factor
from onelip.core.errors import NonFiniteWeight

__all__ = [
    "ExactBound",
    "NonFiniteWeight",
    "ProofFailed",
    "WeightBound",
    "Witness",
    "bound_layer",
    "bound_weight",
    "exact_bound",
    "exact_bound_layer",
    "padding_factor",
]
