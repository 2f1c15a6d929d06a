"""A whole certificate: its hashes, its proof, then every result and the summary."""

import hashlib
import io
import json
import math
import re
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from .norms import ZERO, below, up_root
from .proof import Head, Node, prove_head, prove_nodes, radius_of
from .reading import Part, Rejected, in_hex, is_hex, need, parse_json, read, read_tensors

FORMAT, VERSION = "onelip certificate", 1
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
DIVISORS = {"uint8": 255, "float32": 1, "float64": 1}
Say = Callable[[str], None]
Verdict = dict[str, Any]
Found = list[tuple[int, list[Fraction], Fraction]]  # class, logits, radius of each image


def check_file(part: Part, folder: Path, given: Path | None) -> bytes:
    """The bytes of a file that the certificate names by its hash: where the user says, else where the certificate says,
    else beside it, under whatever name.
    """
    name, wanted = part.text("file"), part.text("sha256")
    need(not PurePosixPath(name).is_absolute(), f"{part.where}, file: expected a relative path, got {name!r:.80}")
    part.agree()
    place = given or folder / name
    if given is None and not place.is_file():
        beside = [folder / Path(name).name, *sorted(folder.glob("*" + Path(name).suffix))[:100]]
        place = next((other for other in beside if other.is_file() and sha256(read(other)) == wanted), place)
    data = read(place)
    need(sha256(data) == wanted, f"{part.where}: another file than the one that was certified")
    return data


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def check_results(results: list[Any], head: Head, cap: Fraction, dtype: str) -> tuple[Found, list[int | None]]:
    need(results, "results: expected one or more")
    K, found, labels = len(head.slope), [], []
    for i, given in enumerate(results):
        result = Part(given, f"result {i}")
        texts = result.items("logits", K)
        need(all(map(is_hex, texts)), f"result {i}, logits: expected a finite float.hex() each")
        logits = [Fraction(float.fromhex(text)) for text in texts]
        y = logits.index(max(logits))
        radius = radius_of(logits, y, head, cap)
        pixels = math.floor((255 * radius) ** 2) if dtype == "uint8" and radius > 0 else None
        labels.append(None if result.is_null("label") else result.integer("label", 0, K - 1))
        result.agree(index=i, radius=in_hex(radius), pixels=pixels, **{"class": y})
        found.append((y, logits, radius))
    need(None not in labels or {*labels} == {None}, "results: expected labels for all images or for none")
    return found, labels


def check_summary(summary: Part, found: Found, labels: list[int | None]) -> None:
    own: dict[str, Any] = {"count": len(found), "certified": sum(radius > 0 for *_, radius in found)}
    if labels[0] is not None:
        right = [radius if y == label else -1 for (y, _, radius), label in zip(found, labels, strict=True)]
        radii = summary.part("cra").given
        plain = all(re.fullmatch("[0-9]{1,9}(/[1-9][0-9]{0,8})?", text) for text in radii)
        need(plain and len(radii) <= 1000, "summary, cra: expected radii as 36/255, and not more than 1000")
        share = {text: sum(r >= Fraction(text) for r in right) / len(right) for text in ("0", *radii)}
        own |= {"accuracy": share["0"], "cra": {text: share[text] for text in radii}}
    summary.agree(**own)


def load_images(path: Path, told: dict[str, Any]) -> np.ndarray:
    try:
        images = np.ascontiguousarray(np.load(io.BytesIO(read(path)), allow_pickle=False))
    except (ValueError, EOFError, TypeError) as error:
        raise Rejected(f"{path}: not a .npy file ({error})") from error
    dtype, shape, most = told["dtype"], (told["count"], *told["shape"]), DIVISORS[told["dtype"]]
    right = images.dtype == np.dtype(dtype) and images.shape == shape
    need(right, f"{path}: expected {dtype} images of shape {shape}, got {images.dtype} {images.shape}")
    need(sha256(images.tobytes()) == told["sha256"], f"{path}: not the images of the certificate")
    need(((images >= 0) & (images <= most)).all(), f"{path}: expected values from 0 to {most}")
    return images


def run(nodes: list[Node], images: np.ndarray) -> list[list[float]]:
    """(count, *sample) in [0, 1] -> logits of each."""
    values = [np.moveaxis(images, 0, -1)]
    for node in nodes[1:]:
        values.append(node.rule.run(*(values[j] for j in node.inputs)))
    return values[-1].T.tolist()


