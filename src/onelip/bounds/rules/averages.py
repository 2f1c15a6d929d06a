"""Linear maps without negative coefficients: means, sums, average pooling, linear interpolation.

For such a map A, and any v > 0 entry by entry (Collatz, Wielandt; the Schur test with weights v):

    ||A||^2 = ||A^T A|| <= max_i (A^T A v)_i / v_i.

A is applied as torch applies it at the sizes of the graph, borders included, A^T is its derivative, and v comes from a
few steps of the power method, so the bound is close to the norm. Every sum here has non-negative terms, so that its
relative rounding error is below (number of terms) * 2^-53; the slack below is larger than that.
"""

from collections.abc import Callable
from fractions import Fraction

import torch
from torch import Tensor

from onelip.bounds._rational import up_root
from onelip.bounds.rules._step import Refusal, Step, Verdict, operation, register_rule

_STEPS = 12

_NAMES = """
    avg_pool1d.default avg_pool2d.default avg_pool3d.default
    adaptive_avg_pool1d.default adaptive_avg_pool2d.default adaptive_avg_pool3d.default
    _adaptive_avg_pool2d.default _adaptive_avg_pool3d.default
    mean.dim mean.default sum.dim_IntList sum.default
    upsample_linear1d.vec upsample_bilinear2d.vec upsample_trilinear3d.vec
    upsample_linear1d.default upsample_bilinear2d.default upsample_trilinear3d.default
    _upsample_bilinear2d_aa.vec col2im.default
"""


@register_rule(*(f"aten.{name}" for name in _NAMES.split()))
def average(step: Step) -> Verdict:
    """See the head of the file."""
    shape = step.source.shape
    arguments = list(step.node.arguments[1:])
    keywords = {name: value for name, value in step.node.keywords.items() if name != "dtype"}

    def apply(x: Tensor) -> Tensor:
        return operation(step.node.op)(x, *arguments, **keywords)

    _check_batch(apply, shape)
    v = torch.ones(shape, dtype=torch.float64)
    squares = []
    for _ in range(_STEPS):
        with torch.enable_grad():
            x = v.clone().requires_grad_()
            y = apply(x)
            (w,) = torch.autograd.grad(y, x, y.detach())  # A^T A v
        if not bool((y >= 0).all() and (w >= 0).all()):
            raise Refusal("has negative coefficients")
        squares.append(float((w / v).max()))
        v = w / w.max().clamp(min=2.0**-1000) + 2.0**-20  # above 0 everywhere
    slack = 1 + 8 * Fraction(v.numel() + apply(v).numel(), 2**53)
    factor = up_root(Fraction(min(squares)) * slack)
    return step.times(factor, "non-negative coefficients, weighted Schur test")


def _check_batch(apply: Callable[[Tensor], Tensor], shape: tuple[int, ...]) -> None:
    """Each sample alone must be answered in its own row alone."""
    for sample in range(shape[0]):
        x = torch.zeros(shape, dtype=torch.float64)
        x[sample] = 1
        y = apply(x)
        if y.dim() == 0 or y.shape[0] != shape[0]:
            raise Refusal(f"its result {tuple(y.shape)} does not have the batch as its first axis")
        if bool((y[torch.arange(shape[0]) != sample] != 0).any()):
            raise Refusal("mixes the samples of a batch")
