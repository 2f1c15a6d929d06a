"""Attacks of foolbox with exact distances: their points are moved to the boundary and evaluated like our own."""

import importlib
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from onelip.attacks.flips import Found, NearestFlips
from onelip.attacks.local import shorten, walk_over_floats
from onelip.attacks.result import AttackResult
from onelip.attacks.search import NEIGHBOURS, Progress, attack_in_batches

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
