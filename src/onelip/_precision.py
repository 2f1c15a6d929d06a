"""Keep what a proof rests on in the precision of its operands: no autocast, no TF32, no bfloat16 in disguise."""

from contextlib import AbstractContextManager, ExitStack, nullcontext
from types import TracebackType
from typing import Any

import torch


def full_precision(device: torch.device) -> AbstractContextManager[object]:
    """A context in which products run in the precision of their operands, whatever is set outside.

    A Gram matrix multiplied in bfloat16 or TF32 underestimates the norm by parts in a thousand; the layer would not be
    1-Lipschitz any more. Autocast does that, and so do torch.set_float32_matmul_precision and, for convolutions on a
    GPU, torch's defaults.
    """
    # Devices without autocast (meta) have none to keep away.
    plain = (
        torch.autocast(device.type, enabled=False) if torch.amp.is_autocast_available(device.type) else nullcontext()
    )
    # A compiler traces no settings; what it compiles runs under those of the program.
    return plain if torch.compiler.is_compiling() else _FullPrecision(device.type, plain)


class _FullPrecision(AbstractContextManager[None]):
    def __init__(self, device_type: str, plain: AbstractContextManager[object]) -> None:
        self.plain = plain
        self.settings: tuple[Any, ...] = ()
        if device_type == "cuda":
            cudnn: Any = torch.backends.cudnn  # torch gives these no type
            self.settings = (torch.backends.cuda.matmul, cudnn.conv)
        elif device_type == "cpu":
            mkldnn: Any = torch.backends.mkldnn
            self.settings = (mkldnn.matmul, mkldnn.conv)

    def __enter__(self) -> None:
        with ExitStack() as stack:
            stack.enter_context(self.plain)
            for setting in self.settings:
                stack.callback(setattr, setting, "fp32_precision", setting.fp32_precision)
                setting.fp32_precision = "ieee"
            self.stack = stack.pop_all()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stack.__exit__(kind, error, trace)
