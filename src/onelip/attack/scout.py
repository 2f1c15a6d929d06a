"""A first search in float32: half the cost of float64 on a CPU, far less on most GPUs.

Float32 is no proof of anything, and needs to be none: what it finds only shows the float64 program where to look.
"""

import copy

import torch
from torch import Tensor

from onelip.attack.boundary import slide
from onelip.attack.nearest import Nearest
from onelip.attack.program import Program
from onelip.attack.rays import shorten, try_ray

_AGREE = 1e-3  # of the margin: where float32 is farther off, it would look in the wrong places
_POLISHING_ROUNDS = 2  # from points that are right to half of float64's digits
_POLISHING_GAIN = 1e-12


def scout_program(program: Program) -> Program | None:
    """The same program in float32; None if it is not in float64, or has no weights to convert, or cannot run so."""
    weights = [p for p in program.model.parameters() if p.is_floating_point()]
    if program.dtype != torch.float64 or not weights:
        return None
    scout = Program(copy.deepcopy(program.model).float(), program.image_shape, torch.float32, program.device)
    try:
        scout.logits(torch.zeros(1, program.image_shape.numel(), dtype=torch.float32, device=program.device))
    except RuntimeError:  # a type that is fixed somewhere inside
        return None
    return scout


def scouting(nearest: Nearest, program: Program, seed: int) -> Nearest:
    """An empty record of the same images for the scout."""
    images = nearest.images.to(program.dtype)
    return Nearest(program, images, nearest.classes, clip=nearest.clip, seed=seed)


def take_over(nearest: Nearest, scouted: Nearest, reach: Tensor | None = None) -> Tensor:
    """Look along the scout's rays, and along the boundary to the nearest flip; returns rows still without one.

    Args:
        nearest: of the float64 program; gains what is found.
        scouted: what the scout found.
        reach: (N), distances up to which the boundary is followed, as only there float64 can refute more than the scout
            did; None for any.
    """
    rows = nearest.rows
    known = scouted.distances[rows]
    margin, seen = nearest.clean_margins[rows], scouted.clean_margins[rows].to(nearest.images.dtype)
    agree = (seen - margin).abs() <= _AGREE * margin  # so written a NaN does not
    shown = rows[agree & known.isfinite() & (known > 0)]
    away = (scouted.points[shown] - scouted.images[shown]).to(nearest.images.dtype)
    flipped = try_ray(nearest, shown, nearest.confine(nearest.images[shown] + away))
    shorten(nearest, shown[flipped], tolerance=1e-3)
    polished = shown[flipped]
    if reach is not None:
        polished = polished[nearest.distances[polished] <= reach[polished]]
    slide(nearest, polished, _POLISHING_ROUNDS, _POLISHING_GAIN)
    return rows[nearest.distances[rows].isinf()]
