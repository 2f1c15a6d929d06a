r"""Crops of $J^\top J$ for the matrix $J$ of a linear layer, without the whole matrix.

Input pixel $p$ reaches output $o$ through tap $t$ of the kernel or not: $S_{p,t,o}$ counts how often, and depends on
size, stride, dilation and padding only. With the weights $W_t$ (outputs, inputs) of the taps,

$$ (J^\top J)_{p,q} = \sum_{t,u} \Bigl(\sum_o S_{p,t,o} S_{q,u,o}\Bigr) W_t^\top W_u . $$

$S$ is the output of the same layer with one channel and one output channel for each tap, so that borders, circular
padding and transposed layers need no rule of their own.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from onelip.core.bake import bake
from onelip.core.errors import UnsupportedLayer
from onelip.core.geometry import LINEAR_LAYERS, sizes_per_axis

Crop = Sequence[slice]


@torch.no_grad()
def jtj(
    layer: nn.Module,
    input_size: int | Sequence[int] = (),
    rows: Crop | None = None,
    columns: Crop | None = None,
) -> Tensor:
    r"""Return a crop of $J^\top J$, for $J$ the matrix (Jacobian) of a linear layer with its stored weights.

    The identity means that the layer preserves distances. The crop includes the effects of the borders. Its cost does
    not depend on the size of the whole matrix: the centre crop of 3 x 3 pixels and 32 channels of a convolution on 32 x
    32 pixels, 288 x 288 of 32768 x 32768 entries, takes milliseconds.

    Args:
        layer: Linear, Conv1d to Conv3d or ConvTranspose1d to ConvTranspose3d with any settings, plain or parametrized.
        input_size: spatial size of the input; not used for Linear.
        rows: slices of the inputs that are the rows of the crop: one for each spatial axis, then one for the channels.
            Slices that are left out select everything.
        columns: the same for the columns of the crop; by default those of the rows.

    Returns:
        (rows, columns) float64. The order of inputs is channels-last: pixel by pixel, the channels of each in turn.

    Raises:
        UnsupportedLayer: for other layers.
        ValueError: if a crop is empty or has too many slices.

    Examples:
        >>> layer = nn.Conv1d(1, 1, 3, padding=1)
        >>> _ = layer.weight.data.copy_(torch.tensor([[[0.0, 1.0, 1.0]]]))
        >>> jtj(layer, 4)  # the first pixel reaches one output only
        tensor([[1., 1., 0., 0.],
                [1., 2., 1., 0.],
                [0., 1., 2., 1.],
                [0., 0., 1., 2.]], dtype=torch.float64)
        >>> jtj(layer, 4, rows=[slice(0, 1)], columns=[slice(0, 2)])
        tensor([[1., 1.]], dtype=torch.float64)
    """
    plain: Any = bake(layer)
    kind = next((kind for kind in LINEAR_LAYERS if isinstance(plain, kind)), None)
    if kind is None:
        names = ", ".join(layer.__name__ for layer in LINEAR_LAYERS)
        raise UnsupportedLayer(f"expected one of {names}, got {type(layer).__name__}")
    size = () if kind is nn.Linear else _size(input_size, plain.weight.dim() - 2)
    weights = _taps(plain)  # (outputs, inputs, taps)
    pixels, channels = _split(rows, size, weights.shape[1])
    pixels_too, channels_too = (pixels, channels) if columns is None else _split(columns, size, weights.shape[1])
    ours, theirs = weights[:, channels], weights[:, channels_too]
    reached = _reached(plain, kind, size, pixels)  # (pixels, taps, outputs)
    reached_too = reached if columns is None else _reached(plain, kind, size, pixels_too)
    crop = weights.new_zeros(len(reached), ours.shape[1], len(reached_too), theirs.shape[1])
    for t in range(weights.shape[2]):
        counts = torch.einsum("po,quo->pqu", reached[:, t], reached_too)
        products = torch.einsum("kc,kdu->ucd", ours[..., t], theirs)
        crop += torch.einsum("pqu,ucd->pcqd", counts, products)
    return crop.flatten(2).flatten(0, 1)


def center_crop(input_size: Sequence[int], pixels: int = 3, channels: int | None = None) -> list[slice]:
    """Return the slices of the pixels in the centre of an input, and of its first channels.

    Args:
        input_size: spatial size of the input.
        pixels: number of pixels along each axis.
        channels: number of channels; None for all.

    Examples:
        >>> center_crop((32, 32), 3, 8)
        [slice(15, 18, None), slice(15, 18, None), slice(0, 8, None)]
    """
    starts = [max(0, (n - pixels + 1) // 2) for n in input_size]
    return [*(slice(start, start + pixels) for start in starts), slice(0, channels)]


def _size(input_size: int | Sequence[int], dims: int) -> tuple[int, ...]:
    sizes = [] if input_size == () else sizes_per_axis(input_size, dims)
    if not sizes or not all(isinstance(n, int) and n > 0 for n in sizes):
        raise ValueError(f"expected the spatial size of the input, {dims} positive integers, got {input_size!r}")
    return tuple(n for n in sizes if n is not None)


def _split(crop: Crop | None, size: tuple[int, ...], channels: int) -> tuple[Tensor, slice]:
    """The pixels of a crop, as indices into the flat image, and its channels."""
    parts = list(crop or ())
    if len(parts) > len(size) + 1:
        raise ValueError(f"expected at most {len(size) + 1} slices (spatial axes, channels), got {len(parts)}")
    parts += [slice(None)] * (len(size) + 1 - len(parts))
    pixels = torch.arange(math.prod(size)).reshape(size)[tuple(parts[:-1])].flatten()
    if not len(pixels) or not len(range(channels)[parts[-1]]):
        raise ValueError(f"expected a crop of an input of size {size} with {channels} channels, got none of it: {crop}")
    return pixels, parts[-1]


def _taps(plain: Any) -> Tensor:
    """The weights (outputs, inputs, taps) of a layer in float64; zero between different groups."""
    weight = plain.weight.detach().double()
    if isinstance(plain, nn.Linear):
        return weight[..., None]
    parts = weight.unflatten(0, (plain.groups, -1)).flatten(3)  # (g, first, second, taps)
    parts = parts.transpose(1, 2) if plain.transposed else parts
    groups, outputs, inputs, taps = parts.shape
    dense = parts.new_zeros(groups, outputs, groups, inputs, taps)
    every = torch.arange(groups)
    dense[every, :, every] = parts
    return dense.flatten(2, 3).flatten(0, 1)


def _reached(plain: Any, kind: Any, size: tuple[int, ...], pixels: Tensor) -> Tensor:
    """How often each tap connects each of some pixels with each output: (pixels, taps, outputs)."""
    device = plain.weight.device
    if kind is nn.Linear:
        return torch.ones(1, 1, 1, dtype=torch.float64, device=device)
    taps = math.prod(plain.kernel_size)
    names = ("kernel_size", "stride", "padding", "dilation", "padding_mode")
    settings = {name: getattr(plain, name) for name in names}
    if plain.transposed:
        settings["output_padding"] = plain.output_padding
    probe = kind(1, taps, bias=False, dtype=torch.float64, device=device, **settings)
    probe._reversed_padding_repeated_twice = plain._reversed_padding_repeated_twice  # what torch pads by
    probe.weight.copy_(torch.eye(taps, dtype=torch.float64).reshape(probe.weight.shape))
    units = torch.zeros(len(pixels), math.prod(size), dtype=torch.float64, device=device)
    units[torch.arange(len(pixels)), pixels] = 1.0
    return probe(units.reshape(len(pixels), 1, *size)).flatten(2)
