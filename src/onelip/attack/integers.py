"""Flips among uint8 images: pixels stay integers, and a distance is a sum of squared integer differences.

To lower an affine margin by a given amount at the least Σ d_i² with integers d_i, take units in the order of what they
gain for what they cost: the k-th unit of pixel i gains |g_i| and costs 2k - 1. That is d_i = round(t |g_i|) for a t. So
scaling a good direction and rounding to the nearest integer is the best there is for a linearised program, and t is
found by halving.
"""

import torch
from torch import Tensor

from onelip.attack.program import Program, has_flipped

_DOUBLINGS = 16
_HALVINGS = 24


def nearest_integers(
    program: Program, images: Tensor, classes: Tensor, points: Tensor, rounds: int
) -> tuple[Tensor, Tensor, Tensor]:
    """uint8 images near uint8 `images` (N, D) at which the class changes, the squared distance, and the logits there.

    Args:
        program: sees an image k as k/255.
        images: (N, D) uint8.
        classes: (N).
        points: (N, D) floats, flips found before, for their directions.
        rounds: how many directions to try; after the first the gradient at the best image so far.

    A squared distance of -1 says that none was found.
    """
    whole = images.long()
    best = whole.clone()
    squares = torch.full((len(images),), -1, dtype=torch.int64, device=images.device)
    logits = program.logits(_scale(program, whole))
    clean = has_flipped(logits, classes)
    squares[clean] = 0
    direction = points.double() * 255 - whole
    for turn in range(rounds):
        if turn:
            here = program.linearise(_scale(program, best), classes)
            direction = -here.gradient.double()
        found, sums, scores = _along(program, whole, classes, direction)
        better = (sums >= 0) & ((squares < 0) | (sums < squares))
        best[better], squares[better], logits[better] = found[better], sums[better], scores[better]
    return best.to(torch.uint8), squares, logits


def _along(program: Program, whole: Tensor, classes: Tensor, direction: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The nearest flip of the form round(image + t direction), by doubling and halving t."""
    largest = direction.abs().amax(1, keepdim=True)
    unit = torch.where((largest > 0) & largest.isfinite(), direction / largest, 0.0)  # t counts the largest change
    low = torch.zeros(len(whole), 1, dtype=torch.float64, device=whole.device)
    high = torch.full_like(low, torch.inf)
    best, squares = whole.clone(), torch.full_like(classes, -1)
    logits = program.logits(_scale(program, whole))
    probe = torch.full_like(low, 1.0)
    for _ in range(_DOUBLINGS + _HALVINGS):
        candidates = (whole + probe * unit).round().clamp(0, 255).long()
        scores = program.logits(_scale(program, candidates))
        flipped = has_flipped(scores, classes)
        sums = (candidates - whole).square().sum(1)
        better = flipped & ((squares < 0) | (sums < squares))
        best[better], squares[better], logits[better] = candidates[better], sums[better], scores[better]
        low = torch.where(flipped[:, None], low, probe)
        high = torch.where(flipped[:, None], probe, high)
        probe = torch.where(high.isfinite(), (low + high) / 2, (2 * low).clamp(max=1e4))
    return best, squares, logits


def _scale(program: Program, whole: Tensor) -> Tensor:
    return whole.to(program.dtype) / 255
