"""`onelip.attack`: search towards the nearest classes, restart at random, refine at the boundary; and foolbox.

The points of foolbox are moved to the boundary and evaluated like our own, with exact distances.
"""

import importlib
import warnings
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn

from onelip.attacks.flips import Found, NearestFlips, flat_classifier
from onelip.attacks.local import (
    ball_steps,
    cross,
    nearest_integers,
    scatter,
    shorten,
    slide,
    tangent_steps,
    walk_over_floats,
)
from onelip.attacks.result import AttackResult
from onelip.core.errors import check_integer
from onelip.core.images import check_labels

NEIGHBOURS = 64  # neighbouring floats to try at the boundary
_TARGETS = 3  # number of target classes, searched one by one
_CONTACT = 1e-6  # relative distance from the radius below which rounding may move a flip inside it
_REACH = 0.05  # relative distance from the radius above which refinement cannot move a flip inside it
_FAR_DIGITS = 1e-6  # relative precision of the distances of such flips
_AGREE = 1e-3  # relative difference of the margins above which the float32 search is not used

Progress = Callable[[int, int], None]


def attack(
    model: nn.Module,
    images: Tensor,
    classes: Tensor | None = None,
    *,
    radii: Tensor | None = None,
    pixels: Sequence[int | None] | None = None,
    steps: int = 20,
    restarts: int = 1,
    clip: bool = False,
    integers: bool = False,
    seed: int = 0,
    batch_size: int = 250,
    progress: Progress | None = None,
) -> AttackResult:
    """Search, for each image, for the nearest point (L2) at which the decision of a model changes.

    The model is attacked in its own dtype. Certificates hold for float64, so attack `model.double()`. A decision has
    changed if the class is not strictly the best of finite scores: ties, NaN and overflow count as changes.

    For a float64 model, the search runs in float32 first, at half the cost. All reported points are verified in the
    dtype of the model.

    Args:
        model: model in eval mode that maps images to scores (N, classes).
        images: (N, ...), uint8 (the model receives x/255) or floating point.
        classes: (N), the decisions to attack. Default: those of the model.
        radii: (N), certified radii. Changed decisions within them are reported in `AttackResult.broken`, and the search
            is most precise near them.
        pixels: for `integers=True`, the certified sums of squared pixel differences.
        steps: number of gradient steps for each target class and each restart.
        restarts: number of random restarts.
        clip: search only points in [0, 1]. Certificates also hold outside, so the default is the stronger attack.
        integers: search only uint8 images.
        seed: seed of the random starts.
        batch_size: number of images per batch.
        progress: called with (images done, total images) after each batch.

    Returns:
        The nearest point found for each image, with its exact distance.

    Raises:
        ValueError: if the model is in training mode, or the images, classes and radii are inconsistent.

    Examples:
        >>> import onelip
        >>> model = nn.Linear(2, 2, bias=False).double().eval()
        >>> _ = model.weight.data.copy_(torch.eye(2))
        >>> found = onelip.attack(model, torch.tensor([[1.0, 0.0]]))
        >>> round(float(found.distances[0]), 6)  # to the line x = y
        0.707107
    """
    check_integer("steps", steps)
    check_integer("restarts", restarts, minimum=0)
    if pixels is not None and len(pixels) != len(images):
        raise ValueError(f"expected pixels for each of {len(images)} images, got {len(pixels)}")
    if integers and images.dtype != torch.uint8:
        raise ValueError(f"expected uint8 images for integers=True, got {images.dtype}; remove integers=True")
    if pixels is not None and not integers:
        raise ValueError("pixels applies to uint8 images only; pass integers=True as well")

    def search(flips: NearestFlips, part: slice) -> Found:
        near = None if radii is None or integers else radii[part].to(flips.images.device, torch.float64)
        rows = _explore_in_float32(flips, near, steps, restarts)
        _explore(flips, rows, steps, restarts)
        _refine(flips, near)
        if not integers:
            return flips.measured()
        # For rows without a flip the point is the image itself: its direction is zero and finds nothing.
        whole = images[part].flatten(1).to(flips.images.device)
        found, sums, logits = nearest_integers(flips.classifier, whole, flips.classes, flips.points)
        return Found(found, logits, [None if s < 0 else Fraction(s, 255**2) for s in sums])

    return attack_in_batches(
        search,
        model,
        images,
        classes,
        radii=radii,
        pixels=pixels,
        clip=clip or integers,
        seed=seed,
        batch_size=batch_size,
        progress=progress,
    )


