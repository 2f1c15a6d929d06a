"""Layers to test methods on: every kind, every setting, and weights that have broken other libraries."""

import warnings
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor, nn

KINDS = ("Linear", "Conv1d", "Conv2d", "Conv3d", "ConvTranspose1d", "ConvTranspose2d", "ConvTranspose3d")
WEIGHTS = ("gaussian", "positive", "zero columns", "zero", "tiny", "huge", "uneven", "one tap", "subnormal", "repeated")


@dataclass(frozen=True)
class LayerCase:
    """One layer with its weights and an input shape; `build` makes it anew each time."""

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

    @property
    def input_shape(self) -> tuple[int, ...]:
        return (self.in_channels, *self.size)

    def build(self) -> nn.Module:
        """The plain torch layer with the weights of this case."""
        if self.kind == "Linear":
            layer: nn.Module = nn.Linear(self.in_channels, self.out_channels, dtype=self.dtype)
        else:
            settings: dict[str, Any] = {
                "stride": self.stride,
                "padding": self.padding,
                "dilation": self.dilation,
                "groups": self.groups,
                "padding_mode": self.padding_mode,
                "dtype": self.dtype,
            }
            if self.kind.startswith("ConvT"):
                settings["output_padding"] = self.output_padding
            layer = getattr(nn, self.kind)(self.in_channels, self.out_channels, self.kernel_size, **settings)
        with torch.no_grad():
            assert isinstance(layer.weight, Tensor)
            layer.weight.copy_(make_weight(tuple(layer.weight.shape), self.weights, self.dtype, self.seed))
        return layer

    def has_output(self) -> bool:
        """Whether torch accepts these settings together and the output is not empty."""
        try:
            with torch.no_grad(), warnings.catch_warnings():
                # torch says that 'same' padding with even kernels costs a copy; once per process is enough.
                warnings.filterwarnings("ignore", "Using padding='same'")
                return self.build()(torch.zeros(1, *self.input_shape, dtype=self.dtype)).numel() > 0
        except (RuntimeError, ValueError):
            return False


def make_weight(shape: tuple[int, ...], kind: str, dtype: torch.dtype, seed: int) -> Tensor:
    """A weight of one of the kinds in WEIGHTS; scales follow the range of the type."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(shape, generator=generator, dtype=torch.float64)
    limits = torch.finfo(dtype)
    if kind == "positive":  # no cancellation anywhere: the norm is as large as entries of this size allow
        weight = weight.abs()
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
    elif kind == "repeated":  # all columns alike: the furthest from orthogonal
        weight = weight[:, :1].expand(shape).clone()
    return weight.clamp(limits.min / 2, limits.max / 2).to(dtype)


def layer_cases(
    *,
    kinds: tuple[str, ...] = KINDS,
    weights: tuple[str, ...] = WEIGHTS,
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.float64),
    padding_modes: tuple[str, ...] = ("zeros", "circular"),
    with_wide: bool = True,
) -> st.SearchStrategy[LayerCase]:
    """A hypothesis strategy over all layers with small Jacobians that torch itself accepts."""

    @st.composite
    def draw_case(draw: st.DrawFn) -> LayerCase:
        kind = draw(st.sampled_from(kinds))
        dtype, weight = draw(st.sampled_from(dtypes)), draw(st.sampled_from(weights))
        seed = draw(st.integers(0, 2**20))
        # Some layers are wide on one side: methods may compute those in another way or precision than narrow ones.
        # Not in two and three dimensions, where many channels with several Gram steps take minutes.
        may_be_wide = with_wide and (kind == "Linear" or kind.endswith("1d"))
        wide = draw(st.sampled_from((None, None, None, "inputs", "outputs"))) if may_be_wide else None
        channels = {side: st.integers(33, 40) if side == wide else st.integers(1, 3) for side in ("inputs", "outputs")}
        if kind == "Linear":
            inputs, outputs = (draw(channels[s] if s == wide else st.integers(1, 9)) for s in ("inputs", "outputs"))
            return LayerCase(kind, inputs, outputs, weights=weight, dtype=dtype, seed=seed)
        dims = int(kind[-2])
        transposed = kind.startswith("ConvT")
        numbers = {1: (5, 4, 3, 4, 12), 2: (4, 3, 3, 3, 6), 3: (3, 2, 2, 2, 4)}[dims]

        def axes(low: int, high: int) -> tuple[int, ...]:
            return tuple(draw(st.integers(low, high)) for _ in range(dims))

        groups = draw(st.sampled_from((1, 1, 2)))
        stride, dilation = axes(1, numbers[1]), axes(1, numbers[2])
        padding: tuple[int, ...] | str = axes(0, numbers[3])
        if not transposed and draw(st.booleans()):
            padding = draw(st.sampled_from(("same", "valid")))
            stride = (1,) * dims if padding == "same" else stride
        return LayerCase(
            kind,
            in_channels=groups * draw(channels["inputs"]),
            out_channels=groups * draw(channels["outputs"]),
            kernel_size=axes(1, numbers[0]),
            stride=stride,
            dilation=dilation,
            padding=padding,
            output_padding=tuple(draw(st.integers(0, max(s, d) - 1)) for s, d in zip(stride, dilation, strict=True)),
            groups=groups,
            padding_mode="zeros" if transposed else draw(st.sampled_from(padding_modes)),
            size=axes(1, numbers[4] if wide is None else 3),
            weights=weight,
            dtype=dtype,
            seed=seed,
        )

    return draw_case().filter(LayerCase.has_output)
