"""Average pooling and interpolation: linear maps that act on each image axis by a matrix of its own.

For X -> A X B^T (and likewise with one or three axes) the norm is ||A|| ||B||. The matrices are read from the forward
pass of the operation itself, at the true sizes, borders included; its derivative is not used. (torch's derivative of
antialiased interpolation is not the adjoint of its forward pass.)

Note [Probes]
    An input that is a comb along one axis (1 at every P-th place, from place r on) and 1 along the others gives

        A comb_r  (x)  B 1  (x)  C 1.

    Where no output reads two teeth of one comb, this shows the entries of A, times the numbers b = (B 1)_o and
    c = (C 1)_o of a reference output o, where the answer s = a b c to an input of ones is the largest. So three such
    matrices A' = A b c, B' = B a c, C' = C a b give  A (x) B (x) C = A' (x) B' (x) C' / s^2.

    Which tooth an output has read is a guess, and so is the assumption that the operation is such a product at all.
    Both are then verified: on random images of two samples and two channels, the operation and the product of the
    matrices must agree up to a relative error of 2^-40, entry by entry. If they do not, P is doubled, up to the
    length of the axis, where nothing is guessed about the teeth; if they do not agree then, no bound is given. This
    also verifies that samples are kept apart and are treated alike.
"""

import math
import re
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import NamedTuple

import torch
from torch import Tensor, nn

from onelip.bounds.fast import bound_weight
from onelip.core.geometry import geometry_of
from onelip.core.rounding import multiply_up
from onelip.graph.step import Refusal, Step, StepBound, aten, register_rule

_COMB = 64  # distance of teeth to begin with
_DENSE = 2**22  # entries up to which a matrix is written out
_AGREE = 2.0**-40
_SLACK = Fraction(1, 2**44)  # of one coefficient, whose rounding error is a few times 2^-53 times the length of an axis

_AVERAGES = frozenset(f"aten.avg_pool{d}d.default" for d in (1, 2, 3))  # whose rule is in pooling.py
_NAMES = """
    adaptive_avg_pool1d.default adaptive_avg_pool2d.default adaptive_avg_pool3d.default
    _adaptive_avg_pool2d.default _adaptive_avg_pool3d.default
    upsample_linear1d.vec upsample_bilinear2d.vec upsample_trilinear3d.vec upsample_bicubic2d.vec
    upsample_linear1d.default upsample_bilinear2d.default upsample_trilinear3d.default upsample_bicubic2d.default
    _upsample_bilinear2d_aa.vec _upsample_bicubic2d_aa.vec _upsample_lanczos2d_aa.vec
    _upsample_bilinear2d_aa.default _upsample_bicubic2d_aa.default _upsample_lanczos2d_aa.default
"""
# Not every version of torch has all of them.
_PRESENT = frozenset(f"aten.{name}" for name in _NAMES.split() if hasattr(torch.ops.aten, name.split(".")[0]))
SEPARABLE = _AVERAGES | _PRESENT


class Sparse(NamedTuple):
    """A matrix with few entries in each row: those of row o are values[o], in columns[o]."""

    columns: Tensor  # (m, most)
    values: Tensor  # (m, most)
    width: int


@register_rule(*_PRESENT)
def separable(step: Step) -> StepBound:
    """The product of the norms along the axes. See the head of the file."""
    matrices, scale = read_matrices(step)
    factor = multiply_up(*(_norm(matrix, step) for matrix in matrices), abs(scale))
    return step.times(factor, "along each axis a matrix, whose norm is proved")


def read_matrices(step: Step) -> tuple[list[Sparse], float]:
    """Matrices, one for each image axis, and a number: the operation is their product times the number."""
    axes = image_axes(step.call.op)
    lead, sizes = step.source.shape[:-axes], step.source.shape[-axes:]
    if not lead:
        raise Refusal("works along the batch axis, so samples depend on each other")
    name, keywords = step.call.op, step.call.keywords

    def apply(x: Tensor) -> Tensor:
        return aten(name)(x, *step.call.arguments[1:], **keywords)

    few = tuple(min(n, 2) for n in lead)  # channels are alike by definition of these operations
    comb = _COMB
    while True:
        matrices, scale = _read(apply, (1,) * len(few), sizes, comb)
        if _agree(apply, matrices, scale, few, sizes):
            return matrices, scale
        if comb >= max(sizes):
            raise Refusal("is not a product of maps along its axes")
        comb *= 2


