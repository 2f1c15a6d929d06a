"""Decisions of a classifier, and the nearest points found at which they change ("flips").

A certificate states that the score of the class is *strictly* above every other score, and that all scores are finite.
Ties, NaN and overflow are therefore flips, whatever `argmax` returns.
"""

import copy
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

import torch
from torch import Tensor, nn

from onelip.core.bake import check_module
from onelip.core.floats import squared_distance
from onelip.core.images import to_float


@dataclass(frozen=True)
class Linearised:
    """Value and gradient of a score difference f_y - f_j at a point, and all scores there."""

    logits: Tensor  # (N, classes)
    margin: Tensor  # (N)
    gradient: Tensor  # (N, D)


class Classifier:
    """Scores and gradients of a model, on points flattened to (N, D)."""

    def __init__(self, model: nn.Module, image_shape: torch.Size, dtype: torch.dtype, device: torch.device) -> None:
        self.model = model
        self.image_shape = image_shape
        self.dtype = dtype
        self.device = device

    def __call__(self, points: Tensor) -> Tensor:
        logits = self.model(points.unflatten(1, self.image_shape))
        if logits.dim() != 2 or logits.shape[0] != len(points) or logits.shape[1] < 2:
            raise ValueError(
                f"expected the model to return scores ({len(points)}, classes) for two or more classes, "
                f"got shape {tuple(logits.shape)}; attack a classifier"
            )
        return logits

    @torch.no_grad()
    def logits(self, points: Tensor) -> Tensor:
        """Return the scores (N, classes) without gradients."""
        return self(points)

    def linearise(self, points: Tensor, classes: Tensor, targets: Tensor | None = None) -> Linearised:
        """Return f_y - f_j and its gradient for the targets j; by default the best other class at each point."""
        with torch.enable_grad():
            inputs = points.detach().requires_grad_()
            logits = self(inputs)
            if targets is None:
                targets = best_others(logits.detach(), classes)
            margin = _differences(logits, classes, targets)
            gradient = _gradient(margin, inputs)
        return Linearised(logits.detach(), margin.detach(), gradient)

    def nearest_targets(self, points: Tensor, classes: Tensor, count: int) -> Tensor:
        """Return the `count` classes (N, count) with the nearest linearised boundaries, at distance m_j / ‖∇m_j‖.

        Only the ten classes with the best scores are compared, because each costs a backward pass.
        """
        with torch.enable_grad():
            inputs = points.detach().requires_grad_()
            logits = self(inputs)
            others = logits.detach().scatter(1, classes[:, None], -torch.inf)
            ranked = others.topk(min(10, logits.shape[1] - 1), dim=1).indices  # (N, candidates)
            distances = []
            for targets in ranked.unbind(1):
                margin = _differences(logits, classes, targets)
                slope = _gradient(margin, inputs, keep_graph=True).norm(dim=1)
                distances.append(margin.detach() / slope)
        # A zero gradient gives no direction: NaN and infinity are sorted last.
        order = torch.stack(distances, 1).nan_to_num(nan=torch.inf).argsort(1)
        return ranked.gather(1, order[:, :count])

    @cached_property
    def in_float32(self) -> "Classifier | None":
        """A float32 copy of a float64 classifier; None if it has no weights to convert, or if the copy does not run."""
        weights = [p for p in self.model.parameters() if p.is_floating_point()]
        if self.dtype != torch.float64 or not weights:
            return None
        converted = Classifier(copy.deepcopy(self.model).float(), self.image_shape, torch.float32, self.device)
        try:
            converted.logits(torch.zeros(1, self.image_shape.numel(), dtype=torch.float32, device=self.device))
        except RuntimeError:  # the model uses a fixed dtype
            return None
        return converted


def flat_classifier(model: nn.Module, images: Tensor) -> tuple[Classifier, Tensor]:
    """Return the classifier and its points (N, D): uint8 images are divided by 255, floating-point ones unchanged."""
    check_module(model)
    if not isinstance(images, Tensor) or images.layout != torch.strided or images.is_nested:
        raise ValueError(f"expected images as a dense tensor, got {type(images).__name__}; use torch.as_tensor(images)")
    if model.training:
        raise ValueError("expected a model in eval mode, got one in training mode; call model.eval()")
    if images.dim() < 2 or not images.numel():
        raise ValueError(
            f"expected a batch of images (N, ...), got shape {tuple(images.shape)}; "
            "for one image, add a batch axis with image[None]"
        )
    if images.dtype != torch.uint8 and not images.is_floating_point():
        raise ValueError(
            f"expected uint8 or floating-point images, got {images.dtype}; use images.to(torch.uint8) for values 0..255"
        )
    weight = next((p for p in model.parameters() if p.is_floating_point()), None)
    device = images.device if weight is None else weight.device
    dtype = (torch.float64 if images.dtype == torch.uint8 else images.dtype) if weight is None else weight.dtype
    if images.is_floating_point() and torch.promote_types(images.dtype, dtype) != dtype:
        raise ValueError(
            f"expected images that the dtype of the model, {dtype}, represents exactly, got {images.dtype}; "
            "convert the model with model.double()"
        )
    points = to_float(images.to(device), dtype)
    if not points.isfinite().all():
        raise ValueError("expected finite images, got a NaN or an infinity; remove these images")
    return Classifier(model, images.shape[1:], dtype, device), points.detach().flatten(1)


