r"""Local searches for flips: gradient steps, crossings of the boundary along rays, neighbouring floats, integers.

Around a point $p$ the margin is $m + g \cdot (z - p)$. With $n = g / \|g\|$ the linearised decision changes where

$$n \cdot \delta \le c, \qquad \delta = z - x, \qquad c = n \cdot (p - x) - m / \|g\|,$$

and the nearest such $z$ has $\delta = c\,n$ for $c < 0$. For an affine classifier this is the exact radius in one step.
Where several pieces of a piecewise linear network meet, the nearest point of the intersection of their half-spaces is
needed: a small quadratic program, whose dual is solved by coordinate ascent. Inside the box [0, 1] it is one equation
in one unknown.
"""

import math

import torch
from torch import Tensor

from onelip.attacks.flips import Classifier, Linearised, NearestFlips, has_flipped, margins
from onelip.core.images import to_float

_PLANES = 3  # half-spaces kept for each image
_SWEEPS = 40  # sweeps of the dual ascent; an attack needs good points, not an exact minimum
_NEWTON_STEPS = 30
_OVERSHOOT = 1e-6  # relative step beyond the linearised boundary, so that rounding does not stop short of it
_HOPELESS = 1.5  # stop searching for a class whose estimated distance is this many times that of the known flip
_BISECTIONS = 120  # twice as many as plain bisection of a float64 interval needs
_DOUBLINGS = 12
_MOST_FLOATS = 8  # number of floats by which a whole point is moved back at once
_INTEGER_DIRECTIONS = 3
_INTEGER_PROBES = 40


# Half-spaces.


class _HalfSpaces:
    """The last few half-spaces n·δ <= c of each image; the oldest is replaced first."""

    def __init__(self, images: Tensor, clip: bool) -> None:
        self.images = images  # (N, D)
        self.clip = clip
        # A half-space with an infinite offset contains every point.
        self.normals = images.new_zeros(len(images), _PLANES, images.shape[1])
        self.offsets = images.new_full((len(images), _PLANES), torch.inf)
        self.newest = -1

    def add(self, points: Tensor, here: Linearised) -> Tensor:
        """Add the linearisation at one point of each image; return whether its gradient is usable."""
        slope = here.gradient.norm(dim=1)
        usable = (slope > 0) & slope.isfinite() & here.margin.isfinite()
        normal = torch.where(usable[:, None], here.gradient / slope[:, None], 0.0)
        offset = ((points - self.images) * normal).sum(1) - here.margin / slope
        self.newest = (self.newest + 1) % _PLANES
        self.normals[:, self.newest] = normal
        self.offsets[:, self.newest] = torch.where(usable, offset, torch.inf)
        return usable

    def nearest(self, only_newest: bool) -> Tensor:
        """Return δ (N, D) of the nearest point of the newest half-space, or of the intersection of all."""
        normal, offset = self.normals[:, self.newest], self.offsets[:, self.newest]
        if self.clip:
            return _nearest_in_box(self.images, normal, offset)
        if only_newest:
            return normal * offset.clamp(max=0)[:, None]
        return -torch.einsum("nm,nmd->nd", _dual_weights(self.normals, self.offsets), self.normals)

    def select(self, keep: Tensor) -> None:
        """Keep only the selected images."""
        self.images, self.normals, self.offsets = self.images[keep], self.normals[keep], self.offsets[keep]


def _dual_weights(normals: Tensor, offsets: Tensor) -> Tensor:
    """w >= 0 (N, M) such that δ = -sum w_i n_i is the shortest in all half-spaces; the n_i have norm one or zero."""
    gram = torch.einsum("nad,nbd->nab", normals, normals)
    weights = torch.zeros_like(offsets)
    for _ in range(_SWEEPS):
        for i in range(offsets.shape[1]):
            value = -(gram[:, i] * weights).sum(1)  # n_i·δ
            weights[:, i] = (weights[:, i] + value - offsets[:, i]).clamp(min=0)
    return weights


