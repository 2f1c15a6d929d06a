"""Base class of the losses, and the offset cross-entropy of the paper."""

import math
from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

from onelip.core.errors import check_number
from onelip.losses.registry import register_loss

LARGEST = 1e30  # of the options of a loss: larger values overflow

Reduction = Literal["mean", "sum", "none"]


class Loss(nn.Module):
    """Base class of losses: `forward(scores, labels, ...)` computes a value per image and returns `self.reduce` of it.

    Besides scores and labels, `forward` declares the keyword arguments `model`, `images` and `progress` that it needs;
    see `onelip.losses`.

    Args:
        reduction: "mean" over the batch, "sum", or "none" for one value per image.

    Attributes:
        certificate: the kind of radius that the loss increases, which evaluation then reports: from the "constant" of
            the network, or from the constants of all "pairs" of classes.
        needs_input_gradient: whether the images must require a gradient when the network is run.

    Examples:
        >>> import torch
        >>> class Hinge(Loss):
        ...     def forward(self, scores, labels):
        ...         return self.reduce(F.multi_margin_loss(scores, labels, reduction="none"))
        >>> Hinge()(torch.tensor([[2.0, 0.0]]), torch.tensor([0]))
        tensor(0.)
    """

    certificate: Literal["constant", "pairs"] = "constant"
    needs_input_gradient: bool = False

    def __init__(self, reduction: Reduction = "mean") -> None:
        super().__init__()
        if reduction not in ("mean", "sum", "none"):
            raise ValueError(f"expected reduction to be 'mean', 'sum' or 'none', got {reduction!r}")
        self.reduction: Reduction = reduction

    def reduce(self, values: Tensor) -> Tensor:
        """Reduce the values of the images (N) by `reduction`."""
        if self.reduction == "none":
            return values
        return values.mean() if self.reduction == "mean" else values.sum()


class OffsetLoss(Loss):
    """Base class of losses that add a term to the offset cross-entropy; see `OffsetCrossEntropy`.

    Args:
        offset: subtracted from the score of the right class; 0 for none.
        temperature: positive.
        reduction: "mean" over the batch, "sum", or "none".
    """

    def __init__(self, offset: float = math.sqrt(2), temperature: float = 0.25, reduction: Reduction = "mean") -> None:
        super().__init__(reduction)
        self.offset = check_number("offset", offset, -LARGEST, LARGEST)
        self.temperature = check_number("temperature", temperature, 0, LARGEST, open_low=True)

    def offset_cross_entropy(self, scores: Tensor, labels: Tensor) -> Tensor:
        """Return the offset cross-entropy of each image (N), computed in at least float32, also under autocast."""
        if scores.dim() != 2 or labels.shape != scores.shape[:1]:
            raise ValueError(
                f"expected scores (N, classes) and labels (N), got {tuple(scores.shape)} and {tuple(labels.shape)}; "
                "labels are class indices, not one-hot vectors"
            )
        scores = widened(scores)
        one_hot = F.one_hot(labels, scores.shape[1]).to(scores.dtype)
        shifted = (scores - self.offset * one_hot) / self.temperature
        return self.temperature * F.cross_entropy(shifted, labels, reduction="none")

    def extra_repr(self) -> str:
        return f"offset={self.offset:g}, temperature={self.temperature:g}, reduction={self.reduction!r}"


@register_loss("offset-cross-entropy")
class OffsetCrossEntropy(OffsetLoss):
    r"""Cross-entropy with an offset and a temperature. The defaults are those of the paper.

    $$ \mathcal L(s, y) = t \cdot \mathrm{crossentropy}\bigl(y, \mathrm{softmax}((s - u\,y) / t)\bigr) $$

    (paper, section Experiments; $y$ is the one-hot label). The offset $u$ is subtracted from the score of the right
    class, so that the loss rewards a margin of $u$: with $u = \sqrt 2$ and a 1-Lipschitz network that is a certified
    radius of 1. The temperature $t$ keeps the gradient close to 1 as long as the margin is well below $u$, and the
    factor $t$ keeps it from growing as $t$ shrinks.

    Args:
        offset: $u$, subtracted from the score of the right class; 0 for none.
        temperature: $t$, positive.
        reduction: "mean" over the batch, "sum", or "none".

    Shape:
        scores (N, classes); labels (N), int64; output a scalar, or (N) with `reduction="none"`.

    Examples:
        >>> import torch
        >>> loss = OffsetCrossEntropy()
        >>> round(float(loss(torch.tensor([[2.0, 0.0]]), torch.tensor([0]))), 4)
        0.0229
    """

    def forward(self, scores: Tensor, labels: Tensor) -> Tensor:
        return self.reduce(self.offset_cross_entropy(scores, labels))


def widened(scores: Tensor) -> Tensor:
    """Return scores in at least float32; scores computed under autocast may be in half precision."""
    return scores if scores.dtype.itemsize >= 4 else scores.float()
