"""Rotation, translation and flip with the meaning of Keras' `RandomRotation` and `RandomTranslation` layers.

Bilinear interpolation; outside the image it continues mirrored about its edge (d c b a | a b c d | d c b a), which
Keras calls 'reflect' and torch reflection with align_corners=False. All take float images (N, C, H, W) and N amounts.
"""

import torch
from torch import Tensor
from torch.nn import functional as F


def rotate(images: Tensor, angle: Tensor) -> Tensor:
    """Rotate about the middle by `angle` in radians: the pixel (x, y) off the middle comes from (cx - sy, sx + cy)."""
    zero = torch.zeros_like(angle)
    return _warp(images, _rotation(images, angle), zero, zero)


def translate(images: Tensor, down: Tensor, right: Tensor) -> Tensor:
    """Move the content `down` and to the `right`, as fractions of height and width; fractions of pixels interpolate."""
    one = torch.eye(2, dtype=images.dtype, device=images.device).expand(len(images), 2, 2)
    return _warp(images, one, -2 * right, -2 * down)


def rotate_translate(images: Tensor, angle: Tensor, down: Tensor, right: Tensor) -> Tensor:
    """`translate(rotate(images))` by one interpolation instead of two: sharper, and half the work.

    The pixel p comes from R(p - d).
    """
    rotation = _rotation(images, angle)
    shift = torch.stack([right, down], dim=1).mul_(-2)  # (N, 2)
    x, y = (rotation @ shift.unsqueeze(2)).squeeze(2).unbind(1)
    return _warp(images, rotation, x, y)


def flip(images: Tensor, chosen: Tensor) -> Tensor:
    """Mirror the chosen images (bool, N) left to right; exact."""
    return torch.where(chosen.view(-1, 1, 1, 1), images.flip(3), images)


def _rotation(images: Tensor, angle: Tensor) -> Tensor:
    """Rotation matrices (N, 2, 2) in torch's coordinates, where both sides of any image run from -1 to 1."""
    height, width = images.shape[-2:]
    cos, sin = torch.cos(angle), torch.sin(angle)
    rows = torch.stack([cos, -sin * (height / width), sin * (width / height), cos], dim=1)
    return rows.view(-1, 2, 2)


def _warp(images: Tensor, matrix: Tensor, x: Tensor, y: Tensor) -> Tensor:
    theta = torch.cat([matrix, torch.stack([x, y], dim=1).unsqueeze(2)], dim=2)  # (N, 2, 3)
    grid = F.affine_grid(theta, list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="reflection", align_corners=False)
