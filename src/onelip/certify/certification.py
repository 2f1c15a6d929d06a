"""The result of certified prediction, its table, and how much each part of the proof wins or costs."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

import torch
from torch import Tensor

from onelip.certify.head import Head
from onelip.certify.margins import PAPER_RADII, certified_accuracy, margins
from onelip.certify.proof import Proof
from onelip.certify.radius import real_radii

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
        right = (self.classes == self._labels()).tolist()
        found = list(zip(right, self.radii.tolist(), strict=True))
        shares = {}
        for radius in radii:
            wanted = radius_fraction(radius)
            # Sound radii are rounded down and include their end; those of real arithmetic do not. Python compares a
            # float with a fraction exactly, and infinity too.
            reached = [ok and (r >= wanted if self.mode == "sound" else r > wanted) for ok, r in found]
            shares[radius_name(radius)] = sum(reached) / len(found)
        return shares

    def certified(self) -> int:
        """How many images have a radius above 0."""
        return int((self.radii > 0).sum())

    def comparison(self, nominal: float = 1.0, radii: Sequence[float] = PAPER_RADII) -> list[dict[str, Any]]:
        """CRA of the same logits, step by step: what tighter constants win, and what the rounding costs.

        Args:
            nominal: the constant by construction, that ordinary evaluations use.
            radii: where.
        """
        labels = self._labels().long()
        margin = margins(self.logits, labels)
        pairs = torch.from_numpy(real_radii(self.logits.numpy(), self.head))
        ordinary = Certification(
            "real-arithmetic", self.classes, pairs, (), self.logits, labels, self.constant, self.head, None
        )

        def plain(constant: float) -> dict[str, float]:
            # A constant of 0 is a network that ignores its input: any positive number serves.
            return {radius_name(r): certified_accuracy(margin, float(r), max(constant, 1e-300)) for r in radii}

        rows = [
            {"name": f"ordinary: L = {nominal:g}, sqrt 2", "mode": "real-arithmetic", "cra": plain(nominal)},
            {"name": "proved L, sqrt 2", "mode": "real-arithmetic", "cra": plain(self.constant)},
            {"name": "proved L, pairs of rows", "mode": "real-arithmetic", "cra": ordinary.cra(radii)},
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


def radius_fraction(radius: float) -> Fraction:
    """The radius that is meant: k/255 where a float is next to it, else the decimal that it is written as.

    Example:
        >>> radius_fraction(36 / 255), radius_fraction(0.1)
        (Fraction(12, 85), Fraction(1, 10))
    """
    near = Fraction(round(radius * 255), 255)
    return near if abs(near - Fraction(radius)) < Fraction(1, 10**12) else Fraction(repr(float(radius)))


def radius_name(radius: float) -> str:
    """As papers write it.

    Example:
        >>> radius_name(36 / 255), radius_name(1.0), radius_name(0.5)
        ('36/255', '1', '1/2')
    """
    exact = radius_fraction(radius)
    if 255 % exact.denominator == 0 and exact.denominator > 1:
        return f"{exact * 255}/255"
    return str(exact) if max(exact.numerator, exact.denominator) < 10**9 else repr(float(radius))
