"""The result of certified prediction, and the certified accuracies that different constants give."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from onelip.certification.margins import PAPER_RADII, certified_accuracy, radius_name, real_radii
from onelip.certification.proof import Proof
from onelip.certification.radius import Head

Mode = Literal["sound", "real-arithmetic"]


@dataclass(frozen=True, eq=False)
class Certification:
    """Classes and radii of images.

    Attributes:
        mode: "sound" (rounding included) or "real-arithmetic".
        classes: (N) int64, the predicted classes.
        radii: (N) float64; 0 if nothing is certified. In the sound mode the class holds up to and including the radius,
            in the other below it.
        pixels: for uint8 images in the sound mode, the largest integer n such that every uint8 image whose sum of
            squared pixel differences is at most n has the same class; else None.
        logits: (N, classes) float64.
        labels: (N), or None.
        constant: proved Lipschitz constant of the map from images to logits.
        head: Lipschitz constants of the differences of logits.
        proof: the proof; None if the constant is by the rules of `onelip.audit`.
        images_sha256: hash of the images in the sound mode, which a certificate is compared with.
    """

    mode: Mode
    classes: Tensor
    radii: Tensor
    pixels: tuple[int | None, ...]
    logits: Tensor
    labels: Tensor | None
    constant: float
    head: Head
    proof: Proof | None
    images_sha256: str | None = None

    def accuracy(self) -> float:
        """Fraction of images whose predicted class is the label."""
        return int((self.classes == self._labels()).sum()) / len(self.classes)

    def cra(self, radii: Sequence[float] = PAPER_RADII) -> dict[str, float]:
        """Certified robust accuracy by radius: the fraction of images with the right class and at least this radius."""
        return self._cra(self.radii, radii, inclusive=self.mode == "sound")

    def _cra(self, found: Tensor, radii: Sequence[float], *, inclusive: bool) -> dict[str, float]:
        right = self.classes == self._labels()
        return {radius_name(r): certified_accuracy(right, found, r, inclusive=inclusive) for r in radii}

    def certified(self) -> int:
        """Number of images with a radius above 0."""
        return int((self.radii > 0).sum())

    def comparison(self, nominal: float = 1.0, radii: Sequence[float] = PAPER_RADII) -> list[dict[str, Any]]:
        """Certified robust accuracy of the same logits with different constants, and with rounding included.

        Args:
            nominal: the constant by construction, as usual evaluations use it.
            radii: radii of the table.

        Returns:
            One row for each constant: its name, its mode, and the accuracy by radius.
        """
        slopes = {
            f"usual: L = {nominal:g}, sqrt 2": math.sqrt(2) * nominal,
            "proved L, sqrt 2": math.sqrt(2) * self.constant,
            "proved L, pairs of rows": torch.tensor(self.head.slope, dtype=torch.float64),
        }
        rows = [
            {
                "name": name,
                "mode": "real-arithmetic",
                "cra": self._cra(real_radii(self.logits, slope), radii, inclusive=False),
            }
            for name, slope in slopes.items()
        ]
        if self.mode == "sound":
            rows.append({"name": "the same, with rounding", "mode": "sound", "cra": self.cra(radii)})
        return rows

    def to_json(self, radii: Sequence[float] = PAPER_RADII, nominal: float = 1.0) -> dict[str, Any]:
        """Totals for JSON. Results for each image are in the tensors, and in a certificate file."""
        middle = float(self.radii.quantile(0.5))
        totals: dict[str, Any] = {
            "mode": self.mode,
            "images": len(self.classes),
            "certified": self.certified(),
            "constant": self.constant,
            "median_radius": middle if math.isfinite(middle) else None,  # infinite for a constant network
            "proof": None if self.proof is None else "exact" if self.proof.exact else "fast",
            "error": None if self.proof is None or self.mode != "sound" else self.proof.error,
        }
        if self.labels is not None:
            totals |= {
                "accuracy": self.accuracy(),
                "cra": self.cra(radii),
                "comparison": self.comparison(nominal, radii),
            }
        return totals

    def __str__(self) -> str:
        lines = [
            f"{len(self.classes)} images, mode: {self.mode}"
            + (" (float64, rounding included)" if self.mode == "sound" else " (rounding not included)"),
            f"proved Lipschitz constant: {self.constant!r}",
            f"certified (radius above 0): {self.certified()}, median radius {float(self.radii.quantile(0.5)):.4g}",
        ]
        if self.labels is not None:
            shares = ", ".join(f"{radius}: {100 * share:.2f}" for radius, share in self.cra().items())
            lines.append(f"accuracy {100 * self.accuracy():.2f} %, CRA ({self.mode}) {shares} %")
        return "\n".join(lines)

    def _labels(self) -> Tensor:
        if self.labels is None:
            raise ValueError("expected labels for accuracy and CRA, got none; give them to certify(..., labels)")
        return self.labels
