"""One ATen operation at a time: what its rule says, and what it is by brute force."""

import math

import torch
from torch import Tensor

from onelip.graph.step import Call, Graph, Ref, aten
from onelip.graph.walk import walk

X = Ref(0)


def fill(arguments, x):
    """The arguments of an operation with a tensor in place of X."""
    return [[x if a == X else a for a in arg] if isinstance(arg, list) else x if arg == X else arg for arg in arguments]


def one_step(op, *arguments, shape, dtype=torch.float64, **keywords):
    """A graph of the input (2, *shape) and one operation on it."""
    shape = (2, *shape)
    result = aten(op)(*fill(arguments, torch.zeros(shape, dtype=dtype)), **keywords)
    several = not isinstance(result, Tensor)
    out_shape = () if several else tuple(result.shape)
    out_type = result[0].dtype if several else result.dtype
    start = Call(0, "", "input", None, (), {}, (), shape, dtype)
    call = Call(1, "", op, None, arguments, keywords, (0,), out_shape, out_type)
    return Graph((start, call), 1, shape)


def verdict(op, *arguments, shape, **keywords):
    """What the walk says of one operation."""
    return walk(one_step(op, *arguments, shape=shape, **keywords))[1]


def norm_from_forward(op, *arguments, shape, **keywords):
    """The norm of an affine operation: its matrix is written out from forward passes of unit vectors."""
    size = math.prod(shape)
    units = torch.eye(size, dtype=torch.float64).reshape(size, *shape)

    def apply(x):
        result = aten(op)(*fill(arguments, x), **keywords)
        pieces = [result] if isinstance(result, Tensor) else result
        return torch.cat([piece.reshape(len(x), -1) for piece in pieces], 1)

    matrix = apply(units) - apply(torch.zeros_like(units))
    return float(torch.linalg.matrix_norm(matrix, 2)) if matrix.numel() else 0.0
