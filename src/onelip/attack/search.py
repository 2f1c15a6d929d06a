"""The whole attack: aim at the nearest classes, start anew at random, then work at the boundary."""

from collections.abc import Callable, Sequence
from fractions import Fraction

import torch
from torch import Tensor, nn

from onelip.attack.boundary import scatter, slide
from onelip.attack.distance import exact_square
from onelip.attack.gradient import ball_steps, tangent_steps
from onelip.attack.integers import nearest_integers
from onelip.attack.nearest import Nearest
from onelip.attack.neighbours import walk
from onelip.attack.program import make_program
from onelip.attack.rays import shorten
from onelip.attack.result import AttackResult
from onelip.attack.scout import scout_program, scouting, take_over

_CANDIDATES = 10  # classes of the best scores whose gradients are looked at
_CONTACT = 1e-6  # a flip relatively so near to the certified radius may be brought inside by rounding
_REACH = 0.05  # a flip relatively farther than this from the radius is not brought inside by the last digits
_FAR_DIGITS = 1e-6  # of distances that are farther
_INTEGER_ROUNDS = 3

Progress = Callable[[int, int], None]


def find_adversarials(
    model: nn.Module,
    images: Tensor,
    classes: Tensor | None = None,
    *,
    radii: Tensor | None = None,
    pixels: Sequence[int | None] | None = None,
    steps: int = 20,
    restarts: int = 1,
    targets: int = 3,
    neighbours: int = 64,
    clip: bool = False,
    integers: bool = False,
    scout: bool = True,
    seed: int = 0,
    batch_size: int = 250,
    progress: Progress | None = None,
) -> AttackResult:
    """Look for the nearest point (L2) at which the program changes its decision, for each image.

    The model is attacked as it is, in its own dtype; certificates are about float64, so give it `model.double()`.
    A flip is a class that is not strictly the best any more: ties, NaN and overflows count.

    Args:
        model: in eval mode, from images to scores (N, classes).
        images: (N, ...), uint8 (the program sees x/255) or floating.
        classes: (N), the decisions to attack; None for the program's own.
        radii: (N), certified radii; flips inside are `AttackResult.broken`, and the search is finest near them.
        pixels: for uint8 images with `integers`, the certified sums of squared pixel differences.
        steps: gradient steps for each target and each restart.
        restarts: random starts.
        targets: how many of the nearest classes are aimed at one by one.
        neighbours: neighbouring floats to try at the boundary, where a flip nearly touches its radius (or radii=None).
        clip: whether flips must be images too, in [0, 1]. A certificate holds outside, so False is the stronger attack.
        integers: whether flips must be uint8 images.
        scout: search float64 programs in float32 first, at half the cost. Flips are of the program itself all the same.
        seed: of the random starts.
        batch_size: images at a time.
        progress: called with (images done, images in all) after each batch.

    Example:
        >>> import onelip
        >>> model = nn.Linear(2, 2, bias=False).double().eval()
        >>> _ = model.weight.data.copy_(torch.eye(2))
        >>> found = find_adversarials(model, torch.tensor([[1.0, 0.0]]))
        >>> round(float(found.distances[0]), 6)  # to the line x = y
        0.707107
    """
    program, points = make_program(model, images)
    if classes is None:
        classes = torch.cat([program.logits(part).argmax(1) for part in points.split(batch_size)])
    check_claims(images, classes, radii)
    _check_integers(images, pixels, integers)
    claims = None if radii is None else radii.detach().double().cpu()
    scouting_program = scout_program(program) if scout else None
    parts: list[tuple[Tensor, Tensor, list[Fraction | None]]] = []
    for first in range(0, len(images), batch_size):
        part = slice(first, min(first + batch_size, len(images)))
        here = classes[part].to(points.device)
        nearest = Nearest(program, points[part], here, clip=clip or integers, seed=seed + first)
        near = None if claims is None or integers else claims[part].to(points.device)
        rows = nearest.rows
        if scouting_program is not None and len(rows):
            scouted = scouting(nearest, scouting_program, seed + first)
            explore(scouted, scouted.rows, steps=steps, restarts=restarts, targets=targets)
            rows = take_over(nearest, scouted, None if near is None else near * (1 + _REACH))
        explore(nearest, rows, steps=steps, restarts=restarts, targets=targets)
        work_at_boundary(nearest, near, neighbours)
        if integers:
            parts.append(_as_integers(nearest, images[part]))
        else:
            parts.append(_as_floats(nearest))
        if progress is not None:
            progress(part.stop, len(images))
    adversarials, logits, squares = zip(*parts, strict=True)
    return AttackResult(
        images=images,
        classes=classes.cpu(),
        adversarials=torch.cat(adversarials).unflatten(1, images.shape[1:]).cpu(),
        logits=torch.cat(logits).cpu(),
        squares=tuple(square for part in squares for square in part),
        radii=claims,
        pixels=None if pixels is None else tuple(pixels),
    )


