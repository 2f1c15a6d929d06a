"""Decompositions of float64 operations that ONNX Runtime lacks into operations that it has.

ONNX Runtime (CPU) has no float64 kernel for Conv, ConvTranspose, AveragePool and Atan, BatchNormalization stores its
epsilon as float32, and torch.onnx rounds Python floats to float32. So a float64 network is exported with

    convolution     y[n, o, p] = b[o] + sum over i, t of W[o, i, t] x[n, i, s p + d t]    one matrix product (im2col)
    average         the sum over the same windows, divided by their size
    batch norm      (x - mean) (weight / sqrt(var + eps)) + bias
    atan2           reduction to [0, tan(pi/32)] and the Taylor series
    numbers         m 2^e with an integer m, which is exact

These are the inner products that a certificate assumes: (channels / groups) * taps products, conventionally summed,
then one bias. Padding adds exact zeros. There is no Winograd and no FFT.
"""

import math
import struct
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

aten = torch.ops.aten


def windows(x: Tensor, kernel: Sequence[int], stride: Sequence[int], dilation: Sequence[int]) -> Tensor:
    """Return all windows of a padded input (n, c, *sizes): (n, c, *kernel, *positions).

    Examples:
        >>> windows(torch.arange(4.0).view(1, 1, 4), [2], [1], [1])[0, 0]
        tensor([[0., 1., 2.],
                [1., 2., 3.]])
    """
    for axis, (k, s, d) in enumerate(zip(kernel, stride, dilation, strict=True)):
        place = 2 + 2 * axis  # after n, c, and the taps and positions of the previous axes
        reach = x.shape[place] - d * (k - 1)  # number of possible window starts
        if k == s == 1:
            x = x.unsqueeze(2 + axis)
            continue
        if k == s and d == 1 and x.shape[place] % k == 0:  # adjacent windows: nothing is copied
            x = x.unflatten(place, (-1, k)).movedim(place + 1, 2 + axis)
            continue
        taps = [aten.slice.Tensor(x, place, d * t, d * t + reach, s) for t in range(k)]
        x = torch.stack(taps, 2 + axis)
    return x


