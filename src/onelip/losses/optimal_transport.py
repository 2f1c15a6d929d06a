r"""Kantorovich-Rubinstein losses: a 1-Lipschitz network that measures how far apart two distributions are.

The Wasserstein-1 distance of two distributions is the largest gap of means over all 1-Lipschitz functions,

$$ W_1(P, Q) = \sup_{\|f\|_{\mathrm{Lip}} \le 1} \; \mathbb E_P f - \mathbb E_Q f, $$

so a network with a proved constant $L$ gives the lower bound $(\mathbb E_P f - \mathbb E_Q f) / L$.
"""

import torch
from torch import Tensor

from onelip.core.errors import check_number
from onelip.losses.registry import LARGEST, Loss, Reduction, register_loss, widened


@register_loss("kr")
class KRLoss(Loss):
    r"""The negated Kantorovich-Rubinstein gap: minimise it to estimate a Wasserstein-1 distance.

    $$ \mathcal L(f, y) = \mathbb E[f \mid y = 0] - \mathbb E[f \mid y = 1] $$

    Scores with several columns are one critic for each class, against all other classes; the result is the mean over
    the classes. The gradient of the loss does not depend on the scores, so the network needs a Lipschitz constant.

    Args:
        reduction: "mean" or "sum" over the batch; "none" for one value for each sample, whose mean is the loss.

    Shape:
        scores (N), (N, 1) or (N, classes); labels (N): 0 and 1 (or booleans) for one critic, else class numbers.

    Examples:
        >>> scores, labels = torch.tensor([3.0, 1.0]), torch.tensor([1, 0])
        >>> KRLoss()(scores, labels)
        tensor(-2.)
    """

    def forward(self, scores: Tensor, labels: Tensor) -> Tensor:
        """Raises ValueError if the shapes do not fit, or if labels of one critic are not 0 and 1."""
        scores, members = _critics(scores, labels)
        return self.reduce(_gaps(scores, members).mean(1))


@register_loss("hkr")
class HKRLoss(Loss):
    r"""Hinge loss with the Kantorovich-Rubinstein gap: a classifier whose scores are robust margins.

    $$ \mathcal L(f, y) = \mathbb E[f \mid y = 0] - \mathbb E[f \mid y = 1]
       + \lambda\, \mathbb E \max(0,\; m - \pm f) $$

    with $+$ for label 1 (Serrurier et al., "Achieving robustness in classification using optimal transport with hinge
    regularization", CVPR 2021). With labels "outside" (1) and "inside" (0) and a large $\lambda$ the network becomes a
    signed distance: it separates the samples by a margin of at least $m$, with the largest slope that its constant
    allows.

    Args:
        margin: m, in units of the scores; positive.
        weight: $\lambda$, the weight of the hinge; not negative.
        reduction: "mean" or "sum" over the batch; "none" for one value for each sample, whose mean is the loss.

    Shape:
        As for `KRLoss`.

    Examples:
        >>> scores, labels = torch.tensor([3.0, 1.0]), torch.tensor([1, 0])
        >>> HKRLoss(margin=1.0, weight=10.0)(scores, labels)
        tensor(8.)
    """

    def __init__(self, margin: float = 1.0, weight: float = 10.0, reduction: Reduction = "mean") -> None:
        super().__init__(reduction)
        self.margin = check_number("margin", margin, 0, LARGEST, open_low=True)
        self.weight = check_number("weight", weight, 0, LARGEST)

    def forward(self, scores: Tensor, labels: Tensor) -> Tensor:
        """Raises ValueError if the shapes do not fit, or if labels of one critic are not 0 and 1."""
        scores, members = _critics(scores, labels)
        signs = members.to(scores.dtype) * 2 - 1
        hinge = (self.margin - signs * scores).clamp(min=0)
        return self.reduce((_gaps(scores, members) + self.weight * hinge).mean(1))

    def extra_repr(self) -> str:
        return f"margin={self.margin:g}, weight={self.weight:g}, reduction={self.reduction!r}"


def _critics(scores: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Scores (N, critics) in at least float32, and which samples belong to the upper side of each critic."""
    columns = scores.unsqueeze(1) if scores.dim() == 1 else scores
    if columns.dim() != 2 or labels.shape != columns.shape[:1]:
        raise ValueError(
            f"expected scores (N), (N, 1) or (N, classes) and labels (N), got {tuple(scores.shape)} and "
            f"{tuple(labels.shape)}; labels are class indices, not one-hot vectors"
        )
    if columns.shape[1] > 1:
        classes = torch.arange(columns.shape[1], device=labels.device)
        return widened(columns), labels.unsqueeze(1) == classes
    if not bool(((labels == 0) | (labels == 1)).all()):
        raise ValueError(
            f"expected labels 0 and 1 for one critic, got {labels.unique().tolist()[:5]}; "
            "use scores (N, classes) for more classes"
        )
    return widened(columns), labels.unsqueeze(1) == 1


def _gaps(scores: Tensor, members: Tensor) -> Tensor:
    """(N, critics), with the mean E[f | not a member] - E[f | member]; a side without samples counts as zero."""
    n = len(scores)
    inside, outside = members.sum(0).clamp(min=1), (~members).sum(0).clamp(min=1)
    return torch.where(members, -scores * n / inside, scores * n / outside)
