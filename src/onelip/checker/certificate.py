"""The whole certificate: hashes, limits, proof, every result, the summary, and the logits of the images."""

import hashlib
import json
import math
from bisect import bisect_left
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np

from .norms import fraction, number
from .program import Proved, Table, check_graph, estimate, is_radius, prove_nodes, squared_slopes
from .reading import TrackedDict, context, ints, json_memory, parse, read, read_tensors, require, require_memory, unread

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
ORIGIN = "labels, where the images come from, that the nodes are the network you mean"
CLASSES = "classes of {} images without radius, and accuracies that count them"
DIVISORS = {"uint8": 255, "float32": 1, "float64": 1}
Log = Callable[[str, str], None]  # called with a topic ("estimate", "node" or "images") and a message


def agree(given: TrackedDict, derived: dict[str, Any]) -> None:
    """Raise Rejected unless the values in the file are exactly the derived ones."""
    for key, own in derived.items():
        require(json.dumps(given[key]) == json.dumps(own), f"{key}: expected {own!r:.200}, got {given[key]!r:.200}")


def check_result(result: TrackedDict, i: int, dtype: str, slopes: Table, error: Fraction, n: int) -> Fraction:
    """Return the radius of an image, which must be the largest proved float64, or 0 if none is proved."""
    logits, radius = [number(v) for v in result["logits"]], number(result["radius"])
    require(len(logits) == len(slopes), f"logits: expected {len(slopes)}, got {len(logits)}")
    y, more = logits.index(max(logits)), Fraction(math.nextafter(radius, math.inf))
    holds, too_small = (is_radius(r, logits, y, slopes[y], error, n) for r in (radius, more))
    right = (holds or radius == 0) and not too_small
    require(right, f"radius: not the largest float64 that is proved, {result['radius']:.80}")
    pixels = math.floor((255 * radius) ** 2) if dtype == "uint8" and radius > 0 else None
    agree(result, {"index": i, "class": y, "pixels": pixels})
    require(result["label"] is None or ints([result["label"]], 0), "label: expected null or an integer")
    return radius


def check_results(content: TrackedDict, slopes: Table, last: Proved) -> None:
    """Check every result, the summary, and the remaining values."""
    data, summary, radii, hits = content["images"], content["summary"], [], []
    for i, result in enumerate(content["results"]):
        with context(f"result {i}"):
            radii.append(check_result(result, i, data["dtype"], slopes, last.error, math.prod(data["shape"])))
            hits += [radii[-1]] if result["class"] == result["label"] else []
    hits.sort()
    require(isinstance(summary["cra"], TrackedDict), "cra: expected an object")
    agree(summary, {"count": len(radii), "certified": sum(found > 0 for found in radii)})
    agree(summary["cra"], {r: len(hits) - bisect_left(hits, fraction(r)) for r, _ in summary["cra"].items()})
    agree(content["preprocessing"], {"divide_by": DIVISORS[data["dtype"]]})
    agree(content, {"statement": STATEMENT, "arithmetic": ARITHMETIC})
    require(type(data["sha256"]) is str and len(data["sha256"]) == 64, "images, sha256: expected 64 digits")
    require(not (left := {*unread(content)}), f"unknown keys {sorted(left)!r:.200}; written by a newer version?")


def check_logits(path: Path, content: TrackedDict, proved: list[Proved], batch: int, log: Log) -> float:
    """Run the program on the images; return the largest difference from the logits in the file, at most 2 error."""
    data, results, nodes, largest = content["images"], content["results"], content["nodes"], Fraction(0)
    images = np.load(path, mmap_mode="r", allow_pickle=False)
    require(str(images.dtype) == data["dtype"], f"expected {data['dtype']}, got {images.dtype}")
    require([*images.shape] == [data["count"], *data["shape"]], f"expected {data['count']} images of {data['shape']}")
    images = np.array(images, order="C")  # one copy in memory, which is hashed and run
    require(hashlib.sha256(images.ravel().data).hexdigest() == data["sha256"], "not the images that were certified")
    require(images.min() >= 0 and images.max() <= DIVISORS[data["dtype"]], "expected values from 0 to 1, or to 255")
    last, most = {j: i for i, node in enumerate(nodes) for j in node["inputs"]}, 2 * proved[-1].error
    for first in range(0, len(images), batch):
        log("images", f"images: {first} of {len(images)}")
        values = {0: np.moveaxis(images[first : first + batch].astype(np.float64) / DIVISORS[data["dtype"]], 0, -1)}
        for i, node in enumerate(nodes[1:], 1):
            values[i] = proved[i].run(*(values[j] for j in node["inputs"]))
            for j in {*node["inputs"]}:
                if last[j] == i:  # not needed any more
                    del values[j]
        (value,) = values.values()
        for i, own in enumerate(value.reshape(-1, value.shape[-1]).T.tolist(), first):
            off = max(abs(Fraction(a) - number(b)) for a, b in zip(own, results[i]["logits"], strict=True))
            require(off <= most, f"image {i}: logits differ by {float(off):.3g}, more than rounding explains")
            largest = max(largest, off)
    return float(largest)


