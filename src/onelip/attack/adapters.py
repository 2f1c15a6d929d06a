"""Attacks of other libraries, with our exact measure: what they find is taken to the boundary and judged the same way.

foolbox is imported when it is asked for (`pip install onelip[attacks]`).
"""

import importlib
import warnings
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, nn

from onelip.attack.distance import exact_square
from onelip.attack.nearest import Nearest
from onelip.attack.neighbours import walk
from onelip.attack.program import Program, make_program
from onelip.attack.rays import shorten
from onelip.attack.result import AttackResult
from onelip.attack.search import Progress, check_claims

# Minimum-norm attacks in L2; L2PGD with its default steps is not one (it misses a third of a linear net's flips).
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
    radii: Tensor | None = None,
    *,
    neighbours: int = 64,
    batch_size: int = 250,
    progress: Progress | None = None,
    **options: Any,
) -> AttackResult:
    """A minimum-norm L2 attack of foolbox, then our bisection to the boundary and our exact distances.

    foolbox keeps its flips in [0, 1], so the images must lie there.

    Args:
        model: in eval mode, from images to scores.
        images: (N, ...), uint8 (taken as x/255) or floating, in [0, 1].
        classes: (N), the decisions to attack; None for the program's own.
        attack: of FOOLBOX_ATTACKS.
        radii: (N), certified radii.
        neighbours: neighbouring floats to try at the boundary.
        batch_size: images at a time.
        progress: called with (images done, images in all).
        **options: for foolbox's attack, e.g. steps=100.
    """
    if attack not in FOOLBOX_ATTACKS:
        raise ValueError(f"expected an attack of {', '.join(FOOLBOX_ATTACKS)}, got {attack!r}")
    foolbox = _import_foolbox()
    program, points = make_program(model, images)
    if not ((points >= 0) & (points <= 1)).all():
        raise ValueError(f"expected images in [0, 1], got a maximum of {float(points.max()):g}; divide by 255")
    if classes is None:
        classes = torch.cat([program.logits(part).argmax(1) for part in points.split(batch_size)])
    check_claims(images, classes, radii)
    run = getattr(foolbox.attacks, FOOLBOX_ATTACKS[attack])(**options)
    found: list[Nearest] = []
    for part, labels in zip(points.split(batch_size), classes.to(points.device).split(batch_size), strict=True):
        nearest = Nearest(program, part, labels, clip=True)
        if len(nearest.rows):
            nearest.evaluate(nearest.rows, _run(foolbox, run, program, part[nearest.rows], labels[nearest.rows]))
            shorten(nearest, nearest.rows)
            walk(nearest, nearest.rows, neighbours)
        found.append(nearest)
        if progress is not None:
            progress(sum(len(n.classes) for n in found), len(images))
    return _result(images, classes, radii, found)


def _run(foolbox: Any, run: Any, program: Program, points: Tensor, classes: Tensor) -> Tensor:
    """The points that foolbox proposes; whether they flip is our judgement."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of an unmaintained library, about numpy and torch of today
        shaped = points.unflatten(1, program.image_shape)
        wrapped = foolbox.PyTorchModel(program.model, bounds=(0, 1), device=program.device)
        proposed = run.run(wrapped, shaped, foolbox.criteria.Misclassification(classes))
    proposed = proposed.detach().to(points.dtype).flatten(1)
    return torch.where(proposed.isfinite().all(1, keepdim=True), proposed, points)


def _result(images: Tensor, classes: Tensor, radii: Tensor | None, found: Sequence[Nearest]) -> AttackResult:
    points = torch.cat([nearest.points for nearest in found]).cpu()
    clean = torch.cat([nearest.images for nearest in found]).cpu()
    known = torch.cat([nearest.distances.isfinite() for nearest in found]).tolist()
    squares: list[Fraction | None] = [
        exact_square(point, image) if is_known else None
        for point, image, is_known in zip(points, clean, known, strict=True)
    ]
    return AttackResult(
        images=images,
        classes=classes.cpu(),
        adversarials=points.unflatten(1, images.shape[1:]),
        logits=torch.cat([nearest.logits for nearest in found]).cpu(),
        squares=tuple(squares),
        radii=None if radii is None else radii.detach().double().cpu(),
    )


def _import_foolbox() -> Any:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module("foolbox")
    except ImportError as error:
        raise ValueError("expected foolbox to be installed, got none; pip install onelip[attacks]") from error
