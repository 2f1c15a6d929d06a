"""Predict the classes of new images, with certified radii: `LoadedRun.predict`."""

import copy
import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, overload

from torch import Tensor, nn

from onelip.certification.predict import Certification, Mode, certify
from onelip.certification.proof import Progress, Proof
from onelip.core.errors import ProofError
from onelip.data import NewImages


@dataclass(frozen=True)
class Prediction:
    """The class of an image, and how far it is certified.

    Attributes:
        image: path of the image, or its index in a tensor.
        class_name: predicted class.
        radius: every image within this L2 distance, for pixels in [0, 1], has the same class; 0 if nothing is
            certified.
        pixels: every uint8 image whose sum of squared pixel differences is at most this number has the same class; None
            if nothing is certified, and in the mode "real-arithmetic".
        change: how the image was changed to fit the network; the radius is then for the changed image. None if it was
            not changed.
    """

    image: str
    class_name: str
    radius: float
    pixels: int | None
    change: str | None = None

    def to_json(self) -> dict[str, Any]:
        """The fields, with `class_name` as "class"."""
        return {"class" if name == "class_name" else name: value for name, value in asdict(self).items()}


@dataclass(frozen=True, eq=False)
class Predictions(Sequence[Prediction]):
    """A sequence with one `Prediction` for each image.

    Attributes:
        items: the predictions.
        mode: "sound" if the radii include all rounding errors, else "real-arithmetic".
        reason: why the mode is not "sound", if it was not chosen; else None.
        skipped: error messages of files that were skipped.
        certification: the same as tensors, with logits and proof.
    """

    items: tuple[Prediction, ...]
    mode: Mode
    reason: str | None
    skipped: tuple[str, ...]
    certification: Certification

    def __len__(self) -> int:
        return len(self.items)

    @overload
    def __getitem__(self, index: int) -> Prediction: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Prediction, ...]: ...
    def __getitem__(self, index: int | slice) -> Prediction | tuple[Prediction, ...]:
        return self.items[index]

    def __iter__(self) -> Iterator[Prediction]:
        return iter(self.items)

    def to_json(self) -> dict[str, Any]:
        """Mode, constant and predictions, for `json.dumps`."""
        return {
            "mode": self.mode,
            "reason": self.reason,
            "constant": self.certification.constant,
            "predictions": [item.to_json() for item in self.items],
            "skipped": list(self.skipped),
        }


def predict(
    plain: nn.Module,
    new: NewImages,
    class_names: Sequence[str],
    *,
    mode: Mode | None = None,
    proof: Proof | None = None,
    batch_size: int = 250,
    progress: Progress | None = None,
) -> Predictions:
    """Predict and certify images with a baked network in float32.

    Args:
        plain: the baked network; it is not changed.
        new: the images, uint8 or floats in [0, 1], with their names.
        class_names: name of each class.
        mode: None for the sound mode if the network can be proved in it, else real arithmetic.
        proof: an earlier proof of this network in float64, to save time.
        batch_size: images at a time; changes speed and memory only.
        progress: called with the work done, all work, and its name.

    Raises:
        ProofError: if no constant of the network is proved, or not in this mode.
    """
    images, reason = new.images, None
    if mode == "real-arithmetic":
        found = certify(plain, images, mode=mode, batch_size=batch_size, progress=progress)
    else:
        try:
            found = _certify_soundly(plain, images, proof, batch_size, progress)
        except ProofError as error:
            if mode == "sound":
                raise
            reason = str(error)
            found = certify(plain, images, mode="real-arithmetic", batch_size=batch_size, progress=progress)
    # No two images are farther apart; a smaller radius is certified too.
    radii = found.radii.clamp(max=math.sqrt(math.prod(images.shape[1:]))).tolist()
    labels: list[int] = found.classes.tolist()
    rows = zip(new.names, [class_names[label] for label in labels], radii, found.pixels, new.changes, strict=True)
    return Predictions(tuple(Prediction(*row) for row in rows), found.mode, reason, new.skipped, found)


def _certify_soundly(
    plain: nn.Module, images: Tensor, proof: Proof | None, batch_size: int, progress: Progress | None
) -> Certification:
    network = copy.deepcopy(plain).cpu().double()
    if proof is not None:
        with suppress(ProofError):  # the weights have been changed since: prove them again
            return certify(network, images, proof=proof, batch_size=batch_size, progress=progress)
    return certify(network, images, batch_size=batch_size, progress=progress)
