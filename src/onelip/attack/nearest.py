"""The nearest flips found so far, one for each image: every part of the attack reports to this record."""

import torch
from torch import Tensor

from onelip.attack.program import Program, has_flipped, margins


class Nearest:
    """For a batch of images and their classes, the nearest point at which the class was seen to change.

    Distances here are float64 with their rounding, good enough to steer a search; the result is measured exactly.
    """

    def __init__(
        self, program: Program, images: Tensor, classes: Tensor, *, clip: bool = False, seed: int | None = 0
    ) -> None:
        self.program = program
        self.images = images  # (N, D)
        self.classes = classes  # (N)
        self.clip = clip
        self.generator = torch.Generator(images.device)
        self.generator.manual_seed(0 if seed is None else seed)
        self.logits = program.logits(images)  # (N, classes), at the points
        self.clean_margins = margins(self.logits, classes)
        self.points = images.clone()
        # An image whose class does not hold at the image itself is its own flip.
        flipped = has_flipped(self.logits, classes)
        self.distances = torch.where(flipped, 0.0, torch.inf).to(torch.float64)

    @property
    def rows(self) -> Tensor:
        """Indices of the images that the class holds at: those worth an attack."""
        return (self.distances > 0).nonzero()[:, 0]

    def evaluate(self, rows: Tensor, points: Tensor) -> tuple[Tensor, Tensor]:
        """Run the program at a point for each of `rows`; returns where it flipped, and the margins."""
        logits = self.program.logits(points)
        return self.offer(rows, points, logits), margins(logits, self.classes[rows])

    def offer(self, rows: Tensor, points: Tensor, logits: Tensor) -> Tensor:
        """Keep the points that flip and are nearer than what was known; returns where the class flipped."""
        flipped = has_flipped(logits, self.classes[rows])
        distances = self.distance(rows, points)
        better = flipped & (distances < self.distances[rows])
        kept = rows[better]
        self.points[kept] = points[better]
        self.distances[kept] = distances[better]
        self.logits[kept] = logits[better]
        return flipped

    def distance(self, rows: Tensor, points: Tensor) -> Tensor:
        """Of points to their images, in float64; not finite where the point is not."""
        return (points.double() - self.images[rows].double()).norm(dim=1)

    def confine(self, points: Tensor) -> Tensor:
        """Back to [0, 1] if images must stay images. Clamping is exact."""
        return points.clamp(0, 1) if self.clip else points

    def noise(self, rows: Tensor) -> Tensor:
        """Random directions of length one, (len(rows), D)."""
        shape = (len(rows), self.images.shape[1])
        noise = torch.randn(shape, generator=self.generator, dtype=self.images.dtype, device=self.images.device)
        return noise / noise.norm(dim=1, keepdim=True)
