"""Whether a computation may look at its values and use derivatives written by hand, and tensors that settings fix."""

from typing import Any

import torch
from torch import Tensor, nn


def is_compiling() -> bool:
    """Whether a graph is being captured: compilers and exporters want ordinary operations, not autograd functions."""
    return torch.compiler.is_compiling()


def is_traced(x: Tensor) -> bool:
    """Whether a compiler, torch.func, forward-mode derivatives or tensors without values are at work.

    Then plain operations of torch must do.

    Examples:
        >>> is_traced(torch.zeros(1)), is_traced(torch.zeros(1, device="meta"))
        (False, True)
    """
    if torch.compiler.is_compiling() or x.is_meta or type(x) not in (Tensor, nn.Parameter):
        return True
    internal: Any = torch._C  # torch has no types, and no public names, for these
    forward_mode: Any = torch.autograd.forward_ad
    return internal._functorch.peek_interpreter_stack() is not None or forward_mode._current_level >= 0


class Constant:
    """A tensor that settings fix, in the type and on the device of what it meets; made once for each.

    Not a buffer: a module that is cast to float32 and back would round it.

    Examples:
        >>> Constant(torch.tensor([0.5], dtype=torch.float64)).like(torch.zeros(1)).dtype
        torch.float32
    """

    _caches = ("._made",)

    def __init__(self, value: Tensor) -> None:
        self.value = value
        self._made: dict[tuple[torch.device, torch.dtype], Tensor] = {}

    def like(self, x: Tensor) -> Tensor:
        """On the device of x; numbers in its type, indices as they are."""
        dtype = x.dtype if self.value.is_floating_point() else self.value.dtype
        made = self._made.get((x.device, dtype))
        if made is None:
            made = self.value.to(x.device, dtype)
            if not is_traced(x) and type(made) is Tensor:
                self._made[x.device, dtype] = made
        return made
