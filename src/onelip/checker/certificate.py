"""A whole certificate: its hashes, its proof, then every result and the summary."""

import hashlib
import io
import json
import math
import re
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from .forward import logits_of
from .norms import below, up_root
from .proof import Head, prove_head, prove_nodes, radius_of
from .reading import (
    Rejected,
    Unreadable,
    fields,
    integer,
    need,
    number,
    parse_json,
    read,
    read_nodes,
    read_tensors,
    same,
)

FILE = {"file", "sha256"}
PARTS: dict[str, set[str]] = {
    "weights": FILE,
    "images": FILE | {"source", "dtype", "count", "shape"},
    "preprocessing": {"divide_by"},
    "input": {"shape", "norm", "error"},
}
WORDS = {"format", "version", "onelip", "created", "statement", "arithmetic", "digest"}
Found = list[tuple[int, list[Fraction], Fraction]]  # class, logits, radius of each image


def check_hash(part: Any, beside: Path, given: Path | None, where: str) -> bytes:
    fields(part, where, FILE)
    plain = type(part["file"]) is str and part["file"] == Path(part["file"]).name
    need(plain, f"{where}: expected the name of a file beside the certificate, got {part['file']!r}")
    data = read(given or beside.parent / part["file"])
    need(hashlib.sha256(data).hexdigest() == part["sha256"], f"{where}: another file than the one that was certified")
    return data


def check_results(certificate: dict[str, Any], head: Head, cap: Fraction) -> Found:
    told, K = certificate["images"], len(head.slope)
    count = integer(told["count"], "images, count", 1)
    results = certificate["results"]
    need(type(results) is list and len(results) == count, f"results: expected {count}")
    found, labels = [], []
    for i, result in enumerate(results):
        fields(result, f"result {i}", {"index", "label", "class", "logits", "radius", "pixels"})
        need(result["index"] == i, f"result {i}: index out of order")
        need(type(result["logits"]) is list and len(result["logits"]) == K, f"result {i}: expected {K} logits")
        logits = [number(v, f"result {i}, logits") for v in result["logits"]]
        y = integer(result["class"], f"result {i}, class", 0, K - 1)
        need(y == logits.index(max(logits)), f"result {i}: class {y} is not the first of the largest logits")
        radius = radius_of(logits, y, head, cap)
        same(result["radius"], radius, f"result {i}, radius")
        pixels = math.floor((255 * radius) ** 2) if told["dtype"] == "uint8" and radius > 0 else None
        need(result["pixels"] == pixels, f"result {i}: expected pixels {pixels}")
        labels.append(None if result["label"] is None else integer(result["label"], f"result {i}, label", 0, K - 1))
        found.append((y, logits, radius))
    need(None not in labels or {*labels} == {None}, "results: expected labels for all images or for none")
    check_summary(certificate["summary"], found, labels)
    return found


def check_summary(given: Any, found: Found, labels: list[int | None]) -> None:
    right = [radius if y == label else Fraction(-1) for (y, _, radius), label in zip(found, labels, strict=True)]

    def share(least: Fraction) -> float:
        return sum(r >= least for r in right) / len(right)

    fields(given, "summary", {"count", "certified"}, ("accuracy", "cra") if labels[0] is not None else ())
    need(type(radii := given.get("cra", {})) is dict, "summary, cra: expected an object")
    plain = all(re.fullmatch(r"[0-9]{1,9}(/[1-9][0-9]{0,8})?", text) for text in radii)
    need(plain, "summary, cra: expected radii as 36/255")
    own = {"count": len(found), "certified": sum(radius > 0 for *_, radius in found)}
    own |= {"accuracy": share(Fraction(0)), "cra": {text: share(Fraction(text)) for text in radii}}
    wrong = [key for key in given if own[key] != given[key]]
    need(not wrong, f"summary: {wrong} is not what the results say")


def load_images(path: Path, told: dict[str, Any], divisor: int) -> np.ndarray:
    try:
        images = np.ascontiguousarray(np.load(io.BytesIO(read(path)), allow_pickle=False))
    except (ValueError, EOFError, TypeError) as error:
        raise Rejected(f"{path}: not a .npy file ({error})") from error
    wanted, got = (told["dtype"], told["count"], *told["shape"]), (images.dtype.str, *images.shape)
    right = images.dtype == np.dtype(told["dtype"]) and got[1:] == wanted[1:]
    need(right, f"{path}: expected {told['count']} images, {wanted}, got {images.dtype} {got[1:]}")
    need(hashlib.sha256(images.tobytes()).hexdigest() == told["sha256"], f"{path}: not the images of the certificate")
    need(((images >= 0) & (images <= divisor)).all(), f"{path}: expected values from 0 to {divisor}")
    return images


