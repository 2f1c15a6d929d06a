"""Rules: one file per family of operations, and the table of them all.

activations     slopes
arithmetic      sums, products with constants
linear          stored weights
movement        views, slices, copies, padding
normalisation   stored and own statistics
pooling         maxima over windows
separable       average pooling, interpolation
sums            sums, means and cumulative sums along axes
"""

from onelip.bounds.rules import (
    activations,
    arithmetic,
    linear,
    movement,
    normalisation,
    pooling,
    separable,
    sums,
)
from onelip.bounds.rules._step import Refusal, Step, Verdict, find_rule, known_operations, register_rule

__all__ = [
    "Refusal",
    "Step",
    "Verdict",
    "activations",
    "arithmetic",
    "find_rule",
    "known_operations",
    "linear",
    "movement",
    "normalisation",
    "pooling",
    "register_rule",
    "separable",
    "sums",
]
