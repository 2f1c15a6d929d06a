"""Random layers for hypothesis: every kind, every setting, and weights that have broken other libraries."""

import torch
from hypothesis import strategies as st

from onelip.testing.layers import KINDS, WEIGHTS, LayerCase


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
