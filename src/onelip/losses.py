"""The loss of the paper: cross-entropy that asks for a margin.

    L(s, y) = t · crossentropy(y, softmax((s - u y) / t))                        (paper, section Experiments)

The offset u is taken off the score of the right class, so that the loss rewards being right by a margin of u: with
u = sqrt 2 and a 1-Lipschitz network that is a certified radius of 1. The temperature t keeps the gradient near 1 in
norm as long as the margin is well below u, and the factor t in front keeps it from growing as t shrinks.
"""

import math
from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

Reduction = Literal["mean", "sum", "none"]


class OffsetCrossEntropy(nn.Module):
    """Cross-entropy with an offset and a temperature; the defaults are the paper's.

    Args:
        offset: u, subtracted from the score of the right class; 0 for none.
        temperature: t, positive.
        reduction: "mean" over the batch, "sum", or "none".

    Example:
        >>> import torch
        >>> loss = OffsetCrossEntropy()
        >>> round(float(loss(torch.tensor([[2.0, 0.0]]), torch.tensor([0]))), 4)
        0.0229
    """

    def __init__(self, offset: float = math.sqrt(2), temperature: float = 0.25, reduction: Reduction = "mean") -> None:
        super().__init__()
        if not math.isfinite(offset):
            raise ValueError(f"expected a finite offset, got {offset!r}")
        if not 0 < temperature < math.inf:
            raise ValueError(f"expected a positive temperature, got {temperature!r}")
        if reduction not in ("mean", "sum", "none"):
            raise ValueError(f"expected reduction to be 'mean', 'sum' or 'none', got {reduction!r}")
        self.offset = float(offset)
        self.temperature = float(temperature)
        self.reduction: Reduction = reduction

    def forward(self, scores: Tensor, labels: Tensor) -> Tensor:
        """scores (N, classes), labels (N) of int64; the loss is computed in at least float32, also under autocast."""
        if scores.dim() != 2 or labels.shape != scores.shape[:1]:
            raise ValueError(
                f"expected scores (N, classes) and labels (N), got {tuple(scores.shape)} and {tuple(labels.shape)}"
            )
        scores = scores if scores.dtype.itemsize >= 4 else scores.float()
        one_hot = F.one_hot(labels, scores.shape[1]).to(scores.dtype)
        shifted = (scores - self.offset * one_hot) / self.temperature
        return self.temperature * F.cross_entropy(shifted, labels, reduction=self.reduction)

    def extra_repr(self) -> str:
        return f"offset={self.offset:g}, temperature={self.temperature:g}, reduction={self.reduction!r}"
