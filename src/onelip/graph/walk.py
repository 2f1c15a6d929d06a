"""From the constants of the operands to the constant of each node, in the order of the graph.

The input has the constant 1. A node gets what its rule proves; where there is no rule, or the rule refuses, no bound is
known of it, nor of anything that rests on it. Every number is about one sample, in L2, in real arithmetic.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from onelip.core.rounding import multiply_up
from onelip.graph._joint import Joint
from onelip.graph.ops.linear import bound_leaf
from onelip.graph.ops.movement import MOVES, SPLITS
from onelip.graph.ops.squares import in_roots, squared
from onelip.graph.step import Refusal, Step, StepBound, find_rule
from onelip.graph.trace import Graph, Node

_SEVERAL = SPLITS | {"aten.aminmax.default"}
_EXACT_ENOUGH = (torch.float32, torch.float64)
_WORDS = {
    "aten.scaled_dot_product_attention.default": "attention multiplies things that all depend on the input",
    "aten.exp.default": "grows without bound",
    "aten.sqrt.default": "its slope at zero has no bound",
    "aten.rsqrt.default": "its slope at zero has no bound",
    "aten.reciprocal.default": "its slope at zero has no bound",
    "aten.log.default": "its slope at zero has no bound",
    "aten.sign.default": "jumps",
    "aten.round.default": "jumps",
    "aten.floor.default": "jumps",
    "aten.hardshrink.default": "jumps",
}


def walk(
    graph: Graph, *, effort: Any = "normal", progress: Callable[[Node], None] | None = None
) -> tuple[StepBound, ...]:
    """A verdict for every node.

    Args:
        graph: of `trace`.
        effort: how hard to work on each stored weight; see `bound_weight`.
        progress: called with every node before it is bounded.

    Examples:
        >>> from onelip.graph.trace import trace
        >>> class Residual(torch.nn.Module):
        ...     def forward(self, x):
        ...         return x + torch.relu(x)
        >>> [verdict.constant for verdict in walk(trace(Residual(), torch.zeros(2, 3)))]
        [1.0, 1.0, 2.0]
    """
    verdicts: list[StepBound] = []
    layers: dict[Any, StepBound] = {}  # a layer used twice is bounded once
    joint = Joint(graph, effort)
    for node in graph.nodes:
        if progress is not None:
            progress(node)
        unknown = [i for i in node.inputs if verdicts[i].constant is None]
        # For what rests on an unknown, the rule is asked all the same, so that every gap is named at once.
        known = [1.0 if verdict.constant is None else verdict.constant for verdict in verdicts]
        holes = {i: verdicts[i].holes for i in node.inputs}
        step = Step(node, graph, known, effort, {i: found for i, found in holes.items() if found is not None})
        verdict = _checked(_verdict(step, layers))
        if unknown:
            verdict = _in_roots(step, replace(verdict, constant=None, root=None), verdicts)
        verdicts.append(_together(step, verdict, joint, verdicts))
    if verdicts[graph.output].holes is not None:
        verdicts[graph.output] = StepBound(None, "contains memory that is not filled", is_refused=True)
    return _blamed(graph, verdicts)


def _in_roots(step: Step, verdict: StepBound, before: list[StepBound]) -> StepBound:
    """The verdict, or what is known by the roots of the operands."""
    if not any(before[i].root is not None for i in step.node.inputs):
        return verdict
    try:
        _check(step)
        return in_roots(step, [other.root for other in before]) or verdict
    except Refusal:
        return verdict


def _together(step: Step, verdict: StepBound, joint: Joint, before: list[StepBound]) -> StepBound:
    """The verdict, or a smaller bound where parts of one tensor come together."""
    found = joint.enter(step.node, verdict)
    constant = None if found is None else before[found.ancestor].constant
    if found is None or constant is None:
        return verdict
    try:
        _check(step)
    except Refusal:
        return verdict
    constant = multiply_up(found.constant, constant)
    if verdict.root is not None:
        return replace(verdict, root=min(constant, verdict.root))
    if not constant < (math.inf if verdict.constant is None else verdict.constant):
        return verdict
    why = "parts of one tensor, together"
    return StepBound(constant, why, remark=found.remark, ancestor=found.ancestor, holes=verdict.holes)


def _blamed(graph: Graph, verdicts: list[StepBound]) -> tuple[StepBound, ...]:
    """The verdicts; steps that the output does not rest on, since others are bounded without them, are not refused."""
    found = list(verdicts)
    constants, roots = {graph.output}, set[int]()  # nodes of which the constant is needed, or that of the root
    for node in reversed(graph.nodes):
        verdict = verdicts[node.index]
        rests = node.inputs if verdict.ancestor is None else [verdict.ancestor]
        if node.index in constants:
            (roots if verdict.constant is not None and verdict.by_roots else constants).update(rests)
        elif node.index in roots and verdict.root is not None:
            (roots if verdict.by_roots else constants).update(rests)
        if node.index not in constants and verdict.is_refused:
            found[node.index] = replace(verdict, is_refused=False, why="bounded as a part of a later step")
    return tuple(found)


def _verdict(step: Step, layers: dict[Any, StepBound]) -> StepBound:
    node = step.node
    if node.op == "input":
        return StepBound(1.0, "the input itself")
    if node.op == "constant":
        return StepBound(0.0, "does not depend on the input")
    try:
        _check(step)
        if node.op == "getitem":
            return _piece(step)
        if node.op != "module":
            if (square := squared(step)) is not None:
                return square
            rule = find_rule(node.op)
            if rule is None:
                raise Refusal(_no_rule(node))
            return rule(step)
        key = (id(node.module), step.source.shape)
        if key not in layers:
            layers[key] = bound_leaf(step)
        first = layers[key]
        assert first.factor is not None
        return step.times(first.factor, first.why, details=first.details)
    except Refusal as refusal:
        return StepBound(None, str(refusal), is_refused=True)
    except Exception as error:  # a rule that fails proves nothing
        return StepBound(None, f"its rule failed: {type(error).__name__}: {error}", is_refused=True)


def _no_rule(node: Node) -> str:
    if node.op in _WORDS:
        return _WORDS[node.op]
    if not node.inputs:
        return "random, so there is no one function"
    return (
        f"no rule for {node.op}; give one with onelip.graph.register_rule({node.op!r}), or put it into a "
        "LipschitzModule that states its constant"
    )


def _check(step: Step) -> None:
    """What holds for every operation: types that keep enough digits, and the batch as the first axis."""
    node = step.node
    if step.holes and node.op not in MOVES:
        raise Refusal("reads memory that is not filled")
    if node.dtype not in _EXACT_ENOUGH:
        name = str(node.dtype).removeprefix("torch.")
        if node.dtype.is_floating_point:
            raise Refusal(f"rounds to {name}, whose rounding error is not negligible; run it in float32 or float64")
        raise Refusal(f"makes {name} of its input, which {'no rule is for' if node.dtype.is_complex else 'jumps'}")
    has_several_results = node.shape == () and node.op != "getitem"
    if not has_several_results and node.shape[:1] != (step.graph.batch,):
        raise Refusal(f"its result {node.shape} does not have the batch as its first axis")


def _piece(step: Step) -> StepBound:
    producer, index = step.source, step.node.arguments[1]
    if producer.op not in _SEVERAL and index != 0:  # of other operations, only the first result is bounded
        raise Refusal(f"result {index} of {producer.op} has no rule")
    return step.times(1.0, f"result {index} of {producer.op}")


def _checked(verdict: StepBound) -> StepBound:
    """Infinite and undefined constants prove nothing."""
    if verdict.constant is None or 0 <= verdict.constant < math.inf:
        return verdict
    return StepBound(None, "its bound is beyond the range of float64", is_refused=True)
