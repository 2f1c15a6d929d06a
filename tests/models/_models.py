"""Helpers of the tests of architectures: small networks, images, and the layers of a network as rows."""

import torch
from torch import Tensor, nn

from onelip.models import create_model
from onelip.nn import ConcatenationPool2d, FirstChannels, MaxMin

CONV, FC, POOL, FIRST, FLATTEN = "conv", "fc", "concatenation pooling", "first channels", "flatten"
MM, NONE = True, False
# One row: layer, kernel size, stride, activation, output size (height, width, channels) or (features,), amount.
Row = tuple[str, int | None, int | None, bool, tuple[int, ...], int]

# Small enough to run: the same code with fewer channels.
SMALL = {
    "aol-small": {"width": 2, "channels": 8, "convs": 2, "linears": 2},
    "aol-fc": {"width": 64, "depth": 4},
    "aol-std": {"width": 4, "depth": 1},
    "aol-dil": {"width": 4, "depth": 2},
    "aol-alt": {"width": 2, "depth": 1},
    "patchwise-tiny": {},
}


def small(name: str, **kwargs) -> nn.Sequential:
    model = create_model(name, **{**SMALL[name], **kwargs})
    assert isinstance(model, nn.Sequential)
    return model


def images(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))


def disturb(model: nn.Module, scale: float = 0.3) -> nn.Module:
    """Move the weights away from the initialisation, where every layer is an isometry."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, dtype=p.dtype, generator=generator), alpha=scale)
    return model


def kind_of(module: nn.Module) -> str:
    kinds = {nn.Conv2d: CONV, nn.Linear: FC, ConcatenationPool2d: POOL, FirstChannels: FIRST, nn.Flatten: FLATTEN}
    return next(kind for base, kind in kinds.items() if isinstance(module, base))


def rows_of(model: nn.Module, x: Tensor) -> list[Row]:
    """The layers of a model as rows with amount 1, recorded while it runs."""
    rows: list[Row] = []

    def record(module: nn.Module, inputs: tuple[Tensor, ...], y: Tensor) -> None:
        if isinstance(module, MaxMin):
            kind, kernel, stride, _, size, amount = rows.pop()
            assert kind in (CONV, FC)
            rows.append((kind, kernel, stride, MM, size, amount))
            return
        kernel = getattr(module, "kernel_size", (None,) * 2)
        stride = getattr(module, "stride", (None,) * 2)
        assert kernel[0] == kernel[1]
        assert stride[0] == stride[1]
        rows.append((kind_of(module), kernel[0], stride[0], NONE, (*y.shape[2:], y.shape[1]), 1))

    for child in model.children():
        child.register_forward_hook(record)
    model(x)
    return rows
