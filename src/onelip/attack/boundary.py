"""Along the boundary: from a known flip to nearer ones, first by its linearisation, then by chance.

Where the boundary is smooth or flat its linearisation leads to the nearest point. At the corners of a piecewise linear
network it does not, and random directions are tried, as far from the known one as has paid lately.
"""

import torch
from torch import Tensor

from onelip.attack.nearest import Nearest
from onelip.attack.planes import Planes
from onelip.attack.rays import shorten, try_ray

_PLANES = 3


def slide(nearest: Nearest, rows: Tensor, rounds: int, gain: float = 1e-6) -> None:
    """Move along the boundary from the known flips towards the image, as long as that brings them nearer by `gain`.

    The boundary's own linearisation says where its nearest point should be. The ray through that point either flips
    nearer than what is known, or the point where it did not gives another half-space.
    """
    rows = rows[nearest.distances[rows].isfinite()]
    if not len(rows):
        return
    planes = Planes(nearest.images[rows], _PLANES, nearest.clip)
    points = nearest.points[rows]
    failures = torch.zeros_like(rows)
    for step in range(rounds):
        here = nearest.program.linearise(points, nearest.classes[rows])
        nearest.offer(rows, points, here.logits)
        planes.add(points, here)
        delta = planes.nearest(only_newest=step % 2 == 0)
        # Full steps first, shorter ones after failures.
        share = 4.0 ** -failures.to(delta.dtype)
        through = nearest.points[rows] + share[:, None] * (planes.images + delta - nearest.points[rows])
        won = try_ray(nearest, rows, through, gain)
        shorten(nearest, rows[won], tolerance=1e-3)
        failures = torch.where(won, 0, failures + 1)
        points = torch.where(won[:, None], nearest.points[rows], through)
        going = failures < 4
        if not going.any():
            return
        rows, points, failures = rows[going], points[going], failures[going]
        planes.select(going)


def scatter(nearest: Nearest, rows: Tensor, rounds: int) -> None:
    """Try rays near that of the known flip; one evaluation for each that does not pay.

    The spread grows after a success and shrinks after a failure so that one try in five succeeds (Rechenberg's rule).
    """
    rows = rows[nearest.distances[rows].isfinite()]
    spread = torch.full((len(rows), 1), 0.3, dtype=nearest.images.dtype, device=rows.device)
    for _ in range(rounds if len(rows) else 0):
        known = nearest.distances[rows][:, None].to(spread.dtype)
        won = try_ray(nearest, rows, nearest.confine(nearest.points[rows] + spread * known * nearest.noise(rows)))
        shorten(nearest, rows[won], tolerance=1e-6)
        spread = torch.where(won[:, None], spread * 1.5, spread / 1.5**0.25)