def attack_in_batches(
    search: Callable[[NearestFlips, slice], Found],
    model: nn.Module,
    images: Tensor,
    classes: Tensor | None,
    *,
    radii: Tensor | None,
    pixels: Sequence[int | None] | None = None,
    clip: bool,
    seed: int = 0,
    batch_size: int,
    progress: Progress | None,
) -> AttackResult:
    """Run a search on each batch and collect the results. The other arguments are those of `attack`.

    Args:
        search: function of the `NearestFlips` of a batch and its slice of the images; returns the flips it found.
    """
    check_integer("batch_size", batch_size)
    classifier, points = flat_classifier(model, images)
    if classes is None:
        classes = torch.cat([classifier.logits(part).argmax(1) for part in points.split(batch_size)])
    _check_claims(images, classes, radii)
    check_labels(classes, classifier.logits(points[:1]).shape[1], "classes: ")
    parts: list[Found] = []
    for first in range(0, len(images), batch_size):
        part = slice(first, min(first + batch_size, len(images)))
        here = classes[part].to(points.device)
        parts.append(search(NearestFlips(classifier, points[part], here, clip=clip, seed=seed + first), part))
        if progress is not None:
            progress(part.stop, len(images))
    return AttackResult(
        images=images,
        classes=classes.cpu(),
        adversarials=torch.cat([part.points for part in parts]).unflatten(1, images.shape[1:]).cpu(),
        logits=torch.cat([part.logits for part in parts]).cpu(),
        squares=tuple(square for part in parts for square in part.squares),
        radii=None if radii is None else radii.detach().double().cpu(),
        pixels=None if pixels is None else tuple(pixels),
    )


def _check_claims(images: Tensor, classes: Tensor, radii: Tensor | None) -> None:
    for name, given in (("class", classes), ("radius", radii)):
        if not isinstance(given, Tensor | None):
            raise ValueError(f"expected a tensor with a {name} for each image, got {type(given).__name__}")
        if given is not None and given.shape != images.shape[:1]:
            raise ValueError(f"expected a {name} for each of {len(images)} images, got shape {tuple(given.shape)}")
    if classes.dtype != torch.int64:
        raise ValueError(f"expected classes of torch.int64, got {classes.dtype}; use classes.long()")
    if radii is not None and not (radii >= 0).all():  # also true for NaN
        raise ValueError("expected radii of at least 0, got a negative number or NaN; use 0 for no claim")


