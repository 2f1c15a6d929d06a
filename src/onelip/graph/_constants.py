"""Constants that a program computes from stored numbers, as they are in real arithmetic.

A model in float32 that computes cos(angle) and sin(angle) has rounded ones, whose squares do not add up to 1. The audit
is about real arithmetic, so such constants are computed in float64. Only smooth operations are: what a program decides
by comparing or rounding, and what it does with float32 by its own wish, stays what it was.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

_NAMES = """
    add sub rsub mul div neg reciprocal sin cos tan exp sqrt rsqrt sigmoid tanh
    view reshape unsqueeze squeeze expand permute transpose slice select clone alias
"""
_SMOOTH = frozenset(_NAMES.split())


def in_real_arithmetic(target: Any, value: Any, arguments: Any, keywords: Any) -> Tensor | None:
    """What an operation that gives `value` in float32 gives in float64; None if that is not known.

    Args:
        target: the operation.
        value: what it has given in the types of the program.
        arguments: constants, in float64 where these are known.
        keywords: likewise.

    Examples:
        >>> angle = torch.tensor(1.0)
        >>> in_real_arithmetic(torch.ops.aten.cos.default, angle.cos(), (angle,), {}).dtype
        torch.float64
    """
    parts = str(target).split(".")
    if not isinstance(value, Tensor) or value.dtype != torch.float32 or parts[0] != "aten" or parts[1] not in _SMOOTH:
        return None
    wide = target(*tree_map(_wide, arguments), **tree_map(_wide, keywords))
    return wide if wide.dtype == torch.float64 else None


def _wide(argument: Any) -> Any:
    return argument.double() if isinstance(argument, Tensor) and argument.dtype == torch.float32 else argument
