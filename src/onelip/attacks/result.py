"""The result of an attack, with exact distances, and the claims of a certificate file to attack."""

import math
from dataclasses import dataclass
from fractions import Fraction
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from onelip.attacks.flips import best_others
from onelip.certification.radius import certified_accuracy, radius_fraction
from onelip.checker.certificate import FORMAT, VERSION
from onelip.core.errors import RunError
from onelip.core.files import file_hash, read_json, write_whole
from onelip.core.images import images_hash
from onelip.core.rounding import up_root


@dataclass(frozen=True, eq=False)
class AttackResult:
    """The nearest changed decision ("flip") found for each image.

    Attributes:
        images: (N, ...), the attacked images.
        classes: (N) int64, the attacked decisions.
        adversarials: (N, ...), the flips, in the dtype of the model or uint8; the image itself if none was found.
        logits: (N, classes), the scores at the flips, as returned by the model during the search. In a batch of another
            size they may round differently; a certificate must hold for that too.
        squares: exact squared distances; None if no flip was found.
        radii: (N) float64, the attacked claim, or None.
        pixels: the same for uint8 images, as sums of squared pixel differences, or None.

    Examples:
        >>> import onelip
        >>> model = torch.nn.Linear(2, 2, bias=False).double().eval()
        >>> _ = model.weight.data.copy_(torch.eye(2))
        >>> found = onelip.attack(model, torch.tensor([[1.0, 0.0]]), radii=torch.tensor([0.8]))
        >>> found.broken  # the true radius is 0.707
        tensor([True])
    """

    images: Tensor
    classes: Tensor
    adversarials: Tensor
    logits: Tensor
    squares: tuple[Fraction | None, ...]
    radii: Tensor | None = None
    pixels: tuple[int | None, ...] | None = None

    def __len__(self) -> int:
        return len(self.classes)

    @property
    def distances(self) -> Tensor:
        """(N) float64, distances of the flips, rounded up. Infinity if none was found."""
        roots = [math.inf if square is None else up_root(square) for square in self.squares]
        return torch.tensor(roots, dtype=torch.float64)

    @property
    def found_classes(self) -> Tensor:
        """(N) int64: the best class at each flip other than the class of the image; -1 without a flip."""
        found = torch.tensor([square is not None for square in self.squares])
        return torch.where(found, best_others(self.logits, self.classes), -1)

    def within(self, radius: float) -> Tensor:
        """Return (N) bool: whether a flip is at most `radius` away, compared exactly (36/255 is exact)."""
        limit = radius_fraction(radius) ** 2
        return torch.tensor([square is not None and square <= limit for square in self.squares])

    @property
    def attacked(self) -> Tensor:
        """(N) bool: whether the claimed radius of the image is above zero."""
        if self.radii is None:
            return torch.zeros(len(self), dtype=torch.bool)
        return self.radii > 0

    @property
    def broken(self) -> Tensor:
        """(N) bool: whether a flip was found in the certified ball. Squared distances and radii are compared exactly.

        An infinite radius and a NaN count as claims that every flip contradicts.
        """
        broken = torch.zeros(len(self), dtype=torch.bool)
        for i, square in enumerate(self.squares):
            if square is None:
                continue
            if self.radii is not None:
                radius = float(self.radii[i])
                outside = radius == 0 or (0 < radius < math.inf and square > Fraction(radius) ** 2)
                broken[i] = not outside
            limit = None if self.pixels is None else self.pixels[i]
            if limit is not None and self.adversarials.dtype == torch.uint8:
                broken[i] |= square * 255**2 <= limit
        return broken

    @property
    def ratios(self) -> Tensor:
        """Found distance over certified radius, for the attacked images; at most 1 means broken."""
        if self.radii is None:
            return torch.empty(0, dtype=torch.float64)
        return self.distances[self.attacked] / self.radii[self.attacked]

    def accuracy(self, labels: Tensor, radius: float = 0.0) -> float:
        """Return the attacked accuracy: the fraction of images with the right class and no flip within `radius`.

        It is an upper bound on the true robust accuracy; the certified accuracy is a lower bound.
        """
        standing = self._right(labels) & ~self.within(radius)
        return int(standing.sum()) / len(self)

    def certified_accuracy(self, labels: Tensor, radius: float = 0.0) -> float:
        """Return the fraction of images with the right class and a claimed radius of at least `radius`."""
        if self.radii is None:
            raise ValueError("no radii were attacked; pass radii= to onelip.attack")
        return certified_accuracy(self._right(labels), self.radii, radius, inclusive=True)

    def _right(self, labels: Tensor) -> Tensor:
        if labels.shape != self.classes.shape:
            raise ValueError(f"expected a label for each of {len(self)} images, got shape {tuple(labels.shape)}")
        return self.classes == labels.cpu()

    def save(self, path: str | Path, *, only_broken: bool = False) -> None:
        """Write images, flips, classes, exact squared distances (as text "a/b") and radii to an .npz file."""
        kept = self.broken.nonzero()[:, 0] if only_broken else torch.arange(len(self))
        arrays = {
            "index": kept.numpy(),
            "images": self.images.cpu()[kept].numpy(),
            "adversarials": self.adversarials[kept].numpy(),
            "classes": self.classes[kept].numpy(),
            "found_classes": self.found_classes[kept].numpy(),
            "logits": self.logits[kept].numpy(),
            "distances": self.distances[kept].numpy(),
            "squares": np.array(["" if self.squares[i] is None else str(self.squares[i]) for i in kept.tolist()]),
        }
        if self.radii is not None:
            arrays["radii"] = self.radii[kept].numpy()
        out = BytesIO()
        np.savez_compressed(out, allow_pickle=False, **arrays)
        write_whole(Path(path), out.getvalue())

    def to_json(self) -> dict[str, Any]:
        """Return counts and ratios; use `save` for the flips."""
        ratios = self.ratios[self.ratios.isfinite()]
        return {
            "images": len(self),
            "flips_found": sum(square is not None for square in self.squares),
            "attacked": int(self.attacked.sum()),
            "broken": int(self.broken.sum()),
            "smallest_ratio": float(ratios.min()) if len(ratios) else None,
            "median_ratio": float(ratios.median()) if len(ratios) else None,
        }

    def __str__(self) -> str:
        found = self.to_json()
        text = f"{found['flips_found']} flips found for {found['images']} images"
        if self.radii is None:
            return text
        ratios = "" if found["smallest_ratio"] is None else f", nearest at {found['smallest_ratio']:.6f} of its radius"
        return f"{text}; {found['attacked']} certified, {found['broken']} broken{ratios}"