def _explore(flips: NearestFlips, rows: Tensor, steps: int, restarts: int) -> None:
    """Search from the images to the boundary, and along it for nearer flips."""
    if not len(rows):
        return
    start = flips.images[rows]
    targets = flips.classifier.nearest_targets(start, flips.classes[rows], _TARGETS)
    for target in targets.unbind(1):
        tangent_steps(flips, rows, start, target, steps)
    _towards_other_images(flips, rows)
    for _ in range(restarts):
        ball_steps(flips, rows, steps)
        known = flips.distances[rows]
        away = torch.where(known.isfinite(), known, 1.0)[:, None].to(start.dtype)
        tangent_steps(flips, rows, flips.confine(start + away * flips.noise(rows)), None, steps)
    shorten(flips, rows, tolerance=1e-3)
    slide(flips, rows, rounds=steps // 2)
    scatter(flips, rows, rounds=steps)


def _towards_other_images(flips: NearestFlips, rows: Tensor) -> None:
    """If gradients found no flip, search the segment to an image of another class, which crosses the boundary."""
    lost = rows[flips.distances[rows].isinf()]
    if not len(lost):
        return
    away = torch.cdist(flips.images[lost].double(), flips.images.double())
    away[flips.classes[lost][:, None] == flips.classes[None]] = torch.inf
    distance, other = away.min(1)
    lost, other = lost[distance.isfinite()], other[distance.isfinite()]
    if len(lost):
        flips.evaluate(lost, flips.images[other])
        shorten(flips, lost, tolerance=1e-3)


def _explore_in_float32(flips: NearestFlips, radii: Tensor | None, steps: int, restarts: int) -> Tensor:
    """Explore with a float32 copy of a float64 model; return the rows that are still without a flip.

    Float32 results are only candidates: the rays are searched again in float64. The boundary is followed only up to
    `_REACH` beyond the radii, because float64 can refute more than float32 only there.
    """
    rows = flips.rows
    if not len(rows) or flips.classifier.in_float32 is None:
        return rows
    images = flips.images.to(torch.float32)
    found = NearestFlips(flips.classifier.in_float32, images, flips.classes, clip=flips.clip, seed=flips.seed)
    _explore(found, found.rows, steps, restarts)
    known = found.distances[rows]
    margin, seen = flips.clean_margins[rows], found.clean_margins[rows].to(flips.images.dtype)
    agree = (seen - margin).abs() <= _AGREE * margin  # false for NaN
    shown = rows[agree & known.isfinite() & (known > 0)]
    away = (found.points[shown] - found.images[shown]).to(flips.images.dtype)
    crossed = shown[cross(flips, shown, flips.confine(flips.images[shown] + away))]
    if radii is not None:
        crossed = crossed[flips.distances[crossed] <= radii[crossed] * (1 + _REACH)]
    slide(flips, crossed, rounds=2, gain=1e-12)  # the float32 points have half the digits of float64
    return rows[flips.distances[rows].isinf()]


def _refine(flips: NearestFlips, radii: Tensor | None) -> None:
    """Shorten flips to neighbouring floats, and search over these if a flip is close to its radius.

    For a flip far from its radius, the last digits of the distance do not matter, and in float64 they would cost as
    much as finding the flip.
    """
    rows = flips.rows
    if radii is None:
        shorten(flips, rows)
        walk_over_floats(flips, rows, NEIGHBOURS)
        return
    shorten(flips, rows, _FAR_DIGITS)
    near = rows[flips.distances[rows] <= radii[rows] * (1 + _REACH)]
    shorten(flips, near)
    walk_over_floats(flips, near[flips.distances[near] <= radii[near] * (1 + _CONTACT)], NEIGHBOURS)


# Minimum-norm L2 attacks only; L2PGD with its default steps misses a third of the flips of a linear network.
FOOLBOX_ATTACKS = {
    "FMN": "L2FMNAttack",
    "DeepFool": "L2DeepFoolAttack",
    "DDN": "DDNAttack",
    "CarliniWagner": "L2CarliniWagnerAttack",
}


def with_foolbox(
    model: nn.Module,
    images: Tensor,
    classes: Tensor | None = None,
    attack: str = "FMN",
    *,
    radii: Tensor | None = None,
    batch_size: int = 250,
    progress: Progress | None = None,
    **options: Any,
) -> AttackResult:
    """Run a minimum-norm L2 attack of foolbox, then bisect to the boundary and measure distances exactly.

    Needs foolbox: `pip install 'onelip[attacks]'`. foolbox searches in [0, 1], so the images must lie there.

    Args:
        model: model in eval mode that maps images to scores (N, classes).
        images: (N, ...), uint8 (the model receives x/255) or floating point in [0, 1].
        classes: (N), the decisions to attack. Default: those of the model.
        attack: "FMN", "DeepFool", "DDN" or "CarliniWagner".
        radii: (N), certified radii.
        batch_size: number of images per batch.
        progress: called with (images done, total images) after each batch.
        **options: options of the foolbox attack, e.g. steps=100.

    Returns:
        The nearest point found for each image, with its exact distance.

    Raises:
        ValueError: if foolbox is not installed, the attack is unknown, or the images do not lie in [0, 1].

    Examples:
        Run the attack of Carlini and Wagner on certified images (not executed here: foolbox is optional):

            found = with_foolbox(model.double(), images, certified.classes, "CarliniWagner", radii=certified.radii)
            assert not found.broken.any()
    """
    if attack not in FOOLBOX_ATTACKS:
        raise ValueError(f"unknown attack {attack!r}; expected one of {', '.join(FOOLBOX_ATTACKS)}")
    if images.is_floating_point() and not ((images >= 0) & (images <= 1)).all():
        raise ValueError(f"expected images in [0, 1], got a maximum of {float(images.max()):g}; divide by 255")
    foolbox = _import_foolbox()
    run = getattr(foolbox.attacks, FOOLBOX_ATTACKS[attack])(**options)

    def search(flips: NearestFlips, part: slice) -> Found:
        rows = flips.rows
        if len(rows):
            flips.evaluate(rows, _propose(foolbox, run, flips, rows))
            shorten(flips, rows)
            walk_over_floats(flips, rows, NEIGHBOURS)
        return flips.measured()

    return attack_in_batches(
        search, model, images, classes, radii=radii, clip=True, batch_size=batch_size, progress=progress
    )


def _propose(foolbox: Any, run: Any, flips: NearestFlips, rows: Tensor) -> Tensor:
    """The points that foolbox proposes; `NearestFlips` decides whether they are flips."""
    points, classifier = flips.images[rows], flips.classifier
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # foolbox is unmaintained and uses deprecated functions of numpy and torch
        wrapped = foolbox.PyTorchModel(classifier.model, bounds=(0, 1), device=classifier.device)
        criterion = foolbox.criteria.Misclassification(flips.classes[rows])
        proposed = run.run(wrapped, points.unflatten(1, classifier.image_shape), criterion)
    proposed = proposed.detach().to(points.dtype).flatten(1)
    return torch.where(proposed.isfinite().all(1, keepdim=True), proposed, points)


def _import_foolbox() -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module("foolbox")
    except ImportError as error:
        raise ValueError("foolbox is not installed: pip install 'onelip[attacks]'") from error
