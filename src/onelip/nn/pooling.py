"""Pooling with constant 1: rearranging, averaging with the right factor, and the norm of each window.

With kernel k and stride s per axis, one input is read by at most m = prod ceil(k/s) windows.

Concatenation (space to depth; Prach, Lampert, ECCV 2022): a permutation, ||f(x)||_2 = ||x||_2.

Average.  The rows of the averaging operator A have the inner products <A_o, A_o'> = prod max(0, k - s|o - o'|) / k^2,
none negative, so by Gershgorin ||A||^2 <= prod r(k, s),  r(k, s) = sum_i max(0, k - s|i|) / k^2.  The layer is
A / sqrt(prod r).  Never worse than the bound m / prod k of Cauchy-Schwarz, equal to it where s = 1 or s >= k, and
reached in the limit of large inputs; without overlap (s >= k) reached by every input that is constant on windows.
Padding with zeros (always counted in the mean) embeds the input, and a rest that fills no window is dropped: both
only restrict A.

Norm of each window (the L2 pooling of LipNeXt):  | ||u|| - ||v|| | <= ||u - v|| in each window; summed over windows,
every input counts at most m times, so ||f(x) - f(y)||_2 <= ||x - y||_2 after division by sqrt(m).
"""

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F

from onelip.core.arguments import per_axis
from onelip.core.errors import UnknownLipschitzConstant
from onelip.core.lipschitz_module import LipschitzModule
from onelip.core.rounding import root_at_most, up_root
from onelip.core.tracing import is_compiling
from onelip.graph.lowering import Lowering, lowers
from onelip.graph.ops.movement import space_to_depth
from onelip.graph.ops.pooling import average

Size = int | Sequence[int]


def _constant(scale: float, square: Fraction) -> float:
    """A float not below scale times the root of a square; 1 for a scale that was made so and rounded down."""
    if not abs(scale) < math.inf:
        raise UnknownLipschitzConstant(f"expected a finite scale, got {scale}")
    constant = up_root(Fraction(scale) ** 2 * square)
    return 1.0 if 1 - 2.0**-50 < constant < 1 else constant


class _Pool(LipschitzModule):
    """What all pooling layers share: the number of spatial axes, which are the last ones of the input."""

    axes: int

    def __init__(self, kernel_size: Size | None, stride: Size | None = None) -> None:
        super().__init__()
        if kernel_size is None and stride is not None:
            raise ValueError(
                f"expected no stride for a global pooling (kernel_size=None), got {stride!r}; leave it out"
            )
        self.kernel_size = None if kernel_size is None else per_axis("kernel_size", kernel_size, self.axes)
        self.stride = self.kernel_size if stride is None else per_axis("stride", stride, self.axes)
        self.padding = (0,) * self.axes

    def _check(self, x: Tensor) -> None:
        if x.dim() not in (self.axes + 1, self.axes + 2):
            raise ValueError(
                f"{type(self).__name__} expected an input (batch, channels, {self.axes} spatial axes), the batch "
                f"optional, got shape {tuple(x.shape)}; reshape it or take the layer for another number of axes"
            )
        k = self.kernel_size or (1,) * self.axes
        if any(n + 2 * p < m for n, m, p in zip(x.shape[-self.axes :], k, self.padding, strict=True)):
            raise ValueError(
                f"{type(self).__name__} expected spatial sizes of at least {k}, got shape {tuple(x.shape)}; "
                "take a smaller kernel, or pad the input with zeros"
            )

    def extra_repr(self) -> str:
        return f"kernel_size={self.kernel_size}, stride={self.stride}"


