"""Roots of sums of squares: L2 pooling, moduli, sqrt(x^2 + eps).

A square has no Lipschitz constant, but the root of a sum of squares has one. So of a call q >= 0 that is made of
squares it is kept how steep its root is, entry by entry: `StepBound.root`.

    q = x^2                 sqrt(q) = |x|: the constant of x
    c q, c >= 0             sqrt(c) times as much
    q1 + q2                 sqrt(q) is the norm of the pair (sqrt(q1), sqrt(q2)): root of the squares of both
    q + c, max(q, c)        the same, c >= 0 being a constant
    A q, A >= 0             entry i of the root is the norm of (sqrt(a_ij q_j))_j, so its square moves by at most
                            sum_j a_ij d_j^2, where sqrt(q_j) moves by d_j: summed over i, this gives the root of the
                            largest sum of a column
    moved, maximum          as for sqrt(q), since the root is increasing
    sqrt(q)                 this is the constant of the call
"""

from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import torch

from onelip.core.rounding import hypotenuse_up, inverse_up, multiply_up, up_root
from onelip.graph.ops.movement import COPIES, MOVES, inserted_everywhere
from onelip.graph.ops.pooling import SEPARABLE, read_matrices
from onelip.graph.step import Call, Ref, Step, StepBound, check_alike, check_axes, find_rule, finite, register_rule

_WITH_CONSTANTS = [f"aten.{name}.{overload}" for name in ("add", "mul", "div") for overload in ("Tensor", "Scalar")]
_LIKE_ITSELF = {f"aten.{name}.default" for name in ("relu", "abs", "clamp_min")} | COPIES
_INCREASING = MOVES | {
    *(
        f"aten.{name}"
        for name in ("amax.default", "amin.default", "max.dim", "min.dim", "sort.default", "topk.default")
    ),
    *(f"aten.max_pool{d}d.default" for d in (1, 2, 3)),
    *(f"aten.max_pool{d}d_with_indices.default" for d in (1, 2, 3)),
    *(f"aten.adaptive_max_pool{d}d.default" for d in (1, 2, 3)),
}  # fmt: skip


@register_rule("aten.square.default")
def square(step: Step) -> StepBound:
    """Squares have no constant, but their roots have."""
    root = step.constants[step.call.inputs[0]]
    return StepBound(None, "its slope grows without bound", is_refused=True, root=root, root_factor=1.0)


def in_roots(step: Step, roots: Sequence[float | None]) -> StepBound | None:
    """The bound on a step that works on squares, or None.

    Args:
        step: a call that has no bound by its own rule.
        roots: constants of the roots of the calls before, or None.
    """
    call = step.call
    made = [i for i in call.inputs if roots[i] is not None]
    if not made:
        return None
    if (base := _sign_times_magnitude(step)) is not None and (root := roots[base]) is not None:
        why = "a number is its sign times its magnitude"
        return StepBound(None, why, root=root, root_factor=1.0, ancestor=base, by_roots=True)
    if len(made) < len(call.inputs):
        return None
    known = {i: root for i in made if (root := roots[i]) is not None}
    if call.op in ("aten.sqrt.default", "aten.pow.Tensor_Scalar"):
        if call.op == "aten.pow.Tensor_Scalar" and call.arguments[1] != 0.5:
            return None
        return StepBound(known[call.inputs[0]], "root of a sum of squares", root_factor=1.0, by_roots=True)
    if len(made) > 1:
        root = _of_several(step, known)
        return None if root is None else StepBound(None, "sum of squares", root=root, by_roots=True)
    factor = _of_one(step)
    if factor is None:
        return None
    root = multiply_up(factor, known[call.inputs[0]])
    return StepBound(None, "sum of squares", root=root, root_factor=factor, by_roots=True)


def _of_several(step: Step, known: dict[int, float]) -> float | None:
    if step.call.op in MOVES:
        return _moved(step, known)
    if step.call.op != "aten.add.Tensor" or finite(step.argument("alpha")) != 1:
        return None
    shapes = [step.graph.calls[i].shape for i in known]
    return hypotenuse_up(*known.values()) if all(shape == step.call.shape for shape in shapes) else None


def _moved(step: Step, known: Any) -> float | None:
    """By the rule of the operation, on the roots."""
    rule = find_rule(step.call.op)
    assert rule is not None
    constant = rule(Step(step.call, step.graph, known, step.effort)).constant
    return constant if step.call.op not in MOVES or _inserts_no_negative(step) else None


def _inserts_no_negative(step: Step) -> bool:
    """Whether all numbers that an operation inserts between entries, such as padding, are nonnegative."""
    return all(bool((piece >= 0).all()) for piece in inserted_everywhere(step))


def _of_one(step: Step) -> float | None:
    """How much steeper the root of the result is than that of the operand."""
    call = step.call
    if call.op in _LIKE_ITSELF:
        return 1.0
    if call.op in _INCREASING:
        return _moved(step, {call.inputs[0]: 1.0})
    if call.op in ("aten.sum.dim_IntList", "aten.mean.dim"):
        count = check_axes(step, step.argument("dim"))
        if count == 0:
            return None
        return 1.0 if "sum" in call.op else up_root(Fraction(1, count))
    if call.op in SEPARABLE:
        return _of_columns(step)
    if call.op not in _WITH_CONSTANTS:
        return None
    given = [step.argument("self"), step.argument("other")]
    name = call.op.split(".")[1]
    if isinstance(given[1], Ref) and (name == "div" or isinstance(given[0], Ref)):
        return None
    check_alike(step, *given)
    constant = finite(given[1] if isinstance(given[0], Ref) else given[0])
    if step.graph.calls[call.inputs[0]].shape != call.shape or not bool((constant >= 0).all()):
        return None
    if not constant.numel():
        return None
    if name == "add":
        return 1.0 if finite(step.argument("alpha")) == 1 else None
    if name == "div":
        least = float(constant.min())
        return up_root(Fraction(inverse_up(least))) if least > 0 else None
    return up_root(Fraction(float(constant.max())))


def _of_columns(step: Step) -> float | None:
    """Root of the largest sum of a column."""
    matrices, scale = read_matrices(step)
    product = Fraction(scale)
    for matrix in matrices:
        if not bool((matrix.values >= 0).all()):
            return None
        sums = torch.zeros(matrix.width, dtype=torch.float64)
        sums.index_add_(0, matrix.columns.flatten(), matrix.values.flatten())
        product *= Fraction(float(sums.max()))
    return up_root(product * (1 + Fraction(1, 2**40))) if product >= 0 else None


def _sign_times_magnitude(step: Step) -> int | None:
    """The call q, for sign(q) * relu(abs(q)): torch's way to the root in its L2 pooling."""
    if step.call.op != "aten.mul.Tensor" or len(step.call.inputs) != 2:
        return None
    calls = [step.graph.calls[i] for i in step.call.inputs]
    for sign, other in (calls, calls[::-1]):
        if sign.op == "aten.sign.default" and _is_magnitude(other, sign.inputs[0], step):
            return sign.inputs[0]
    return None


def _is_magnitude(call: Call, of: int, step: Step) -> bool:
    while call.index != of:
        if call.op not in ("aten.relu.default", "aten.abs.default"):
            return False
        call = step.graph.calls[call.inputs[0]]
    return True
