"""From the constants of the operands to the constant of each call, in the order of the graph.

The input has the constant 1. Each other call gets the smallest of the bounds that are known:

    by its rule         from the constants of its operands (`step.py`)
    by roots            from the constants of the roots of its operands, where these are squares (`ops/squares.py`)
    by parts            from the constant of an earlier call, if its operands are parts of that result (`parts/`)

If there is none, no bound is known of the call, nor of any call that depends on it. Example: x + relu(x) has the
constants 1 (input), 1 (relu) and 2 (sum of both). Every number is about one sample, in L2, in real arithmetic.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from onelip.core.rounding import multiply_up
from onelip.graph.ops.movement import MOVES
from onelip.graph.ops.squares import in_roots
from onelip.graph.parts import Joint
from onelip.graph.step import Call, Graph, Refusal, Step, StepBound, find_rule

_EXACT_ENOUGH = (torch.float32, torch.float64)


def walk(
    graph: Graph, *, effort: Any = "normal", progress: Callable[[Call], None] | None = None
) -> tuple[StepBound, ...]:
    """The bound of every call, or why none is known.

    Args:
        graph: of `trace`.
        effort: how hard to work on each stored weight; see `bound_weight`.
        progress: called with every call before it is bounded.

    Examples:
        >>> from onelip.graph.trace import trace
        >>> class Residual(torch.nn.Module):
        ...     def forward(self, x):
        ...         return x + torch.relu(x)
        >>> [bound.constant for bound in walk(trace(Residual(), torch.zeros(2, 3)))]
        [1.0, 1.0, 2.0]
    """
    bounds: list[StepBound] = []
    constants: list[float] = []
    holes: dict[int, torch.Tensor] = {}
    layers: dict[Any, StepBound] = {}  # a layer used twice is bounded once
    joint = Joint(graph, effort)
    for call in graph.calls:
        if progress is not None:
            progress(call)
        step = Step(call, graph, constants, effort, holes)
        bound = _by_rule(step, layers)
        if any(bounds[i].constant is None for i in call.inputs):
            bound = _by_roots(step, replace(bound, constant=None, root=None), bounds)
        bound = _by_parts(step, bound, joint, bounds)
        bounds.append(bound)
        # Rules of calls that depend on an unknown constant are applied as well, so that all gaps are reported at once.
        constants.append(1.0 if bound.constant is None else bound.constant)
        if bound.holes is not None:
            holes[call.index] = bound.holes
    if bounds[graph.output].holes is not None:
        bounds[graph.output] = StepBound(None, "contains uninitialised memory", is_refused=True)
    return _blamed(graph, bounds)


def _by_rule(step: Step, layers: dict[Any, StepBound]) -> StepBound:
    """The bound of the rule of a call, or why there is none."""
    call = step.call
    if call.op == "input":
        return StepBound(1.0, "the input itself")
    if call.op == "constant":
        return StepBound(0.0, "does not depend on the input")
    try:
        _check(step)
        rule = find_rule(call.op)
        if rule is None:
            raise Refusal(_no_rule(call))
        if call.module is None:
            found = rule(step)
        else:
            key = (id(call.module), step.source.shape)
            if key not in layers:
                layers[key] = rule(step)
            first = layers[key]
            assert first.factor is not None
            found = step.times(first.factor, first.why, details=first.details)
        if found.constant is not None and not 0 <= found.constant < math.inf:
            raise Refusal("its bound is beyond the range of float64")
        return found
    except Refusal as refusal:
        return StepBound(None, str(refusal), is_refused=True)
    except Exception as error:  # a rule that fails proves nothing
        return StepBound(None, f"its rule failed: {type(error).__name__}: {error}", is_refused=True)


def _by_roots(step: Step, bound: StepBound, before: list[StepBound]) -> StepBound:
    """`bound`, or a bound from the roots of the operands."""
    if not any(before[i].root is not None for i in step.call.inputs):
        return bound
    try:
        _check(step)
        return in_roots(step, [other.root for other in before]) or bound
    except Exception:  # a refusal, or a rule that fails: it proves nothing
        return bound


def _by_parts(step: Step, bound: StepBound, joint: Joint, before: list[StepBound]) -> StepBound:
    """The bound of the rule, or a smaller one where parts of one tensor come together."""
    found = joint.enter(step.call, bound)
    constant = None if found is None else before[found.ancestor].constant
    if found is None or constant is None:
        return bound
    try:
        _check(step)
    except Refusal:
        return bound
    constant = multiply_up(found.constant, constant)
    if bound.root is not None:
        return replace(bound, root=min(constant, bound.root))
    if not constant < (math.inf if bound.constant is None else bound.constant):
        return bound
    why = "parts of one tensor, together"
    return StepBound(constant, why, remark=found.remark, ancestor=found.ancestor, holes=bound.holes)


def _blamed(graph: Graph, bounds: list[StepBound]) -> tuple[StepBound, ...]:
    """The bounds, where only calls that the output depends on are refused: others are part of a later bound."""
    found = list(bounds)
    constants, roots = {graph.output}, set[int]()  # calls whose constants, or those of their roots, are needed
    for call in reversed(graph.calls):
        bound = bounds[call.index]
        rests = call.inputs if bound.ancestor is None else [bound.ancestor]
        if call.index in constants:
            (roots if bound.constant is not None and bound.by_roots else constants).update(rests)
        elif call.index in roots and bound.root is not None:
            (roots if bound.by_roots else constants).update(rests)
        if call.index not in constants and bound.is_refused:
            found[call.index] = replace(bound, is_refused=False, why="bounded as a part of a later step")
    return tuple(found)


def _no_rule(call: Call) -> str:
    if not call.inputs and call.op.startswith("aten."):
        return "random, so there is no one function"
    return (
        f"no rule for {call.op}; give one with onelip.graph.register_rule({call.op!r}), or put it into a "
        "LipschitzModule that states its constant"
    )


def _check(step: Step) -> None:
    """Refuse, for every operation, types with too few digits, and results without the batch as the first axis."""
    call = step.call
    if call.op not in MOVES and any(i in step.holes for i in call.inputs):
        raise Refusal("reads uninitialised memory")
    if call.dtype not in _EXACT_ENOUGH:
        name = str(call.dtype).removeprefix("torch.")
        if call.dtype.is_floating_point:
            raise Refusal(f"rounds to {name}, whose rounding error is not negligible; run it in float32 or float64")
        raise Refusal(f"its result is {name}, which {'has no rules' if call.dtype.is_complex else 'jumps'}")
    has_several_results = call.shape == () and call.op != "getitem"
    if not has_several_results and not (call.keeps_batch and call.shape[:1] == (step.graph.batch,)):
        raise Refusal(f"its result {call.shape} does not have the batch as its first axis")
