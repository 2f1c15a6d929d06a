"""Convolutions whose windows tile the image, as one product of matrices: in training faster than a convolution."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from onelip.core.tracing import is_compiling


def tiles(layer: nn.Module, x: Tensor) -> bool:
    """Whether `convolve_tiles` computes this layer: 2d, kernel and stride equal, channels last, on a CPU.

    Examples:
        >>> x = torch.zeros(1, 3, 8, 8).to(memory_format=torch.channels_last)
        >>> tiles(nn.Conv2d(3, 4, 2, stride=2), x), tiles(nn.Conv2d(3, 4, 2), x)
        (True, False)
    """
    if not isinstance(layer, nn.Conv2d) or x.dim() != 4 or x.device.type != "cpu" or is_compiling():
        return False
    if layer.kernel_size != layer.stride or layer.groups != 1 or layer.padding not in ((0, 0), "valid"):
        return False
    return x.movedim(1, -1).is_contiguous() and not any(n % k for n, k in zip(x.shape[2:], layer.stride, strict=True))


def convolve_tiles(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The convolution of channels-last images with a kernel as large as its stride.

    Args:
        x: (N, in, H, W), channels last.
        weight: (out, in, k, m); H and W are multiples of k and m.
        bias: (out), or None.

    Returns:
        (N, out, H / k, W / m), channels last.

    Examples:
        >>> x, weight = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last), torch.randn(5, 3, 2, 2)
        >>> bool((convolve_tiles(x, weight, None) - F.conv2d(x, weight, stride=2)).abs().max() < 1e-5)
        True
    """
    count, channels, height, width = x.shape
    k, m = weight.shape[2:]
    rows = x.movedim(1, -1)
    if torch.is_autocast_enabled("cpu"):
        rows = rows.to(torch.get_autocast_dtype("cpu"))  # before the pixels are moved, which then takes half the time
    if k > 1 or m > 1:
        rows = rows.reshape(count, height // k, k, width // m, m, channels).transpose(2, 3)
        rows = rows.reshape(count, height // k, width // m, k * m * channels)
    matrix = weight.permute(0, 2, 3, 1).reshape(len(weight), -1)  # without a copy if the kernel is channels last
    return F.linear(rows, matrix, bias).movedim(-1, 1)
