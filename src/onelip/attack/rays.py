"""Flips along rays from an image: where the ray through a point crosses the boundary, down to neighbouring floats."""

import torch
from torch import Tensor

from onelip.attack.nearest import Nearest
from onelip.attack.program import margins

_MOST_STEPS = 120  # twice what plain halving of a float64 interval needs
_MOST_DOUBLINGS = 12


def try_ray(nearest: Nearest, rows: Tensor, through: Tensor, gain: float = 1e-6) -> Tensor:
    """Whether the ray from the image through a point flips at `gain` below the known distance; one evaluation.

    Images without a known flip are looked at ever farther out.
    """
    length = nearest.distance(rows, through)
    known = nearest.distances[rows]
    sensible = (length > 0) & length.isfinite()
    unit = torch.where(sensible[:, None], (through - nearest.images[rows]) / length[:, None].to(through.dtype), 0.0)
    out = torch.where(known.isfinite(), known * (1 - gain), length * 1.001)
    flipped = torch.zeros_like(sensible)
    todo = sensible.nonzero()[:, 0]
    for _ in range(_MOST_DOUBLINGS):
        if not len(todo):
            break
        points = nearest.confine(nearest.images[rows[todo]] + out[todo, None].to(unit.dtype) * unit[todo])
        flipped[todo], _ = nearest.evaluate(rows[todo], points)
        out[todo] *= 2
        todo = todo[~flipped[todo] & ~known[todo].isfinite()]
    return flipped


def shorten(nearest: Nearest, rows: Tensor, tolerance: float = 0.0) -> None:
    """Move known flips towards their images until the interval around the crossing is relatively at most `tolerance`.

    At tolerance 0 that means neighbouring floats. The margin is nearly linear along the ray, so the crossing is guessed
    from it, and probed alternately a little beyond and a little before the guess: where both fall as foreseen, the
    interval shrinks to that little. A wrong guess costs a halving.
    """
    rows = rows[nearest.distances[rows].isfinite() & (nearest.distances[rows] > 0)]
    if not len(rows):
        return
    images = nearest.images[rows]
    high = nearest.distances[rows]
    unit = (nearest.points[rows] - images) / high[:, None].to(images.dtype)
    low = torch.zeros_like(high)
    low_margin = nearest.clean_margins[rows].double()
    high_margin = margins(nearest.logits[rows], nearest.classes[rows]).double()
    trust = torch.full_like(high, 1e-2)
    beyond = torch.ones_like(high, dtype=torch.bool)
    # The point is rounded to the program's dtype: finer steps along the ray change nothing.
    least = max(tolerance, 2 * torch.finfo(images.dtype).eps)
    active = torch.arange(len(rows), device=rows.device)
    for _ in range(_MOST_STEPS):
        active = active[(high - low)[active] > least * high[active]]
        if not len(active):
            return
        a, b = low[active], high[active]
        share = low_margin[active] / (low_margin[active] - high_margin[active])
        nudge = torch.where(beyond[active], trust[active], -trust[active])
        probe = a + (share + nudge) * (b - a)
        # A NaN fails both comparisons and gets the middle.
        usable = (probe > a) & (probe < b) & (trust[active] < 0.5)
        probe = torch.where(usable, probe, (a + b) / 2)
        points = nearest.confine(images[active] + probe[:, None].to(unit.dtype) * unit[active])
        flipped, margin = nearest.evaluate(rows[active], points)
        margin = margin.double()
        low[active] = torch.where(flipped, a, probe)
        high[active] = torch.where(flipped, probe, b)
        low_margin[active] = torch.where(flipped, low_margin[active], margin)
        high_margin[active] = torch.where(flipped, margin, high_margin[active])
        foreseen = flipped == beyond[active]
        finer = torch.where(usable, trust[active].square().clamp(min=1e-12), 1e-2)
        trust[active] = torch.where(foreseen | ~usable, finer, 0.5)
        beyond[active] = ~beyond[active]
