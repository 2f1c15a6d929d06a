"""Traced networks: their graphs, the rules of their operations, and the programs of certificates.

Read the modules in this order:

    step.py         a traced network: its calls; rules: the constant of a call
    trace.py        from a model to its calls, with _opaque.py and _reader.py
    ops/            the rules, one file for each family of operations
    walk.py         the constants of all calls, for the audit
    parts/          tighter constants for calls that join parts of one tensor
    modules.py      the constant of a module by itself, for the summary
    kinds.py        the nodes of a certified program: how they run, and their rounding errors
    lowering.py     from calls to nodes
    reference.py    runs a graph and compares a model with it
"""

from onelip.core.errors import CannotTrace
from onelip.graph import kinds, ops as ops
from onelip.graph.lowering import Lowering, lowers
from onelip.graph.step import Call, Graph, Ref, Refusal, Step, known_operations, register_rule
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