def image_axes(op: str) -> int:
    """The number of image axes in the name of an operation.

    Examples:
        >>> image_axes("aten.avg_pool2d.default")
        2
    """
    found = re.search(r"([123])d", op)
    assert found is not None
    return int(found.group(1))


def _read(
    apply: Callable[[Tensor], Tensor], ones: Sequence[int], sizes: Sequence[int], comb: int
) -> tuple[list[Sparse], float]:
    """Note [Probes]: the matrices A', B', C', and 1 / s^(axes - 1)."""
    axes = len(sizes)
    answer = apply(torch.ones(*ones, *sizes, dtype=torch.float64))
    shape = answer.shape[-axes:]
    place = int(answer.abs().argmax())
    s = float(answer.flatten()[place])
    if not 0 < abs(s) < math.inf:
        raise Refusal("gives nothing but zeros, or infinities, for an input of ones")
    reference = [int(i) for i in torch.unravel_index(torch.tensor(place), shape)]
    matrices = []
    for axis, n in enumerate(sizes):
        period = min(comb, n)
        teeth = torch.arange(n) % period == torch.arange(period)[:, None]  # (period, n)
        view = [period, *ones[1:], *(n if a == axis else 1 for a in range(axes))]
        probes = teeth.double().view(view).expand(period, *ones[1:], *sizes)
        seen = apply(probes.contiguous()).reshape(period, *shape)
        for other in reversed(range(axes)):
            if other != axis:
                seen = seen.select(other + 1, reference[other])
        matrices.append(_nearest(seen, n))
    return matrices, 1 / s ** (axes - 1)


def _nearest(seen: Tensor, n: int) -> Sparse:
    """From the answers (period, m) to combs: an output is taken to read the tooth that is nearest to it."""
    period, m = seen.shape
    most = int((seen != 0).sum(0).max())
    r = (seen != 0).byte().argsort(dim=0, descending=True, stable=True)[:most].T  # (m, most)
    centre = (torch.arange(m) + 0.5) * (n / m) - 0.5
    nearest = ((centre[:, None] - r) / period).round().long()
    nearest = torch.minimum(nearest, (n - 1 - r) // period).clamp(min=0)
    return Sparse(r + period * nearest, seen.T.gather(1, r), n)


def _along(matrices: Sequence[Sparse], x: Tensor) -> Tensor:
    """The product of the matrices, on the last axes of x."""
    for axis, matrix in zip(range(-len(matrices), 0), matrices, strict=True):
        read = x.movedim(axis, -1)[..., matrix.columns]  # (..., m, most)
        x = (read * matrix.values).sum(-1).movedim(-1, axis)
    return x


def _agree(
    apply: Callable[[Tensor], Tensor], matrices: list[Sparse], scale: float, lead: Sequence[int], sizes: Sequence[int]
) -> bool:
    x = torch.randn(*lead, *sizes, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = apply(x)
    wanted = _along(matrices, x) * scale
    if found.shape != wanted.shape:
        return False
    magnitude = _along([matrix._replace(values=matrix.values.abs()) for matrix in matrices], x.abs()) * abs(scale)
    return bool(((found - wanted).abs() <= _AGREE * magnitude).all())


def _norm(matrix: Sparse, step: Step) -> float:
    """Not below the norm of a matrix, whose coefficients may be off by the slack."""
    largest = float(matrix.values.abs().max())
    if not largest < math.inf:
        raise Refusal("has coefficients that are not finite")
    m, n = len(matrix.columns), matrix.width
    slack = _SLACK * Fraction(largest) * (math.isqrt(matrix.values.numel() + 2 * m) + 1)
    if m * n <= _DENSE:
        dense = torch.zeros(m, n, dtype=torch.float64).scatter_add_(1, matrix.columns, matrix.values)
        proved = bound_weight(dense, geometry_of(nn.Linear(n, m, device="meta")), effort=step.effort).value
    else:  # Schur test: ||A||^2 <= (largest sum of a row) (largest sum of a column), of magnitudes
        rows = matrix.values.abs().sum(1)
        columns = torch.zeros(n, dtype=torch.float64)
        columns.scatter_add_(0, matrix.columns.flatten(), matrix.values.abs().flatten())
        proved = math.sqrt(float(rows.max())) * math.sqrt(float(columns.max())) * (1 + 2.0**-30)
    return math.nextafter(float(Fraction(proved) + slack), math.inf)
