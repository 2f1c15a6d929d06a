"""From the constants of the operands to the constant of each node, in the order of the graph.

The input has the constant 1. A node gets what its rule proves; where there is no rule, or the rule refuses, nobody
vouches for it, and for nothing that rests on it. Every number is about one sample, in L2, in real arithmetic.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from onelip.bounds.graph import Graph, Node
from onelip.bounds.rules import Refusal, Step, Verdict, find_rule
from onelip.bounds.rules.linear import bound_module

_EXACT_ENOUGH = (torch.float32, torch.float64)
# Any result of these is a part of the operand; of other operations with several results, only the first is bounded.
_PIECES = ("aten.split.Tensor", "aten.split_with_sizes.default", "aten.chunk.default", "aten.unbind.int")
_WORDS = {
    "aten.scaled_dot_product_attention.default": "attention multiplies things that all depend on the input",
    "aten.exp.default": "grows without bound",
    "aten.pow.Tensor_Scalar": "its slope grows without bound",
    "aten.square.default": "its slope grows without bound",
    "aten.sqrt.default": "its slope at zero has no bound",
    "aten.rsqrt.default": "its slope at zero has no bound",
    "aten.reciprocal.default": "its slope at zero has no bound",
    "aten.log.default": "its slope at zero has no bound",
    "aten.sign.default": "jumps",
    "aten.round.default": "jumps",
    "aten.floor.default": "jumps",
    "aten.hardshrink.default": "jumps",
    "aten.threshold.default": "may jump at its threshold",
}


def walk(
    graph: Graph, *, effort: Any = "normal", progress: Callable[[Node], None] | None = None
) -> tuple[Verdict, ...]:
    """A verdict for every node.

    Args:
        graph: of `trace`.
        effort: how hard to work on each stored weight; see `bound_weight`.
        progress: called with every node before it is bounded.

    Example:
        >>> from onelip.bounds.graph import trace
        >>> class Residual(torch.nn.Module):
        ...     def forward(self, x):
        ...         return x + torch.relu(x)
        >>> [verdict.constant for verdict in walk(trace(Residual(), torch.zeros(2, 3)))]
        [1.0, 1.0, 2.0]
    """
    verdicts: list[Verdict] = []
    layers: dict[Any, Verdict] = {}  # a layer used twice is bounded once
    for node in graph.nodes:
        if progress is not None:
            progress(node)
        unknown = [i for i in node.inputs if verdicts[i].constant is None]
        # For what rests on an unknown, the rule is asked all the same, so that every gap is named at once.
        known = [1.0 if verdict.constant is None else verdict.constant for verdict in verdicts]
        step = Step(node, graph, known, effort)
        verdict = _checked(_verdict(step, layers))
        verdicts.append(replace(verdict, constant=None) if unknown else verdict)
    return tuple(verdicts)


def _verdict(step: Step, layers: dict[Any, Verdict]) -> Verdict:
    node = step.node
    if node.op == "input":
        return Verdict(1.0, None, "the input itself")
    if node.op == "constant":
        return Verdict(0.0, None, "does not depend on the input")
    try:
        _check(step)
        if node.op == "getitem":
            return _piece(step)
        if node.op != "module":
            rule = find_rule(node.op)
            if rule is None:
                raise Refusal(_no_rule(node))
            return rule(step)
        key = (id(node.module), step.source.shape)
        if key not in layers:
            layers[key] = bound_module(step)
        first = layers[key]
        assert first.factor is not None
        return step.times(first.factor, first.why, details=first.details)
    except Refusal as refusal:
        return Verdict(None, None, str(refusal), is_refused=True)
    except Exception as error:  # a rule that cannot cope with a call vouches for nothing
        return Verdict(None, None, f"its rule failed: {type(error).__name__}: {error}", is_refused=True)


def _no_rule(node: Node) -> str:
    if node.op in _WORDS:
        return _WORDS[node.op]
    if not node.inputs:
        return "random, so there is no one function"
    return (
        f"no rule for {node.op}; give one with onelip.bounds.register_rule({node.op!r}), or put it into a "
        "LipschitzModule that states its constant"
    )


def _check(step: Step) -> None:
    """What holds for every operation: types that keep enough digits, and the batch as the first axis."""
    node = step.node
    if node.dtype not in _EXACT_ENOUGH:
        name = str(node.dtype).removeprefix("torch.")
        if node.dtype.is_floating_point:
            raise Refusal(f"rounds to {name}, whose rounding is no trifle; run it in float32 or float64")
        raise Refusal(f"makes {name} of its input, which {'no rule is for' if node.dtype.is_complex else 'jumps'}")
    has_several_results = node.shape == () and node.op != "getitem"
    if not has_several_results and node.shape[:1] != (step.graph.batch,):
        raise Refusal(f"its result {node.shape} does not have the batch as its first axis")


def _piece(step: Step) -> Verdict:
    producer, index = step.source, step.node.arguments[1]
    if producer.op not in _PIECES and index != 0:
        raise Refusal(f"result {index} of {producer.op} has no rule")
    return step.times(1.0, f"result {index} of {producer.op}")


def _checked(verdict: Verdict) -> Verdict:
    """Infinite and undefined constants prove nothing."""
    if verdict.constant is None or 0 <= verdict.constant < math.inf:
        return verdict
    return Verdict(None, None, "its bound is beyond the range of float64", is_refused=True)
