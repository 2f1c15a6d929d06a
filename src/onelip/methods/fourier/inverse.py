"""Inverses of batches of matrices that are right with any number of threads.

torch (2.13, and others: issues 141358 and 142815 of pytorch) factorises the matrices of a batch in several threads at
once after `torch.set_num_threads(n)`, n > 1, and Intel's library is not safe for that: from some 150 rows on inverses
are wrong by tens of per cent, mostly without an error. One matrix after the other is right.
"""

from typing import Any

import torch
from torch import Tensor

from onelip.core.precision import full_precision
from onelip.core.tracing import is_traced

_SAFE_ROWS = 64  # wrong results were seen from 151 rows on


def inverse(A: Tensor) -> Tensor:
    """A^-1 for each of A (b, n, n); of singular ones whatever torch.linalg.inv_ex gives.

    Compiled programs still take torch's way, which is right as long as nobody sets the number of threads.

    Examples:
        >>> inverse(torch.tensor([[[2.0, 0.0], [0.0, 4.0]]])).tolist()
        [[[0.5, 0.0], [0.0, 0.25]]]
    """
    if torch.compiler.is_compiling() or A.device.type != "cpu" or len(A) <= 1 or A.shape[-1] <= _SAFE_ROWS:
        return torch.linalg.inv_ex(A).inverse
    if is_traced(A):
        return torch.stack([torch.linalg.inv_ex(matrix).inverse for matrix in A])
    return torch.linalg.inv_ex(A).inverse if torch.get_num_threads() == 1 else _OneByOne.apply(A)


class _OneByOne(torch.autograd.Function):
    """The loop, with the derivative of all of them in two products."""

    @staticmethod
    def forward(ctx: Any, A: Tensor) -> Tensor:
        X = torch.stack([torch.linalg.inv_ex(matrix).inverse for matrix in A])
        ctx.save_for_backward(X)
        return X

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (X,) = ctx.saved_tensors
        with full_precision(X.device):
            return -(X.mH @ gradients[0] @ X.mH)