class _ConcatenationPool(_Pool):
    proved_constant = 1.0

    kernel_size: tuple[int, ...]

    def __init__(self, kernel_size: Size) -> None:
        super().__init__(kernel_size)

    def forward(self, x: Tensor) -> Tensor:
        self._check(x)
        *outer, channels = x.shape[: -self.axes]
        sizes, k = x.shape[-self.axes :], self.kernel_size
        if any(n % m for n, m in zip(sizes, k, strict=True)):
            raise ValueError(
                f"{type(self).__name__} expected spatial sizes that are multiples of {k}, got {tuple(sizes)} "
                f"(input of shape {tuple(x.shape)}); crop or zero-pad the input first, both are 1-Lipschitz"
            )
        split = [part for n, m in zip(sizes, k, strict=True) for part in (n // m, m)]
        y = x.reshape(*outer, channels, *split)  # (..., c, h/k, k, w/k, k)
        first = len(outer) + 1
        offsets, positions = range(first + 1, y.dim(), 2), range(first, y.dim(), 2)
        y = y.permute(*range(first), *offsets, *positions)  # (..., c, k, k, h/k, w/k)
        return y.reshape(*outer, channels * math.prod(k), *y.shape[-self.axes :])

    def extra_repr(self) -> str:
        return f"kernel_size={self.kernel_size}"


class ConcatenationPool1d(_ConcatenationPool):
    """Windows of length k become k channels each: (n, c, l) to (n, c k, l/k)."""

    axes = 1


class ConcatenationPool2d(_ConcatenationPool):
    """Windows become channels: (n, c, h, w) to (n, c k², h/k, w/k), channels in the order of torch's pixel_unshuffle.

    Examples:
        >>> import torch
        >>> ConcatenationPool2d(2)(torch.arange(4.0).view(1, 1, 2, 2)).flatten()
        tensor([0., 1., 2., 3.])
    """

    axes = 2


class ConcatenationPool3d(_ConcatenationPool):
    """Windows become channels: (n, c, d, h, w) to (n, c k³, d/k, h/k, w/k)."""

    axes = 3


class _LipschitzAvgPool(_Pool):
    def __init__(self, kernel_size: Size | None, stride: Size | None = None, padding: Size = 0) -> None:
        super().__init__(kernel_size, stride)
        self.padding = per_axis("padding", padding, self.axes, 0)
        k = self.kernel_size or (0,) * self.axes
        if any(2 * p > m for p, m in zip(self.padding, k, strict=True)):
            raise ValueError(
                f"expected padding of at most half the kernel size {self.kernel_size}, got {padding!r}; pad less, "
                "and not at all where the pooling is global"
            )
        if self.kernel_size is not None:
            self.scale = root_at_most(1 / self._square())

    def _square(self) -> Fraction:
        """A bound of the squared norm of the average alone, from the settings that the layer has now."""
        square = Fraction(1)
        for k, s in zip(self.kernel_size or (), self.stride or (), strict=True):
            square *= Fraction(k + 2 * sum(range(k - s, 0, -s)), k * k)  # r(k, s) of the file's head
        return square

    @property
    def lipschitz_constant(self) -> float:
        """1 as built; settings that were changed afterwards are counted as they are."""
        is_global = self.kernel_size is None or self.stride is None
        return 1.0 if is_global else _constant(self.scale, self._square())

    def forward(self, x: Tensor) -> Tensor:
        self._check(x)
        if self.kernel_size is None or self.stride is None:
            sizes = x.shape[-self.axes :]
            spatial = tuple(range(-self.axes, 0))
            return x.mean(spatial, keepdim=True) * root_at_most(Fraction(math.prod(sizes)))
        pool = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)[self.axes - 1]
        return pool(x, self.kernel_size, self.stride, self.padding) * self.scale

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, padding={self.padding}"


class LipschitzAvgPool1d(_LipschitzAvgPool):
    """Average over windows of (n, c, l), times the factor that makes the norm 1; global if kernel_size is None."""

    axes = 1


class LipschitzAvgPool2d(_LipschitzAvgPool):
    """Average over windows of (n, c, h, w), times the factor that makes the norm 1; global if kernel_size is None.

    Examples:
        >>> import torch
        >>> layer = LipschitzAvgPool2d(2)  # mean times 2
        >>> layer(torch.ones(1, 1, 2, 2)), layer.scale
        (tensor([[[[2.]]]]), 2.0)
    """

    axes = 2


class LipschitzAvgPool3d(_LipschitzAvgPool):
    """Average over windows of (n, c, d, h, w), times the factor that makes it norm 1; global if kernel_size is None."""

    axes = 3


def _unit(windows: Tensor) -> tuple[Tensor, Tensor]:
    """Each window (last axis) divided by its norm, zero staying zero; and its norm."""
    largest = windows.detach().abs().amax(-1, keepdim=True)
    # Divided by infinity, a zero window and all its derivatives stay 0; an infinite one must not become inf / inf.
    z = windows / largest.masked_fill(largest.isinf(), 1.0).masked_fill(largest == 0, math.inf)
    # One entry of z is ±1 unless all are 0, so the clamp acts on zero windows alone.
    root = z.square().sum(-1, keepdim=True).clamp(min=1).sqrt()
    return z / root, (largest * root).squeeze(-1)


class _WindowNorm(Function):
    """Norm over the last axis; the gradient is the unit vector, formed without the square of anything large or tiny."""

    generate_vmap_rule = True

    @staticmethod
    def forward(windows: Tensor) -> Tensor:
        return _unit(windows)[1]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0])
        ctx.save_for_forward(inputs[0])

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        return grad_outputs[0].unsqueeze(-1) * _unit(ctx.saved_tensors[0])[0]

    @staticmethod
    def jvp(ctx: Any, *grad_inputs: Any) -> Any:
        return (grad_inputs[0] * _unit(ctx.saved_tensors[0])[0]).sum(-1)


