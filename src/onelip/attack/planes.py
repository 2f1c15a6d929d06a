"""The nearest point of a linearised boundary.

Around p the margin is m + g·(z - p), so with n = g/‖g‖ the linearised class changes where

    n·δ <= c,    δ = z - x,    c = n·(p - x) - m/‖g‖,

and the nearest such z has δ = c n for c < 0. For an affine classifier that is its exact radius in one step. Where
several pieces of a piecewise linear network meet, the nearest point of their common half-spaces is wanted: a small
quadratic programme, solved in its dual by coordinate ascent. Inside the box [0, 1] it is one equation in one unknown.
"""

import torch
from torch import Tensor

from onelip.attack.program import Linearised

_SWEEPS = 40  # of the dual ascent; it need not be exact, an attack only wants good points
_NEWTON_STEPS = 30


class Planes:
    """The last few half-spaces n·δ <= c of each image, oldest replaced first."""

    def __init__(self, images: Tensor, count: int, clip: bool) -> None:
        self.images = images  # (N, D)
        self.clip = clip
        # An offset of infinity is a half-space that holds always.
        self.normals = images.new_zeros(len(images), count, images.shape[1])
        self.offsets = images.new_full((len(images), count), torch.inf)
        self.newest = -1

    def add(self, points: Tensor, here: Linearised) -> Tensor:
        """Take the linearisation at a point of each image; returns where it has a direction at all."""
        slope = here.gradient.norm(dim=1)
        sensible = (slope > 0) & slope.isfinite() & here.margin.isfinite()
        normal = torch.where(sensible[:, None], here.gradient / slope[:, None], 0.0)
        offset = ((points - self.images) * normal).sum(1) - here.margin / slope
        self.newest = (self.newest + 1) % self.offsets.shape[1]
        self.normals[:, self.newest] = normal
        self.offsets[:, self.newest] = torch.where(sensible, offset, torch.inf)
        return sensible

    def nearest(self, only_newest: bool) -> Tensor:
        """δ (N, D): the nearest point of the newest half-space, or of all that are kept."""
        normal, offset = self.normals[:, self.newest], self.offsets[:, self.newest]
        if self.clip:
            return _nearest_in_box(self.images, normal, offset)
        if only_newest:
            return normal * offset.clamp(max=0)[:, None]
        weights = _dual_weights(self.normals, self.offsets)
        return -torch.einsum("nm,nmd->nd", weights, self.normals)

    def select(self, keep: Tensor) -> None:
        """Go on with some of the images."""
        self.images, self.normals, self.offsets = self.images[keep], self.normals[keep], self.offsets[keep]


def _dual_weights(normals: Tensor, offsets: Tensor) -> Tensor:
    """w >= 0 (N, M) with δ = -sum w_i n_i the shortest in all half-spaces; the n_i have length one (or zero)."""
    gram = torch.einsum("nad,nbd->nab", normals, normals)
    weights = torch.zeros_like(offsets)
    for _ in range(_SWEEPS):
        for i in range(offsets.shape[1]):
            value = -(gram[:, i] * weights).sum(1)  # n_i·δ
            weights[:, i] = (weights[:, i] + value - offsets[:, i]).clamp(min=0)
    return weights


def _nearest_in_box(images: Tensor, normal: Tensor, offset: Tensor) -> Tensor:
    """δ = clip(x - t n, 0, 1) - x with the least t >= 0 for which n·δ <= c, or as near as the box allows.

    n·δ(t) is convex and falling in t, so Newton's steps from t = 0 never overshoot, and end after finitely many.
    """
    t = torch.zeros_like(offset)
    delta = torch.zeros_like(images)
    for _ in range(_NEWTON_STEPS):
        moved = images - t[:, None] * normal
        free = (moved > 0) & (moved < 1) if t.any() else torch.ones_like(moved, dtype=torch.bool)
        delta = moved.clamp(0, 1) - images
        excess = (normal * delta).sum(1) - offset
        slope = (normal.square() * free).sum(1)
        step = torch.where((excess > 0) & (slope > 0), excess / slope, 0.0)
        if not step.any():
            break
        t = t + step
    return delta
