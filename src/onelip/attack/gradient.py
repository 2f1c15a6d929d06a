"""The two gradient searches: steps to the linearised boundary, and normalised steps in a shrinking ball.

Steps to the linearised boundary converge in one step for an affine classifier and in a few for a piecewise linear one,
to the nearest point of the piece they end on. Normalised steps from random starts look elsewhere, and do not care how
long the gradient is.
"""

import math

import torch
from torch import Tensor

from onelip.attack.nearest import Nearest
from onelip.attack.planes import Planes
from onelip.attack.rays import shorten, try_ray

_PLANES = 3
_OVERSHOOT = 1e-6  # beyond the linearised boundary, so that rounding does not leave a step before it
_HOPELESS = 1.5  # a class whose boundary still seems so many times farther than a known flip is given up


def tangent_steps(nearest: Nearest, rows: Tensor, start: Tensor, targets: Tensor | None, steps: int) -> None:
    """Go to the nearest point of the linearised boundary, linearise there, and so on.

    Args:
        nearest: what is known; gains what is found.
        rows: which images.
        start: (len(rows), D), where to begin.
        targets: (len(rows)) of classes to reach; None for the best other class at each point.
        steps: at most so many forward and backward passes.
    """
    points = start
    planes = Planes(nearest.images[rows], _PLANES, nearest.clip)
    for step in range(steps):
        here = nearest.program.linearise(points, nearest.classes[rows], targets)
        nearest.offer(rows, points, here.logits)
        sensible = planes.add(points, here)
        # One plane, or all that are kept: the first is right on a face of the boundary, the second where faces meet.
        delta = planes.nearest(only_newest=step < 4 or step % 2 == 0)
        length = delta.norm(dim=1)
        moves = sensible & (length > 0)
        aim = planes.images + delta * (1 + _OVERSHOOT)
        # Full steps may cycle between two faces; half steps then settle between them.
        damping = 1.0 if step < steps // 2 else 0.5
        new = nearest.confine(points + damping * (aim - points))
        far = (new - points).norm(dim=1) > 1e-9 * length
        hopeful = (length < _HOPELESS * nearest.distances[rows]) | (step < 3)
        points = torch.where(moves[:, None], new, points)
        going = moves & far & hopeful
        if step == steps - 1 or not going.any():
            break
        _cross(nearest, rows[~going], points[~going])
        rows, points = rows[going], points[going]
        targets = None if targets is None else targets[going]
        planes.select(going)
    _cross(nearest, rows, points)


def ball_steps(nearest: Nearest, rows: Tensor, steps: int) -> None:
    """Normalised gradient steps from a random start, projected into a ball just inside the nearest known flip."""
    known = nearest.distances[rows]
    # Without a known flip: a ball in which every image of [0, 1] lies.
    size = torch.where(known.isfinite(), known, math.sqrt(nearest.images.shape[1]))
    delta = nearest.noise(rows) * size[:, None].to(nearest.images.dtype)
    images = nearest.images[rows]
    for step in range(steps):
        size = torch.minimum(size, nearest.distances[rows] * 0.99)[:, None].to(images.dtype)
        length = delta.norm(dim=1, keepdim=True)
        points = nearest.confine(images + delta * (size / length).nan_to_num(nan=1.0).clamp(max=1))
        here = nearest.program.linearise(points, nearest.classes[rows])
        nearest.offer(rows, points, here.logits)
        slope = here.gradient.norm(dim=1, keepdim=True)
        sensible = (slope > 0) & slope.isfinite()
        direction = torch.where(sensible, here.gradient / slope, nearest.noise(rows))
        stride = size * (0.05 + 0.45 * (1 + math.cos(math.pi * step / steps)) / 2)
        delta = points - images - stride * direction
        size = size[:, 0].double()
    _cross(nearest, rows, nearest.confine(images + delta))


def _cross(nearest: Nearest, rows: Tensor, points: Tensor) -> None:
    """The search ended at these points, perhaps just before the boundary: look along their rays."""
    if len(rows):
        won = try_ray(nearest, rows, points)
        shorten(nearest, rows[won], tolerance=1e-3)