def _nearest_in_box(images: Tensor, normal: Tensor, offset: Tensor) -> Tensor:
    """δ = clip(x - t n, 0, 1) - x with the smallest t >= 0 for which n·δ <= c, or as close as the box allows.

    n·δ(t) is convex and decreasing in t, so Newton steps from t = 0 never overshoot, and stop after finitely many.
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


# Gradient steps.


def tangent_steps(flips: NearestFlips, rows: Tensor, start: Tensor, targets: Tensor | None, steps: int) -> None:
    """Move to the nearest point of the linearised boundary, linearise there, and repeat.

    It converges in one step for an affine classifier and in a few for a piecewise linear one, to the nearest point of
    the piece on which it ends.

    Args:
        flips: updated with the flips found.
        rows: indices of the images.
        start: (len(rows), D), starting points.
        targets: (len(rows)), classes to reach; None for the best other class at each point.
        steps: maximum number of forward and backward passes.
    """
    points = start
    planes = _HalfSpaces(flips.images[rows], flips.clip)
    for step in range(steps):
        here = flips.classifier.linearise(points, flips.classes[rows], targets)
        flips.offer(rows, points, here.logits)
        usable = planes.add(points, here)
        # On a face of the boundary the newest plane suffices; where faces meet, all are needed.
        delta = planes.nearest(only_newest=step < 4 or step % 2 == 0)
        length = delta.norm(dim=1)
        moves = usable & (length > 0)
        aim = planes.images + delta * (1 + _OVERSHOOT)
        # Full steps may cycle between two faces; half steps then converge between them.
        damping = 1.0 if step < steps // 2 else 0.5
        new = flips.confine(points + damping * (aim - points))
        far = (new - points).norm(dim=1) > 1e-9 * length
        hopeful = (length < _HOPELESS * flips.distances[rows]) | (step < 3)
        points = torch.where(moves[:, None], new, points)
        going = moves & far & hopeful
        if step == steps - 1 or not going.any():
            break
        cross(flips, rows[~going], points[~going])
        rows, points = rows[going], points[going]
        targets = None if targets is None else targets[going]
        planes.select(going)
    cross(flips, rows, points)


def ball_steps(flips: NearestFlips, rows: Tensor, steps: int) -> None:
    """Take normalised gradient steps from a random start, projected into a ball just inside the nearest known flip."""
    known = flips.distances[rows]
    # Without a known flip, use a ball that contains every image in [0, 1].
    size = torch.where(known.isfinite(), known, math.sqrt(flips.images.shape[1]))
    delta = flips.noise(rows) * size[:, None].to(flips.images.dtype)
    images = flips.images[rows]
    for step in range(steps):
        size = torch.minimum(size, flips.distances[rows] * 0.99)[:, None].to(images.dtype)
        length = delta.norm(dim=1, keepdim=True)
        points = flips.confine(images + delta * (size / length).nan_to_num(nan=1.0).clamp(max=1))
        here = flips.classifier.linearise(points, flips.classes[rows])
        flips.offer(rows, points, here.logits)
        slope = here.gradient.norm(dim=1, keepdim=True)
        usable = (slope > 0) & slope.isfinite()
        direction = torch.where(usable, here.gradient / slope, flips.noise(rows))
        stride = size * (0.05 + 0.45 * (1 + math.cos(math.pi * step / steps)) / 2)
        delta = points - images - stride * direction
        size = size[:, 0].double()
    cross(flips, rows, flips.confine(images + delta))


# Rays from an image through a point.


def cross(flips: NearestFlips, rows: Tensor, through: Tensor, gain: float = 1e-6, tolerance: float = 1e-3) -> Tensor:
    """Search the boundary along the rays through some points; return whether a flip nearer by `gain` was found."""
    won = _try_ray(flips, rows, through, gain)
    shorten(flips, rows[won], tolerance)
    return won


def _try_ray(flips: NearestFlips, rows: Tensor, through: Tensor, gain: float) -> Tensor:
    """Whether the point of the ray at `gain` below the known distance is a flip, by one evaluation.

    Without a known flip, points at doubling distances are tried.
    """
    length = flips.distance(rows, through)
    known = flips.distances[rows]
    usable = (length > 0) & length.isfinite()
    unit = torch.where(usable[:, None], (through - flips.images[rows]) / length[:, None].to(through.dtype), 0.0)
    out = torch.where(known.isfinite(), known * (1 - gain), length * 1.001)
    flipped = torch.zeros_like(usable)
    todo = usable.nonzero()[:, 0]
    for _ in range(_DOUBLINGS):
        if not len(todo):
            break
        points = flips.confine(flips.images[rows[todo]] + out[todo, None].to(unit.dtype) * unit[todo])
        flipped[todo], _ = flips.evaluate(rows[todo], points)
        out[todo] *= 2
        todo = todo[~flipped[todo] & ~known[todo].isfinite()]
    return flipped


def shorten(flips: NearestFlips, rows: Tensor, tolerance: float = 0.0) -> None:
    """Move known flips towards their images until the relative width of the crossing interval is at most `tolerance`.

    With tolerance 0, the interval ends at neighbouring floats. The margin is nearly linear along the ray, so the
    crossing is estimated from it and probed alternately slightly beyond and slightly before the estimate. If both
    probes are as predicted, the interval shrinks to the space between them. A wrong estimate costs one bisection.
    """
    rows = flips.with_flip(rows)
    if not len(rows):
        return
    images = flips.images[rows]
    high = flips.distances[rows]
    unit = (flips.points[rows] - images) / high[:, None].to(images.dtype)
    low = torch.zeros_like(high)
    low_margin = flips.clean_margins[rows].double()
    high_margin = margins(flips.logits[rows], flips.classes[rows]).double()
    trust = torch.full_like(high, 1e-2)
    beyond = torch.ones_like(high, dtype=torch.bool)
    # Points are rounded to the dtype of the model: finer steps along the ray have no effect.
    least = max(tolerance, 2 * torch.finfo(images.dtype).eps)
    active = torch.arange(len(rows), device=rows.device)
    for _ in range(_BISECTIONS):
        active = active[(high - low)[active] > least * high[active]]
        if not len(active):
            return
        a, b = low[active], high[active]
        share = low_margin[active] / (low_margin[active] - high_margin[active])
        nudge = torch.where(beyond[active], trust[active], -trust[active])
        probe = a + (share + nudge) * (b - a)
        # A NaN fails both comparisons and is replaced by the midpoint.
        usable = (probe > a) & (probe < b) & (trust[active] < 0.5)
        probe = torch.where(usable, probe, (a + b) / 2)
        points = flips.confine(images[active] + probe[:, None].to(unit.dtype) * unit[active])
        flipped, margin = flips.evaluate(rows[active], points)
        margin = margin.double()
        low[active] = torch.where(flipped, a, probe)
        high[active] = torch.where(flipped, probe, b)
        low_margin[active] = torch.where(flipped, low_margin[active], margin)
        high_margin[active] = torch.where(flipped, margin, high_margin[active])
        predicted = flipped == beyond[active]
        finer = torch.where(usable, trust[active].square().clamp(min=1e-12), 1e-2)
        trust[active] = torch.where(predicted | ~usable, finer, 0.5)
        beyond[active] = ~beyond[active]


# Along the boundary.


def slide(flips: NearestFlips, rows: Tensor, rounds: int, gain: float = 1e-6) -> None:
    """Move along the boundary from known flips towards the image while the distance decreases by `gain`.

    The linearisation of the boundary predicts its nearest point. Either the ray through that point has a nearer flip,
    or the point adds another half-space.
    """
    rows = flips.with_flip(rows)
    if not len(rows):
        return
    planes = _HalfSpaces(flips.images[rows], flips.clip)
    points = flips.points[rows]
    failures = torch.zeros_like(rows)
    for step in range(rounds):
        here = flips.classifier.linearise(points, flips.classes[rows])
        flips.offer(rows, points, here.logits)
        planes.add(points, here)
        delta = planes.nearest(only_newest=step % 2 == 0)
        # Full steps first, shorter ones after failures.
        share = 4.0 ** -failures.to(delta.dtype)
        through = flips.points[rows] + share[:, None] * (planes.images + delta - flips.points[rows])
        won = cross(flips, rows, through, gain)
        failures = torch.where(won, 0, failures + 1)
        points = torch.where(won[:, None], flips.points[rows], through)
        going = failures < 4
        if not going.any():
            return
        rows, points, failures = rows[going], points[going], failures[going]
        planes.select(going)


def scatter(flips: NearestFlips, rows: Tensor, rounds: int) -> None:
    """Try random rays near the ray of the known flip; one that fails costs one evaluation.

    At the corners of a piecewise linear boundary the linearisation fails, but random directions do not. Their spread
    grows after a success and shrinks after a failure so that about one in five succeeds (Rechenberg's rule).
    """
    rows = flips.with_flip(rows)
    spread = torch.full((len(rows), 1), 0.3, dtype=flips.images.dtype, device=rows.device)
    for _ in range(rounds if len(rows) else 0):
        known = flips.distances[rows][:, None].to(spread.dtype)
        through = flips.confine(flips.points[rows] + spread * known * flips.noise(rows))
        won = cross(flips, rows, through, tolerance=1e-6)
        spread = torch.where(won[:, None], spread * 1.5, spread / 1.5**0.25)


# Neighbouring floats.


def walk_over_floats(flips: NearestFlips, rows: Tensor, rounds: int) -> None:
    """Try `rounds` neighbouring floats of each known flip, and move to those that are flips and nearer.

    In real arithmetic there is one boundary; the program has a thin region around it in which rounding determines the
    decision. A certificate that ignores rounding is refuted there, by a point a few floats inside its radius (Jin et
    al., arXiv 2205.10159).
    """
    rows = flips.with_flip(rows)
    if not len(rows) or rounds < 1:
        return
    images = flips.images[rows]
    downhill = -flips.classifier.linearise(flips.points[rows], flips.classes[rows]).gradient
    for step in range(rounds):
        points = flips.points[rows]
        if step % 2 == 0:
            # Move some coordinates by one float towards the image.
            candidates = torch.where(_some(flips, points), torch.nextafter(points, images), points)
        else:
            # Move the whole point by a few floats towards the image, and some coordinates by one float down the margin.
            floats = 1 + (flips.uniform((len(points), 1)) * _MOST_FLOATS).floor()
            back = images + (points - images) * (1 - floats * torch.finfo(points.dtype).eps)
            chosen = _some(flips, points) & (downhill != 0)
            candidates = torch.where(chosen, torch.nextafter(back, back + downhill.sign()), back)
        candidates = flips.confine(candidates)
        logits = flips.classifier.logits(candidates)
        # ‖q - x‖² - ‖p - x‖² = (q - p)·((q - x) + (p - x)): its sign is right even if both norms round to one float.
        change = ((candidates - points) * ((candidates - images) + (points - images))).sum(1)
        won = has_flipped(logits, flips.classes[rows]) & (change < 0)
        flips.points[rows[won]] = candidates[won]
        flips.logits[rows[won]] = logits[won]
        flips.distances[rows[won]] = flips.distance(rows[won], candidates[won])


def _some(flips: NearestFlips, points: Tensor) -> Tensor:
    """A random mask of coordinates (N, D): from one to all of them, with log-uniform probability."""
    chances = flips.uniform(tuple(points.shape))
    return chances < torch.pow(points.shape[1], -flips.uniform((len(points), 1)))


# Integers.


def nearest_integers(
    classifier: Classifier, images: Tensor, classes: Tensor, points: Tensor
) -> tuple[Tensor, list[int], Tensor]:
    r"""Search for flips among uint8 images, where a distance is a sum of squared integer differences.

    To lower an affine margin by a given amount at the smallest $\sum d_i^2$ with integers $d_i$, take units in the
    order of gain over cost: the k-th unit of pixel i gains $|g_i|$ and costs $2k - 1$. The result is
    $d_i = \mathrm{round}(t |g_i|)$ for some $t$: scaling a direction and rounding it to integers is optimal for a
    linearised classifier. The directions are those of `points`, then the gradients at the best image so far.

    Args:
        classifier: the classifier; it receives k/255 for a pixel k.
        images: (N, D) uint8.
        classes: (N), the attacked decisions.
        points: (N, D) floats, known flips.

    Returns:
        The images (N, D), their squared distances (-1 if none was found), and their scores.
    """
    whole = images.long()
    best = whole.clone()
    logits = classifier.logits(to_float(whole, classifier.dtype))
    squares = torch.where(has_flipped(logits, classes), 0, -1)
    direction = points.double() * 255 - whole
    for turn in range(_INTEGER_DIRECTIONS):
        if turn:
            direction = -classifier.linearise(to_float(best, classifier.dtype), classes).gradient.double()
        largest = direction.abs().amax(1, keepdim=True)
        unit = torch.where((largest > 0) & largest.isfinite(), direction / largest, 0.0)
        low = torch.zeros(len(whole), 1, dtype=torch.float64, device=whole.device)
        high = torch.full_like(low, torch.inf)
        t = torch.full_like(low, 1.0)  # the largest change of a pixel: doubled until a flip is found, then bisected
        for _ in range(_INTEGER_PROBES):
            candidates = (whole + t * unit).round().clamp(0, 255).long()
            scores = classifier.logits(to_float(candidates, classifier.dtype))
            flipped = has_flipped(scores, classes)
            sums = (candidates - whole).square().sum(1)
            better = flipped & ((squares < 0) | (sums < squares))
            best[better], squares[better], logits[better] = candidates[better], sums[better], scores[better]
            low = torch.where(flipped[:, None], low, t)
            high = torch.where(flipped[:, None], t, high)
            t = torch.where(high.isfinite(), (low + high) / 2, (2 * low).clamp(max=1e4))
    return best.to(torch.uint8), squares.tolist(), logits
