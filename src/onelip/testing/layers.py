"""Layers to test methods on: a grid of all settings of each kind, and weights that are difficult cases.

Note [Covering]
    All combinations of settings of one kind are thousands of layers. Most faults need two settings together, and those
    of phases need kernel size, stride and dilation on one axis. So a covering selects from a list of layers each one
    that adds a new pair of settings, or in one dimension a new triple (kernel size, stride, dilation). Of layers
    without overlap, which are matrices, it selects each one that adds a new setting. Rejected layers cover nothing: in
    the end, every pair that the method accepts in some layer of the list occurs in a selected layer.
"""

import itertools
import math
import random
from collections.abc import Hashable, Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

KINDS = ("Linear", "Conv1d", "Conv2d", "Conv3d", "ConvTranspose1d", "ConvTranspose2d", "ConvTranspose3d")
WEIGHTS = (
    "gaussian",
    "ones",
    "one hot",
    "rank one",
    "repeated",
    "positive",
    "zero columns",
    "zero",
    "one tap",
    "uneven",
    "tiny",
    "huge",
    "subnormal",
)
FULL_TYPES = (torch.float32, torch.float64)
ALL_TYPES = (*FULL_TYPES, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class LayerCase:
    """One layer with its weights and an input shape; `build` creates a new copy each time.

    Attributes:
        kind: name of a class of torch.nn.
        size: spatial size of the input.
        weights: one of `WEIGHTS`.
        promises_size: whether `input_size` is passed to methods that accept it but do not require it.
    """

    kind: str
    in_channels: int = 2
    out_channels: int = 2
    kernel_size: tuple[int, ...] = ()
    stride: tuple[int, ...] = ()
    dilation: tuple[int, ...] = ()
    padding: tuple[int, ...] | str = ()
    output_padding: tuple[int, ...] = ()
    groups: int = 1
    padding_mode: str = "zeros"
    size: tuple[int, ...] = ()
    weights: str = "gaussian"
    dtype: torch.dtype = torch.float64
    seed: int = 0
    bias: bool = True
    promises_size: bool = False

    @property
    def input_shape(self) -> tuple[int, ...]:
        return (self.in_channels, *self.size)

    @property
    def is_transposed(self) -> bool:
        return self.kind.startswith("ConvT")

    def build(self) -> nn.Module:
        """Return the plain torch layer with the weights of this case."""
        settings: dict[str, Any] = {"bias": self.bias, "dtype": self.dtype}
        if self.kind == "Linear":
            layer: nn.Module = nn.Linear(self.in_channels, self.out_channels, **settings)
        else:
            settings |= {
                "stride": self.stride,
                "padding": self.padding,
                "dilation": self.dilation,
                "groups": self.groups,
                "padding_mode": self.padding_mode,
            }
            if self.is_transposed:
                settings["output_padding"] = self.output_padding
            kind = getattr(nn, self.kind)
            layer = kind(self.in_channels, self.out_channels, self.kernel_size, **settings)
        with torch.no_grad():
            assert isinstance(layer.weight, Tensor)
            layer.weight.copy_(make_weight(tuple(layer.weight.shape), self.weights, self.dtype, self.seed))
            if isinstance(layer.bias, Tensor):
                layer.bias.copy_(make_weight((self.out_channels, 1), "gaussian", self.dtype, self.seed + 1)[:, 0])
        return layer

    @cached_property
    def pads(self) -> tuple[tuple[int, int], ...]:
        """Padding (left, right) of each axis."""
        if self.padding == "same":
            return tuple((reach // 2, reach - reach // 2) for reach in self._reaches)
        if isinstance(self.padding, str):
            return ((0, 0),) * len(self.kernel_size)
        return tuple((p, p) for p in self.padding)

    @property
    def _reaches(self) -> list[int]:
        return [d * (k - 1) for k, d in zip(self.kernel_size, self.dilation, strict=True)]

    def has_output(self) -> bool:
        """Whether torch accepts this combination of settings and the output is not empty."""
        if self.padding == "same" and any(s > 1 for s in self.stride):
            return False
        most = {"circular": 0, "reflect": 1}.get(self.padding_mode)  # by how much padding must be smaller than images
        if most is not None and any(p > n - most for n, pad in zip(self.size, self.pads, strict=True) for p in pad):
            return False
        if not self.is_transposed:
            return all(n + sum(p) > r for n, p, r in zip(self.size, self.pads, self._reaches, strict=True))
        axes = zip(self.size, self.stride, self.pads, self._reaches, self.output_padding, strict=True)
        return all((n - 1) * s - sum(p) + r + extra >= 0 for n, s, p, r, extra in axes)

    def levels(self) -> dict[str, Hashable]:
        """Return the settings that a covering combines."""
        if self.kind == "Linear":
            return {"channels": (self.in_channels, self.out_channels, self.dtype)}
        return {
            "kernel_size": self.kernel_size,
            "stride": self.stride,
            "dilation": self.dilation,
            "padding": self._padding_level(),
            "padding_mode": self.padding_mode,
            "output_padding": self.output_padding,
            "channels": (self.groups, self.in_channels, self.out_channels),
        }

    @cached_property
    def overlaps(self) -> bool:
        """Whether two outputs read the same input; without overlap a convolution is a matrix."""
        axes = zip(self.kernel_size, self.stride, self.dilation, strict=True)
        return any(k > s // math.gcd(s, d) for k, s, d in axes)

    def lone_levels(self) -> dict[str, Hashable]:
        """Return the settings that a covering must contain, but not in all combinations."""
        return {"size": self.size, "dtype": self.dtype, "bias": self.bias, "promises_size": self.promises_size}

    def _padding_level(self) -> str:
        """Class of the padding, by its effect on the size."""
        if isinstance(self.padding, str):
            return self.padding
        totals = [*map(sum, self.pads)]
        if not any(totals):
            return "none"
        if totals == self._reaches:
            return "keeps the size"
        return "beyond the kernel" if any(t > 2 * r for t, r in zip(totals, self._reaches, strict=True)) else "other"

    def traits(self) -> frozenset[str]:
        """Return the names of the special properties of the layer."""
        found: dict[str, bool] = {
            "overlapping": self.overlaps,
            "strided": any(s > 1 for s in self.stride),
            "kernel no multiple of stride": any(k % s for k, s in zip(self.kernel_size, self.stride, strict=True)),
            "dilated": any(d > 1 for d in self.dilation),
            "stride and dilation": any(s > 1 and d > 1 for s, d in zip(self.stride, self.dilation, strict=True)),
            "common factor": any(math.gcd(s, d) > 1 for s, d in zip(self.stride, self.dilation, strict=True)),
            "rectangular": len({*self.kernel_size}) > 1 or len({*self.stride}) > 1 or len({*self.dilation}) > 1,
            "grouped": self.groups > 1,
            "zero padding": self.padding_mode == "zeros" and any(map(sum, self.pads)),
            "circular": self.padding_mode == "circular" and any(map(sum, self.pads)),
            "padding='same'": self.padding == "same",
            "output padding": any(self.output_padding),
            "more outputs": self.out_channels > self.in_channels,
            "more inputs": self.out_channels < self.in_channels,
        }
        return frozenset(name for name, holds in found.items() if holds)


def make_weight(shape: tuple[int, ...], kind: str, dtype: torch.dtype, seed: int) -> Tensor:
    """Return a weight of one of the kinds in `WEIGHTS`, scaled to the range of the dtype."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(shape, generator=generator, dtype=torch.float64)
    limits = torch.finfo(dtype)
    if kind == "positive":  # no cancellation: the norm is as large as possible for entries of this size
        weight = weight.abs()
    elif kind == "ones":
        weight.fill_(1)
    elif kind == "one hot":  # every rescaling makes it 1, so constants that are too small are detected
        place = int(torch.randint(max(1, weight.numel()), (1,), generator=generator))
        weight.zero_().view(-1)[place : place + 1] = 1
    elif kind == "rank one":
        sizes = [(n,) + (1,) * (len(shape) - 1 - axis) for axis, n in enumerate(shape)]
        weight = torch.ones(shape, dtype=torch.float64)
        for size in sizes:
            weight = weight * torch.randn(size, generator=generator, dtype=torch.float64)
    elif kind == "zero columns":
        weight[:, torch.rand(shape[1], generator=generator) < 0.5] = 0
    elif kind == "zero":
        weight.zero_()
    elif kind == "tiny":  # the Gram matrix underflows
        weight *= limits.tiny**0.75
    elif kind == "huge":  # the Gram matrix overflows
        weight *= limits.max**0.75
    elif kind == "uneven":  # channels of very different size
        weight *= 10.0 ** torch.randint(-12, 13, (shape[0], shape[1], *(1 for _ in shape[2:])), generator=generator)
    elif kind == "one tap":
        mask = torch.zeros(shape[2:], dtype=torch.float64)
        mask.view(-1)[int(torch.randint(mask.numel(), (1,), generator=generator))] = 1
        weight *= mask
    elif kind == "subnormal":
        weight *= limits.smallest_normal / 8
    elif kind == "repeated":  # all columns equal: the furthest from orthogonal
        weight = weight[:, :1].expand(shape).clone()
    return weight.clamp(limits.min / 2, limits.max / 2).to(dtype)


class _Values(NamedTuple):
    """Values that the grid combines for one number of dimensions; channels as (groups, inputs, outputs)."""

    kernel_size: tuple[tuple[int, ...], ...]
    stride: tuple[tuple[int, ...], ...]
    dilation: tuple[tuple[int, ...], ...]
    channels: tuple[tuple[int, int, int], ...]
    size: tuple[tuple[int, ...], ...]


_VALUES = {
    1: _Values(
        kernel_size=((1,), (2,), (3,), (4,), (5,)),
        stride=((1,), (2,), (3,), (4,)),
        dilation=((1,), (2,), (3,)),
        channels=((1, 2, 2), (1, 1, 3), (1, 3, 2), (2, 4, 4), (2, 4, 6)),
        size=((7,), (12,)),
    ),
    2: _Values(
        kernel_size=((1, 1), (2, 2), (3, 3), (3, 2), (1, 3), (4, 4)),
        stride=((1, 1), (2, 2), (1, 2), (3, 3)),
        dilation=((1, 1), (2, 2), (1, 2)),
        channels=((1, 2, 2), (1, 1, 3), (1, 3, 2), (2, 4, 4)),
        size=((4, 5), (6, 4)),
    ),
    3: _Values(
        kernel_size=((1, 1, 1), (2, 1, 2), (1, 3, 2), (3, 1, 3)),
        stride=((1, 1, 1), (2, 2, 2), (1, 2, 1)),
        dilation=((1, 1, 1), (1, 2, 1)),
        channels=((1, 2, 2), (1, 1, 2), (1, 3, 1), (2, 4, 4)),
        size=((2, 4, 3), (4, 2, 4)),
    ),
}
# Some are wide: methods may compute those differently or in another precision.
_FEATURES = ((1, 1), (3, 3), (6, 6), (2, 5), (5, 2), (4, 40), (40, 4), (70, 70), (150, 70))


@lru_cache
def grid(kind: str, *, dtypes: tuple[torch.dtype, ...] = FULL_TYPES, seed: int = 0) -> tuple[LayerCase, ...]:
    """Return all layers of one kind in the grid, in random order; dtype, bias and size are random.

    Examples:
        >>> cases = grid("ConvTranspose2d")
        >>> len(cases) > 1000, all(case.has_output() for case in cases)
        (True, True)
    """
    draw = random.Random(f"{kind}{seed}")
    if kind == "Linear":
        found = [
            LayerCase(kind, *features, dtype=dtype, bias=bias)
            for features, dtype, bias in itertools.product(_FEATURES, dtypes, (True, False))
        ]
    else:
        found = [case for case in _convolutions(kind, dtypes, draw) if case.has_output()]
    draw.shuffle(found)
    return tuple(found)


def _convolutions(kind: str, dtypes: tuple[torch.dtype, ...], draw: random.Random) -> Iterator[LayerCase]:
    values = _VALUES[int(kind[-2])]
    for kernel, stride, dilation, channels in itertools.product(*values[:4]):
        groups, inputs, outputs = channels
        copies_pixels = channels == values.channels[0]  # only a few, because methods reject them
        for mode, padding, extra in _paddings(kind, kernel, stride, dilation, copies_pixels):
            yield LayerCase(
                kind,
                inputs,
                outputs,
                kernel,
                stride,
                dilation,
                padding,
                extra,
                groups,
                mode,
                draw.choice(values.size),
                dtype=draw.choice(dtypes),
                seed=draw.randrange(2**20),
                bias=draw.random() < 0.5,
                promises_size=draw.random() < 0.5,
            )


def _paddings(
    kind: str, kernel: tuple[int, ...], stride: tuple[int, ...], dilation: tuple[int, ...], copies_pixels: bool
) -> Iterator[tuple[str, tuple[int, ...] | str, tuple[int, ...]]]:
    """Mode, padding and output padding."""
    none = (0,) * len(kernel)
    full = tuple(d * (k - 1) for k, d in zip(kernel, dilation, strict=True))
    half, beyond = tuple(n // 2 for n in full), tuple(n + 1 for n in full)
    if kind.startswith("ConvT"):
        largest = [max(s, d) - 1 for s, d in zip(stride, dilation, strict=True)]
        extras = dict.fromkeys(tuple(min(extra, n) for n in largest) for extra in (0, 1, max(largest)))
        for padding, extra in itertools.product(dict.fromkeys((none, half, full)), extras):
            yield "zeros", padding, extra
        return
    numbers = dict.fromkeys((none, half, full, beyond))
    for padding in (*numbers, "same", "valid"):
        yield "zeros", padding, none
    for padding in dict.fromkeys((half, full, "same")):
        if padding != none:
            yield "circular", padding, none
    if any(half) and copies_pixels:
        yield "reflect", half, none
        yield "replicate", half, none


@lru_cache
def covering_masks(cases: tuple[LayerCase, ...], strength: int | None) -> tuple[int, ...]:
    """Return, for each layer, a number whose bits are its combinations of settings; see Note [Covering].

    Args:
        cases: layers of one kind.
        strength: number of settings in a combination, besides (kernel size, stride, dilation); None for all settings,
            so that every layer is selected.
    """
    if strength is None:
        return tuple(1 << i for i in range(len(cases)))
    bits: dict[Hashable, int] = {}
    masks = []
    for case in cases:
        together = strength if case.overlaps else 1
        found: list[Hashable] = [
            (case.overlaps, levels) for levels in itertools.combinations(case.levels().items(), together)
        ]
        found += case.lone_levels().items()
        if strength >= 2 and len(case.size) == 1:
            found.append((case.kernel_size, case.stride, case.dilation))
        masks.append(sum(1 << bits.setdefault(combination, len(bits)) for combination in {*found}))
    return tuple(masks)