def check_logits(images: np.ndarray, nodes: list[Node], head: Head, cap: Fraction, found: Found, say: Say) -> Verdict:
    """Runs the program; how far its logits are from the file's, and how much smaller the radii from them are.

    Two runs of one program are apart by at most twice its error: each logit by `tolerance`, each margin by `loss`.
    """
    apart, smaller, rows = ZERO, ZERO, []
    batch = min(100, 1 + 2**27 // sum(math.prod(node.rule.shape) for node in nodes))  # in some gigabytes
    for i, (y, logits, radius) in enumerate(found):
        if i == len(rows):
            say(f"images: {i} of {len(found)}")
            rows += run(nodes, images[i : i + batch].astype(np.float64) / DIVISORS[str(images.dtype)])
        own = [Fraction(v) for v in rows[i]]
        off = [a - b for a, b in zip(own, logits, strict=True)]
        close = all(abs(a) <= t for a, t in zip(off, head.tolerance, strict=True))
        close = close and all(abs(off[y] - a) <= loss for a, loss in zip(off, head.loss[y], strict=True))
        need(close, f"image {i}: logits are {float(max(map(abs, off))):.3g} off, more than rounding explains")
        apart, smaller = max(apart, *map(abs, off)), max(smaller, radius - radius_of(own, y, head, cap))
    return {"logits_apart": float(apart), "radii_smaller_by": float(smaller)}


def check(
    path: Path,
    weights: Path | None = None,
    config: Path | None = None,
    images: Path | None = None,
    say: Say = lambda text: None,
) -> Verdict:
    """What is proved, and what was not checked.

    Raises:
        Rejected: if anything in the certificate is not as it is derived here.
        Unreadable: if a file is not there.
        ImportError: without python-flint.
    """
    certificate = parse_json(read(path), "certificate")
    need(certificate.get("format") == FORMAT, f"expected a {FORMAT}")
    got = repr(certificate.get("version"))
    need(
        got == repr(VERSION), f"expected version {VERSION}, got {got:.80}; use the checker of the onelip that wrote it"
    )
    body = {key: value for key, value in certificate.items() if key != "digest"}
    text = json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    digest = sha256(text.encode())
    need(certificate.get("digest") == digest, "digest: the certificate was changed")

    whole = Part(certificate, "certificate")
    tensors = read_tensors(check_file(whole.part("weights"), path.parent, weights))
    if not whole.is_null("config"):
        check_file(whole.part("config"), path.parent, config)
    told, summary = whole.part("images"), whole.part("summary")
    dtype = told.choice("dtype", *DIVISORS)
    nodes = prove_nodes(whole.items("nodes"), tensors, say)
    head, shape = prove_head(whole.part("head"), nodes), [*nodes[0].rule.shape]
    cap = below(up_root(math.prod(shape)))  # the largest float whose square is below n
    found, labels = check_results(whole.items("results"), head, cap, dtype)
    check_summary(summary, found, labels)
    for key in ("onelip", "created"):
        whole.text(key)
    for key in ("source", "sha256", *(() if told.is_null("file") else ("file",))):
        told.text(key)
    told.agree(count=len(found), shape=shape)
    first = {"shape": shape, "norm": in_hex(nodes[0].norm), "error": in_hex(nodes[0].error)}
    divide = {"divide_by": DIVISORS[dtype]}
    words = {"format": FORMAT, "version": VERSION, "statement": STATEMENT, "arithmetic": ARITHMETIC}
    whole.agree(**words, digest=digest, preprocessing=divide, input=first)

    proved = {"accepted": True, "lipschitz": float(nodes[-1].lipschitz), "error": float(nodes[-1].error)}
    proved |= {key: summary.given.get(key) for key in ("count", "certified", "cra")}
    unchecked = ["labels, where the images come from, and that the nodes are the network you mean"]
    if images is None and told.given["file"] is not None:
        named = path.parent / told.given["file"]
        images = named if named.is_file() else None
    if images is None:
        unchecked.append("that the logits are those of the images: they are taken from the file; give --images")
    else:
        proved |= check_logits(load_images(images, told.given), nodes, head, cap, found, say)
    return {**proved, "logits_checked": images is not None, "not_checked": unchecked}
