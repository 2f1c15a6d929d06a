"""Does the program of a model depend on the number of samples, other than that it runs for each of them?

Two traces of two and of four samples do not show what `if x.shape[0] > 8` does. So it is noted whether a forward that
is not of torch or onelip gets a number from a tensor: its shape, its length, parts of a split. If one does, a further
trace has an unknown number of samples, and torch lists the conditions on it that the program asked for.
"""

import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._sympy.numbers import int_oo

# What does not depend on the number of samples.
_HARMLESS = (Tensor, torch.dtype, torch.device, torch.layout, bool, type(None))
_RANK = ("dim", "ndimension")
# Between a forward and this mode, where functions of torch are written in Python.
_WRAPPERS = ("torch.overrides", "torch.functional", "torch.nn.functional", "torch._tensor", "torch._jit_internal")


class Sizes(TorchFunctionMode):
    """Notes whether code that is not of torch or onelip gets anything from a tensor that its length may decide."""

    is_read = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not isinstance(result, _HARMLESS) and getattr(func, "__name__", "") not in _RANK:
            frame: Any = sys._getframe(1)
            while frame and frame.f_globals.get("__name__", "") in _WRAPPERS:
                frame = frame.f_back
            caller = frame.f_globals.get("__name__", "") if frame else ""
            self.is_read |= caller.partition(".")[0] not in ("torch", "onelip")
        return result


def conditions_on_length(running: nn.Module, example: Tensor) -> list[str] | None:
    """What a program asks of the number of samples, as torch writes it; None if it needs the number itself."""
    try:
        program = torch.export.export(
            running, (example,), dynamic_shapes=({0: torch.export.Dim.DYNAMIC},), strict=False
        )
    except Exception:  # also where torch has no such trace for other reasons
        return None
    ranges = [f"{name} is in {found}" for name, found in program.range_constraints.items() if found.upper != int_oo]
    return [*program._guards_code, *ranges]