class _L2Pool(_Pool):
    def __init__(self, kernel_size: Size | None, stride: Size | None = None) -> None:
        super().__init__(kernel_size, stride)
        self.scale = root_at_most(Fraction(1, self._readers()))

    def _readers(self) -> int:
        """Windows that one input can lie in, by the settings that the layer has now."""
        if self.kernel_size is None or self.stride is None:
            return 1
        return math.prod(-(-a // b) for a, b in zip(self.kernel_size, self.stride, strict=True))

    @property
    def lipschitz_constant(self) -> float:
        """1 as built; settings that were changed afterwards are counted as they are."""
        return _constant(self.scale, Fraction(self._readers()))

    def forward(self, x: Tensor) -> Tensor:
        self._check(x)
        if self.kernel_size is None or self.stride is None:
            windows = x.flatten(-self.axes)[(..., *(None,) * self.axes, slice(None))]  # (n, c, 1, 1, h w)
        else:
            windows = x
            for axis, k, s in zip(range(-self.axes, 0), self.kernel_size, self.stride, strict=True):
                windows = windows.unfold(x.dim() + axis, k, s)
            windows = windows.flatten(-self.axes)  # (n, c, h', w', k k)
        if is_compiling():
            return _unit(windows)[1] * self.scale
        return _WindowNorm.apply(windows) * self.scale  # pyright: ignore[reportOperatorIssue]


class L2Pool1d(_L2Pool):
    """Norm of every window of (n, c, l), divided by sqrt(ceil(k/s)); global if kernel_size is None."""

    axes = 1


class L2Pool2d(_L2Pool):
    """Norm of every window of (n, c, h, w), divided by sqrt(prod ceil(k/s)); global if kernel_size is None.

    Right for tiny and huge values, and with gradient 0 where a window is 0.

    Examples:
        >>> import torch
        >>> L2Pool2d(2)(torch.tensor([[[[3.0, 0.0], [0.0, 4.0]]]]))
        tensor([[[[5.]]]])
    """

    axes = 2


class L2Pool3d(_L2Pool):
    """Norm of every window of (n, c, d, h, w), divided by sqrt(prod ceil(k/s)); global if kernel_size is None."""

    axes = 3


@lowers(ConcatenationPool1d, ConcatenationPool2d, ConcatenationPool3d)
def _lower_concatenation(low: Lowering) -> int:
    return space_to_depth(low, list(low.module.kernel_size))


@lowers(LipschitzAvgPool1d, LipschitzAvgPool2d, LipschitzAvgPool3d)
def _lower_average(low: Lowering) -> int:
    module, sizes = low.module, low.source_shape[1:]
    kernel = module.kernel_size or sizes
    scale = module.scale if module.kernel_size else root_at_most(Fraction(math.prod(kernel)))
    if any(module.padding) or len(sizes) != module.axes:
        return low.refuse()
    return average(low, kernel, module.stride or kernel, scale)
