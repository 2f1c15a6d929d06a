"""What the sound mode refuses to certify: programs that do not compute as Note [Arithmetic] says.

The note allows any order of summation, but only sums of products. Torch's fast convolutions (Winograd in NNPACK,
oneDNN's and cuDNN's choices) are none, and TF32, bfloat16 and autocast round otherwise. All of them are for other types
than float64: there, on the CPU, torch has its own im2col and matrix multiplication. That is asked of torch here, layer
by layer, and not taken for granted.
"""

from collections.abc import Iterator

import torch
from torch import nn

from onelip.certify.program import Operation, Program, halves
from onelip.certify.rounding import ProofError

# All of them: patches to columns, then one matrix product (per group); "Empty" computes nothing.
_PLAIN_BACKENDS = frozenset(
    ("Slow2d", "Slow3d", "SlowDilated2d", "SlowDilated3d", "SlowTranspose2d", "SlowTranspose3d", "Empty")
)


def check_sound(model: nn.Module) -> None:
    """Refuse a model that is not a float64 program on the CPU in eval mode.

    Raises:
        ProofError: with what to do.
    """
    if not isinstance(model, nn.Module):
        raise ProofError(f"expected a torch module, got {type(model).__name__}; wrap the function in an nn.Module")
    instead = "or ask for mode='real-arithmetic', whose radii leave rounding out"
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
                f"expected a program on the CPU for the sound mode, got {tensor.device} in {name!r}: what a GPU "
                f"library computes is not known well enough; call model.cpu(), {instead}"
            )
    training = next((name for name, module in model.named_modules() if module.training), None)
    if training is not None:
        what = f"{training!r}" if training else "the model"
        raise ProofError(f"expected a model in eval mode, got {what} in training mode; call model.eval()")
    if not _rounds_to_nearest():
        raise ProofError("expected float64 that rounds to nearest, got another rounding mode; restore it")


def check_backends(program: Program, batch_size: int) -> None:
    """Refuse convolutions that torch would compute in another way than by sums of products.

    Raises:
        ProofError: naming the layer.
    """
    select = getattr(torch._C, "_select_conv_backend", None)
    for node, shape in _convolutions(program):
        if select is None:
            raise ProofError("expected a torch that tells how it convolves (2.10 or newer), got another; update it")
        for batch in {1, batch_size}:
            name = _backend(select, node, shape, batch)
            if name not in _PLAIN_BACKENDS:
                raise ProofError(
                    f"{node.title}: expected a convolution by im2col and matrix products, got torch's backend {name}, "
                    "whose rounding nobody has bounded; use torch for the CPU without extra backends"
                )


def _convolutions(program: Program) -> Iterator[tuple[Operation, tuple[int, ...]]]:
    """All of them, with the shapes of their inputs."""
    for node in program.nodes:
        if node.op == "conv":
            yield node, program.nodes[node.inputs[0]].shape
        elif node.op == "potential":
            forth, back = halves(node)
            yield forth, node.shape
            yield back, forth.shape


def _backend(select, node: Operation, shape: tuple[int, ...], batch: int) -> str:
    settings, transposed = node.settings, node.settings["transposed"]
    # Padding that torch does not do inside of a convolution comes before it; the backend does not depend on it.
    padding = [left if left == right and settings["mode"] == "zeros" else 0 for left, right in settings["padding"]]
    sizes = [n + 2 * (sum(pair) - p) for n, pair, p in zip(shape[1:], settings["padding"], padding, strict=True)]
    # One number seen as many: only type and shape are asked for.
    x = torch.zeros((), dtype=torch.float64).expand(batch, shape[0], *sizes)
    channels = [node.shape[0]]
    stride, dilation, output_padding = (list(settings[k]) for k in ("stride", "dilation", "output_padding"))
    found = select(
        x, node.weight, node.bias, stride, padding, dilation, transposed, output_padding, settings["groups"], channels
    )
    return found.name


def _rounds_to_nearest() -> bool:
    one, half = torch.ones((), dtype=torch.float64), torch.full((), 2.0**-53, dtype=torch.float64)
    up, down = one + 3 * half, one + half  # ties go to the even neighbour; directed rounding gets one of these wrong
    return bool(up == 1 + 2.0**-51) and bool(down == 1) and bool(-one - half == -1)


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
