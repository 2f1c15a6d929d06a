"""A whole certificate: its hashes, its proof, then every result and the summary, and the program run on the images."""

import hashlib
import io
import json
import math
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from .norms import fraction, number
from .proof import Node, is_radius, prove_nodes, squared_slopes
from .reading import Told, about, ints, need, parse, read, read_tensors, unread

FORMAT, VERSION = "onelip certificate", 3
STATEMENT = (
    "For every image x of this file with a radius R > 0, and every x' with ||x' - x||_2 <= R, pixels counted in [0, 1] "
    "and allowed to leave it: the program (nodes, with the weights named) run on x' gives the class of x, strictly "
    "ahead of every other. Where pixels is an integer N: so does every uint8 image whose sum of squared differences to "
    "x is at most N."
)
ARITHMETIC = (
    "IEEE binary64, round to nearest, ties to even; inputs rounded once; each inner product summed in any order, with "
    "or without fused multiply-add; subnormal numbers may be flushed to zero; no overflow; conventional "
    "multiplication, that is no Winograd, FFT or Strassen."
)
ORIGIN = "labels, where the images come from, that the nodes are the network you mean, classes of images without radius"
DIVISORS = {"uint8": 255, "float32": 1, "float64": 1}
Say = Callable[[str], None]


def agree(given: Told, derived: dict[str, Any]) -> None:
    """Refuses what is not, to the letter, what is derived."""
    for key, own in derived.items():
        need(json.dumps(given[key]) == json.dumps(own), f"{key}: expected {own!r:.200}, got {given[key]!r:.200}")


def check_result(told: Told, i: int, dtype: str, slopes: list[list[Fraction]], error: Fraction, n: int) -> Fraction:
    """Its radius, which must be the largest binary64 that is one; 0 if there is none."""
    logits, radius = [number(v) for v in told["logits"]], number(told["radius"])
    need(len(logits) == len(slopes), f"expected {len(slopes)} logits, got {len(logits)}")
    y, more = logits.index(max(logits)), Fraction(math.nextafter(radius, math.inf))
    holds, too_small = (is_radius(r, logits, y, slopes[y], error, n) for r in (radius, more))
    right = (holds or radius == 0) and not too_small
    need(right, f"radius: not the largest float64 that is proved, {told['radius']:.80}")
    pixels = math.floor((255 * radius) ** 2) if dtype == "uint8" and radius > 0 else None
    agree(told, {"index": i, "class": y, "pixels": pixels})
    return radius


def check_logits(path: Path, told: Told, nodes: list[Node], say: Say) -> float:
    """Runs the program on the images: how far its logits are from the file's, which is at most twice the error."""
    data = told["images"]
    images = np.asarray(np.load(io.BytesIO(read(path)), allow_pickle=False))
    need(str(images.dtype) == data["dtype"], f"expected {data['dtype']}, got {images.dtype}")
    need([*images.shape] == [data["count"], *data["shape"]], f"expected {data['count']} images of {data['shape']}")
    need(hashlib.sha256(images.tobytes()).hexdigest() == data["sha256"], "not the images of the certificate")
    need(((images >= 0) & (images <= DIVISORS[data["dtype"]])).all(), "expected values from 0 to 1, or to 255")
    apart, batch = Fraction(0), min(100, 1 + 2**27 // sum(math.prod(node.shape) for node in nodes))  # some gigabytes
    for first in range(0, len(images), batch):
        say(f"images: {first} of {len(images)}")
        values = [np.moveaxis(images[first : first + batch].astype(np.float64) / DIVISORS[data["dtype"]], 0, -1)]
        for node, of in zip(nodes[1:], told["nodes"][1:], strict=True):
            values.append(node.run(*(values[j] for j in of["inputs"])))
        last = values[-1].reshape(-1, values[-1].shape[-1]).T.tolist()
        for i, (own, result) in enumerate(zip(last, told["results"][first : first + batch], strict=True), first):
            off = max(abs(Fraction(a) - number(b)) for a, b in zip(own, result["logits"], strict=True))
            need(off <= 2 * nodes[-1].error, f"image {i}: logits are {float(off):.3g} off, more than rounding explains")
            apart = max(apart, off)
    return float(apart)


def check(
    path: Path,
    weights: Path | None = None,
    config: Path | None = None,
    images: Path | None = None,
    say: Say = lambda text: None,
) -> dict[str, Any]:
    """What is proved, and what was not checked.

    Raises:
        Rejected: if anything in the certificate is not as it is derived here.
        OSError: if a file cannot be read.
        ImportError: without python-flint.
    """
    with about("certificate"):
        told = parse(read(path))
        need(told["format"] == FORMAT, f"expected a {FORMAT}")
        advice = "certify again" if told["version"] in (1, 2) else "use the onelip that wrote it, or a newer one"
        need(told["version"] == VERSION, f"expected version {VERSION}, got {told['version']!r:.40}; {advice}")
        body = json.dumps({k: v for k, v in told.items() if k != "digest"}, sort_keys=True, separators=(",", ":"))
        need(hashlib.sha256(body.encode()).hexdigest() == told["digest"], "digest: the certificate was changed")
        say(f"{told['images']['source']!r:.80}, by onelip {told['onelip']!r:.20}, {told['created']!r:.40}")
        parts = {key: told[key] for key in ("weights", "config", "images") if told[key] is not None}
        places = {key: path.parent / part["file"] for key, part in parts.items()}
        stored = read(weights or places["weights"], parts["weights"]["sha256"])
        if "config" in parts:
            read(config or places["config"], parts["config"]["sha256"])
    with about("weights"):
        tensors = read_tensors(stored)
    with about("certificate"):
        nodes = prove_nodes(told["nodes"], tensors, say)
        slopes = squared_slopes(told["pairs"], told["nodes"], nodes, tensors)
        data, summary, n, radii, hits = parts["images"], told["summary"], math.prod(nodes[0].shape), [], []
        need(type(told["results"]) is list and told["results"], "results: expected some")
        for i, result in enumerate(told["results"]):
            with about(f"result {i}"):
                radii.append(check_result(result, i, data["dtype"], slopes, nodes[-1].error, n))
                need(result["label"] is None or ints([result["label"]], 0), "label")
                hits += [radii[-1]] if result["class"] == result["label"] else []
        agree(data, {"count": len(radii), "shape": nodes[0].shape})
        agree(summary, {"count": len(radii), "certified": sum(found > 0 for found in radii)})
        agree(summary["cra"], {r: sum(found >= fraction(r) for found in hits) for r, _ in summary["cra"].items()})
        agree(told["preprocessing"], {"divide_by": DIVISORS[data["dtype"]]})
        agree(told, {"statement": STATEMENT, "arithmetic": ARITHMETIC})
        need(len(data["sha256"]) == 64, "images, sha256: expected 64 digits")
        need(not (left := {*unread(told)}), f"unknown {sorted(left)!r:.200}; of a newer version?")
    found = {"accepted": True, "lipschitz": float(nodes[-1].lipschitz), "error": float(nodes[-1].error), **summary}
    place = images or places["images"]
    if images is None and not place.is_file():
        unchecked = f"that the logits, taken from the file, are those of the images, as {place} is not there"
        return found | {"logits_checked": False, "not_checked": [ORIGIN, unchecked]}
    with about(f"images, {place}"):
        apart = check_logits(place, told, nodes, say)
    return found | {"logits_checked": True, "logits_apart": apart, "not_checked": [ORIGIN]}
