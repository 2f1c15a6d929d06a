"""Layers x - 2 V* relu(V x + b) and their blocks as two linear layers with MaxMin between, each of norm at most 1.

What a sum of two maps can be said of, 1 + 2 ||V||^2, is three times too much; but with relu(q) = (q + |q|) / 2 and
S = (I - V* V)^(1/2), for ||V|| <= 1,

    x - 2 V* relu(V x + b) = S p - V* |q| - V* b,       p = S x,  q = V x + b,                                   (1)

and [S; V] has orthonormal columns. MaxMin of ((p + q) / sqrt 2, (p - q) / sqrt 2) is ((p + |q|) / sqrt 2,
(p - |q|) / sqrt 2), and both rotations are orthogonal. So everything before MaxMin is one matrix of norm 1, and
everything after it is another one: the norms that any checker can prove of linear layers suffice for the block.

Only some columns of x may be there (the others zero), and only some rows asked for: V = [A B] with inputs for B and
outputs for A is a Sandwich layer. The rows of p are then turned into as few as there are outputs or inputs, which
changes nothing: for a Q with orthonormal columns whose range has S's rows (or columns), S_out Q Q* S_in = S_out S_in.

Where rounding has made ||V|| larger than 1 the negative eigenvalues of I - V* V are taken as zero: what is off then is
of the size of that rounding. The layers are proved as they are stored, so this is no matter of soundness.
"""

import math
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn

from onelip.methods.fourier.plain import plain_periodic
from onelip.nn.maxmin import MaxMin


def reflected(V: Tensor, inputs: slice, outputs: slice) -> tuple[Tensor, Tensor]:
    """The matrices before and after MaxMin, (b, 2 k, inputs) and (b, outputs, 2 k), for V (b, hidden, n).

    k is the larger one of hidden and the smaller one of inputs and outputs.

    Examples:
        >>> V = torch.eye(3, dtype=torch.float64)[None, :2] * 0.6
        >>> before, after = reflected(V, slice(None), slice(None))
        >>> x = torch.randn(3, dtype=torch.float64)
        >>> one, other = (before[0] @ x).chunk(2)
        >>> y = after[0] @ torch.cat([torch.maximum(one, other), torch.minimum(one, other)])
        >>> bool((y - (x - 2 * V[0].T @ (V[0] @ x).relu())).abs().max() < 1e-14)
        True
    """
    S = _root_of_rest(V)
    into, out = S[..., inputs], S[:, outputs]  # (b, n, inputs), (b, outputs, n)
    if into.shape[-1] <= out.shape[-2] and into.shape[-1] < S.shape[-1]:
        Q = torch.linalg.qr(into).Q
        into, out = Q.mH @ into, out @ Q
    elif out.shape[-2] < S.shape[-1]:
        Q = torch.linalg.qr(out.mH).Q
        into, out = Q.mH @ into, out @ Q
    q_in, q_out = V[..., inputs], V.mH[:, outputs]
    k = max(into.shape[-2], V.shape[-2])
    into, q_in = (_rows(M, k) for M in (into, q_in))
    out, q_out = (_rows(M.mT, k).mT for M in (out, q_out))
    before = torch.cat([into + q_in, into - q_in], -2)
    after = torch.cat([out - q_out, out + q_out], -1)
    return before * math.sqrt(0.5), after * math.sqrt(0.5)


def plain_dense(
    V: Tensor, bias: Tensor | None, inputs: slice, outputs: slice, factor: float, *, axes: int
) -> nn.Sequential:
    """(1) times a factor for a matrix V (hidden, n): Linear layers, or 1x1 convolutions on so many spatial axes."""
    wide = V.to(_wide(V))
    before, after = (M[0] for M in reflected(wide[None], inputs, outputs))
    after = after * factor
    added = None if bias is None else _biases(wide, bias.to(wide.dtype), len(before) // 2, outputs, factor)
    kind: Any = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)[axes]
    taps: tuple[int, ...] = (1,) * (axes > 0)

    def layer(M: Tensor, number: int) -> nn.Module:
        made = kind(*reversed(M.shape), *taps, bias=added is not None, dtype=V.dtype, device=V.device)
        if not V.is_meta:
            made.weight.copy_(M.reshape(made.weight.shape))
            if added is not None:
                made.bias.copy_(added[number])
        return made

    with torch.no_grad():
        parts = (("before", layer(before, 0)), ("maxmin", MaxMin(1 if axes else -1)), ("after", layer(after, 1)))
    return nn.Sequential(OrderedDict(parts))


def plain_by_frequency(
    matrices: Tensor, bias: Tensor | None, inputs: slice, outputs: slice, factor: float, *, size: tuple[int, ...]
) -> nn.Sequential:
    """(1) times a factor for a circular convolution, V by its matrices (frequencies, hidden, n, 2)."""
    wide = matrices.to(_wide(matrices))
    V = torch.view_as_complex(wide)
    before, after = reflected(V, inputs, outputs)
    after = after * factor
    one = two = None
    if bias is not None:
        # A constant image has the frequency 0 alone, where V is real.
        one, two = _biases(wide[0, ..., 0], bias.to(wide.dtype), before.shape[1] // 2, outputs, factor)

    def layer(M: Tensor, added: Tensor | None) -> nn.Module:
        parts = torch.view_as_real(M.resolve_conj().contiguous()).to(matrices.dtype)
        return plain_periodic(parts, added, input_size=size, size=size)

    parts = (("before", layer(before, one)), ("maxmin", MaxMin()), ("after", layer(after, two)))
    return nn.Sequential(OrderedDict(parts))


def _biases(V: Tensor, bias: Tensor, k: int, outputs: slice, factor: float) -> tuple[Tensor, Tensor]:
    """What is added before MaxMin, (2 k), and after the second map; V (hidden, n) real."""
    half = _rows(bias[:, None], k)[:, 0] * math.sqrt(0.5)
    return torch.cat([half, -half]), -factor * (V.T[outputs] @ bias)


def _root_of_rest(V: Tensor) -> Tensor:
    """(I - V* V)^(1/2), Hermitian, (b, n, n)."""
    if V.is_meta:
        return V.mH @ V
    rest = torch.eye(V.shape[-1], dtype=V.dtype, device=V.device) - V.mH @ V
    if not bool(rest.isfinite().all()):  # for the one who bakes to name
        return torch.full_like(rest, math.nan)
    values, vectors = torch.linalg.eigh(rest)
    return (vectors * values.clamp(min=0).sqrt()[:, None, :]) @ vectors.mH


def _wide(M: Tensor) -> torch.dtype:
    """The type to compute in: float64 where a device has it."""
    return torch.float32 if M.device.type == "mps" else torch.float64


def _rows(M: Tensor, count: int) -> Tensor:
    """Zeros below."""
    missing = M.new_zeros(*M.shape[:-2], count - M.shape[-2], M.shape[-1])
    return torch.cat([M, missing], -2)