def check_images(
    images: np.ndarray, divisor: int, nodes: list[SimpleNamespace], head: Head, found: Found, cap: Fraction, say: Any
) -> dict[str, float]:
    """Runs the program; how far its logits are from the file's, and how much smaller the radii from them are.

    Two runs of one program are apart by at most twice its error: each logit by `tolerance`, each margin by `loss`.
    """
    difference = shortfall = Fraction(0)
    for start in range(0, len(images), 100):
        rows = logits_of(nodes, images[start : start + 100].astype(np.float64) / divisor)
        for i, row in enumerate(rows.tolist(), start):
            y, logits, radius = found[i]
            own = [Fraction(v) for v in row]
            off = [a - b for a, b in zip(own, logits, strict=True)]
            close = all(abs(a) <= t for a, t in zip(off, head.tolerance, strict=True))
            close = close and all(abs(off[y] - a) <= loss for a, loss in zip(off, head.loss[y], strict=True))
            need(close, f"image {i}: logits are {float(max(map(abs, off))):.3g} off, more than rounding explains")
            difference, shortfall = (
                max(difference, *map(abs, off)),
                max(shortfall, radius - radius_of(own, y, head, cap)),
            )
        say(f"images: {min(start + 100, len(images))} of {len(images)}")
    return {"logits_apart": float(difference), "radii_smaller_by": float(shortfall)}


def check(
    path: Path,
    weights: Path | None = None,
    config: Path | None = None,
    images: Path | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """What is proved, and what was not checked.

    Raises:
        Rejected: if anything in the certificate is not as it is derived here.
        Unreadable: if a file or python-flint is not there.
    """
    try:
        import flint  # noqa: F401
    except ImportError as error:
        raise Unreadable("expected python-flint for exact integers, got none; pip install python-flint") from error
    certificate = parse_json(read(path), "certificate")
    need(certificate.get("format") == "onelip certificate", "expected a onelip certificate")
    version = certificate.get("version")
    need(version == 1, f"expected version 1, got {version!r}; use the checker of the onelip that wrote it")
    fields(certificate, "certificate", WORDS | {*PARTS, "nodes", "head", "results", "summary", "config"})
    for name, keys in PARTS.items():
        fields(certificate[name], name, keys)
    body = {key: value for key, value in certificate.items() if key != "digest"}
    text = json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    need(certificate["digest"] == hashlib.sha256(text.encode()).hexdigest(), "digest: the certificate was changed")
    tensors = read_tensors(check_hash(certificate["weights"], path, weights, "weights"))
    if certificate["config"] is not None:
        check_hash(certificate["config"], path, config, "config")

    told, divisor = certificate["images"], certificate["preprocessing"]["divide_by"]
    need(told["dtype"] in ("uint8", "float32", "float64"), f"images: unknown dtype {told['dtype']!r}")
    need(divisor == (255 if told["dtype"] == "uint8" else 1), f"preprocessing: {told['dtype']} divided by {divisor}")
    nodes = read_nodes(certificate["nodes"], tensors)
    states = prove_nodes(nodes, say)
    need(list(states[0].shape) == told["shape"] == certificate["input"]["shape"], "images: not of the input's shape")
    for key in ("norm", "error"):
        same(certificate["input"][key], getattr(states[0], key), f"input, {key}")
    head = prove_head(certificate["head"], nodes, states)
    cap = below(up_root(math.prod(states[0].shape)))  # the largest float whose square is below n
    found = check_results(certificate, head, cap)
    proved = {"accepted": True, "lipschitz": float(states[-1].lipschitz), "error": float(states[-1].error)}
    proved |= {key: certificate["summary"].get(key) for key in ("count", "certified", "cra")}
    unchecked = ["words, labels, where the images come from, and that the nodes are the network you mean"]
    if images is None:
        unchecked.append("that the logits are those of the images: they are taken from the file; give --images")
    else:
        proved |= check_images(load_images(images, told, divisor), divisor, nodes, head, found, cap, say)
    return {**proved, "not_checked": unchecked}
