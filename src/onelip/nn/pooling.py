"""Pooling layers with Lipschitz constant 1: space to depth, overlapping patches, scaled averages, window norms."""

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F

from onelip.core.docstrings import like
from onelip.core.errors import check_integer, per_axis
from onelip.core.lipschitz_module import Bound, LipschitzModule
from onelip.core.modes import is_compiling, is_scripting
from onelip.core.rounding import root_at_most, up_root
from onelip.graph.lowering import Lowering, lowers
from onelip.graph.ops.movement import space_to_depth as lower_space_to_depth
from onelip.graph.ops.pooling import average

Size = int | Sequence[int]


def _bound(scale: float, square: Fraction) -> Bound:
    """Return scale * sqrt(square), rounded up; 1 if the scale was computed for 1 and rounded down."""
    if not abs(scale) < math.inf:
        return Bound(None, f"its scale is {scale}, which is not finite")
    constant = up_root(Fraction(scale) ** 2 * square)
    return Bound(1.0 if 1 - 2.0**-50 < constant < 1 else constant, "kernel size, stride and scale")


class _Pool(LipschitzModule):
    """Base of all pooling layers; the spatial axes are the last `axes` axes of the input."""

    axes: int

    def __init__(self, kernel_size: Size | None, stride: Size | None = None) -> None:
        super().__init__()
        if kernel_size is None and stride is not None:
            raise ValueError(f"expected no stride for a global pooling (kernel_size=None), got {stride!r}; remove it")
        self.kernel_size = None if kernel_size is None else per_axis("kernel_size", kernel_size, self.axes)
        self.stride = self.kernel_size if stride is None else per_axis("stride", stride, self.axes)
        self.padding = (0,) * self.axes

    def _check(self, x: Tensor) -> None:
        if x.dim() not in (self.axes + 1, self.axes + 2):
            raise ValueError(
                f"{type(self).__name__} expected an input (batch, channels, {self.axes} spatial axes), the batch "
                f"optional, got shape {tuple(x.shape)}; reshape it, or use the layer for another number of axes"
            )
        k = self.kernel_size or (1,) * self.axes
        if any(n + 2 * p < m for n, m, p in zip(x.shape[-self.axes :], k, self.padding, strict=True)):
            raise ValueError(
                f"{type(self).__name__} expected spatial sizes of at least {k}, got shape {tuple(x.shape)}; "
                "use a smaller kernel, or pad the input with zeros"
            )

    def extra_repr(self) -> str:
        return f"kernel_size={self.kernel_size}, stride={self.stride}"


