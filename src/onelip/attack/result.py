"""What an attack found, measured exactly."""

from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from onelip.certify.certification import radius_fraction
from onelip.certify.rounding import up_root


@dataclass(frozen=True, eq=False)
class AttackResult:
    """The nearest flip that was found for each image.

    `logits` are those that the program gave when the flip was seen; in a batch of another size it may round otherwise,
    which a certificate must survive too.
    """

    images: Tensor  # (N, ...), as they were given
    classes: Tensor  # (N) int64, the classes whose change was looked for
    adversarials: Tensor  # (N, ...) in the program's dtype, or uint8; the image itself where none was found
    logits: Tensor  # (N, classes), at the adversarials
    squares: tuple[Fraction | None, ...]  # exact squared distances; None where no flip was found
    radii: Tensor | None = None  # (N) float64, the claim under attack
    pixels: tuple[int | None, ...] | None = None  # the same for uint8 images: Σ d_i² of pixel differences

    def __len__(self) -> int:
        return len(self.classes)

    @property
    def distances(self) -> Tensor:
        """(N) float64, rounded up: no flip is farther than its number. Infinity where none was found."""
        roots = [float("inf") if square is None else up_root(square) for square in self.squares]
        return torch.tensor(roots, dtype=torch.float64)

    @property
    def found_classes(self) -> Tensor:
        """(N) int64: the best class at each flip, other than the image's unless scores are NaN; -1 without a flip."""
        found = torch.tensor([square is not None for square in self.squares])
        others = self.logits.scatter(1, self.classes[:, None], -torch.inf).argmax(1)
        return torch.where(found, others, -1)

    def within(self, radius: float) -> Tensor:
        """(N) bool: images with a flip at a distance of at most `radius`, as rationals (36/255 is meant as such)."""
        limit = radius_fraction(radius) ** 2
        return torch.tensor([square is not None and square <= limit for square in self.squares])

    @property
    def attacked(self) -> Tensor:
        """(N) bool: images about which something is claimed, a radius above zero."""
        if self.radii is None:
            return torch.zeros(len(self), dtype=torch.bool)
        return self.radii > 0

    @property
    def broken(self) -> Tensor:
        """(N) bool: a flip lies in the certified ball. No tolerance: squared distances and radii are rationals.

        An infinite radius, or a NaN, is a claim too: every flip contradicts it.
        """
        broken = torch.zeros(len(self), dtype=torch.bool)
        for i, square in enumerate(self.squares):
            if square is None:
                continue
            if self.radii is not None:
                radius = float(self.radii[i])
                outside = radius == 0 or (0 < radius < float("inf") and square > Fraction(radius) ** 2)
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
        """Attacked accuracy: the share of images of the right class with no flip found within a radius.

        An upper bound of the true robust accuracy, as CRA is a lower one.
        """
        if labels.shape != self.classes.shape:
            raise ValueError(f"expected a label for each of {len(self)} images, got {tuple(labels.shape)}")
        standing = (self.classes == labels.cpu()) & ~self.within(radius)
        return int(standing.sum()) / len(self)

    def save(self, path: str | Path, *, only_broken: bool = False) -> None:
        """Images, flips, classes, exact distances (as texts "a/b") and radii, as an .npz without pickles."""
        from io import BytesIO

        from onelip.training.files import write_whole

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
        """Counts and ratios; the flips themselves are for `save`."""
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
