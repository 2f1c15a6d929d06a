"""Spatial geometry of torch layers: weight layouts, groups, strides, dilations and padding.

Every linear layer of torch is converted to one form: a batch of kernels (g, rows, columns, *taps) of stride-1
convolutions whose columns are rescaled. Two facts make this possible.

Note [Phases]
    With stride s and dilation d, tap t of output o reads input s o + d t - p. Two taps read the same input pixel only
    if d (t - t') is a multiple of s, that is, if t = t' modulo s / gcd(s, d). So the taps split into s / gcd(s, d)
    phases per axis, and a strided convolution is a stride-1 convolution whose columns are pairs (input channel, phase):
    `torch.nn.functional.pixel_unshuffle` of the kernel. Apart from this, dilation only moves the entries of the Gram
    operator.

Note [Borders]
    A zero-padded layer is S T E: E adds zeros around the input (an isometry), T is the operator on all of Z^D, and S
    selects outputs (norm 1). So a bound on T is a bound on the layer, for every amount of zero padding, 'same',
    'valid' and output_padding. Circular padding repeats no output as long as left + right padding is at most d (k - 1).
    The Gram entries of the periodic operator are then sums of those of T (entries that coincide modulo the period), so
    their absolute sums are not larger. The phases are consistent across the border only if s divides the input size.
    Reflect and replicate padding copy pixels: their norm is above 1.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from onelip.core.errors import UnsupportedLayer

LINEAR_LAYERS = (
    nn.Linear,
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.ConvTranspose1d,
    nn.ConvTranspose2d,
    nn.ConvTranspose3d,
)


@dataclass(frozen=True)
class Geometry:
    """How a layer's weight (first, second, *taps) acts.

    Attributes:
        transposed: whether the first axis of the weight counts input channels (ConvTranspose) rather than outputs.
        groups: number of channel groups.
        kernel_size: taps per axis; () for Linear.
        phases: number of phases per axis, see Note [Phases]; 1 where the stride-aware bound does not apply.
        identity_tap: index per axis of the tap that alone makes the layer an identity, or the closest map to it.
        strided: whether any stride is above 1.
        needs_size_divisible_by: for circular layers that use phases, the number per axis that must divide the input
            size; None for all other layers.
    """

    transposed: bool
    groups: int
    kernel_size: tuple[int, ...]
    phases: tuple[int, ...]
    identity_tap: tuple[int, ...]
    strided: bool = False
    needs_size_divisible_by: tuple[int, ...] | None = field(default=None)

    def columns_are_second(self, side: str) -> bool:
        """Whether the channels on this side of the layer ("inputs" or "outputs") are the second axis of the weight."""
        return (side == "inputs") != self.transposed

    def to_kernel(self, weight: Tensor, side: str) -> Tensor:
        """Convert a weight (first, second, *taps) to a kernel (g, rows, columns, *taps) with `side` as the columns."""
        kernel = weight.unflatten(0, (self.groups, -1))  # (g, first, second, *taps)
        if any(s > 1 for s in self.phases):
            kernel = self._split_phases(kernel)
        return kernel if self.columns_are_second(side) else kernel.transpose(1, 2)

    def to_weight(self, kernel: Tensor, side: str) -> Tensor:
        """Convert a kernel back to a weight; the inverse of `to_kernel`."""
        kernel = kernel if self.columns_are_second(side) else kernel.transpose(1, 2)
        if any(s > 1 for s in self.phases):
            kernel = self._join_phases(kernel)
        return kernel.flatten(0, 1)

    def kernel_shape(self, weight_shape: Sequence[int], side: str) -> tuple[int, ...]:
        """Return the shape of the result of `to_kernel`."""
        return tuple(self.to_kernel(torch.empty(tuple(weight_shape), device="meta"), side).shape)

    def _split_phases(self, kernel: Tensor) -> Tensor:
        # Pad with zero taps so that every phase has the same number of taps.
        missing = [(-k) % s for k, s in zip(self.kernel_size, self.phases, strict=True)]
        kernel = F.pad(kernel, [amount for m in reversed(missing) for amount in (0, m)])
        for axis, s in enumerate(self.phases):
            kernel = kernel.unflatten(3 + 2 * axis, (-1, s))  # (g, first, second, taps, phases, ...)
        taps = range(3, kernel.dim(), 2)
        phases = range(4, kernel.dim(), 2)
        return kernel.permute(0, 1, 2, *phases, *taps).flatten(2, 2 + len(self.phases))

    def _join_phases(self, kernel: Tensor) -> Tensor:
        dims = len(self.phases)
        kernel = kernel.unflatten(2, (-1, *self.phases))  # (g, first, second, *phases, *taps)
        order = [axis for i in range(dims) for axis in (3 + dims + i, 3 + i)]
        kernel = kernel.permute(0, 1, 2, *order)
        for axis in range(dims):
            kernel = kernel.flatten(3 + axis, 4 + axis)
        return kernel[(slice(None),) * 3 + tuple(slice(0, k) for k in self.kernel_size)]


def geometry_of(module: nn.Module, input_size: int | Sequence[int] | None = None) -> Geometry:
    """Return the geometry of a linear layer.

    Args:
        module: one of `LINEAR_LAYERS`.
        input_size: the spatial size of the input, if it is fixed. Only strided circular convolutions use it.

    Raises:
        UnsupportedLayer: for other layers, and for padding for which the bound does not hold.
    """
    if any(isinstance(parameter, nn.UninitializedParameter) for parameter in module._parameters.values()):
        raise UnsupportedLayer(
            f"{type(module).__name__} has no weights before its first input; "
            "run the model once to initialise it, then apply the method"
        )
    if isinstance(module, nn.Linear):
        return Geometry(False, 1, (), (), ())
    if not isinstance(module, LINEAR_LAYERS):
        names = ", ".join(layer.__name__ for layer in LINEAR_LAYERS)
        raise UnsupportedLayer(
            f"expected one of {names}, got {type(module).__name__}; "
            "apply the method to these layers only, or use onelip.constrain"
        )
    assert isinstance(module, nn.modules.conv._ConvNd)
    _check_settings(module)
    return _conv_geometry(module, input_size)


def _check_settings(module: nn.modules.conv._ConvNd) -> None:
    """torch also runs a layer with `layer.stride = 2`, but its constructor stores one number for each axis."""
    axes = next(d for d in (1, 2, 3) if isinstance(module, (LINEAR_LAYERS[d], LINEAR_LAYERS[3 + d])))
    for name in ("kernel_size", "stride", "dilation", "padding"):
        value: Any = getattr(module, name)
        if not (isinstance(value, str) and name == "padding") and not (isinstance(value, tuple) and len(value) == axes):
            raise UnsupportedLayer(
                f"expected {name} to be a tuple of {axes} numbers, as torch's constructor stores it, got {value!r}; "
                "set it to such a tuple"
            )


def _conv_geometry(module: nn.modules.conv._ConvNd, input_size: int | Sequence[int] | None) -> Geometry:
    kernel, stride, dilation = module.kernel_size, module.stride, module.dilation
    padding = padding_of(module)
    wraps = [False] * len(kernel)
    if module.padding_mode == "circular":
        wraps = [sum(p) > 0 for p in padding]
        _check_circular(module, padding)
    elif module.padding_mode != "zeros" and any(sum(p) > 0 for p in padding):
        raise UnsupportedLayer(
            f"expected zero or circular padding, got padding_mode={module.padding_mode!r} with padding "
            f"{module.padding}, which copies pixels of the input, so even the identity kernel has a norm above 1; "
            "use padding_mode='zeros' (or 'circular'), or crop instead of padding"
        )
    phases = [min(s // math.gcd(s, d), k) for k, s, d in zip(kernel, stride, dilation, strict=True)]
    divisible = None
    if any(wrap and s > 1 for wrap, s in zip(wraps, stride, strict=True)):
        sizes = sizes_per_axis(input_size, len(kernel))
        closes = [not w or (n is not None and n % s == 0) for w, n, s in zip(wraps, sizes, stride, strict=True)]
        phases = [phase if close else 1 for phase, close in zip(phases, closes, strict=True)]
        if any(w and c for w, c in zip(wraps, closes, strict=True)):
            divisible = tuple(s if w and c else 1 for s, w, c in zip(stride, wraps, closes, strict=True))
    return Geometry(
        transposed=module.transposed,
        groups=module.groups,
        kernel_size=tuple(kernel),
        phases=tuple(phases),
        identity_tap=tuple(
            _identity_tap(k, s, d, p[0], phase)
            for k, s, d, p, phase in zip(kernel, stride, dilation, padding, phases, strict=True)
        ),
        strided=any(s > 1 for s in stride),
        needs_size_divisible_by=divisible,
    )


def padding_of(module: nn.modules.conv._ConvNd) -> list[tuple[int, int]]:
    """Return the padding (left, right) of each axis, as torch applies it."""
    if module.padding_mode != "zeros":
        # torch pads by this copy of the setting, which it makes in the constructor; `padding` may have changed since.
        ends = module._reversed_padding_repeated_twice
        return [(left, right) for left, right in zip(ends[::2], ends[1::2], strict=True)][::-1]
    if module.padding == "same":
        totals = [d * (k - 1) for k, d in zip(module.kernel_size, module.dilation, strict=True)]
        return [(total // 2, total - total // 2) for total in totals]
    if module.padding == "valid":
        return [(0, 0)] * len(module.kernel_size)
    return [(int(p), int(p)) for p in module.padding]


def _check_circular(module: nn.modules.conv._ConvNd, padding: list[tuple[int, int]]) -> None:
    for axis, (k, d, p) in enumerate(zip(module.kernel_size, module.dilation, padding, strict=True)):
        if sum(p) > d * (k - 1):
            raise UnsupportedLayer(
                f"expected circular padding of at most dilation * (kernel_size - 1) = {d * (k - 1)} in total, "
                f"got {p[0]} + {p[1]} on spatial axis {axis}: outputs would be repeated, so the norm could exceed 1; "
                f"use padding <= {d * (k - 1) // 2}, or padding_mode='zeros'"
            )


def sizes_per_axis(size: int | Sequence[int] | None, dims: int) -> Sequence[int | None]:
    """Return one size for each axis; a single number, or None, is repeated."""
    if size is None or isinstance(size, int):
        return [size] * dims
    if len(size) != dims:
        raise ValueError(f"expected input_size to be one number or {dims} numbers, got {tuple(size)}")
    return list(size)


def _identity_tap(k: int, s: int, d: int, left: int, phases: int) -> int:
    """Index, within a phase, of the tap that reads the input pixel itself if there is one, else of a middle tap."""
    if s == 1 and left % d == 0 and left // d < k:
        return left // d
    return (k // phases - 1) // 2  # middle of the k // phases taps that every phase has
