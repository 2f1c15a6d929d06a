"""Rules: one file per family of operations, and the table of them all.

activations     slopes
arithmetic      sums, products with constants
averages        linear maps without negative coefficients
interpolation   bicubic
linear          stored weights
movement        views, slices, copies, padding
normalisation   stored and own statistics
pooling         maxima over windows
"""

from onelip.bounds.rules import (
    activations,
    arithmetic,
    averages,
    interpolation,
    linear,
    movement,
    normalisation,
    pooling,
)
from onelip.bounds.rules._step import Refusal, Step, Verdict, find_rule, known_operations, register_rule

__all__ = [
    "Refusal",
    "Step",
    "Verdict",
    "activations",
    "arithmetic",
    "averages",
    "find_rule",
    "interpolation",
    "known_operations",
    "linear",
    "movement",
    "normalisation",
    "pooling",
    "register_rule",
]
