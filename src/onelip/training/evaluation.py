"""Accuracy and certified robust accuracy of a network, in the ordinary mode of the literature.

The network is baked and runs in float32, whatever the training ran in. Radii follow from its Lipschitz constant, by
construction or by bounds of its stored weights (`onelip.training.constants`), in real arithmetic. The rounding of the
forward pass is not in these numbers.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from onelip._precision import full_precision
from onelip.certify.margins import PAPER_RADII, certified_accuracy, margins
from onelip.data import to_float
from onelip.losses import OffsetCrossEntropy
from onelip.training.constants import BY_CONSTRUCTION, Constants

MODE = BY_CONSTRUCTION


@dataclass(frozen=True)
class Scores:
    """The numbers of a set of images."""

    images: int
    accuracy: float
    cra: dict[str, float | None]  # by radius; None where the network has no known constant
    mean_margin: float | None  # of f_y - max f_i, negative where the network is wrong; None if a score is not finite
    median_margin: float | None

    def to_json(self) -> dict[str, Any]:
        """As the log has it."""
        return {
            "images": self.images,
            "accuracy": self.accuracy,
            "cra": self.cra,
            "mean_margin": self.mean_margin,
            "median_margin": self.median_margin,
        }


@dataclass(frozen=True)
class Evaluation:
    """What `evaluate` finds."""

    total: Scores
    loss: float | None
    lipschitz: float | None
    per_class: dict[int, Scores]
    mode: str = MODE

    def to_json(self, class_names: tuple[str, ...]) -> dict[str, Any]:
        """Everything, with names of the classes."""
        return {
            **self.total.to_json(),
            "loss": self.loss,
            "lipschitz": self.lipschitz,
            "mode": self.mode,
            "per_class": [{"name": class_names[k], **scores.to_json()} for k, scores in self.per_class.items()],
        }


def evaluate(
    plain: nn.Module,
    images: Tensor,
    labels: Tensor,
    *,
    lipschitz: float | None,
    pairs: Tensor | None = None,
    mode: str = MODE,
    loss: OffsetCrossEntropy | None = None,
    radii: tuple[float, ...] = PAPER_RADII,
    batch_size: int = 500,
) -> Evaluation:
    """Evaluate a network on uint8 images.

    Args:
        plain: the baked network (`onelip.bake`), in float32; it is put into eval mode.
        images: (N, C, H, W) uint8.
        labels: (N) int64.
        lipschitz: the constant to certify with, e.g. `onelip.summary(model).constant`; None certifies nothing.
        pairs: constants of the differences f_i - f_j (classes, classes), to certify with instead of sqrt(2) lipschitz;
            see `onelip.training.constants`.
        mode: how the constants were come by, for the report.
        loss: evaluated too, with its own offset and temperature.
        radii: where to take the certified robust accuracy.
        batch_size: images at a time; changes nothing but speed and memory.
    """
    scores = compute_scores(plain, images, batch_size)
    margin = margins(scores, labels)
    total_loss = None if loss is None else finite_or_none(float(loss(scores, labels)))

    def of(chosen: Tensor) -> Scores:
        return _scores(scores[chosen], labels[chosen], margin[chosen], lipschitz, pairs, radii)

    per_class = {label: of(labels == label) for label in torch.unique(labels).tolist()}
    return Evaluation(of(torch.ones_like(labels, dtype=torch.bool)), total_loss, lipschitz, per_class, mode)


def evaluate_with(
    known: Constants, plain: nn.Module, images: Tensor, labels: Tensor, loss: OffsetCrossEntropy
) -> Evaluation:
    """`evaluate` with the constants of the network, whichever they are."""
    return evaluate(plain, images, labels, lipschitz=known.total, pairs=known.pairs, mode=known.mode, loss=loss)


@torch.no_grad()
def compute_scores(plain: nn.Module, images: Tensor, batch_size: int = 500) -> Tensor:
    """Logits (N, classes) of uint8 images in float32, on the CPU; never under autocast."""
    plain.eval()
    weight = next(plain.parameters())
    layout = torch.channels_last if is_channels_last(plain) else torch.contiguous_format
    parts = []
    with full_precision(weight.device):
        for part in images.split(batch_size):
            batch = to_float(part.to(weight.device)).contiguous(memory_format=layout)
            parts.append(plain(batch).float().cpu())
    return torch.cat(parts)


def is_channels_last(model: nn.Module) -> bool:
    """Whether the kernels lie in memory with their channels last, so that images should too."""
    kernels = [p for p in model.parameters() if p.dim() == 4]
    return any(not p.is_contiguous() and p.is_contiguous(memory_format=torch.channels_last) for p in kernels)


def _scores(
    scores: Tensor,
    labels: Tensor,
    margin: Tensor,
    lipschitz: float | None,
    pairs: Tensor | None,
    radii: tuple[float, ...],
) -> Scores:
    def cra(radius: float) -> float | None:
        if lipschitz is None:
            return None
        if pairs is None:
            return certified_accuracy(margin, radius, lipschitz)
        return int(certified_by_pairs(scores, labels, radius, pairs).sum()) / len(labels)

    return Scores(
        images=len(margin),
        accuracy=certified_accuracy(margin, 0.0),
        cra={radius_name(radius): cra(radius) for radius in radii},
        mean_margin=finite_or_none(float(margin.mean())),
        median_margin=finite_or_none(float(margin.quantile(0.5))),
    )


def certified_by_pairs(scores: Tensor, labels: Tensor, radius: float, pairs: Tensor) -> Tensor:
    """Whether f_y - f_i > pairs[y, i] * radius for every other class i (N); a NaN is never certified.

    Example:
        >>> scores, labels = torch.tensor([[2.0, 0.0], [0.5, 0.0]]), torch.tensor([0, 0])
        >>> certified_by_pairs(scores, labels, 1.0, torch.ones(2, 2))
        tensor([ True, False])
    """
    if not radius >= 0:
        raise ValueError(f"expected a radius of at least 0, got {radius!r}")
    wide, right = scores.detach().double(), labels[:, None]
    needed = pairs.double()[labels] * radius
    holds = (wide.gather(1, right) - wide > needed).scatter(1, right, True)
    return holds.all(1) & wide.isfinite().all(1)


def radius_name(radius: float) -> str:
    """As papers write it.

    Example:
        >>> radius_name(36 / 255), radius_name(1.0)
        ('36/255', '1')
    """
    parts = radius * 255
    if radius % 1 and abs(parts - round(parts)) < 1e-9:
        return f"{round(parts)}/255"
    return f"{radius:g}"


def finite_or_none(value: float) -> float | None:
    """JSON has no NaN."""
    return value if abs(value) < float("inf") else None
