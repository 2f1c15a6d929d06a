"""A layer that acts frequency by frequency as plain real torch layers: what `onelip.bake` makes of the Fourier methods.

The rows of Phi are the waves of `onelip.methods.fourier.frequencies`, two for each frequency f. So Phi^T Phi = I, and
with the real form [Re M, -Im M; Im M, Re M] of each matrix

    irfft(M rfft(x)) = Phi^T (real blocks of M) Phi x.                                                           (1)

Three linear layers: no complex number, no FFT. Each has a norm that can be proved from what is stored, and the product
of the three is max_f ||M_f|| but for rounding. As convolutions whose windows do not overlap they need no other axes:

    Phi       (1, c, n)     ->  (2 f, c, 1)       kernel (1, n)
    blocks    (2 f, c, 1)   ->  (2 f c', 1, 1)    kernel (c, 1), a group for each frequency
    Phi^T     (2 f, c', 1)  ->  (1, c', n)        transposed, kernel (1, n)

Pixels that are filled up with zeros before, and cut afterwards, are columns of Phi that are left out. A bias is a
constant image: it is added to frequency 0. Interleaved images (ECO) are taken apart and put together by strided
convolutions with kernels of zeros and ones; filling up is the padding of these. As a circular layer commutes with
shifts, it does not matter on which side the zeros are.
"""

import math
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn

from onelip.core.guards import ImageSizeGuard
from onelip.methods.fourier.frequencies import real_waves


class LayerSizeGuard(ImageSizeGuard):
    """Forward pre-hook that refuses inputs of another size than a layer was made for: it would take a part of them."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = args[0] if args else kwargs.get("input")
        if isinstance(x, Tensor) and tuple(x.shape[1:]) != self.shape:
            raise ValueError(
                f"expected an input (batch, {', '.join(map(str, self.shape))}), the size that the layer was made for, "
                f"got shape {tuple(x.shape)}; make the layer anew with input_size of your images, or resize them"
            )


def plain_periodic(
    matrices: Tensor,
    bias: Tensor | None,
    *,
    input_size: tuple[int, ...],
    size: tuple[int, ...],
    spacing: tuple[int, ...] | None = None,
) -> nn.Sequential:
    """The layers of (1).

    Args:
        matrices: (frequencies, rows, columns, 2), real and imaginary parts, of the frequencies that are kept.
        bias: (rows), or None.
        input_size: spatial size of inputs and outputs.
        size: period of the convolution.
        spacing: distance of the pixels of one of several interleaved images, for each axis.

    Examples:
        >>> M = torch.randn(3, 2, 2, 2)
        >>> x = torch.randn(5, 2, 4)
        >>> y = torch.fft.irfft(torch.einsum("foi,bif->bof", torch.view_as_complex(M), torch.fft.rfft(x)), 4)
        >>> bool((plain_periodic(M, None, input_size=(4,), size=(4,))(x) - y).abs().max() < 1e-5)
        True
    """
    spaces = spacing or (1,) * len(size)
    frequencies, rows, columns = matrices.shape[:3]
    images = math.prod(spaces)
    # Where there is nothing to take apart, what is filled up is left out.
    seen = tuple(n if d == 1 else k for n, k, d in zip(input_size, size, spaces, strict=True))
    place: dict[str, Any] = {"dtype": matrices.dtype, "device": matrices.device}
    pixels = math.prod(seen)
    parts: OrderedDict[str, nn.Module] = OrderedDict()
    if images > 1:
        parts["apart"] = _interleaved(columns, input_size, size, spaces, False, place)
    parts["lines"] = nn.Flatten(2)
    parts["pixels"] = nn.Unflatten(1, (1, columns * images))
    analysis = nn.Conv2d(1, 2 * frequencies, (1, pixels), stride=(1, pixels), bias=False, **place)
    parts["analysis"] = analysis
    if images > 1:
        parts["coefficients"] = nn.Flatten(2)
        parts["channels"] = nn.Unflatten(2, (columns, images))
    blocks = nn.Conv2d(
        2 * frequencies,
        2 * frequencies * rows,
        (columns, 1),
        stride=(columns, 1),
        groups=frequencies,
        bias=bias is not None,
        **place,
    )
    parts["frequencies"] = blocks
    parts["products"] = nn.Flatten(1)
    parts["waves"] = nn.Unflatten(1, (2 * frequencies, rows * images, 1))
    synthesis = nn.ConvTranspose2d(2 * frequencies, 1, (1, pixels), stride=(1, pixels), bias=False, **place)
    parts["synthesis"] = synthesis
    parts["sums"] = nn.Flatten(1, 2)
    parts["image"] = nn.Unflatten(2, seen)
    if images > 1:
        parts["together"] = _interleaved(rows, input_size, size, spaces, True, place)
    made = nn.Sequential(parts)
    with torch.no_grad():
        _fill(blocks, matrices, bias, size)
        if not matrices.is_meta:
            Phi = real_waves(size, seen)[:, None, None]  # (2 f, 1, 1, pixels)
            analysis.weight.copy_(Phi)
            synthesis.weight.copy_(Phi)
    for fixed in (analysis, synthesis):
        fixed.requires_grad_(False)
    made.register_forward_pre_hook(LayerSizeGuard((columns, *input_size)), with_kwargs=True)
    return made


def _fill(blocks: nn.Conv2d, matrices: Tensor, bias: Tensor | None, size: tuple[int, ...]) -> None:
    real, imaginary = matrices.unbind(-1)  # (f, rows, columns)
    # (f, part of the output, rows, part of the input, columns)
    parts = torch.stack([torch.stack([real, -imaginary], 2), torch.stack([imaginary, real], 2)], 1)
    blocks.weight.copy_(parts.reshape(blocks.weight.shape))
    if bias is not None and blocks.bias is not None:
        blocks.bias.zero_()
        # Frequency 0 of a constant image: its entries times sqrt(n).
        blocks.bias[: len(bias)].copy_(bias.double() * math.sqrt(math.prod(size)))


def _interleaved(
    channels: int,
    input_size: tuple[int, ...],
    size: tuple[int, ...],
    spacing: tuple[int, ...],
    transposed: bool,
    place: dict[str, Any],
) -> nn.Module:
    """(c, *input_size) -> (c times images, *size), filled up with zeros; transposed the way back, which cuts them."""
    images = math.prod(spacing)
    missing = [k * d - n if d > 1 else 0 for n, k, d in zip(input_size, size, spacing, strict=True)]
    padding = [-(-m // 2) for m in missing]
    settings: dict[str, Any] = {"stride": spacing, "padding": padding, "groups": channels, "bias": False, **place}
    axes = len(size)
    if transposed:
        settings["output_padding"] = [2 * p - m for p, m in zip(padding, missing, strict=True)]
        kind: Any = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[axes - 1]
        layer = kind(channels * images, channels, spacing, **settings)
    else:
        kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[axes - 1]
        layer = kind(channels, channels * images, spacing, **settings)
    with torch.no_grad():
        if not layer.weight.is_meta:
            layer.weight.copy_(torch.eye(images).reshape(images, 1, *spacing).repeat(channels, *(1,) * (axes + 1)))
    return layer.requires_grad_(False)