def check(
    path: str | Path,
    weights: str | Path | None = None,
    config: str | Path | None = None,
    images: str | Path | None = None,
    *,
    max_minutes: float | None = None,
    max_memory: float = 4.0,
    log: Log = lambda topic, message: None,
) -> dict[str, Any]:
    """Check a certificate.

    Args:
        path: the certificate.
        weights: its weight file. Default: at the path stated in the certificate.
        config: its configuration file. Default: at the path stated in the certificate.
        images: its images, a .npy file. Default: at the path stated in the certificate.
        max_minutes: limit of the estimated work, in minutes of one core. Default: half a minute, plus two minutes per
            megabyte of the files, and at most one hour.
        max_memory: limit of the estimated memory, in gigabytes.
        log: called with a topic and a message.

    Returns:
        The proved numbers, the summary, and a list of statements that were not checked.

    Raises:
        Rejected: if the certificate is not proved, or an estimate exceeds its limit.
        OSError: if a file cannot be read.
        ImportError: without python-flint.
    """
    with context("certificate"):
        data = read(Path(path), max_memory)
        content = parse(data, max_memory)
        require(content["format"] == FORMAT, f"expected a {FORMAT}")
        advice = "certify again" if content["version"] in (1, 2) else "use the onelip that wrote it, or a newer one"
        require(content["version"] == VERSION, f"expected version {VERSION}, got {content['version']!r:.40}; {advice}")
        body = json.dumps({k: v for k, v in content.items() if k != "digest"}, sort_keys=True, separators=(",", ":"))
        require(hashlib.sha256(body.encode()).hexdigest() == content["digest"], "digest: the certificate was changed")
        parts = {key: content[key] for key in ("weights", "config", "images") if content[key] is not None}
        log(
            "certificate",
            f"from {parts['images']['source']!r:.80}, {content['onelip']!r:.20}, {content['created']!r:.40}",
        )
        places = {key: Path(path).parent / part["file"] for key, part in parts.items()}
        stored = read(Path(weights or places["weights"]), max_memory, content["weights"]["sha256"])
        if "config" in places:
            read(Path(config or places["config"]), max_memory, content["config"]["sha256"])
    with context("weights"):
        tensors = read_tensors(stored, max_memory)
    with context("certificate"):
        nodes, results, place = content["nodes"], content["results"], Path(images or places["images"])
        check_graph(nodes)
        require(type(results) is list and results, "results: expected a list, not empty")
        require(content["images"]["dtype"] in [*DIVISORS], f"images, dtype: expected one of {[*DIVISORS]}")
        agree(content["images"], {"count": len(results), "shape": nodes[0]["shape"]})
        runs = images is not None or place.is_file()
        seconds, memory, batch, slowest, largest = estimate(nodes, tensors, len(results), len(results) * runs)
        pixels = len(results) * math.prod(nodes[0]["shape"]) * np.dtype(content["images"]["dtype"]).itemsize * runs
        files, memory = len(data) + len(stored) + pixels, memory + json_memory(data) + 3 * len(stored) + pixels
        limit = min(0.5 + 2e-6 * files, 60.0) if max_minutes is None else max_minutes
        work = f"estimated work {seconds / 60:.2g} min of one core"
        log("estimate", f"{work}, memory {memory / 1e9:.2g} GB")
        advice = f"most of it for {slowest}; --max-minutes {math.ceil(seconds / 60)} allows it"
        require(seconds <= 60 * limit, f"{work}, limit {limit:.2g} min for files of {files / 1e6:.2g} MB, {advice}")
        require_memory(memory, max_memory, largest)
        del data, body, stored
        proved = prove_nodes(nodes, tensors, log)
        slopes = squared_slopes(content["pairs"], nodes, proved, tensors)
        check_results(content, slopes, proved[-1])
    found = {"accepted": True, "lipschitz": float(proved[-1].lipschitz), "error": float(proved[-1].error)}
    found |= content["summary"]
    uncertified = len(results) - content["summary"]["certified"]
    unchecked = [ORIGIN, *([CLASSES.format(uncertified)] if uncertified else [])]
    if not runs:
        unchecked.append(f"that the logits in the file are those of the images: {place} does not exist")
        return found | {"logits_checked": False, "not_checked": unchecked}
    with context(f"images, {place}"):
        apart = check_logits(place, content, proved, batch, log)
    return found | {"logits_checked": True, "logits_apart": apart, "not_checked": unchecked}
