"""Interpolation with negative coefficients: bicubic. Linear interpolation has none, see averages.py.

The map is X -> A X B^T for each channel, so its norm is ||A|| ||B||. A is read off images that are constant along the
other axis, where the coefficients of B sum to 1, and its norm is proved as that of a stored matrix. A coefficient is
off by a few 2^-53, far below the slack for all of them.
"""

import math
from fractions import Fraction

import torch
from torch import Tensor, nn

from onelip.bounds.fast import bound_weight
from onelip.bounds.rules._step import Refusal, Step, Verdict, operation, register_rule
from onelip.geometry import geometry_of
from onelip.nn._base import multiply_up

_SLACK = Fraction(1, 2**44)  # of one coefficient


@register_rule("aten.upsample_bicubic2d.vec", "aten.upsample_bicubic2d.default", "aten._upsample_bicubic2d_aa.vec")
def bicubic(step: Step) -> Verdict:
    """See the head of the file."""
    height, width = step.source.shape[2:]
    arguments, keywords = step.node.arguments[1:], step.node.keywords

    def apply(x: Tensor) -> Tensor:
        return operation(step.node.op)(x, *arguments, **keywords)

    rows = torch.eye(height, dtype=torch.float64)[:, None, :, None].expand(-1, 1, -1, width)
    columns = torch.eye(width, dtype=torch.float64)[:, None, None, :].expand(-1, 1, height, -1)
    along = apply(rows.contiguous())[:, 0, :, 0].T, apply(columns.contiguous())[:, 0, 0, :].T
    factor = multiply_up(*(_norm(matrix, step) for matrix in along))
    return step.times(factor, "along each axis a matrix, whose norm is proved")


def _norm(matrix: Tensor, step: Step) -> float:
    if not bool(matrix.isfinite().all()):
        raise Refusal("has coefficients that are not finite")
    outputs, inputs = matrix.shape
    proved = bound_weight(matrix, geometry_of(nn.Linear(inputs, outputs)), effort=step.effort).value
    slack = _SLACK * math.isqrt(outputs * inputs + 1) + _SLACK
    return math.nextafter(float(Fraction(proved) + slack), math.inf)
