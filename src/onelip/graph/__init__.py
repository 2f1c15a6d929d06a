"""What a network computes: the traced graph, the operations and their rules, the program of a certificate."""

from onelip.core.errors import CannotTrace
from onelip.graph import kinds, ops as ops
from onelip.graph.calls import Call, Graph, Ref
from onelip.graph.lowering import Lowering, lowers
from onelip.graph.step import Refusal, Step, known_operations, register_rule
from onelip.graph.trace import trace

__all__ = [
    "Call",
    "CannotTrace",
    "Graph",
    "Lowering",
    "Ref",
    "Refusal",
    "Step",
    "kinds",
    "known_operations",
    "lowers",
    "register_rule",
    "trace",
]
