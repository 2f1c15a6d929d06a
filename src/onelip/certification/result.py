"""The result of certified prediction, its table, and how much each part of the proof wins or costs."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from onelip.certification.head import Head
from onelip.certification.margins import PAPER_RADII, certified_accuracy, radius_name, real_radii
from onelip.certification.proof import Proof

Mode = Literal["sound", "real-arithmetic"]


@dataclass(frozen=True, eq=False)
class Certification:
    """Classes and radii of images.

    Attributes:
        mode: "sound" (the program, with its rounding) or "real-arithmetic".
        classes: (N) int64, predicted.
        radii: (N) float64; 0 where nothing is certified. Sound: the class holds up to and including the radius.
        pixels: for uint8 images in the sound mode the integer N of "every image whose sum of squared pixel differences
            is at most N has this class"; else None.
        logits: (N, classes) float64.
        labels: (N), or None.
        constant: proved Lipschitz constant of the map from images to logits.
        head: slopes and losses of the pairs of classes.
        proof: None where only a rule for real arithmetic is known.
        images_sha256: of the images, in the sound mode, so that a file is not written for others.
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
        """Share of images with the right class."""
        return int((self.classes == self._labels()).sum()) / len(self.classes)

    def cra(self, radii: Sequence[float] = PAPER_RADII) -> dict[str, float]:
        """Certified robust accuracy by radius: the share of images with the right class and such a radius."""
        return self._cra(self.radii, radii, inclusive=self.mode == "sound")

    def _cra(self, found: Tensor, radii: Sequence[float], *, inclusive: bool) -> dict[str, float]:
        right = self.classes == self._labels()
        return {radius_name(r): certified_accuracy(right, found, r, inclusive=inclusive) for r in radii}

    def certified(self) -> int:
        """How many images have a radius above 0."""
        return int((self.radii > 0).sum())

    def comparison(self, nominal: float = 1.0, radii: Sequence[float] = PAPER_RADII) -> list[dict[str, Any]]:
        """CRA of the same logits, step by step: what tighter constants win, and what the rounding costs.

        Args:
            nominal: the constant by construction, that ordinary evaluations use.
            radii: where.
        """
        slopes = {
            f"ordinary: L = {nominal:g}, sqrt 2": math.sqrt(2) * nominal,
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
        """Totals; the images themselves are in the tensors, and in a certificate file."""
        middle = float(self.radii.quantile(0.5))
        totals: dict[str, Any] = {
            "mode": self.mode,
            "images": len(self.classes),
            "certified": self.certified(),
            "constant": self.constant,
            "median_radius": middle if math.isfinite(middle) else None,  # a constant network is never changed
            "proof": None if self.proof is None else self.proof.kind,
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
            + (" (float64 program, rounding inside)" if self.mode == "sound" else " (rounding left out)"),
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