def convolution(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Tensor:
    """`aten.convolution` as one matrix product per image and group.

    Examples:
        >>> x, w = torch.rand(2, 4, 6, 6).double(), torch.rand(3, 4, 3, 3).double()
        >>> y = convolution(x, w, None, [2, 2], [1, 1], [1, 1], False, [0, 0], 1)
        >>> torch.allclose(y, torch.nn.functional.conv2d(x, w, None, 2, 1), rtol=1e-14)
        True
    """
    kernel = weight.shape[2:]
    ends = [(p, p) for p in padding]
    if transposed and _is_tiled(kernel, stride, padding, dilation, output_padding):
        y = _tiles(x, weight, padding, output_padding, groups)
        return y if bias is None else y + bias.view(-1, *(1,) * len(kernel))
    if transposed:
        # A transposed convolution is a stride-1 convolution over x with zeros inserted, a flipped kernel, and swapped
        # channels.
        x = _spread(x, stride)
        weight = weight.unflatten(0, (groups, -1)).transpose(1, 2).flatten(0, 1)  # (out, in / groups, *kernel)
        weight = weight.flip(list(range(2, weight.dim())))
        whole = [d * (k - 1) for d, k in zip(dilation, kernel, strict=True)]
        ends = [(w - p, w - p + o) for w, p, o in zip(whole, padding, output_padding, strict=True)]
        stride = [1] * len(kernel)
    columns = windows(_pad(x, ends), kernel, stride, dilation)  # (n, in, *kernel, *positions)
    positions = columns.shape[2 + len(kernel) :]
    inner = weight.shape[1] * math.prod(kernel)
    if groups == 1:
        product = weight.reshape(-1, inner) @ columns.reshape(-1, inner, math.prod(positions))  # (n, out, positions)
    else:
        rows = weight.reshape(groups, -1, inner)
        product = rows @ columns.reshape(
            -1, groups, inner, math.prod(positions)
        )  # (n, groups, out / groups, positions)
    y = product.reshape(-1, weight.shape[0], *positions)
    return y if bias is None else y + bias.view(-1, *(1,) * len(kernel))


def _is_tiled(
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    output_padding: Sequence[int],
) -> bool:
    """Whether each output of a transposed convolution has one input: adjacent windows, possibly cropped."""
    cut = all(more <= p for p, more in zip(padding, output_padding, strict=True))
    return list(kernel) == list(stride) and all(d == 1 for d in dilation) and cut


def _tiles(x: Tensor, weight: Tensor, padding: Sequence[int], output_padding: Sequence[int], groups: int) -> Tensor:
    """A tiled transposed convolution: every input becomes a window, by one matrix product."""
    axes, (inputs, outputs) = weight.dim() - 2, weight.shape[:2]
    kernel, sizes = weight.shape[2:], x.shape[2:]
    rows = weight.reshape(groups, inputs // groups, outputs * math.prod(kernel)).transpose(1, 2)
    if groups == 1:
        y = rows[0] @ x.reshape(-1, inputs, math.prod(sizes))
    else:
        y = rows @ x.reshape(-1, groups, inputs // groups, math.prod(sizes))
    y = y.reshape(-1, groups * outputs, *kernel, *sizes)
    order = [axis for i in range(axes) for axis in (2 + axes + i, 2 + i)]
    y = y.permute(0, 1, *order).reshape(-1, groups * outputs, *(n * k for n, k in zip(sizes, kernel, strict=True)))
    for axis, (p, more) in enumerate(zip(padding, output_padding, strict=True), start=2):
        if p:
            y = aten.slice.Tensor(y, axis, p, y.shape[axis] - p + more)
    return y


def _pad(x: Tensor, ends: Sequence[tuple[int, int]]) -> Tensor:
    """Pad both ends of each axis with zeros; a negative number crops."""
    flat = [n for pair in reversed(ends) for n in pair]
    return aten.constant_pad_nd(x, flat) if any(flat) else x


def _spread(x: Tensor, stride: Sequence[int]) -> Tensor:
    """Insert stride - 1 zeros between neighbours along each axis."""
    for axis, s in enumerate(stride, start=2):
        if s > 1:
            n = x.shape[axis]
            x = aten.constant_pad_nd(x.unsqueeze(axis + 1), [0, 0] * (x.dim() - 1 - axis) + [0, s - 1])
            x = aten.slice.Tensor(x.flatten(axis, axis + 1), axis, 0, s * (n - 1) + 1)
    return x


def average_pool(
    x: Tensor,
    kernel_size: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Tensor:
    """`aten.avg_pool2d` and `avg_pool3d` as sums over windows; not for the incomplete last windows of ceil_mode.

    Examples:
        >>> average_pool(torch.arange(16.0).view(1, 1, 4, 4), [2, 2])
        tensor([[[[ 2.5000,  4.5000],
                  [10.5000, 12.5000]]]])
    """
    if ceil_mode or (any(padding) and not count_include_pad and divisor_override is None):
        return NotImplemented
    axes = x.dim() - 2 if len(kernel_size) == 1 else len(kernel_size)
    kernel, pads = _per_axis(kernel_size, axes), _per_axis(padding, axes)
    batched = x if x.dim() == axes + 2 else x.unsqueeze(0)
    taps = windows(_pad(batched, [(p, p) for p in pads]), kernel, _per_axis(stride, axes) or kernel, [1] * axes)
    y = taps.sum(list(range(2, 2 + axes))) / (divisor_override or math.prod(kernel))
    return y if x.dim() == axes + 2 else y.squeeze(0)


def _per_axis(values: Sequence[int], axes: int) -> list[int]:
    return list(values) * axes if len(values) == 1 else list(values)


def batch_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, var: Tensor, momentum: float, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute batch normalisation in eval mode with its exact epsilon; the other two outputs are empty, as in torch."""
    factor = torch.rsqrt(var + eps) if weight is None else weight * torch.rsqrt(var + eps)
    trailing = (1,) * (x.dim() - 2)
    y = (x - mean.view(-1, *trailing)) * factor.view(-1, *trailing)
    empty = x.new_empty((0,))
    return (y if bias is None else y + bias.view(-1, *trailing)), empty, empty


def atan2(y: Tensor, x: Tensor) -> Tensor:
    """Return the angle of (x, y) up to a few roundings, from square roots and products; -0.0 counts as 0.

    Examples:
        >>> y, x = torch.randn(2, 1000, dtype=torch.float64)
        >>> float((atan2(y, x) - torch.atan2(y, x)).abs().max()) < 2e-15
        True
    """
    big, small = torch.maximum(x.abs(), y.abs()), torch.minimum(x.abs(), y.abs())
    t = small / torch.where(big == 0, torch.ones_like(big), big)  # in [0, 1]
    for _ in range(3):  # atan t = 2 atan(t / (1 + sqrt(1 + t^2)))
        t = t / (1 + torch.sqrt(1 + t * t))
    square, series = t * t, torch.zeros_like(t)
    for k in range(9, -1, -1):  # t <= tan(pi/32) < 0.099: the first omitted term is below 1e-21
        series = square * series + (-1) ** k / (2 * k + 1)
    angle = 8 * t * series
    angle = torch.where(y.abs() > x.abs(), -angle + math.pi / 2, angle)
    angle = torch.where(x < 0, -angle + math.pi, angle)
    return torch.where(y < 0, -angle, angle)


def exact_number(value: float, like: Tensor) -> Tensor:
    """Return the number as an exact float64 scalar tensor: torch.onnx does not round integers and powers of two.

    Examples:
        >>> float(exact_number(0.1, torch.zeros(1, dtype=torch.float64))) == 0.1
        True
    """
    fraction, exponent = math.frexp(value)
    whole = torch.full((), int(fraction * 2.0**53), dtype=like.dtype, device=like.device)
    return aten.mul.Tensor(whole, 2.0 ** (exponent - 53))


def _is_lossy(value: object, like: object) -> bool:
    """Whether torch.onnx would round this number in a float64 graph, and `exact_number` can represent it."""
    if not isinstance(value, float) or not isinstance(like, Tensor) or like.dtype != torch.float64:
        return False
    # Below 2^-96 float32 cannot represent the power of two of `exact_number`.
    return 2.0**-96 < abs(value) < 2.0**127 and struct.unpack("f", struct.pack("f", value))[0] != value


def _with_exact_number(operation: Callable[..., Tensor]) -> Callable[..., Any]:
    def rule(x: Tensor, number: object, **settings: Any) -> Any:
        if _is_lossy(settings.get("alpha"), x) and isinstance(number, Tensor):  # x + alpha y
            return operation(x, aten.mul.Tensor(number, exact_number(settings["alpha"], x)))
        return operation(x, exact_number(number, x), **settings) if _is_lossy(number, x) else NotImplemented  # pyright: ignore

    return rule


def clamp(x: Tensor, min: float | None = None, max: float | None = None) -> Tensor:
    """Compute `aten.clamp` with limits that float32 cannot represent."""
    if not _is_lossy(min, x) and not _is_lossy(max, x):
        return NotImplemented
    ends = [None if end is None else exact_number(float(end), x) if end else torch.zeros_like(x) for end in (min, max)]
    return aten.clamp.Tensor(x, *ends)


def float64_decompositions() -> dict[Any, Callable[..., Any]]:
    """Return the table for `ExportedProgram.run_decompositions`: torch's own, and those of this module."""
    table = dict(torch.export.default_decompositions())
    # torch's decomposition copies the weight for each image; ONNX can multiply a matrix by a batch.
    table.pop(aten.matmul.default)
    ours: dict[Any, Callable[..., Any]] = {
        aten.convolution.default: convolution,
        aten.avg_pool2d.default: average_pool,
        aten.avg_pool3d.default: average_pool,
        aten._native_batch_norm_legit_no_training.default: batch_norm,
        aten.atan2.default: atan2,
        aten.clamp.default: clamp,
        aten.remainder.Scalar: _with_exact_number(aten.remainder.Tensor),
        aten.pow.Tensor_Scalar: _with_exact_number(aten.pow.Tensor_Tensor),
    }
    for name in ("add", "sub", "mul", "div"):
        operation = getattr(aten, name).Tensor
        ours[operation] = _with_exact_number(operation)
    for name in ("lt", "le", "gt", "ge", "eq", "ne"):
        operations = getattr(aten, name)
        ours[operations.Scalar] = _with_exact_number(operations.Tensor)
    return table | ours
