"""Certified prediction: a class and a radius for every image, and the certified accuracies that follow.

Sound mode. The claim is about the float64 program: for every image x' with ||x' - x||_2 <= radius, the network
computes the same class for x', with a logit strictly above all others, in whatever order its sums are computed. The
rounding of the images (k / 255), of the network and of the radius itself is included.

Real-arithmetic mode. The usual claim of the literature, about the network without rounding, with the computed logits:
radius = min_j (f_y - f_j) / slope_yj. The class is the same at every smaller distance.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from onelip.bounds.falsify import Claims, example_points, falsify, refute
from onelip.bounds.fast import Effort
from onelip.certification.audit import audited
from onelip.certification.proof import (
    Progress,
    Proof,
    check_backends,
    check_model,
    check_same,
    check_sound,
    claims_of_proof,
    prove_baked,
)
from onelip.certification.radius import (
    PAPER_RADII,
    Head,
    certified_accuracy,
    certified_radii,
    pixel_distance,
    radius_name,
    real_radii,
    same_for_all,
)
from onelip.core.bake import bake, copy_model, plain_of
from onelip.core.errors import CannotTrace, ProofError
from onelip.core.images import check_images, check_labels, images_hash, to_float
from onelip.core.modes import full_precision
from onelip.core.state import unchanged
from onelip.graph.kinds import NodeBound
from onelip.graph.reference import Reference, check_model_itself
from onelip.graph.trace import trace

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


def certify(
    model: nn.Module,
    images: Tensor,
    labels: Tensor | None = None,
    *,
    mode: Mode = "sound",
    exact: bool = False,
    proof: Proof | None = None,
    batch_size: int = 250,
    effort: Effort = "normal",
    progress: Progress | None = None,
) -> Certification:
    """Compute the class and the certified L2 radius of each image, in units of pixels in [0, 1].

    Args:
        model: the network in eval mode; in the sound mode, in float64 on the CPU. If it has parametrized layers or
            batch normalisation, `onelip.bake(model)` is run and certified.
        images: (N, C, H, W), uint8, or float32 or float64 in [0, 1].
        labels: (N) int64, for accuracy and certified robust accuracy.
        mode: "sound" for the network as it runs, rounding included; "real-arithmetic" for the usual claim without
            rounding, in any precision.
        exact: bound the layers in rational arithmetic, which needs python-flint, instead of float64 with error terms.
            Both are proofs; certificate files need the exact one.
        proof: an earlier result of `prove` or `certify` for this model and image shape, to save time.
        batch_size: number of images per forward pass; changes only speed and memory.
        effort: more effort gives tighter bounds of the layers.
        progress: function that is called with the number of completed steps, their total number, and a title.

    Returns:
        Classes, radii, logits and the proof.

    Raises:
        ProofError: if the model is not a float64 program (sound mode), an operation has no rule, or the given proof is
            for another network.
        CannotTrace: if the model changes from call to call, or computes something else than its trace.
        UnsoundBound: if a measurement contradicts the proof, which is a bug in onelip.
        ValueError: for images outside of [0, 1] or of another dtype.

    Examples:
        >>> model = nn.Sequential(nn.Flatten(), nn.Linear(2, 2, bias=False)).double().eval()
        >>> _ = model[1].weight.data.copy_(torch.tensor([[0.8, 0.0], [0.0, 0.8]]))
        >>> found = certify(model, torch.tensor([[[[0.9, 0.4]]]]))
        >>> int(found.classes[0]), round(float(found.radii[0]), 6)  # the distance to the diagonal
        (0, 0.353553)
    """
    if mode not in ("sound", "real-arithmetic"):
        raise ValueError(f"expected the mode 'sound' or 'real-arithmetic', got {mode!r}; pick one")
    if batch_size < 1:
        raise ValueError(f"expected a batch_size of at least 1, got {batch_size}")
    check_images(images)
    if not isinstance(labels, Tensor | None):
        raise ValueError(f"expected labels as a tensor, got {type(labels).__name__}; use torch.as_tensor(labels)")
    if labels is not None and (labels.dtype not in (torch.int64, torch.int32) or labels.shape != (len(images),)):
        raise ValueError(
            f"expected {len(images)} integer labels, got {labels.dtype} {tuple(labels.shape)}; "
            "pass one class index for each image"
        )
    if proof is not None and not isinstance(proof, Proof):
        raise ValueError(
            f"expected proof to be a result of onelip.prove, got {proof!r}; for exact proofs use exact=True"
        )
    if proof is not None and exact and not proof.exact:
        raise ValueError("the given proof is not exact: pass onelip.prove(model, shape, exact=True), or no proof")
    options = _Options(proof, exact, batch_size, effort, progress)
    if mode == "sound":
        check_sound(model)
    with unchanged(model):
        return (_certify_soundly if mode == "sound" else _certify_in_real_arithmetic)(model, images, labels, options)


@dataclass(frozen=True)
class _Options:
    """The options of `certify` that both modes use."""

    proof: Proof | None
    exact: bool
    batch_size: int
    effort: Effort
    progress: Progress | None

    def proof_for(self, plain: nn.Module, points: Tensor) -> Proof:
        """The given proof, if it is one of this network, or a new one; tested at the points."""
        shape = tuple(points.shape[1:])
        if self.proof is None:
            return prove_baked(plain, shape, self.exact, self.effort, self.progress, points)
        check_same(self.proof, plain, shape)
        falsify(claims_of_proof(self.proof, points), points[:2])
        return self.proof


def _certify_soundly(model: nn.Module, images: Tensor, labels: Tensor | None, options: _Options) -> Certification:
    plain, points = plain_of(model), _points(images)
    proved = options.proof_for(plain, points)
    check_backends(proved.program, options.batch_size)
    check_model(proved, model, points)
    if labels is not None:
        check_labels(labels, proved.program.classes)
    logits = _run(plain, images, torch.float64, options, _Comparison(proved))
    classes = logits.argmax(1)
    radii = certified_radii(logits.numpy(), classes.numpy(), proved.head, math.prod(images.shape[1:]))
    return Certification(
        mode="sound",
        classes=classes,
        radii=torch.from_numpy(radii),
        pixels=_pixels(images, radii.tolist()),
        logits=logits,
        labels=labels,
        constant=proved.constant,
        head=proved.head,
        proof=proved,
        images_sha256=images_hash(images),
    )


def _certify_in_real_arithmetic(
    model: nn.Module, images: Tensor, labels: Tensor | None, options: _Options
) -> Certification:
    plain = bake(model, fold=False).eval()  # not folded: this claim does not include the rounding of folded weights
    like = next((p.detach() for p in plain.parameters()), torch.zeros(()))
    proved, points = None, _points(images)
    _check_types(plain, points.to(like))
    try:
        proved = options.proof_for(plain, points)
        constant, claims = proved.constant, claims_of_proof(proved, points)
    except ProofError:
        if options.proof is not None:  # of another model
            raise
        constant, claims = _audited(plain, points, options.effort)
    reference = Reference(claims, [like.dtype])
    check_model_itself(model, reference, points, like)
    logits = _run(plain, images, like.dtype, options, _Comparison(reference)).double().cpu()
    if labels is not None:
        check_labels(labels, logits.shape[1])
    return real_certification(logits, labels, constant, proved)


def real_certification(
    logits: Tensor, labels: Tensor | None, constant: float, proof: Proof | None = None
) -> Certification:
    """Classes and radii in real arithmetic, from computed logits and a proved constant of the network.

    Args:
        logits: (N, classes).
        labels: (N), or None.
        constant: Lipschitz constant of the network.
        proof: the proof with constants for each pair of classes; None to use sqrt(2) `constant` for all.
    """
    head = same_for_all(logits.shape[1], NodeBound(constant, 0.0, 0.0)) if proof is None else proof.head
    return Certification(
        mode="real-arithmetic",
        classes=logits.argmax(1),
        radii=real_radii(logits, torch.tensor(head.slope, dtype=torch.float64)),
        pixels=(None,) * len(logits),
        logits=logits.double(),
        labels=labels,
        constant=constant,
        head=head,
        proof=proof,
    )


def _check_types(plain: nn.Module, points: Tensor) -> None:
    """Refuse a model that is another program in float64, in which it is proved, than in its own type."""
    if points.dtype == torch.float64:
        return
    own, wide = (
        [(call.place, call.op) for call in trace(copy, x).calls]
        for copy, x in ((plain, points), (copy_model(plain).double(), points.double()))
    )
    if own != wide:
        raise CannotTrace(
            f"expected a model that is the same program in {points.dtype} and in float64, got one that depends on the "
            "type of its input; compute the same in both"
        )


def _audited(plain: nn.Module, points: Tensor, effort: Effort) -> tuple[float, Claims]:
    """The constant by the rules of the audit, which support more operations, and the claims to test."""
    found, claims = audited(bake(plain, fold=False).cpu().double(), points, effort=effort)
    if found.upper is None or not found.upper < math.inf:
        raise ProofError(f"expected a model with a proved constant, got one with {'; '.join(found.unproved)}")
    return found.upper, claims


def _points(images: Tensor) -> Tensor:
    """Points at which the proof is tested, in float64: the first and the last image, and two more."""
    chosen = images[[0, -1]].cpu()
    return example_points(to_float(chosen, torch.float64), 4)


@torch.no_grad()
def _run(
    plain: nn.Module,
    images: Tensor,
    dtype: torch.dtype,
    options: _Options,
    check: Callable[[Tensor, Tensor], None],
) -> Tensor:
    """Logits (N, classes) of all images, computed by the model itself."""
    device = next((p.device for p in plain.parameters()), torch.device("cpu"))
    parts, done = [], 0
    with full_precision(device):
        for part in images.split(options.batch_size):
            batch = to_float(part.to(device), dtype)
            logits = plain(batch)
            if logits.dim() != 2 or logits.shape[0] != len(batch) or logits.shape[1] < 2:
                raise ProofError(
                    f"expected logits (images, classes) of two classes or more, got the shape {tuple(logits.shape)} "
                    f"for {len(batch)} images; certify a classifier, or use onelip.audit"
                )
            check(batch, logits)
            parts.append(logits)
            done += len(batch)
            if options.progress is not None:
                options.progress(done, len(images), "images")
    return torch.cat(parts)


class _Comparison:
    """Compares the logits of the model with those of the proved program.

    The model itself computes the logits, since it is what will be used. The proof is about the program that was traced
    from it. Both are within `error` of the logits in real arithmetic, so they differ by at most twice that. In the
    first batch of each length all images are compared, to detect a model that depends on the length of a batch or on
    the position in it; in others the first, the last and one between. In the real-arithmetic mode there is no proved
    error, and 8 images of the first batch of each length are compared.
    """

    def __init__(self, proof: Proof | Reference) -> None:
        self.proof = proof
        self.lengths: set[int] = set()

    def __call__(self, batch: Tensor, logits: Tensor) -> None:
        count = len(batch)
        is_new, three = count not in self.lengths, [0, count // 2, count - 1]
        self.lengths.add(count)
        if isinstance(self.proof, Reference):
            chosen = sorted({round(i * (count - 1) / 7) for i in range(8)}) if is_new else three
            self.proof.check(batch[chosen], logits[chosen], f"in a batch of {count} images")
            return
        chosen = slice(None) if is_new else three
        expected = self.proof.program.run(batch[chosen])[-1]
        distance = float((expected - logits[chosen]).norm(dim=1).max())
        if not distance <= 2.000001 * self.proof.error:
            raise ProofError(
                f"expected logits within {2 * self.proof.error:.3g} of those of the proved program, got a distance of "
                f"{distance:.3g}: the model is not the function that was traced (does it mix images of a batch?)"
            )
        self._check_pairs(batch, logits)

    def _check_pairs(self, batch: Tensor, logits: Tensor) -> None:
        """Check the proved constant on pairs of neighbouring images of the batch."""
        assert isinstance(self.proof, Proof)
        apart = (batch[1:] - batch[:-1]).flatten(1).norm(dim=1)
        allowed = self.proof.constant * apart * (1 + 2.0**-30) + 2.000001 * self.proof.error
        moved = (logits[1:] - logits[:-1]).norm(dim=1)
        if not bool((moved <= allowed).all()):
            worst = int((moved - allowed).argmax())
            refute("the network", float(moved[worst] / apart[worst]), self.proof.constant)


def _pixels(images: Tensor, radii: list[float]) -> tuple[int | None, ...]:
    if images.dtype != torch.uint8:
        return (None,) * len(radii)
    return tuple(pixel_distance(radius) for radius in radii)
