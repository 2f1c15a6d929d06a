"""A whole certificate: its hashes, its proof, then every result and the summary, and the program run on the images."""

import hashlib
import io
import json
import math
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path

import numpy as np

from .norms import ZERO, below, up_root
from .program import Told
from .proof import Head, Node, prove_head, prove_nodes, radius_of
from .reading import Rejected, Unreadable, agree, fit, in_hex, need, parse_json, read, read_tensors

FORMAT, VERSION = "onelip certificate", 2
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
ORIGIN = "labels, where the images come from, and that the nodes are the network you mean"
DIVISORS = {"uint8": 255, "float32": 1, "float64": 1}
KEYS = "format version onelip created statement arithmetic weights config images preprocessing nodes head results"
Say = Callable[[str], None]
Found = list[tuple[int, list[Fraction], Fraction]]  # class, logits, radius of each image


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def read_named(part: Told, where: str, folder: Path, given: Path | None) -> bytes:
    """The bytes of a file that the certificate names by its hash: where the user says, else where the certificate says,
    else beside it, under whatever name.
    """
    fit(part, "file sha256", f"{where}, ")
    place = given or folder / part["file"]
    if given is None and not place.is_file():
        beside = sorted(other for other in folder.iterdir() if place.suffix in ("", other.suffix))[:100]
        place = next((other for other in beside if other.is_file() and sha256(read(other)) == part["sha256"]), place)
    data = read(place)
    need(sha256(data) == part["sha256"], f"{where}: another file than the one that was certified")
    return data


def check_results(told: Told, head: Head, cap: Fraction) -> tuple[Found, Told]:
    """Class, logits and radius of each image; and the summary."""
    found: Found = []
    for i, result in enumerate(told["results"]):
        fit(result, "index label class logits radius pixels", f"result {i}, ")
        logits, K = [Fraction(float.fromhex(v)) for v in result["logits"]], len(head.slope)
        need(len(logits) == K > (result["label"] or 0), f"result {i}: expected {K} logits, and a label below {K}")
        y = logits.index(max(logits))
        radius = radius_of(logits, y, head, cap)
        pixels = math.floor((255 * radius) ** 2) if told["images"]["dtype"] == "uint8" and radius > 0 else None
        agree(result, {"index": i, "class": y, "radius": in_hex(radius), "pixels": pixels}, f"result {i}, ")
        found.append((y, logits, radius))
    summary: Told = {"count": len(found), "certified": sum(radius > 0 for *_, radius in found)}
    labels = [result["label"] for result in told["results"]]
    if {*labels} != {None}:
        need(labels and None not in labels, "results: expected one or more, and labels for all of them or for none")
        fit(told["summary"], "count certified accuracy cra", "summary, ")
        radii = told["summary"]["cra"]
        right = [radius if y == label else -1 for (y, _, radius), label in zip(found, labels, strict=True)]
        share = {r: sum(radius >= Fraction(r) for radius in right) / len(right) for r in ("0", *radii)}
        summary |= {"accuracy": share["0"], "cra": {r: share[r] for r in radii}}
    return found, summary


def load_images(path: Path, told: Told) -> np.ndarray:
    try:
        images = np.asarray(np.load(io.BytesIO(read(path)), allow_pickle=False))
    except Unreadable:
        raise
    except Exception as error:  # whatever numpy's reader meets
        raise Rejected(f"{path}: not a .npy file ({error})") from error
    dtype, shape, most = told["dtype"], (told["count"], *told["shape"]), DIVISORS[told["dtype"]]
    right = (str(images.dtype), images.shape) == (dtype, shape)
    need(right, f"{path}: expected {dtype} images of shape {shape}, got {images.dtype} {images.shape}")
    need(sha256(images.tobytes()) == told["sha256"], f"{path}: not the images of the certificate")
    need(((images >= 0) & (images <= most)).all(), f"{path}: expected values from 0 to {most}")
    return images


