"""Margins, radii and certified robust accuracy (CRA), in real arithmetic.

If the scores f have Lipschitz constant L (L2), no perturbation of norm r can change the decision where

    f_y - max_{i != y} f_i > sqrt(2) L r,

since the difference of two scores is sqrt(2) L-Lipschitz (Tsuzuku et al., 2018; paper, section Experiments). The
inequality is strict, as in the paper. This is the ordinary evaluation of the literature: the rounding of the forward
pass is not in it.
"""

import math

import torch
from torch import Tensor

# The radii of the paper's tables.
PAPER_RADII = (36 / 255, 72 / 255, 108 / 255, 1.0)


def margins(scores: Tensor, labels: Tensor | None = None) -> Tensor:
    """Score of the right class minus the best of the others, in float64; negative where the decision is wrong.

    Args:
        scores: (N, classes), at least two classes.
        labels: (N) of int64; None for the predicted class, whose margin is never negative.

    A row with a NaN or an infinity has the margin NaN, which certifies nothing.

    Example:
        >>> margins(torch.tensor([[2.0, 0.5, 1.0]]), torch.tensor([0]))
        tensor([1.], dtype=torch.float64)
    """
    if scores.dim() != 2 or scores.shape[1] < 2 or not scores.is_floating_point():
        raise ValueError(
            f"expected floating-point scores (N, classes) of two classes or more, got {scores.dtype} "
            f"{tuple(scores.shape)}"
        )
    scores = scores.detach().double()
    if labels is None:
        labels = scores.argmax(1)
    if labels.shape != scores.shape[:1]:
        raise ValueError(f"expected a label for each of the {len(scores)} rows, got {tuple(labels.shape)}")
    right = labels[:, None]
    others = scores.scatter(1, right, -math.inf)
    difference = scores.gather(1, right)[:, 0] - others.amax(1)
    return torch.where(scores.isfinite().all(1), difference, math.nan)


def radii(margin: Tensor, lipschitz: float = 1.0) -> Tensor:
    """Certified radius margin / (sqrt(2) L), zero where the margin is not positive (or NaN).

    A decision is certified for every perturbation of a norm *below* its radius.

    Example:
        >>> radii(torch.tensor([2.0, -1.0]), lipschitz=2.0)
        tensor([0.7071, 0.0000])
    """
    radius = margin / (math.sqrt(2) * _checked(lipschitz))
    return torch.where(margin > 0, radius, 0.0)


def certified(margin: Tensor, radius: float, lipschitz: float = 1.0) -> Tensor:
    """Whether each decision holds under every perturbation of norm at most `radius`; at radius 0: whether it is right.

    Example:
        >>> certified(torch.tensor([1.5, 1.0, float("nan")]), 1.0)
        tensor([ True, False, False])
    """
    if not radius >= 0:
        raise ValueError(f"expected a radius of at least 0, got {radius!r}")
    threshold = math.sqrt(2) * _checked(lipschitz) * radius
    return margin > threshold  # so written a NaN is never certified


def certified_accuracy(margin: Tensor, radius: float, lipschitz: float = 1.0) -> float:
    """CRA: the share of all images, margins taken with their true labels, that is certified at a radius.

    Example:
        >>> certified_accuracy(torch.tensor([2.0, 1.0, -1.0, float("nan")]), 0.5)
        0.5
    """
    if not len(margin):
        raise ValueError("expected at least one margin, got none")
    return int(certified(margin, radius, lipschitz).sum()) / len(margin)


def _checked(lipschitz: float) -> float:
    if not 0 < lipschitz < math.inf:
        raise ValueError(f"expected a positive finite Lipschitz constant, got {lipschitz!r}")
    return lipschitz