def space_to_depth(x: Tensor, block: Sequence[int]) -> Tensor:
    """Turn the entries of each block of pixels into channels, in the order of `torch.nn.PixelUnshuffle`.

    Args:
        x: (..., channels, *size).
        block: for each spatial axis, the size of a block, which divides that of x.

    Examples:
        >>> space_to_depth(torch.arange(6).reshape(1, 6), (2,))
        tensor([[0, 2, 4],
                [1, 3, 5]])
    """
    if all(k == 1 for k in block):
        return x
    axes = len(block)
    *outer, channels = x.shape[:-axes]
    sizes = [n // k for n, k in zip(x.shape[-axes:], block, strict=True)]
    y = x.reshape(*outer, channels, *(part for pair in zip(sizes, block, strict=True) for part in pair))
    first = len(outer) + 1  # (..., c, h/k, k, w/k, k)
    offsets, positions = range(first + 1, y.dim(), 2), range(first, y.dim(), 2)
    y = y.permute(*range(first), *offsets, *positions)  # (..., c, k, k, h/k, w/k)
    return y.reshape(*outer, channels * math.prod(block), *sizes)


class _ConcatenationPool(_Pool):
    proved_constant = 1.0

    kernel_size: tuple[int, ...]

    def __init__(self, kernel_size: Size) -> None:
        super().__init__(kernel_size)

    def forward(self, x: Tensor) -> Tensor:
        if is_scripting():  # of two axes
            (h, w), n = self.kernel_size, x.dim() - 3
            windows = x.unflatten(n + 1, [x.shape[n + 1] // h, h]).unflatten(n + 3, [x.shape[n + 2] // w, w])
            y = windows.movedim([n + 2, n + 4], [n + 1, n + 2]).flatten(n, n + 2)
        else:
            y = self._split(x)
        return y

    def _split(self, x: Tensor) -> Tensor:
        self._check(x)
        sizes, k = x.shape[-self.axes :], self.kernel_size
        if any(n % m for n, m in zip(sizes, k, strict=True)):
            raise ValueError(
                f"{type(self).__name__} expected spatial sizes that are multiples of {k}, got {tuple(sizes)} "
                f"(input of shape {tuple(x.shape)}); crop or zero-pad the input first, both are 1-Lipschitz"
            )
        return space_to_depth(x, k)

    def extra_repr(self) -> str:
        return f"kernel_size={self.kernel_size}"


class ConcatenationPool2d(_ConcatenationPool):
    r"""Space to depth: the entries of each window become channels.

    This is a permutation of the entries, so $\|f(x)\|_2 = \|x\|_2$. With two spatial axes and one kernel size for both
    it is `torch.nn.PixelUnshuffle`. From the networks of AOL (Prach, Lampert, ECCV 2022).

    Args:
        kernel_size: size $k$ of the windows, one integer or one per axis; it is the stride as well.

    Shape:
        - Input: $(N, C, H, W)$ or $(C, H, W)$; the kernel size divides the spatial size.
        - Output: $(N, C k^2, H/k, W/k)$ or $(C k^2, H/k, W/k)$.

    Examples:
        >>> import torch
        >>> ConcatenationPool2d(2)(torch.zeros(1, 3, 4, 4)).shape[2:]
        torch.Size([2, 2])
    """

    axes = 2
    is_scriptable = True
    kernel_size: tuple[int, int]


@like(ConcatenationPool2d, axes=1)
class ConcatenationPool1d(_ConcatenationPool):
    axes = 1


@like(ConcatenationPool2d, axes=3)
class ConcatenationPool3d(_ConcatenationPool):
    axes = 3


class _LipschitzAvgPool(_Pool):
    def __init__(self, kernel_size: Size | None, stride: Size | None = None, padding: Size = 0) -> None:
        super().__init__(kernel_size, stride)
        self.padding = per_axis("padding", padding, self.axes, 0)
        k = self.kernel_size or (0,) * self.axes
        if any(2 * p > m for p, m in zip(self.padding, k, strict=True)):
            raise ValueError(
                f"expected padding of at most half the kernel size {self.kernel_size}, got {padding!r}; "
                "a global pooling has no padding"
            )
        if self.kernel_size is not None:
            self.scale = root_at_most(1 / self._square())

    def _square(self) -> Fraction:
        """Return a bound on the squared norm of the average alone, from the current settings of the layer."""
        square = Fraction(1)
        for k, s in zip(self.kernel_size or (), self.stride or (), strict=True):
            square *= Fraction(k + 2 * sum(range(k - s, 0, -s)), k * k)  # r(k, s) of the class docstrings
        return square

    def bound(self) -> Bound:
        """1 as built; computed from the current settings if they were changed afterwards."""
        is_global = self.kernel_size is None or self.stride is None
        return Bound(1.0, "scaled mean") if is_global else _bound(self.scale, self._square())

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


class LipschitzAvgPool2d(_LipschitzAvgPool):
    r"""Average over windows, scaled such that the Lipschitz constant is 1.

    The rows of the averaging operator $A$ with kernel size $k$ and stride $s$ have the inner products
    $\prod \max(0, k - s|o - o'|) / k^2 \ge 0$ (a product over the axes). By Gershgorin,

    $$\|A\|_2^2 \le \prod r(k, s), \qquad r(k, s) = \frac{1}{k^2} \sum_i \max(0, k - s|i|),$$

    and the layer is $A / \sqrt{\prod r(k, s)}$. The bound is attained in the limit of large inputs, and for
    $s \ge k$ by each input that is constant on the windows. Zero padding, and dropping a remainder that does not fill
    a window, only restrict $A$.

    Args:
        kernel_size: size of the windows, one integer or one per axis; None for one window with the whole input.
        stride: stride of the windows; `kernel_size` by default.
        padding: zeros on both sides, at most half the kernel size; they are counted in the mean.

    Shape:
        - Input: $(N, C, H, W)$ or $(C, H, W)$.
        - Output: $(N, C, H_{out}, W_{out})$ or $(C, H_{out}, W_{out})$, sizes as in `torch.nn.AvgPool2d`.

    Attributes:
        scale: the factor $1 / \sqrt{\prod r(k, s)}$, rounded down.

    Examples:
        >>> import torch
        >>> layer = LipschitzAvgPool2d(2)
        >>> x = torch.ones(1, 1, 4, 4)
        >>> round(float(layer(x).norm() / x.norm()), 4)
        1.0
    """

    axes = 2


@like(LipschitzAvgPool2d, axes=1)
class LipschitzAvgPool1d(_LipschitzAvgPool):
    axes = 1


@like(LipschitzAvgPool2d, axes=3)
class LipschitzAvgPool3d(_LipschitzAvgPool):
    axes = 3


def _unit(windows: Tensor) -> tuple[Tensor, Tensor]:
    """Return each window (last axis) divided by its norm, zero for zero windows, and the norms."""
    largest = windows.detach().abs().amax(-1, keepdim=True)
    # A zero window is divided by infinity, so that it and all its derivatives stay 0; inf / inf must not occur.
    z = windows / largest.masked_fill(largest.isinf(), 1.0).masked_fill(largest == 0, math.inf)
    # One entry of z is ±1 unless all are 0, so the clamp only acts on zero windows.
    root = z.square().sum(-1, keepdim=True).clamp(min=1).sqrt()
    return z / root, (largest * root).squeeze(-1)


class _WindowNorm(Function):
    """Norm over the last axis; its gradient is the unit vector, computed without squares of large or tiny numbers."""

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
        """Return the largest number of windows that contain one input, from the current settings of the layer."""
        if self.kernel_size is None or self.stride is None:
            return 1
        return math.prod(-(-a // b) for a, b in zip(self.kernel_size, self.stride, strict=True))

    def bound(self) -> Bound:
        """1 as built; computed from the current settings if they were changed afterwards."""
        return _bound(self.scale, Fraction(self._readers()))

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


class L2Pool2d(_L2Pool):
    r"""Euclidean norm of each window, divided by $\sqrt m$.

    With kernel size $k$ and stride $s$, one input is contained in at most $m = \prod \lceil k/s \rceil$ windows
    (a product over the axes). In each window $|\|u\|_2 - \|v\|_2| \le \|u - v\|_2$, so the layer is 1-Lipschitz.
    The result is accurate for tiny and for huge values, and the gradient is 0 where a window is 0. It is the L2 pooling
    of LipNeXt.

    Args:
        kernel_size: size of the windows, one integer or one per axis; None for one window with the whole input.
        stride: stride of the windows; `kernel_size` by default.

    Shape:
        - Input: $(N, C, H, W)$ or $(C, H, W)$.
        - Output: $(N, C, H_{out}, W_{out})$ or $(C, H_{out}, W_{out})$, sizes as in
            `torch.nn.AvgPool2d` without padding.

    Attributes:
        scale: the factor $1 / \sqrt m$, rounded down.

    Examples:
        >>> import torch
        >>> x = torch.zeros(1, 1, 2, 2)
        >>> x.view(-1)[:2] = torch.tensor([3.0, 4.0])
        >>> L2Pool2d(2)(x).flatten()
        tensor([5.])
    """

    axes = 2


@like(L2Pool2d, axes=1)
class L2Pool1d(_L2Pool):
    axes = 1


@like(L2Pool2d, axes=3)
class L2Pool3d(_L2Pool):
    axes = 3


def lapped_patches(
    channels: int,
    patch: int,
    overlap: int,
    *,
    extra_padding: int | tuple[int, ...] = 0,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> nn.Conv2d:
    r"""Return a fixed convolution whose outputs are the pixels of overlapping windows, with norm 1.

    Windows of $k = p + o$ pixels in each direction lie at a distance of $p$, so that neighbours share $o$ rows or
    columns. Pixel $(i, j)$ of a window is multiplied by $a_i a_j$ with

    $$a_i = \sqrt{1/2} \text{ for } i < o \text{ or } i \ge p, \qquad a_i = 1 \text{ otherwise.}$$

    The squares of the weights of a pixel in all windows sum to 1, so $\|f(x)\|_2 = \|x\|_2$ except for the outermost
    $o/2$ rows and columns, of which one window is missing. Each output reads one pixel: the Gram matrix is diagonal,
    and the bound of the stored weights is tight. A 1x1 convolution after it sees windows that are larger than their
    distance, but is a matrix, which `onelip.optim.LipschitzMuon` can keep orthogonal.

    Args:
        channels: number of channels of the image.
        patch: distance $p$ of the windows.
        overlap: $o$, even, at most $p$; 0 gives patches that tile the image.
        extra_padding: zeros on both sides beyond the $o/2$ of the overlap, one number or one per axis.
        device: device of the weight.
        dtype: type of the weight.

    Returns:
        A depthwise convolution of stride $p$ with `channels * (p + o)**2` outputs, no bias and no gradient.

    Shape:
        - Input: $(N, C, H, W)$ with $C$ = channels.
        - Output: $(N, C k^2, H/p, W/p)$ if $p$ divides the size.

    Raises:
        ValueError: if the overlap is odd or larger than the patch.

    Examples:
        >>> layer = lapped_patches(3, 4, 2)
        >>> x = torch.zeros(1, 3, 32, 32)
        >>> x[..., 1:-1, 1:-1] = torch.randn(30, 30)
        >>> layer(x).shape, bool((layer(x).norm() / x.norm() - 1).abs() < 1e-5)
        (torch.Size([1, 108, 8, 8]), True)
    """
    patch, overlap = check_integer("patch", patch), check_integer("overlap", overlap, 0, patch)
    if overlap % 2:
        raise ValueError(f"expected an even overlap, half of it on each side, got {overlap}")
    size = patch + overlap
    down, right = (overlap // 2 + extra for extra in per_axis("extra_padding", extra_padding, 2, 0))
    place: Any = {"device": device, "dtype": dtype}
    layer = nn.Conv2d(channels, channels * size**2, size, patch, (down, right), groups=channels, bias=False, **place)
    a = torch.ones(size, device="cpu", dtype=layer.weight.dtype)
    # Rounded down, so that the squares sum to at most 1.
    shared = torch.nextafter(torch.full_like(a, 0.5**0.5), torch.zeros_like(a))
    a[:overlap], a[patch:] = shared[:overlap], shared[patch:]
    window = torch.diag((a[:, None] * a).flatten()).reshape(size**2, 1, size, size)
    layer.weight.data.copy_(window.repeat(channels, 1, 1, 1))
    return layer.requires_grad_(False)


@lowers(ConcatenationPool1d, ConcatenationPool2d, ConcatenationPool3d)
def _lower_concatenation(low: Lowering) -> int:
    return lower_space_to_depth(low, list(low.module.kernel_size))


@lowers(LipschitzAvgPool1d, LipschitzAvgPool2d, LipschitzAvgPool3d)
def _lower_average(low: Lowering) -> int:
    module, sizes = low.module, low.source_shape[1:]
    kernel = module.kernel_size or sizes
    scale = module.scale if module.kernel_size else root_at_most(Fraction(math.prod(kernel)))
    if any(module.padding) or len(sizes) != module.axes:
        return low.refuse()
    return average(low, kernel, module.stride or kernel, scale)
