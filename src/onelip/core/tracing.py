"""Detect tracing, where values cannot be read and custom derivatives cannot be used; constant tensors of a module."""

from typing import Any

import torch
from torch import Tensor, nn

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
