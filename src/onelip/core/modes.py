"""How torch runs: full precision for the products that a bound depends on, and detection of tracing."""

import threading
from contextlib import AbstractContextManager, ExitStack, nullcontext
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn


def full_precision(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which products run in the precision of their operands, whatever the global settings are.

    A Gram matrix computed in bfloat16 or TF32 underestimates the norm by parts in a thousand, and the layer would no
    longer be 1-Lipschitz. Autocast lowers the precision, and so do `torch.set_float32_matmul_precision` and, for
    convolutions on a GPU, torch's defaults. Inside torch.compile only autocast is disabled: a compiled program must be
    run with settings that do not allow TF32.

    Args:
        device: device of the operands.
    """
    # Some devices (meta) have no autocast to disable.
    plain = (
        torch.autocast(device.type, enabled=False) if torch.amp.is_autocast_available(device.type) else nullcontext()
    )
    return plain if torch.compiler.is_compiling() else _FullPrecision(device.type, plain)


def rounding_room(dtype: torch.dtype) -> float:
    """Return the factor by which the norm of a computed weight may exceed the constant of its method.

    Constants by construction are those of real arithmetic. BLAS libraries sum the products of a Gram matrix in blocks,
    and sums of equal numbers round in one direction: 17 eps were measured for a weight of 3000 equal rows (float32,
    MKL, Xeon). Other libraries have other blocks, so more is allowed. Proofs for the stored weights need no such room.

    Args:
        dtype: type of the weight.

    Examples:
        >>> rounding_room(torch.float64) - 1 < 2e-14
        True
    """
    return 1 + 64 * torch.finfo(dtype).eps


class _FullPrecision(AbstractContextManager[None]):
    """Process-wide precision settings: the first context to enter changes them, the last to leave restores them."""

    lock = threading.Lock()
    inside: dict[str, int] = {}  # noqa: RUF012  number of active contexts per device type
    before: dict[str, list[str]] = {}  # noqa: RUF012  settings before the first context

    def __init__(self, device_type: str, plain: AbstractContextManager[object]) -> None:
        self.device_type = device_type
        self.plain = plain

    def __enter__(self) -> None:
        with ExitStack() as stack:
            stack.enter_context(self.plain)
            self._enter_settings()
            stack.callback(self._leave_settings)
            self.stack = stack.pop_all()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stack.__exit__(kind, error, trace)

    def _enter_settings(self) -> None:
        with self.lock:
            if self.inside.get(self.device_type, 0) == 0:
                self.before[self.device_type] = [setting.fp32_precision for setting in _settings(self.device_type)]
                for setting in _settings(self.device_type):
                    setting.fp32_precision = "ieee"
            self.inside[self.device_type] = self.inside.get(self.device_type, 0) + 1

    def _leave_settings(self) -> None:
        with self.lock:
            self.inside[self.device_type] -= 1
            if self.inside[self.device_type] == 0:
                for setting, value in zip(_settings(self.device_type), self.before[self.device_type], strict=True):
                    setting.fp32_precision = value


def _settings(device_type: str) -> tuple[Any, ...]:
    backends: Any = torch.backends  # torch does not type these attributes
    if device_type == "cuda":
        return backends.cuda.matmul, backends.cudnn.conv
    return (backends.mkldnn.matmul, backends.mkldnn.conv) if device_type == "cpu" else ()


# ---- Detect tracing, where values cannot be read and custom derivatives cannot be used; constant tensors of a module


# False in Python. torch.jit.script does not compile the branch that it excludes.
is_scripting = torch.jit.is_scripting  # pyright: ignore[reportPrivateImportUsage]


def is_compiling() -> bool:
    """Whether a graph is being captured: compilers and exporters need ordinary operations, not autograd functions."""
    return torch.compiler.is_compiling()


def is_traced(x: Tensor) -> bool:
    """Whether only plain torch operations may be used on `x`.

    True under a compiler, torch.func or forward-mode differentiation, and for meta tensors and tensor subclasses.

    Examples:
        >>> is_traced(torch.zeros(1)), is_traced(torch.zeros(1, device="meta"))
        (False, True)
    """
    if torch.compiler.is_compiling() or x.is_meta or type(x) not in (Tensor, nn.Parameter):
        return True
    internal: Any = torch._C  # torch has neither types nor public names for these
    forward_mode: Any = torch.autograd.forward_ad
    return internal._functorch.peek_interpreter_stack() is not None or forward_mode._current_level >= 0


class Constant:
    """A constant tensor that follows the device and dtype of the input; each conversion is cached.

    It is not a buffer, because casting the module to float32 and back would round a buffer.

    Args:
        value: the tensor, in its highest precision.

    Examples:
        >>> Constant(torch.tensor([0.5], dtype=torch.float64)).like(torch.zeros(1)).dtype
        torch.float32
    """

    _caches = ("._made",)

    def __init__(self, value: Tensor) -> None:
        self.value = value
        self._made: dict[tuple[torch.device, torch.dtype], Tensor] = {}

    def like(self, x: Tensor) -> Tensor:
        """Return the tensor on the device of `x`; floating-point values in the dtype of `x`, integers unchanged."""
        dtype = x.dtype if self.value.is_floating_point() else self.value.dtype
        made = self._made.get((x.device, dtype))
        if made is None:
            made = self.value.to(x.device, dtype)
            if not is_traced(x) and type(made) is Tensor:
                self._made[x.device, dtype] = made
        return made
