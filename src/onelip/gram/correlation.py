"""Products of convolution operators as kernels: the Gram operator P^T P, P^T D, and P G for a Gram operator G."""

import torch.nn.functional as F
from torch import Tensor

from onelip.core.precision import full_precision

_CONVOLVE = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


def self_correlation(P: Tensor) -> Tensor:
    """Return the kernel of P^T P: (g, columns, columns, *(2k - 1)) for P (g, rows, columns, *k), differentiable.

    Entry [a, c, delta] is sum over rows and taps t of P[:, a, t + delta] P[:, c, t], with delta = 0 in the middle.
    """
    with full_precision(P.device):
        return correlation(P, P)


def correlation(P: Tensor, D: Tensor) -> Tensor:
    """Return the kernel of P^T D, of two kernels of one shape, in the form of `self_correlation`.

    Entry [a, c, delta] is sum over rows and taps t of P[:, a, t + delta] D[:, c, t].
    """
    if P.dim() == 3:
        return P.mT @ D
    g, _, C, *taps = P.shape
    # The input channels take the role of the batch; groups stay groups.
    signal = P.permute(2, 0, 1, *range(3, P.dim())).flatten(1, 2)  # (C, g * R, *k)
    kernel = D.transpose(1, 2).flatten(0, 1)  # (g * C, R, *k)
    padding = tuple(k - 1 for k in taps)
    G = _CONVOLVE[len(taps)](signal, kernel, padding=padding, groups=g)  # (C, g * C, *(2k - 1))
    return G.unflatten(1, (g, C)).transpose(0, 1)


def composition(P: Tensor, G: Tensor) -> Tensor:
    """Return the kernel of P G, cut back to the taps of P (g, rows, columns, *k), for G as `self_correlation` has it.

    The uncut product has 3k - 2 taps. Entry [r, c, t] is sum over a, s of P[r, a, s] G[a, c, s - t].
    """
    if P.dim() == 3:
        return P @ G
    g, _, C, *taps = P.shape
    signal = P.transpose(0, 1).flatten(1, 2)  # (R, g * C, *k)
    kernel = G.transpose(1, 2).flatten(0, 1)  # (g * C, C, *(2k - 1))
    product = _CONVOLVE[len(taps)](signal, kernel, padding=tuple(k - 1 for k in taps), groups=g)
    return product.unflatten(1, (g, C)).transpose(0, 1)