def has_flipped(logits: Tensor, classes: Tensor) -> Tensor:
    """Whether the class is not strictly the best of finite scores; ties, NaN and infinities count as flipped.

    Examples:
        >>> has_flipped(torch.tensor([[2.0, 1.0], [1.0, 1.0], [2.0, float("nan")]]), torch.tensor([0, 0, 0]))
        tensor([False,  True,  True])
    """
    right = logits.gather(1, classes[:, None])
    others = logits.scatter(1, classes[:, None], -torch.inf)
    return ~((right > others).all(1) & logits.isfinite().all(1))


def best_others(logits: Tensor, classes: Tensor) -> Tensor:
    """Return the best class other than the given one."""
    return logits.scatter(1, classes[:, None], -torch.inf).argmax(1)


def margins(logits: Tensor, classes: Tensor) -> Tensor:
    """Return f_y - max_{j != y} f_j."""
    return _differences(logits, classes, best_others(logits, classes))


def _differences(logits: Tensor, classes: Tensor, targets: Tensor) -> Tensor:
    return (logits.gather(1, classes[:, None]) - logits.gather(1, targets[:, None]))[:, 0]


def _gradient(margin: Tensor, inputs: Tensor, keep_graph: bool = False) -> Tensor:
    if not margin.requires_grad:  # the scores do not depend on the input
        return torch.zeros_like(inputs)
    (gradient,) = torch.autograd.grad(margin.sum(), inputs, retain_graph=keep_graph, allow_unused=True)
    return torch.zeros_like(inputs) if gradient is None else gradient


@dataclass
class Found:
    """Points, their scores and their exact squared distances (None without a flip) for a batch of images."""

    points: Tensor  # (N, D)
    logits: Tensor  # (N, classes)
    squares: list[Fraction | None]


class NearestFlips:
    """The nearest flip found so far for each image of a batch; all stages of the attack update it.

    Distances are rounded to float64, which is enough to guide the search; `measured` computes them exactly.
    """

    def __init__(self, classifier: Classifier, images: Tensor, classes: Tensor, *, clip: bool, seed: int) -> None:
        self.classifier = classifier
        self.images = images  # (N, D)
        self.classes = classes  # (N)
        self.clip = clip
        self.seed = seed
        self.generator = torch.Generator(images.device).manual_seed(seed)
        self.logits = classifier.logits(images)  # (N, classes), at the points
        self.clean_margins = margins(self.logits, classes)
        self.points = images.clone()
        # If the class is not the decision at the image itself, the image is its own flip.
        self.distances = torch.where(has_flipped(self.logits, classes), 0.0, torch.inf).to(torch.float64)

    @property
    def rows(self) -> Tensor:
        """Indices of the images to attack: those without a flip at the image itself."""
        return (self.distances > 0).nonzero()[:, 0]

    def with_flip(self, rows: Tensor) -> Tensor:
        """Return the `rows` with a known flip that is not the image itself."""
        return rows[self.distances[rows].isfinite() & (self.distances[rows] > 0)]

    def evaluate(self, rows: Tensor, points: Tensor) -> tuple[Tensor, Tensor]:
        """Evaluate one point for each of `rows`; return whether it is a flip, and the margin."""
        logits = self.classifier.logits(points)
        return self.offer(rows, points, logits), margins(logits, self.classes[rows])

    def offer(self, rows: Tensor, points: Tensor, logits: Tensor) -> Tensor:
        """Store the flips that are nearer than the known ones; return which points are flips."""
        flipped = has_flipped(logits, self.classes[rows])
        distances = self.distance(rows, points)
        better = flipped & (distances < self.distances[rows])
        kept = rows[better]
        self.points[kept] = points[better]
        self.distances[kept] = distances[better]
        self.logits[kept] = logits[better]
        return flipped

    def distance(self, rows: Tensor, points: Tensor) -> Tensor:
        """Return the distances of points to their images in float64; not finite if the point is not."""
        return (points.double() - self.images[rows].double()).norm(dim=1)

    def confine(self, points: Tensor) -> Tensor:
        """Clamp points to [0, 1] if `clip` is set. Clamping is exact."""
        return points.clamp(0, 1) if self.clip else points

    def noise(self, rows: Tensor) -> Tensor:
        """Return random unit vectors (len(rows), D)."""
        shape = (len(rows), self.images.shape[1])
        noise = torch.randn(shape, generator=self.generator, dtype=self.images.dtype, device=self.images.device)
        return noise / noise.norm(dim=1, keepdim=True)

    def uniform(self, shape: tuple[int, ...]) -> Tensor:
        """Return random numbers in [0, 1)."""
        return torch.rand(shape, generator=self.generator, dtype=self.images.dtype, device=self.images.device)

    def measured(self) -> Found:
        """Return the flips with their exact squared distances."""
        known = self.distances.isfinite().tolist()
        pairs = zip(self.points.cpu(), self.images.cpu(), known, strict=True)
        squares = [squared_distance(point, image) if is_known else None for point, image, is_known in pairs]
        return Found(self.points, self.logits, squares)
