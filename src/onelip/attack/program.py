"""The program under attack: a model as it is, in its own dtype, and what counts as its decision having changed.

A certificate says that the score of the class is *strictly* above every other score, all of them finite. So a tie, a
NaN and an overflow are flips, whatever `argmax` makes of them.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Linearised:
    """A score difference f_y - f_j around a point, and the scores there."""

    logits: Tensor  # (N, classes)
    margin: Tensor  # (N)
    gradient: Tensor  # (N, D)


class Program:
    """Scores, decisions and gradients of a model, on points flattened to (N, D)."""

    def __init__(self, model: nn.Module, image_shape: torch.Size, dtype: torch.dtype, device: torch.device) -> None:
        self.model = model
        self.image_shape = image_shape
        self.dtype = dtype
        self.device = device

    def __call__(self, points: Tensor) -> Tensor:
        logits = self.model(points.unflatten(1, self.image_shape))
        if logits.dim() != 2 or logits.shape[0] != len(points) or logits.shape[1] < 2:
            raise ValueError(
                f"expected scores ({len(points)}, classes) of two classes or more from the model, "
                f"got {tuple(logits.shape)}"
            )
        return logits

    @torch.no_grad()
    def logits(self, points: Tensor) -> Tensor:
        """(N, classes), without gradients."""
        return self(points)

    def linearise(self, points: Tensor, classes: Tensor, targets: Tensor | None = None) -> Linearised:
        """f_y - f_j and its gradient, for the targets j; None for the best other class at each point."""
        with torch.enable_grad():
            inputs = points.detach().requires_grad_()
            logits = self(inputs)
            if targets is None:
                targets = best_others(logits.detach(), classes)
            margin = differences(logits, classes, targets)
            gradient = _gradient(margin, inputs)
        return Linearised(logits.detach(), margin.detach(), gradient)

    def nearest_targets(self, points: Tensor, classes: Tensor, candidates: int, count: int) -> Tensor:
        """The `count` classes (N, count) whose boundaries are nearest if the scores were affine: m_j / ‖∇m_j‖.

        Only the `candidates` classes of the best scores are looked at: each costs a backward pass.
        """
        with torch.enable_grad():
            inputs = points.detach().requires_grad_()
            logits = self(inputs)
            others = logits.detach().scatter(1, classes[:, None], -torch.inf)
            ranked = others.topk(min(candidates, logits.shape[1] - 1), dim=1).indices  # (N, candidates)
            away = []
            for targets in ranked.unbind(1):
                margin = differences(logits, classes, targets)
                slope = _gradient(margin, inputs, keep_graph=True).norm(dim=1)
                away.append(margin.detach() / slope)
        # A slope of zero leads nowhere: NaN and infinity go last.
        order = torch.stack(away, 1).nan_to_num(nan=torch.inf).argsort(1)
        return ranked.gather(1, order[:, :count])


def make_program(model: nn.Module, images: Tensor) -> tuple[Program, Tensor]:
    """The program and its points (N, D), for uint8 images (taken as x/255) or floating ones (taken as they are)."""
    if model.training:
        raise ValueError("expected a model in eval mode, got one in training mode; call model.eval()")
    if images.dim() < 2 or not images.numel():
        raise ValueError(f"expected a batch of images (N, ...), got shape {tuple(images.shape)}")
    weight = next((p for p in model.parameters() if p.is_floating_point()), None)
    device = images.device if weight is None else weight.device
    dtype = (torch.float64 if images.dtype == torch.uint8 else images.dtype) if weight is None else weight.dtype
    if images.dtype == torch.uint8:
        points = images.to(device, dtype) / 255
    elif not images.is_floating_point():
        raise ValueError(f"expected uint8 or floating images, got {images.dtype}")
    elif torch.promote_types(images.dtype, dtype) != dtype:
        raise ValueError(
            f"expected images that the model's {dtype} holds exactly, got {images.dtype}; "
            "convert the model with model.double()"
        )
    else:
        points = images.to(device, dtype)
    if not points.isfinite().all():
        raise ValueError("expected finite images, got a NaN or an infinity")
    return Program(model, images.shape[1:], dtype, device), points.detach().flatten(1)


def has_flipped(logits: Tensor, classes: Tensor) -> Tensor:
    """Where a class is not strictly the best of finite scores. So written, NaN means flipped.

    Example:
        >>> has_flipped(torch.tensor([[2.0, 1.0], [1.0, 1.0], [2.0, float("nan")]]), torch.tensor([0, 0, 0]))
        tensor([False,  True,  True])
    """
    right = logits.gather(1, classes[:, None])
    others = logits.scatter(1, classes[:, None], -torch.inf)
    return ~((right > others).all(1) & logits.isfinite().all(1))


def best_others(logits: Tensor, classes: Tensor) -> Tensor:
    """The best class besides the given one."""
    return logits.scatter(1, classes[:, None], -torch.inf).argmax(1)


def differences(logits: Tensor, classes: Tensor, targets: Tensor) -> Tensor:
    """f_y - f_j, one per row."""
    return (logits.gather(1, classes[:, None]) - logits.gather(1, targets[:, None]))[:, 0]


def margins(logits: Tensor, classes: Tensor) -> Tensor:
    """f_y - max_{j != y} f_j."""
    return differences(logits, classes, best_others(logits, classes))


def _gradient(margin: Tensor, inputs: Tensor, keep_graph: bool = False) -> Tensor:
    if not margin.requires_grad:  # scores that do not depend on the input at all
        return torch.zeros_like(inputs)
    (gradient,) = torch.autograd.grad(margin.sum(), inputs, retain_graph=keep_graph, allow_unused=True)
    return torch.zeros_like(inputs) if gradient is None else gradient