class ClaimedRadii(NamedTuple):
    """Classes and radii claimed by a certificate."""

    classes: Tensor  # (N) int64
    radii: Tensor  # (N) float64; 0 for no claim
    pixels: tuple[int | None, ...]  # the same for uint8 images


def read_claims(path: Path, run: Path, images: Tensor, part: slice) -> ClaimedRadii:
    """Read the results for consecutive images from a certificate file.

    The certificate is not checked (use `onelip check`), but it must be for the weights of `run` and for these images.

    Args:
        path: the certificate.
        run: the run directory, with plain.safetensors.
        images: all images of the split.
        part: the images to attack.

    Raises:
        RunError: if the file is not a certificate, or is for other weights or images.
    """
    content: Any = read_json(path)
    try:
        if content["format"] != FORMAT or content["version"] != VERSION:
            raise RunError(
                f"{path}: expected an {FORMAT} of version {VERSION}, got {content['format']!r} of version "
                f"{content['version']!r}; certify again, or use the onelip that wrote it"
            )
        count = content["images"]["count"]
        expected = content["weights"]["sha256"], content["images"]["sha256"]
        results = content["results"]
        indices = [result["index"] for result in results]
        classes = torch.tensor([int(result["class"]) for result in results], dtype=torch.int64)
        radii = torch.tensor([float.fromhex(result["radius"]) for result in results], dtype=torch.float64)
        pixels = tuple(None if result["pixels"] is None else int(result["pixels"]) for result in results)
        if type(count) is not int or count < 0:
            raise ValueError(f"the number of images is {count!r}")
        if not all(math.isfinite(radius) for radius in radii.tolist()):
            raise ValueError("a radius is not finite")
    except (KeyError, TypeError, ValueError, OverflowError, RuntimeError) as error:
        if isinstance(error, RunError):
            raise
        raise RunError(f"{path}: not an onelip certificate ({error!r})") from error
    found = file_hash(run / "plain.safetensors"), images_hash(images[:count])
    for what, want, got in zip(("weights", "images"), expected, found, strict=True):
        if want != got:
            raise RunError(
                f"{path}: the certificate is for other {what} (sha256 {str(want)[:12]}…) than those of {run} "
                f"({got[:12]}…); create one: onelip certify {run} --out cert.json"
            )
    if indices != list(range(count)) or count < part.stop:
        raise RunError(
            f"{path}: expected results for the first {part.stop} images in order, got {len(indices)}; use --limit "
            f"{max(1, count - part.start)}"
        )
    return ClaimedRadii(classes[part], radii[part], pixels[part])