def explore(nearest: Nearest, rows: Tensor, *, steps: int, restarts: int, targets: int) -> None:
    """From the images to the boundary, and along it to near flips."""
    if not len(rows):
        return
    start = nearest.images[rows]
    aims = nearest.program.nearest_targets(start, nearest.classes[rows], _CANDIDATES, targets)
    for aim in aims.unbind(1):
        tangent_steps(nearest, rows, start, aim, steps)
    _towards_other_images(nearest, rows)
    for _ in range(restarts):
        ball_steps(nearest, rows, steps)
        known = nearest.distances[rows]
        away = torch.where(known.isfinite(), known, 1.0)[:, None].to(start.dtype)
        tangent_steps(nearest, rows, nearest.confine(start + away * nearest.noise(rows)), None, steps)
    shorten(nearest, rows, tolerance=1e-3)
    slide(nearest, rows, rounds=steps // 2)
    scatter(nearest, rows, rounds=steps)


def work_at_boundary(nearest: Nearest, radii: Tensor | None, neighbours: int) -> None:
    """Down to neighbouring floats, and over them where a flip nearly touches its radius.

    A flip far from its radius refutes nothing by its last digits, which in float64 cost as much as finding it.
    """
    rows = nearest.rows
    if radii is None:
        shorten(nearest, rows)
        walk(nearest, rows, neighbours)
        return
    shorten(nearest, rows, _FAR_DIGITS)
    near = rows[nearest.distances[rows] <= radii[rows] * (1 + _REACH)]
    shorten(nearest, near)
    walk(nearest, near[nearest.distances[near] <= radii[near] * (1 + _CONTACT)], neighbours)


def _towards_other_images(nearest: Nearest, rows: Tensor) -> None:
    """Where gradients led nowhere: the segment to an image of another class crosses the boundary somewhere."""
    lost = rows[nearest.distances[rows].isinf()]
    if not len(lost):
        return
    away = torch.cdist(nearest.images[lost].double(), nearest.images.double())
    away[nearest.classes[lost][:, None] == nearest.classes[None]] = torch.inf
    distance, other = away.min(1)
    lost, other = lost[distance.isfinite()], other[distance.isfinite()]
    if len(lost):
        nearest.evaluate(lost, nearest.images[other])
        shorten(nearest, lost, tolerance=1e-3)


def _as_floats(nearest: Nearest) -> tuple[Tensor, Tensor, list[Fraction | None]]:
    squares = [
        exact_square(point, image) if finite else None
        for point, image, finite in zip(
            nearest.points.cpu(), nearest.images.cpu(), nearest.distances.isfinite().tolist(), strict=True
        )
    ]
    return nearest.points, nearest.logits, squares


def _as_integers(nearest: Nearest, images: Tensor) -> tuple[Tensor, Tensor, list[Fraction | None]]:
    whole = images.flatten(1).to(nearest.images.device)
    # Rows without a flip have their image as the point: a direction of zero, which finds nothing before the gradient.
    found, sums, logits = nearest_integers(nearest.program, whole, nearest.classes, nearest.points, _INTEGER_ROUNDS)
    return found, logits, [None if s < 0 else Fraction(s, 255**2) for s in sums.tolist()]


def check_claims(images: Tensor, classes: Tensor, radii: Tensor | None) -> None:
    """Refuse classes and radii that are no claim about these images."""
    for name, given in (("class", classes), ("radius", radii)):
        if given is not None and given.shape != images.shape[:1]:
            raise ValueError(f"expected a {name} for each of {len(images)} images, got shape {tuple(given.shape)}")
    if classes.dtype != torch.int64:
        raise ValueError(f"expected classes of torch.int64, got {classes.dtype}")
    if radii is not None and not (radii >= 0).all():  # so written a NaN is refused
        raise ValueError("expected radii of at least 0, got a negative one or a NaN; 0 claims nothing")


def _check_integers(images: Tensor, pixels: Sequence[int | None] | None, integers: bool) -> None:
    if pixels is not None and len(pixels) != len(images):
        raise ValueError(f"expected a number of pixels for each of {len(images)} images, got {len(pixels)}")
    if integers and images.dtype != torch.uint8:
        raise ValueError(f"expected uint8 images for an attack in integers, got {images.dtype}; leave integers=False")
    if pixels is not None and not integers:
        raise ValueError("expected integers=True beside pixels, got integers=False: pixels are a claim about integers")
