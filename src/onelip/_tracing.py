"""Whether a computation may look at its values, and use functions whose derivative is written by hand."""

import torch
from torch import Tensor


def is_traced(x: Tensor) -> bool:
    """Whether a compiler, torch.func or a tensor without memory is at work: then plain operations of torch must do.

    Example:
        >>> is_traced(torch.zeros(1)), is_traced(torch.zeros(1, device="meta"))
        (False, True)
    """
    functorch = torch._C._functorch  # pyright: ignore[reportAttributeAccessIssue]  torch has no type for it
    return x.is_meta or torch.compiler.is_compiling() or functorch.peek_interpreter_stack() is not None
