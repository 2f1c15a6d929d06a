"""The norm of a layer's linear operator, approached from below: v <- A^T A v / |A^T A v|, sigma = |A v| <= ||A||.

A is the layer itself, with its stride, dilation, groups and padding, on an image of a given size; not the kernel
reshaped to a matrix, whose norm can be sqrt(taps) times too small. What is found is an estimate: training may use it,
a certificate never does.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from onelip.core.precision import full_precision

# How far beyond the kernel's own extent the image goes if nobody says how large it is.
_EXTENTS = 3

_CONVOLUTIONS = {
    (1, False): F.conv1d,
    (2, False): F.conv2d,
    (3, False): F.conv3d,
    (1, True): F.conv_transpose1d,
    (2, True): F.conv_transpose2d,
    (3, True): F.conv_transpose3d,
}


class Operator:
    """A layer without its weight and bias: `operator(x, W)` is what the layer computes with W.

    Args:
        module: Linear, ConvNd or ConvTransposeNd.
        input_size: spatial size of the input; by default one that holds the kernel three times.

    Examples:
        >>> operator = Operator(nn.Conv2d(2, 3, 3, padding=1), (8, 8))
        >>> operator.input_shape
        (2, 8, 8)
    """

    def __init__(self, module: nn.Module, input_size: int | tuple[int, ...] | None = None) -> None:
        self.wrapping: list[int] | None = None
        self.settings: dict[str, object] = {}
        self.dims = 0
        if isinstance(module, nn.Linear):
            self.input_shape: tuple[int, ...] = (module.in_features,)
            return
        assert isinstance(module, nn.modules.conv._ConvNd)
        self.dims = len(module.kernel_size)
        self.transposed = module.transposed
        self.settings = {"stride": module.stride, "dilation": module.dilation, "groups": module.groups}
        if module.padding_mode == "circular":
            self.wrapping = list(module._reversed_padding_repeated_twice)
        else:
            self.settings["padding"] = module.padding
        if module.transposed:
            self.settings["output_padding"] = module.output_padding
        self.input_shape = (module.in_channels, *_size(module, input_size))

    def __call__(self, x: Tensor, W: Tensor) -> Tensor:
        if not self.dims:
            return F.linear(x, W)
        if self.wrapping is not None:
            x = F.pad(x, self.wrapping, mode="circular")
        convolve: object = _CONVOLUTIONS[self.dims, self.transposed]
        return convolve(x, W, **self.settings)  # pyright: ignore[reportCallIssue]  the settings fit the layer

    def start(self, like: Tensor) -> Tensor:
        """A unit vector (1, *input_shape) to begin with, the same each time: processes must agree on it."""
        generator = torch.Generator().manual_seed(0)
        v = torch.randn(1, *self.input_shape, generator=generator, dtype=torch.float64)
        return (v / v.norm()).to(device=like.device, dtype=like.dtype if like.dtype.itemsize >= 4 else torch.float32)


def _size(module: nn.modules.conv._ConvNd, size: int | tuple[int, ...] | None) -> tuple[int, ...]:
    if size is None:
        extents = [d * (k - 1) + 1 for k, d in zip(module.kernel_size, module.dilation, strict=True)]
        # A multiple of the stride, so that circular phases close.
        return tuple(-(-_EXTENTS * n // s) * s for n, s in zip(extents, module.stride, strict=True))
    sizes = (size,) * len(module.kernel_size) if isinstance(size, int) else tuple(size)
    if len(sizes) != len(module.kernel_size) or any(n < 1 for n in sizes):
        raise ValueError(
            f"expected input_size to be a positive number or {len(module.kernel_size)} of them, got {size!r}"
        )
    return sizes


def iterate(operator: Operator, W: Tensor, v: Tensor, steps: int = 1) -> Tensor:
    """v after some steps of the power method on A^T A; the adjoint is the derivative of A, so it fits every setting."""
    W = W.detach()
    with full_precision(W.device), torch.enable_grad():
        for _ in range(steps):
            x = v.detach().to(W.dtype).requires_grad_()
            y = operator(x, W)
            (z,) = torch.autograd.grad(y, x, y.detach())
            size = torch.linalg.vector_norm(z)
            # A zero weight, or one out of range, leaves the vector as it was: it must be a unit vector ever after.
            v = torch.where((size > 0) & (size < torch.inf), z / size, x.detach())
    return v.detach()


def estimated_norm(operator: Operator, W: Tensor, v: Tensor) -> Tensor:
    """sigma = |A v|, differentiable in W: the derivative of the norm itself if v has converged."""
    with full_precision(W.device):
        return torch.linalg.vector_norm(operator(v.detach().to(W.dtype), W))
