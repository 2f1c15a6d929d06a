"""The kernel of the Gram operator of a convolution."""

import torch.nn.functional as F
from torch import Tensor

from onelip.core.precision import full_precision


def self_correlation(P: Tensor) -> Tensor:
    """Return the kernel of P^T P: (g, columns, columns, *(2k - 1)) for P (g, rows, columns, *k), differentiable.

    Entry [a, c, delta] is sum over rows and taps t of P[:, a, t + delta] P[:, c, t], with delta = 0 in the middle.
    """
    with full_precision(P.device):
        if P.dim() == 3:
            return P.mT @ P
        g, _, C, *taps = P.shape
        # The input channels act as the batch; groups stay groups.
        signal = P.permute(2, 0, 1, *range(3, P.dim())).flatten(1, 2)  # (C, g * R, *k)
        kernel = P.transpose(1, 2).flatten(0, 1)  # (g * C, R, *k)
        correlate = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}[len(taps)]
        G = correlate(signal, kernel, padding=tuple(k - 1 for k in taps), groups=g)  # (C, g * C, *(2k - 1))
        return G.unflatten(1, (g, C)).transpose(0, 1)
