"""Reject programs whose arithmetic is not that of Note [Arithmetic] in core/rounding.py, which the sound mode assumes.

The note allows any order of summation, but only sums of products. Fast convolutions (Winograd in NNPACK, algorithms of
oneDNN and cuDNN) compute something else, and TF32, bfloat16 and autocast round differently. All of these are for other
dtypes than float64: for float64 on the CPU, torch uses im2col and a matrix multiplication. `check_backends`
asks torch for the backend of each layer, to be sure.
"""

import itertools
from typing import Any

import torch
from torch import nn

from onelip.core.errors import ProofError
from onelip.core.geometry import padding_of
from onelip.graph.kinds import Affine, Exponential, Potential, Program

# Each computes patches as columns, then one matrix product per group; "Empty" computes nothing.
_PLAIN_BACKENDS = frozenset(
    ("Slow2d", "Slow3d", "SlowDilated2d", "SlowDilated3d", "SlowTranspose2d", "SlowTranspose3d", "Empty")
)


def check_sound(model: nn.Module) -> None:
    """Reject a model that is not a float64 program on the CPU in eval mode.

    Raises:
        ProofError: if it is not; the message names the fix.
    """
    if not isinstance(model, nn.Module):
        raise ProofError(f"expected a torch module, got {type(model).__name__}; wrap the function in an nn.Module")
    instead = "or ask for mode='real-arithmetic', whose radii do not include rounding"
    for device in {"cpu", *(p.device.type for p in model.parameters())}:
        if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
            raise ProofError(
                f"expected no autocast, got torch.autocast to {torch.get_autocast_dtype(device)}: it rounds more than "
                f"the proof allows; leave the region, {instead}"
            )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if not tensor.is_floating_point():
            continue
        if tensor.dtype != torch.float64:
            raise ProofError(
                f"expected a float64 program for the sound mode, got {_short(tensor.dtype)} in {name!r}: its rounding "
                f"is too coarse for a proof; call model.double(), which is exact, {instead}"
            )
        if tensor.device.type != "cpu":
            raise ProofError(
                f"expected a program on the CPU for the sound mode, got {tensor.device} in {name!r}: the "
                f"rounding errors of GPU libraries are not known; call model.cpu(), {instead}"
            )
    training = next((name for name, module in model.named_modules() if module.training), None)
    if training is not None:
        what = f"{training!r}" if training else "the model"
        raise ProofError(f"expected a model in eval mode, got {what} in training mode; call model.eval()")
    if not _rounds_to_nearest():
        raise ProofError(
            "expected float64 that rounds to nearest, got another rounding mode; set the CPU back to round-to-nearest"
        )


def check_backends(program: Program, batch_size: int) -> None:
    """Reject convolutions that torch does not compute as sums of products.

    Raises:
        ProofError: if there is one; the message names the layer.
    """
    select = getattr(torch._C, "_select_conv_backend", None)
    for node in program.nodes:
        if not isinstance(node, Affine) or node.conv is None:
            continue
        if select is None:
            raise ProofError(
                "the backends of convolutions are unknown in this version of torch; install torch 2.10 or newer"
            )
        directions = (False, True) if isinstance(node, Potential) else (False,)
        for adjoint, batch in itertools.product(directions, (1, batch_size)):
            name = _backend(select, node, node.conv, adjoint, batch)
            if name not in _PLAIN_BACKENDS:
                raise ProofError(
                    f"{node.title}: expected a convolution by im2col and matrix products, got torch's backend {name}, "
                    "whose rounding is not bounded; use torch for the CPU without extra backends"
                )


def _backend(select: Any, node: Affine, conv: nn.modules.conv._ConvNd, adjoint: bool, batch: int) -> str:
    """Name of torch's backend for a convolution, or for its adjoint (which keeps the size)."""
    weight, pairs = node.weight.values, padding_of(conv)
    channels = (conv.out_channels, conv.in_channels) if adjoint else (conv.in_channels, conv.out_channels)
    # Other padding is done before the convolution; the backend does not depend on it.
    padding = [left if left == right and not node.is_circular else 0 for left, right in pairs]
    sizes = [n + 2 * (sum(pair) - p) for n, pair, p in zip(node.pixels, pairs, padding, strict=True)]
    # An expanded scalar: only dtype and shape matter.
    x = torch.zeros((), dtype=torch.float64).expand(batch, channels[0], *sizes)
    apart = adjoint or isinstance(node, Exponential)  # the bias is not added by the convolution
    bias = None if apart or node.bias is None else node.bias.values
    stride, dilation, output_padding = map(list, (conv.stride, conv.dilation, conv.output_padding))
    transposed = conv.transposed or adjoint
    arguments = stride, padding, dilation, transposed, output_padding, conv.groups, [channels[1]]
    return select(x, weight, bias, *arguments).name


def _rounds_to_nearest() -> bool:
    one, half = torch.ones((), dtype=torch.float64), torch.full((), 2.0**-53, dtype=torch.float64)
    up, down = one + 3 * half, one + half  # ties go to the even neighbour; directed rounding gets one of these wrong
    return bool(up == 1 + 2.0**-51) and bool(down == 1) and bool(-one - half == -1)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