def check_logits(images: np.ndarray, nodes: list[Node], head: Head, cap: Fraction, found: Found, say: Say) -> Told:
    """Runs the program; how far its logits are from the file's, and how much smaller the radii from them are.

    Two runs of one program are apart by at most twice its error: each logit by `tolerance`, each margin by `loss` / 2.
    """
    apart, smaller, rows = ZERO, ZERO, []
    batch = min(100, 1 + 2**27 // sum(math.prod(node.told["shape"]) for node in nodes))  # in some gigabytes
    for i, (y, logits, radius) in enumerate(found):
        if i == len(rows):
            say(f"images: {i} of {len(found)}")
            values = [np.moveaxis(images[i : i + batch].astype(np.float64) / DIVISORS[str(images.dtype)], 0, -1)]
            for node in nodes[1:]:
                values.append(node.rule.run(*(values[j] for j in node.told["inputs"])))
            rows += values[-1].T.tolist()
        own = [Fraction(v) for v in rows[i]]
        off = [a - b for a, b in zip(own, logits, strict=True)]
        close = all(abs(a) <= t for a, t in zip(off, head.tolerance, strict=True))
        close = close and all(2 * abs(off[y] - a) <= loss for a, loss in zip(off, head.loss[y], strict=True))
        need(close, f"image {i}: logits are {float(max(map(abs, off))):.3g} off, more than rounding explains")
        apart, smaller = max(apart, *map(abs, off)), max(smaller, radius - radius_of(own, y, head, cap))
    return {"logits_apart": float(apart), "radii_smaller_by": float(smaller)}


def check(
    path: Path,
    weights: Path | None = None,
    config: Path | None = None,
    images: Path | None = None,
    say: Say = lambda text: None,
) -> Told:
    """What is proved, and what was not checked.

    Raises:
        Rejected: if anything in the certificate is not as it is derived here.
        Unreadable: if a file is not there.
        ImportError: without python-flint.
    """
    told = parse_json(read(path), "certificate")
    need(told.get("format") == FORMAT, f"expected a {FORMAT}")
    got = repr(told.get("version"))
    advice = "certify again" if got == "1" else "use the onelip that wrote it, or a newer one"
    need(got == repr(VERSION), f"expected version {VERSION}, got {got:.80}; {advice}")
    body = {key: value for key, value in told.items() if key != "digest"}
    digest = sha256(json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode())
    need(told.get("digest") == digest, "digest: the certificate was changed")
    fit(told, f"{KEYS} summary digest", "certificate, ")
    fit(data := told["images"], "source file sha256 dtype count shape", "images, ")
    need(data["dtype"] in DIVISORS, f"images, dtype: expected one of {[*DIVISORS]}, got {data['dtype']!r:.80}")

    tensors = read_tensors(read_named(told["weights"], "weights", path.parent, weights))
    if told["config"] is not None:
        read_named(told["config"], "config", path.parent, config)
    nodes = prove_nodes(told["nodes"], tensors, say)
    head, shape = prove_head(told["head"], nodes), nodes[0].told["shape"]
    cap = below(up_root(math.prod(shape)))  # the largest float whose square is below n
    found, summary = check_results(told, head, cap)
    agree(data, {"count": len(found), "shape": shape}, "images, ")
    derived = {"preprocessing": {"divide_by": DIVISORS[data["dtype"]]}, "summary": summary}
    agree(told, derived | {"statement": STATEMENT, "arithmetic": ARITHMETIC}, "certificate, ")

    proved = {"accepted": True, "lipschitz": float(nodes[-1].lipschitz), "error": float(nodes[-1].error)}
    proved |= {key: summary.get(key) for key in ("count", "certified", "cra")}
    unchecked = [ORIGIN]
    if not all(radius > 0 for *_, radius in found):
        unchecked.append("the class of images without a radius: rounding may decide it")
    place = path.parent / data["file"]
    if images is None and data["file"] and place.is_file():
        images = place
    if images is None:
        where = f"{place} is not there" if data["file"] else "no file of them is named"
        unchecked.append(f"that the logits, taken from the file, are those of the images: {where}; give --images")
    else:
        proved |= check_logits(load_images(images, data), nodes, head, cap, found, say)
    return {**proved, "logits_checked": images is not None, "not_checked": unchecked}
