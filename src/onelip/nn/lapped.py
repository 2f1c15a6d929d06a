"""Overlapping patches of images with constant 1: a lapped window, as a convolution with fixed weights."""

import numpy as np
import torch
from torch import nn

from onelip.core.arguments import check_integer, per_axis


def lapped_patches(channels: int, patch: int, overlap: int, *, extra_padding: int | tuple[int, ...] = 0) -> nn.Conv2d:
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
    layer = nn.Conv2d(channels, channels * size**2, size, patch, (down, right), groups=channels, bias=False)
    # Rounded down: the squares sum to at most 1.
    half = float(np.nextafter(np.float32(0.5**0.5), np.float32(0))) if overlap else 1.0
    a = torch.tensor([half if i < overlap or i >= patch else 1.0 for i in range(size)], device=layer.weight.device)
    window = torch.diag((a[:, None] * a).flatten()).reshape(size**2, 1, size, size)
    layer.weight.data.copy_(window.repeat(channels, 1, 1, 1))
    return layer.requires_grad_(False)
