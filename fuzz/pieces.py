"""Smaller public pieces: overlapping patches, crops of J^T J, and the trained networks of the zoo."""

import functools
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from fuzz import layers, library, oracle, radii
from fuzz.case import Case, Outcome, Random, crash, fill, smaller_numbers

ROUNDING = 2.0**-44  # of sums of products in float64, relative to the same sums of absolute values


def draw(rng: Random) -> Case:
    """A call of one of them."""
    kind = rng.choice(("patches", "jtj", "jtj", "zoo")) if rng.random() < 0.5 else rng.choice(("patches", "jtj"))
    case: Case = {"part": "pieces", "kind": kind, "seed": rng.randrange(2**20)}
    if kind == "patches":
        patch = rng.randint(1, 4)
        numbers = {"channels": rng.randint(1, 3), "patch": patch, "overlap": 2 * rng.randint(0, patch // 2)}
        extra, size = ([rng.randint(low, high) for _ in range(2)] for low, high in ((0, 2), (1, 9)))
        return case | numbers | {"extra": extra, "size": size}
    if kind == "zoo":
        return case | {"name": rng.choice(library.zoo()), "scale": rng.choice((1.0, 0.1, 0.5))}
    layer = layers.draw(rng, ("none",)) | {"part": "layers"}
    axes = len(layer["size"])
    ends = [[rng.randint(0, 3), rng.randint(0, 9)] for _ in range(2 * (axes + 1))]
    columns = ends[axes + 1 :] if rng.random() < 0.5 else None
    return case | {"layer": layer, "rows": ends[: axes + 1], "columns": columns}


def check(case: Case) -> Outcome:
    outcome = Outcome("proved", case["kind"])
    try:
        return {"patches": _patches, "jtj": _crop, "zoo": _zoo}[case["kind"]](case, outcome)
    except library.UnsoundBound as error:
        return outcome.fail("contradiction", crash(error))
    except Exception as error:
        if not library.is_refusal(error):
            return outcome.fail("crash", crash(error))
        outcome.verdict = "refused"
        return outcome


def _patches(case: Case, outcome: Outcome) -> Outcome:
    """The norm is at most what is claimed, and that is 1."""
    numbers = case["channels"], case["patch"], case["overlap"]
    layer = library.layers.lapped_patches(*numbers, extra_padding=tuple(case["extra"]))
    proved = library.claim(layer)
    if proved is None:
        outcome.verdict = "unproved"
        return outcome
    try:
        matrix = oracle.dense(layer.double(), (case["channels"], *case["size"]))
    except RuntimeError:  # an image that is smaller than a window
        return Outcome("invalid")
    outcome.compare("patches", oracle.norm_of(matrix)[0], proved, oracle.exceeds(matrix, proved) or proved > 1 + 1e-9)
    return outcome


def _crop(case: Case, outcome: Outcome) -> Outcome:
    """Each entry is that of the product of the dense matrix with itself."""
    given, size = case["layer"], tuple(case["layer"]["size"])
    try:
        layer = layers.plain(given, bias=False).requires_grad_(False)
        fill(layer, "gauss", case["seed"])
        layer = layer.double()
        matrix = oracle.dense(layer, (given["channels"][0], *size))
    except (RuntimeError, ValueError):
        return Outcome("invalid")
    if matrix.size == 0:
        return Outcome("invalid")
    rows, columns = _slices(case["rows"]), None if case["columns"] is None else _slices(case["columns"])
    found = library.jtj(layer, size, rows, columns).numpy()
    last = matrix.reshape(len(matrix), given["channels"][0], *size)
    last = np.moveaxis(last, 1, -1)  # channels last, as the crop has them
    one, other = (last[(slice(None), *part)].reshape(len(matrix), -1) for part in (rows, columns or rows))
    off = np.abs(found - one.T @ other) - ROUNDING * (np.abs(one).T @ np.abs(other))
    outcome.claims += 1
    if found.shape != (one.shape[1], other.shape[1]) or not (off <= 0).all():
        outcome.fail("false bound", f"jtj is off by {np.max(off):.3g}")
    return outcome


def _slices(ends: list[list[int]]) -> list[slice]:
    return [slice(start, start + length + 1) for start, length in ends]


@functools.cache
def _proof(name: str) -> tuple[Any, Any, Any, tuple[int, ...]]:
    model, shape = library.pretrained(name)
    model = model.double()
    return model, library.bake(model), library.prove(model, shape), shape


def _zoo(case: Case, outcome: Outcome) -> Outcome:
    """No point inside a radius has another class."""
    model, plain, proof, shape = _proof(case["name"])
    generator = torch.Generator().manual_seed(case["seed"])
    images = (255 * case["scale"] * torch.rand((2, *shape), generator=generator)).to(torch.uint8)
    found = library.certify(model, images, proof=proof)
    for i, (radius, y) in enumerate(zip(found.radii.tolist(), found.classes.tolist(), strict=True)):
        if radius > 0:
            radii.try_image(plain, images[i], y, radius, case | {"mode": "sound"}, outcome, found.pixels[i])
    outcome.verdict = "proved" if outcome.claims else "unproved"
    return outcome


def smaller(case: Case) -> Iterator[Case]:
    """Cases with one setting simpler."""
    if case["kind"] == "jtj":
        yield from (case | {"layer": layer} for layer in layers.smaller(case["layer"]))
    for key in ("channels", "patch", "overlap", "extra", "size", "rows"):
        for value in smaller_numbers(case.get(key)):
            yield case | {key: value}
