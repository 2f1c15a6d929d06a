"""A walk over neighbouring floats at the boundary: flips that only the rounding of the program makes.

Real arithmetic has one boundary; the program has a fringe around it in which its rounding decides. A certificate that
forgets rounding is refuted there, by a point a few floats inside its radius (Jin et al., arXiv 2205.10159).
"""

import torch
from torch import Tensor

from onelip.attack.nearest import Nearest
from onelip.attack.program import has_flipped

_MOST_FLOATS = 8  # how many neighbouring floats a whole point is drawn back by at once


def walk(nearest: Nearest, rows: Tensor, rounds: int) -> None:
    """Try `rounds` neighbours of each known flip, and go to each that flips and is nearer."""
    rows = rows[nearest.distances[rows].isfinite() & (nearest.distances[rows] > 0)]
    if not len(rows) or rounds < 1:
        return
    images = nearest.images[rows]
    downhill = -nearest.program.linearise(nearest.points[rows], nearest.classes[rows]).gradient
    for step in range(rounds):
        points = nearest.points[rows]
        if step % 2 == 0:
            candidates = _coordinates_back(nearest, points, images)
        else:
            candidates = _all_back_some_downhill(nearest, points, images, downhill)
        candidates = nearest.confine(candidates)
        logits = nearest.program.logits(candidates)
        # ‖q - x‖² - ‖p - x‖² = (q - p)·((q - x) + (p - x)): its sign is seen where the norms themselves round alike.
        change = ((candidates - points) * ((candidates - images) + (points - images))).sum(1)
        won = has_flipped(logits, nearest.classes[rows]) & (change < 0)
        nearest.points[rows[won]] = candidates[won]
        nearest.logits[rows[won]] = logits[won]
        nearest.distances[rows[won]] = nearest.distance(rows[won], candidates[won])


def _coordinates_back(nearest: Nearest, points: Tensor, images: Tensor) -> Tensor:
    """Some coordinates one float towards the image: from nearly all of them to a single one."""
    chosen = _uniform(nearest, points.shape) < _share(nearest, points)
    return torch.where(chosen, torch.nextafter(points, images), points)


def _all_back_some_downhill(nearest: Nearest, points: Tensor, images: Tensor, downhill: Tensor) -> Tensor:
    """The whole point a few floats towards the image, some coordinates one float down the margin."""
    floats = 1 + (_uniform(nearest, (len(points), 1)) * _MOST_FLOATS).floor()
    back = images + (points - images) * (1 - floats * torch.finfo(points.dtype).eps)
    chosen = _uniform(nearest, points.shape) < _share(nearest, points)
    return torch.where(chosen & (downhill != 0), torch.nextafter(back, back + downhill.sign()), back)


def _share(nearest: Nearest, points: Tensor) -> Tensor:
    """Of coordinates to move, (N, 1): each size from one coordinate to all equally likely, on a scale of powers."""
    return torch.pow(points.shape[1], -_uniform(nearest, (len(points), 1)))


def _uniform(nearest: Nearest, shape: tuple[int, ...]) -> Tensor:
    return torch.rand(shape, generator=nearest.generator, dtype=nearest.images.dtype, device=nearest.images.device)
