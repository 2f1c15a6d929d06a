"""Certified prediction: a class and a radius for every image.

Sound mode. The claim is about the float64 program: for every image x' with ||x' - x||_2 <= radius, running the network
on x' gives the same class, strictly ahead of all others, whatever the order in which its sums are added up. The
rounding of the images (k / 255), of the network and of the radius itself is inside.

Real-arithmetic mode. The ordinary claim of the literature, about the function that the network would be without
rounding, with logits as computed: radius = min_j (f_y - f_j) / slope_yj, up to (not including) it.
"""

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from onelip._precision import full_precision
from onelip.certify.certification import Certification, Mode
from onelip.certify.environment import check_backends, check_sound
from onelip.certify.head import same_for_all
from onelip.certify.images import check_images, float_batches, images_hash
from onelip.certify.interpreter import run_program
from onelip.certify.proof import Effort, Progress, Proof, fingerprint, prove
from onelip.certify.radius import certified_radii, pixel_distance, real_radii
from onelip.certify.recursion import State
from onelip.certify.rounding import ProofError
from onelip.export import bake


def certify(
    model: nn.Module,
    images: Tensor,
    labels: Tensor | None = None,
    *,
    mode: Mode = "sound",
    proof: Literal["fast", "exact"] | Proof = "fast",
    batch_size: int = 250,
    effort: Effort = "normal",
    progress: Progress | None = None,
) -> Certification:
    """Class and certified L2 radius of each image, in units of pixels in [0, 1].

    Args:
        model: in eval mode; for the sound mode in float64 on the CPU. Parametrized layers are baked first.
        images: (N, C, H, W), uint8, or float32 and float64 in [0, 1].
        labels: (N) of int64, for accuracy and CRA.
        mode: "sound" for the program as it runs, "real-arithmetic" for the ordinary claim, in any precision.
        proof: "fast", "exact", or what `prove` gave for this model and shape.
        batch_size: images at a time; changes nothing but speed and memory.
        effort: how tight the bounds of the layers shall be.
        progress: called with how much is done, of how much, and what.

    Raises:
        ProofError: if the model is no float64 program (sound mode), or an operation has no rule.
        ValueError: for images outside of [0, 1], or of another type.

    Example:
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
    _check_labels(labels, len(images))
    if mode == "sound":
        check_sound(model)
        return _certify_soundly(model, images, labels, proof, batch_size, effort, progress)
    return _certify_ordinarily(model, images, labels, proof, batch_size, effort, progress)


def _certify_soundly(
    model: nn.Module,
    images: Tensor,
    labels: Tensor | None,
    proof: Literal["fast", "exact"] | Proof,
    batch_size: int,
    effort: Effort,
    progress: Progress | None,
) -> Certification:
    plain = _plain(model)
    proved = _proof_for(plain, tuple(images.shape[1:]), proof, effort, progress)
    check_backends(proved.program, batch_size)

    _check_range(labels, proved.program.classes)
    logits = _run(plain, images, batch_size, torch.float64, progress, _Comparison(proved))
    radii = certified_radii(logits.numpy(), proved.head, math.prod(images.shape[1:]))
    return Certification(
        mode="sound",
        classes=logits.argmax(1),
        radii=torch.from_numpy(radii),
        pixels=_pixels(images, radii.tolist()),
        logits=logits,
        labels=labels,
        constant=proved.constant,
        head=proved.head,
        proof=proved,
        images_sha256=images_hash(images),
    )


def _certify_ordinarily(
    model: nn.Module,
    images: Tensor,
    labels: Tensor | None,
    proof: Literal["fast", "exact"] | Proof,
    batch_size: int,
    effort: Effort,
    progress: Progress | None,
) -> Certification:
    plain = bake(model).eval()
    dtype = next((p.dtype for p in plain.parameters()), torch.float32)
    proved = None
    try:
        proved = _proof_for(plain, tuple(images.shape[1:]), proof, effort, progress)
        constant = proved.constant
    except ProofError:
        if isinstance(proof, Proof):  # of another model
            raise
        constant = _audited(plain, images, effort)
    logits = _run(plain, images, batch_size, dtype, progress).double().cpu()
    _check_range(labels, logits.shape[1])
    head = same_for_all(logits.shape[1], State(constant, 0.0, 0.0)) if proved is None else proved.head
    return Certification(
        mode="real-arithmetic",
        classes=logits.argmax(1),
        radii=torch.from_numpy(real_radii(logits.numpy(), head)),
        pixels=(None,) * len(images),
        logits=logits,
        labels=labels,
        constant=constant,
        head=head,
        proof=proved,
    )


def _audited(plain: nn.Module, images: Tensor, effort: Effort) -> float:
    """The constant by the rules for real arithmetic, which know more operations."""
    from onelip.bounds.audit import lipschitz

    example = images[:2].double().div(255 if images.dtype == torch.uint8 else 1)
    audit = lipschitz(bake(plain).cpu().double(), example, lower=False, effort=effort)
    if audit.upper is None or not audit.upper < math.inf:
        raise ProofError(f"expected a model with a proved constant, got one with {'; '.join(audit.not_vouched)}")
    return audit.upper


def _plain(model: nn.Module) -> nn.Module:
    return bake(model) if any(parametrize.is_parametrized(module) for module in model.modules()) else model


def _proof_for(
    plain: nn.Module,
    shape: tuple[int, ...],
    proof: Literal["fast", "exact"] | Proof,
    effort: Effort,
    progress: Progress | None,
) -> Proof:
    if not isinstance(proof, Proof):
        return prove(plain, shape, proof, effort=effort, progress=progress)
    if proof.program.input_shape != shape:
        raise ProofError(f"expected images of the proof's shape {proof.program.input_shape}, got {shape}")
    if proof.fingerprint != fingerprint(plain):
        raise ProofError("expected a proof of this model's weights, got one of others; prove them again")
    return proof


@torch.no_grad()
def _run(
    plain: nn.Module,
    images: Tensor,
    batch_size: int,
    dtype: torch.dtype,
    progress: Progress | None,
    check: Callable[[Tensor, Tensor], None] | None = None,
) -> Tensor:
    """Logits (N, classes) of all images, computed by the model itself."""
    device = next((p.device for p in plain.parameters()), torch.device("cpu"))
    parts, done = [], 0
    with full_precision(device):
        for batch in float_batches(images, batch_size, dtype, device):
            logits = plain(batch)
            if logits.dim() != 2 or logits.shape[0] != len(batch) or logits.shape[1] < 2:
                raise ProofError(
                    f"expected logits (images, classes) of two classes or more, got the shape {tuple(logits.shape)} "
                    f"for {len(batch)} images"
                )
            if check is not None:
                check(batch, logits)
            parts.append(logits)
            done += len(batch)
            if progress is not None:
                progress(done, len(images), "images")
    return torch.cat(parts)


class _Comparison:
    """Images run through the program that was proved must give the same as by the model, but for rounding.

    The model itself computes the logits, since it is what will be used. The proof is about a program that was read off
    it; both computed values lie within `error` of the real one, so their distance is at most twice that. Of the first
    batch of each length all images are compared, so that a model that works with the length of a batch, or with the
    place in it, is seen; of others the first, the last and one between.
    """

    def __init__(self, proof: Proof) -> None:
        self.proof = proof
        self.lengths: set[int] = set()

    def __call__(self, batch: Tensor, logits: Tensor) -> None:
        count = len(batch)
        chosen = slice(None) if count not in self.lengths else [0, count // 2, count - 1]
        self.lengths.add(count)
        expected = run_program(self.proof.program, batch[chosen])[-1]
        distance = float((expected - logits[chosen]).norm(dim=1).max())
        if not distance <= 2.000001 * self.proof.error:
            raise ProofError(
                f"expected logits within {2 * self.proof.error:.3g} of those of the proved program, got a distance of "
                f"{distance:.3g}: the model is not the function that was traced (does it mix images of a batch?)"
            )


def _pixels(images: Tensor, radii: list[float]) -> tuple[int | None, ...]:
    if images.dtype != torch.uint8:
        return (None,) * len(radii)
    return tuple(pixel_distance(radius) for radius in radii)


def _check_labels(labels: Tensor | None, count: int) -> None:
    if labels is None:
        return
    if labels.dtype not in (torch.int64, torch.int32) or labels.shape != (count,):
        raise ValueError(f"expected {count} integer labels, got {labels.dtype} {tuple(labels.shape)}")


def _check_range(labels: Tensor | None, classes: int) -> None:
    if labels is None:
        return
    low, high = int(labels.min()), int(labels.max())
    if not (low >= 0 and high < classes):
        raise ValueError(f"expected labels from 0 to {classes - 1}, got values from {low} to {high}; count from 0")
