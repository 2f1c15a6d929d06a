"""What is claimed about images, to be attacked: from certifying them now, or from a certificate file."""

import hashlib
import math
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from onelip.certify.certification import radius_fraction
from onelip.checker.certificate import FORMAT, VERSION
from onelip.training.errors import RunError
from onelip.training.files import read_json


@dataclass(frozen=True, eq=False)
class Claims:
    """Classes that shall hold within radii."""

    classes: Tensor  # (N) int64
    radii: Tensor  # (N) float64; 0 claims nothing
    pixels: tuple[int | None, ...]  # the same for uint8 images

    def accuracy(self, labels: Tensor, radius: float) -> float:
        """CRA: the share of images of the right class whose radius is at least the given one, as rationals."""
        wanted = radius_fraction(radius)
        right = (self.classes == labels).tolist()
        reached = [ok and Fraction(r) >= wanted for ok, r in zip(right, self.radii.tolist(), strict=True)]
        return sum(reached) / len(reached)


def certified_claims(
    network: nn.Module, images: Tensor, batch_size: int, progress: Callable[[int, int, str], None] | None = None
) -> Claims:
    """Certify the images, in the sound mode."""
    from onelip.certify.predict import certify

    found = certify(network, images, batch_size=batch_size, progress=progress)
    return Claims(found.classes, found.radii, found.pixels)


def read_claims(path: Path, run: Path, images: Tensor, part: slice) -> Claims:
    """The results of some images in a row, of a certificate for a run's weights and for these images.

    The certificate is not checked (`onelip check` does): it is attacked. But it must be about this program.

    Raises:
        RunError: if it is no certificate, or one for other weights or other images.
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
        if not all(math.isfinite(radius) for radius in radii.tolist()):
            raise ValueError("a radius is not finite")
    except (KeyError, TypeError, ValueError) as error:
        raise RunError(f"{path}: expected an onelip certificate, got something else ({error!r})") from error
    weights = run / "plain.safetensors"
    found = _sha256(weights.read_bytes()), _sha256(images[:count].contiguous().numpy().tobytes())
    for what, want, got in zip(("weights", "images"), expected, found, strict=True):
        if want != got:
            raise RunError(
                f"{path}: expected a certificate for the {what} of {run} (sha256 {got[:12]}…), got one for others "
                f"({str(want)[:12]}…); make one with onelip certify {run} --out cert.json"
            )
    if indices != list(range(count)) or count < part.stop:
        raise RunError(
            f"{path}: expected results for the first {part.stop} images in order, got {len(indices)}; give --limit "
            f"{max(1, count - part.start)}"
        )
    return Claims(classes[part], radii[part], pixels[part])


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
