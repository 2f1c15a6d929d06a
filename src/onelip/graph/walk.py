"""From the constants of the operands to the constant of each call, in the order of the graph.

The input has the constant 1. A call gets what its rule proves; where there is no rule, or the rule refuses, no bound is
known of it, nor of anything that rests on it. Every number is about one sample, in L2, in real arithmetic.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from onelip.core.rounding import multiply_up
from onelip.graph.calls import Call, Graph
from onelip.graph.ops.linear import bound_leaf
from onelip.graph.ops.movement import MOVES, SPLITS
from onelip.graph.ops.squares import in_roots, squared
from onelip.graph.parts import Joint
from onelip.graph.step import Refusal, Step, StepBound, find_rule

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
    graph: Graph, *, effort: Any = "normal", progress: Callable[[Call], None] | None = None
) -> tuple[StepBound, ...]:
    """A verdict for every call.

    Args:
        graph: of `trace`.
        effort: how hard to work on each stored weight; see `bound_weight`.
        progress: called with every call before it is bounded.

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
    for call in graph.calls:
        if progress is not None:
            progress(call)
        unknown = [i for i in call.inputs if verdicts[i].constant is None]
        # For what rests on an unknown, the rule is asked all the same, so that every gap is named at once.
        known = [1.0 if verdict.constant is None else verdict.constant for verdict in verdicts]
        holes = {i: verdicts[i].holes for i in call.inputs}
        step = Step(call, graph, known, effort, {i: found for i, found in holes.items() if found is not None})
        verdict = _checked(_verdict(step, layers))
        if unknown:
            verdict = _in_roots(step, replace(verdict, constant=None, root=None), verdicts)
        verdicts.append(_together(step, verdict, joint, verdicts))
    if verdicts[graph.output].holes is not None:
        verdicts[graph.output] = StepBound(None, "contains memory that is not filled", is_refused=True)
    return _blamed(graph, verdicts)


def _in_roots(step: Step, verdict: StepBound, before: list[StepBound]) -> StepBound:
    """The bound of the rule, or one from the roots of the operands."""
    if not any(before[i].root is not None for i in step.call.inputs):
        return verdict
    try:
        _check(step)
        return in_roots(step, [other.root for other in before]) or verdict
    except Refusal:
        return verdict


def _together(step: Step, verdict: StepBound, joint: Joint, before: list[StepBound]) -> StepBound:
    """The verdict, or a smaller bound where parts of one tensor come together."""
    found = joint.enter(step.call, verdict)
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
    constants, roots = {graph.output}, set[int]()  # calls of which the constant is needed, or that of the root
    for call in reversed(graph.calls):
        verdict = verdicts[call.index]
        rests = call.inputs if verdict.ancestor is None else [verdict.ancestor]
        if call.index in constants:
            (roots if verdict.constant is not None and verdict.by_roots else constants).update(rests)
        elif call.index in roots and verdict.root is not None:
            (roots if verdict.by_roots else constants).update(rests)
        if call.index not in constants and verdict.is_refused:
            found[call.index] = replace(verdict, is_refused=False, why="bounded as a part of a later step")
    return tuple(found)


def _verdict(step: Step, layers: dict[Any, StepBound]) -> StepBound:
    call = step.call
    if call.op == "input":
        return StepBound(1.0, "the input itself")
    if call.op == "constant":
        return StepBound(0.0, "does not depend on the input")
    try:
        _check(step)
        if call.op == "getitem":
            return _piece(step)
        if call.op != "module":
            if (square := squared(step)) is not None:
                return square
            rule = find_rule(call.op)
            if rule is None:
                raise Refusal(_no_rule(call))
            return rule(step)
        key = (id(call.module), step.source.shape)
        if key not in layers:
            layers[key] = bound_leaf(step)
        first = layers[key]
        assert first.factor is not None
        return step.times(first.factor, first.why, details=first.details)
    except Refusal as refusal:
        return StepBound(None, str(refusal), is_refused=True)
    except Exception as error:  # a rule that fails proves nothing
        return StepBound(None, f"its rule failed: {type(error).__name__}: {error}", is_refused=True)


def _no_rule(call: Call) -> str:
    if call.op in _WORDS:
        return _WORDS[call.op]
    if not call.inputs and call.op.startswith("aten."):
        return "random, so there is no one function"
    return (
        f"no rule for {call.op}; give one with onelip.graph.register_rule({call.op!r}), or put it into a "
        "LipschitzModule that states its constant"
    )


def _check(step: Step) -> None:
    """What holds for every operation: types that keep enough digits, and the batch as the first axis."""
    call = step.call
    if step.holes and call.op not in MOVES:
        raise Refusal("reads memory that is not filled")
    if call.dtype not in _EXACT_ENOUGH:
        name = str(call.dtype).removeprefix("torch.")
        if call.dtype.is_floating_point:
            raise Refusal(f"rounds to {name}, whose rounding error is not negligible; run it in float32 or float64")
        raise Refusal(f"its result is {name}, which {'has no rules' if call.dtype.is_complex else 'jumps'}")
    has_several_results = call.shape == () and call.op != "getitem"
    if not has_several_results and not (call.keeps_batch and call.shape[:1] == (step.graph.batch,)):
        raise Refusal(f"its result {call.shape} does not have the batch as its first axis")


def _piece(step: Step) -> StepBound:
    producer, index = step.source, step.call.arguments[1]
    if producer.op not in _SEVERAL and index != 0:  # of other operations, only the first result is bounded
        raise Refusal(f"result {index} of {producer.op} has no rule")
    return step.times(1.0, f"result {index} of {producer.op}")


def _checked(verdict: StepBound) -> StepBound:
    """Infinite and undefined constants prove nothing."""
    if verdict.constant is None or 0 <= verdict.constant < math.inf:
        return verdict
    return StepBound(None, "its bound is beyond the range of float64", is_refused=True)
