"""The checker accepts what is right, and nothing else: every number, hash, setting and error term is missed when wrong.

Each rejection is told from the others by its reason, so that a test fails if just its own check is taken away.
"""

import ast
import copy
import hashlib
import json
import math
import os
import shutil
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from _certificates import Builder, U, safetensors, sealed, summary_of, text, up_root, write
from hypothesis import given, settings
from hypothesis import strategies as st

from onelip import checker
from onelip.checker import Rejected, Unreadable, check, norms, proof, report
from onelip.checker.layers import Map
from onelip.checker.reading import read_tensors

SOURCE = Path(checker.__file__).parent


def dyadic(*shape, seed=0, low=-12, high=13):
    return np.random.default_rng(seed + sum(shape)).integers(low, high, shape) / 64


def pixels(shape, count=3, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (count, *shape)).astype(np.uint8)


def maxmin(x):
    a, b = np.split(x, 2)
    return np.concatenate([np.maximum(a, b), np.minimum(a, b)])


def avg_pool(net, scale=0.75):
    """Windows of 2 x 2 without overlap: row sums 4 scale, column sums scale."""
    c, h, w = net.states[-1][0]
    n = 8 * U / (1 - 8 * U)
    sizes = {"kernel": [2, 2], "stride": [2, 2], "scale": text(scale)}
    pool = lambda x: x.reshape(c, h // 2, 2, w // 2, 2).sum((2, 4)) * scale  # noqa: E731
    factor = Fraction(2 * scale)
    return net.scaled("avg_pool", (c, h // 2, w // 2), pool, factor, rounding=n, underflow=6, **sizes)


def max_pool(net):
    """3 x 3 with stride 1 and padding 1: nine windows read a pixel."""
    shape = net.states[-1][0]

    def pool(x):
        x = np.pad(x, [(0, 0), (1, 1), (1, 1)], constant_values=-np.inf)
        return np.lib.stride_tricks.sliding_window_view(x, (3, 3), axis=(1, 2)).max((3, 4))

    sizes = {"kernel": [3, 3], "stride": [1, 1], "padding": [1, 1], "dilation": [1, 1]}
    return net.scaled("max_pool", shape, pool, Fraction(3), **sizes)


def scale(net, factor):
    shape = net.states[-1][0]
    return net.scaled(
        "scale", shape, lambda x: x * factor, abs(Fraction(factor)), rounding=U, underflow=1, factor=text(factor)
    )


def everything(drop=()):
    """(4, 4, 4) to 3 logits through every kind of node that rounds."""
    net = Builder((4, 4, 4), drop)
    net.normalize([0.5, 0.25, 0.125, 0.75], [0.5, 0.3, 0.25, 1.0])
    net.map(dyadic(4, 4, 3, 3), dyadic(4, seed=1), padding=[[1, 1], [1, 1]], steps=2)
    net.exact("maxmin", (4, 4, 4), maxmin, axis=0)
    max_pool(net)
    a = avg_pool(net)
    b = net.map(dyadic(4, 4, 1, 1), dyadic(4, seed=2), kind="cholesky")
    c = net.add(a, b)
    scale(net, -0.4)
    net.concat(c, len(net.nodes) - 1)
    net.exact("flatten", (32,), np.ravel)
    net.map(dyadic(8, 32), dyadic(8, seed=3), kind="cholesky", side="outputs")
    net.exact("relu", (8,), lambda x: np.maximum(x, 0))
    net.map(dyadic(4, 8), dyadic(4, seed=4))
    net.exact("first_channels", (3,), lambda x: x[:3], count=3)
    return net


def quiet(drop=()):
    """Zero weights: only the underflow terms are left, so that each of them shows; and no slope, so the cap does."""
    net = Builder((4,), drop)
    net.map(np.zeros((4, 4)), kind="zero")
    net.normalize([0.0] * 4, [0.5] * 4)
    net.exact("reshape", (1, 2, 2), lambda x: x.reshape(1, 2, 2))
    avg_pool(net)
    net.exact("flatten", (1,), np.ravel)
    scale(net, 0.5)
    net.add(len(net.nodes) - 1, len(net.nodes) - 1)
    net.map(np.ones((2, 1)) / 64)
    net.map(np.zeros((3, 2)), [0.5, -0.25, 0.0], kind="zero")
    return net


def no_head(drop=()):
    net = Builder((6,), drop)
    net.map(dyadic(4, 6), dyadic(4))
    net.exact("abs", (4,), np.abs)
    return net


def small(drop=()):
    net = Builder((6,), drop)
    net.map(dyadic(4, 6), dyadic(4), kind="cholesky", side="outputs")
    net.exact("maxmin", (4,), maxmin, axis=0)
    net.map(dyadic(3, 4), dyadic(3), steps=2)
    return net


def files(net, directory, *, pairs=True, labels=True, images=None, edit=None):
    images = pixels(net.states[0][0]) if images is None else images
    content = net.build(images, [i % 2 for i in range(len(images))] if labels else None, pairs=pairs)
    content = copy.deepcopy(content)
    if edit:
        edit(content)
    return write(directory, content, safetensors(net.tensors), images=images)


def rejected(path, reason, **given):
    with pytest.raises(Rejected, match=reason):
        check(path, **given)


# ---- what is right


@pytest.mark.parametrize("make", [everything, quiet, small, no_head])
@pytest.mark.parametrize("kind", ["uint8", "float32", "float64"])
def test_accepts_what_is_right(make, kind, tmp_path):
    net = make()
    images = pixels(net.states[0][0])
    images = images if kind == "uint8" else (images / 255).astype(kind)
    path = files(net, tmp_path, pairs=make is not no_head, images=images)
    verdict = check(path, images=tmp_path / "images.npy")
    assert verdict["certified"] > 0
    assert verdict["logits_apart"] < 1e-12
    assert verdict["lipschitz"] == float(net.states[-1][1])
    assert len(check(path)["not_checked"]) == 2


CONVOLUTIONS = [
    {"padding": [[1, 1], [1, 1]], "mode": "circular"},
    {"stride": [2, 2]},
    {"stride": [2, 2], "padding": [[1, 1], [1, 1]], "mode": "circular"},
    {"stride": [2, 2], "padding": [[1, 1], [1, 1]], "side": "outputs", "steps": 2},
    {"dilation": [2, 1], "stride": [2, 3], "padding": [[2, 1], [0, 1]]},
    {"dilation": [2, 2], "stride": [4, 1], "padding": [[3, 3], [3, 3]]},
    {"stride": [4, 5], "kind": "cholesky"},
    {"transposed": True, "stride": [2, 2], "padding": [[1, 1], [1, 1]], "output_padding": [1, 0]},
    {"transposed": True, "stride": [2, 1], "dilation": [1, 2], "side": "outputs"},
    {"groups": 2, "padding": [[0, 1], [1, 0]]},
    {"groups": 2, "transposed": True, "stride": [3, 2]},
]


@pytest.mark.parametrize("size", [5, 6])
@pytest.mark.parametrize("conv", CONVOLUTIONS, ids=str)
def test_convolutions(conv, size, tmp_path):
    """Two derivations of the Schur sums and of the layer itself agree; the true norm is not above."""
    net = Builder((4, size, size))
    half, turned = 4 // conv.get("groups", 1), conv.get("transposed", False)
    net.map(dyadic(4, half, 3, 3), dyadic(2 * half if "groups" in conv else 4), **conv)
    norm, proved = net.true_norm
    assert norm <= proved * (1 + 1e-14)
    n = math.prod(net.states[-1][0])
    net.exact("flatten", (n,), np.ravel)
    net.map(dyadic(2, n), kind="cholesky", side="outputs")
    check(files(net, tmp_path), images=tmp_path / "images.npy")
    assert turned == net.nodes[1]["transposed"]


@pytest.mark.parametrize("axes", [1, 3])
def test_other_numbers_of_axes(axes, tmp_path):
    net = Builder((2, *(3,) * axes))
    net.map(dyadic(3, 2, *(2,) * axes), dyadic(3), stride=[2] * axes, padding=[[1, 0]] * axes, side="outputs")
    n = math.prod(net.states[-1][0])
    net.exact("flatten", (n,), np.ravel)
    net.map(dyadic(2, n))
    check(files(net, tmp_path), images=tmp_path / "images.npy")


def test_moving_nodes(tmp_path):
    net = Builder((2, 4, 4))
    unshuffled = lambda x: x.reshape(2, 2, 2, 2, 2).transpose(0, 2, 4, 1, 3).reshape(8, 2, 2)  # noqa: E731
    net.exact("concatenate", (8, 2, 2), unshuffled, kernel=[2, 2])
    net.exact("pad_channels", (9, 2, 2), lambda x: np.pad(x, [(0, 1), (0, 0), (0, 0)]), count=9)
    sort = lambda x: -np.sort(-x.reshape(3, 3, 2, 2), axis=0).reshape(9, 2, 2)  # noqa: E731
    net.exact("groupsort", (9, 2, 2), sort, axis=0, group_size=3)
    net.exact("identity", (9, 2, 2), lambda x: x)
    net.exact("maxmin", (9, 2, 2), lambda x: np.sort(x, axis=2)[:, :, ::-1], axis=2)
    net.map(dyadic(2, 9, 2, 2), dyadic(2))
    net.exact("reshape", (2,), np.ravel)
    check(files(net, tmp_path), images=tmp_path / "images.npy")


# ---- numbers


@settings(max_examples=50)
@given(st.fractions(min_value=0, max_value=10**40), st.integers(-700, 700))
def test_rounding(x, e):
    x *= Fraction(2) ** e
    for found, is_above in ((norms.up(x), lambda v: v >= x), (norms.up_root(x), lambda v: v * v >= x)):
        assert is_above(found)
        assert found == 0 or not is_above(Fraction(math.nextafter(float(found), 0.0)))
    low = norms.below(x)
    assert low < x <= Fraction(math.nextafter(float(low), math.inf))


@settings(max_examples=50)
@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=5))
def test_integers_are_exact(values):
    whole, e = norms.to_integers(np.array(values))
    assert [int(m) * Fraction(2) ** e for m in whole] == [Fraction(v) for v in values]


# ---- terms left out by the writer

EVERYTHING = {
    "domain": r"node 0 .*norm",
    "input rounding": r"node 0 .*error",
    "input underflow": r"node 0 .*error",
    "mean in norm": r"node 1 .*norm",
    "normalize rounding": r"node 1 .*error",
    "bias positions": r"node 2 .*bias_norm",
    "error carried": r"node 2 .*error",
    "product rounding": r"node 2 .*error",
    "bias rounding": r"node 2 .*error",
    "bias in norm": r"node 2 .*norm",
    "max_pool factor": r"node 4 .*lipschitz",
    "avg_pool factor": r"node 5 .*lipschitz",
    "avg_pool rounding": r"node 5 .*error",
    "sum rounding": r"node 7 .*error",
    "scale rounding": r"node 8 .*error",
    "scale factor": r"node 8 .*lipschitz",
    "head product": r"head, rounding",
    "head bias": r"head, rounding",
    "head error": r"head, loss",
    "head rounding": r"head, loss",
    "strictly below": r"result 0, radius",
}
QUIET = {
    "underflow": r"node 1 .*error",
    "normalize underflow": r"node 2 .*error",
    "avg_pool underflow": r"node 4 .*error",
    "scale underflow": r"node 6 .*error",
    "sum underflow": r"node 7 .*error",
    "error in rounding": r"node 8 .*error",
    "head underflow": r"head, rounding",
    "cap": r"result 0, radius",
}
DROPPED = [(everything, *item) for item in EVERYTHING.items()] + [(quiet, *item) for item in QUIET.items()]
DROPPED.append((no_head, "output error", "head, loss"))


@pytest.mark.parametrize(("make", "term", "reason"), DROPPED, ids=lambda v: v if isinstance(v, str) else "")
def test_a_term_left_out_is_missed(make, term, reason, tmp_path):
    rejected(files(make({term}), tmp_path, pairs=make is not no_head), reason)


def test_every_term_of_the_writer_is_left_out_once(tmp_path):
    nets = [everything(), quiet(), no_head()]
    for net in nets:
        net.build(pixels(net.states[0][0]), pairs=net is not nets[2])
    # A factor of 1 is no change in the last two of them; "max_pool" neither rounds nor underflows.
    named = {term for net in nets for term in net.used} - {"max_pool rounding", "max_pool underflow"}
    assert named == {term for _, term, _ in DROPPED}


# ---- bounds


def lower(value):
    return value * (1 - Fraction(1, 10**6))


@pytest.mark.parametrize(("kind", "reason"), [("schur", "another square"), ("cholesky", "not proved")])
def test_square_too_small(kind, reason, tmp_path):
    """Everything after it is consistent."""
    for steps in (1, 2) if kind == "schur" else (1,):
        net = Builder((6,))
        net.map(dyadic(6, 6), kind=kind, steps=steps, square=lower)
        net.map(dyadic(2, 6))
        rejected(files(net, tmp_path), reason)


def test_cholesky_is_tight(tmp_path):
    """One part in 2^33 below the true norm is too small already; a claim of any size above is proved."""
    W = dyadic(6, 6)
    largest = Fraction(float(np.linalg.eigvalsh(W.T @ W)[-1]))
    for factor, good in ((1 - Fraction(1, 2**33), False), (1 + Fraction(1, 2**28), True), (Fraction(10**9), True)):
        net = Builder((6,))
        net.map(W, kind="cholesky", square=lambda _, factor=factor: largest * factor)
        net.map(dyadic(2, 6))
        path = files(net, tmp_path)
        check(path) if good else rejected(path, "not proved")


def test_cholesky_believes_no_factor(monkeypatch):
    """The factor is a guess: with a wrong one, or one of another matrix, the residual says no."""
    W = np.eye(3)
    whole, e = norms.to_integers(W)
    assert norms.is_bounded(Fraction(2), whole, e, W)
    monkeypatch.setattr(np.linalg, "cholesky", lambda guess: np.eye(3) * 2.0**-30)
    assert not norms.is_bounded(Fraction(2), whole, e, W)
    almost = 1 - Fraction(1, 2**20)
    monkeypatch.setattr(np.linalg, "cholesky", lambda guess: np.sqrt(np.maximum(guess, 0.0) + np.eye(3) * 2.0**-60))
    assert not norms.is_bounded(almost, whole, e, W)


def test_zero_and_other_kinds(tmp_path):
    net = Builder((6,))
    net.map(dyadic(6, 6), kind="zero")
    net.map(dyadic(2, 6))
    rejected(files(net, tmp_path), "weights and square to be zero")
    net = Builder((2, 3, 3))
    net.map(dyadic(2, 2, 3, 3), kind="cholesky")
    net.exact("flatten", (2,), np.ravel)
    rejected(files(net, tmp_path), "one tap")


def test_extreme_weights(tmp_path):
    """Products that under- and overflow float64 are exact here."""
    tiny = np.array([[4.5e-23] + [2.6e-23] * 5] * 2, np.float32).astype(float) * 2.0**-900
    for W in (tiny, np.ldexp(tiny.T, 1300), np.array([[2.0**-1074, 1.0], [2.0**480, 0.0]])):
        layer = Map(W[None], np.zeros(len(W)), False, False, (), (), (), (), W.shape[1], (len(W),))
        q = [1] * W.shape[1]
        G = [[sum(Fraction(a) * Fraction(b) for a, b in zip(x, y, strict=True)) for x in W.T] for y in W.T]
        square = max(sum(map(abs, row)) for row in G)
        bound = {"kind": "schur", "side": "inputs", "steps": 1, "scale": [q], "square": "0/1"}
        fraction = f"{square.numerator}/{square.denominator}"
        assert norms.square_of(bound | {"square": fraction}, layer, "") == square
        with pytest.raises(Rejected, match="another square"):
            norms.square_of(bound, layer, "")
        claim = square * 2
        fraction = f"{claim.numerator}/{claim.denominator}"
        assert norms.square_of({"kind": "cholesky", "side": "inputs", "steps": 1, "square": fraction}, layer, "")


# ---- single changes, the digest made to fit


def at(content, *path):
    for key in path:
        content = content[key]
    return content


def change(*path, to=None, by=None):
    """An edit of one place of a certificate."""

    def edit(content):
        place = at(content, *path[:-1])
        place[path[-1]] = by(place[path[-1]]) if by else to

    return edit


def more(hexadecimal):
    return text(math.nextafter(float.fromhex(hexadecimal), math.inf))


def less(hexadecimal):
    return text(math.nextafter(float.fromhex(hexadecimal), -math.inf))


def without_node(index):
    """One node less; those behind refer to the node before it."""

    def edit(content):
        del content["nodes"][index]
        for node in content["nodes"][1:]:
            node["inputs"] = [i - 1 if i >= index else i for i in node["inputs"]]
        content["head"]["node"] -= 1

    return edit


def swap(i, j):
    def edit(content):
        nodes = content["nodes"]
        nodes[i], nodes[j] = nodes[j], nodes[i]

    return edit


def swap_class(content):
    content["results"][0]["class"] = (content["results"][0]["class"] + 1) % 3


def swap_label(content):
    result = content["results"][0]
    result["label"] = (result["class"] + (result["class"] == result["label"])) % 3


def raise_logit(content):
    result = content["results"][0]
    change("logits", result["class"], by=lambda v: text(float.fromhex(v) + 1e-9))(result)


CHANGES = {
    "version": (change("version", to=2), "expected version 1, got 2"),
    "format": (change("format", to="another"), "expected a onelip certificate"),
    "unknown part": (change("more", to=1), r"unknown \['more'\]; of a newer version"),
    "unknown op": (change("nodes", 1, "op", to="conv4d"), "no rule for it"),
    "unknown setting": (change("nodes", 2, "ceil", to=1), "node 2 .*unknown"),
    "unknown kind": (change("nodes", 2, "bound", "kind", to="svd"), "node 2 .*unknown; a newer"),
    "scale": (change("nodes", 2, "bound", "scale", 0, 1, by=lambda q: q + 1), "node 2 .*another square"),
    "scale 0": (change("nodes", 2, "bound", "scale", 0, 1, to=0), "node 2 .*scale: expected an integer from 1"),
    "scale short": (change("nodes", 2, "bound", "scale", 0, by=lambda q: q[1:]), "expected 4 scale integers, got 3"),
    "steps": (change("nodes", 2, "bound", "steps", to=1), "node 2 .*another square"),
    "side": (change("nodes", 2, "bound", "side", to="outputs"), "node 2 .*another square"),
    "square": (change("nodes", 2, "bound", "square", to="1/1"), "node 2 .*another square"),
    "lowest terms": (change("nodes", 2, "bound", "square", to="4/2"), "lowest terms"),
    "cholesky square": (change("nodes", 6, "bound", "square", to="1/999"), "node 6 .*not proved"),
    "sigma": (change("nodes", 2, "sigma", by=less), "node 2 .*sigma"),
    "absolute": (change("nodes", 2, "absolute", by=less), "node 2 .*absolute"),
    "bias_norm": (change("nodes", 2, "bias_norm", by=less), "node 2 .*bias_norm"),
    "lipschitz": (change("nodes", 9, "lipschitz", by=less), "node 9 .*lipschitz"),
    "norm": (change("nodes", 13, "norm", by=more), "node 13 .*norm"),
    "error": (change("nodes", 14, "error", by=less), "node 14 .*error"),
    "input norm": (change("input", "norm", by=less), "input, norm"),
    "input error": (change("input", "error", by=less), "input, error"),
    "input shape": (change("input", "shape", to=[64]), "not of the input's shape"),
    "images shape": (change("images", "shape", to=[64]), "not of the input's shape"),
    "head node": (change("head", "node", to=11), "not the last linear map"),
    "head other": (change("head", "node", to=14), "not the linear map"),
    "pairs": (change("head", "pairs", to=False), "expected pairs to be true, or false"),
    "classes": (change("head", "classes", to=4), "expected 4 logits"),
    "distance": (change("head", "distance", 0, 1, by=less), "head, distance"),
    "rounding": (change("head", "rounding", 2, by=less), "head, rounding"),
    "slope": (change("head", "slope", 0, 1, by=less), "head, slope"),
    "loss": (change("head", "loss", 2, 1, by=less), "head, loss"),
    "diagonal": (change("head", "loss", 1, 1, by=more), "head, loss"),
    "radius": (change("results", 0, "radius", by=more), "result 0, radius"),
    "radius smaller": (change("results", 0, "radius", by=less), "result 0, radius"),
    "pixels": (change("results", 0, "pixels", by=lambda n: n + 1), "expected pixels"),
    "class": (swap_class, "is not the first of the largest"),
    "label": (swap_label, r"\['accuracy'"),
    "labels": (change("results", 0, "label", to=None), "for all images or for none"),
    "logits": (raise_logit, "result 0, radius"),
    "logits nan": (change("results", 0, "logits", 0, to="nan"), "finite float.hex"),
    "logits inf": (change("results", 0, "logits", 0, to="inf"), "finite float.hex"),
    "logits decimal": (change("results", 0, "logits", 0, to="0.5"), "finite float.hex"),
    "index": (change("results", 1, "index", to=0), "out of order"),
    "result gone": (change("results", by=lambda r: r[:-1]), "results: expected 3"),
    "result and count": (change("images", "count", to=2), "results: expected 2"),
    "certified": (change("summary", "certified", by=lambda n: n - 1), r"\['certified'\] is not"),
    "count": (change("summary", "count", to=4), r"\['count'\] is not"),
    "cra": (change("summary", "cra", "36/255", by=lambda v: v + 0.125), r"\['cra'\] is not"),
    "cra radius": (change("summary", "cra", "0x1/2", to=1.0), "expected radii as"),
    "accuracy": (change("summary", "accuracy", to=0.9), r"\['accuracy'\] is not"),
    "preprocessing": (change("preprocessing", "divide_by", to=1), "uint8 divided by 1"),
    "dtype": (change("images", "dtype", to="float64"), "float64 divided by 255"),
    "node removed": (without_node(8), "node 8 .*lipschitz"),
    "nodes swapped": (swap(2, 3), "node 2 .*inputs: expected"),
    "input later": (change("nodes", 3, "inputs", to=[3]), "node 3 .*inputs: expected an integer from 0 to 2"),
    "two inputs": (change("nodes", 3, "inputs", to=[2, 2]), "node 3 .*expected a list of 1"),
    "another input": (change("nodes", 7, "inputs", to=[5, 5]), "node 7 "),
    "stride": (change("nodes", 2, "stride", to=[2, 1]), "node 2 .*expected 8 scale integers, got 4"),
    "dilation": (change("nodes", 2, "dilation", to=[2, 1]), "node 2 .*bias_norm"),
    "padding": (change("nodes", 2, "padding", to=[[1, 1], [1, 2]]), "node 2 .*bias_norm"),
    "circular too wide": (change("nodes", 2, "padding", to=[[3, 1], [1, 1]]), "node 2 .*bias_norm"),
    "groups": (change("nodes", 2, "groups", to=2), "node 2 .*expected 8 channels"),
    "mode": (change("nodes", 2, "mode", to="reflect"), "unknown mode"),
    "transposed": (change("nodes", 2, "transposed", to=True), "node 2 .*another square"),
    "output_padding": (change("nodes", 2, "output_padding", to=[1, 0]), "output_padding 1"),
    "weight name": (change("nodes", 2, "weight", to="t99"), "no tensor 't99'"),
    "bias gone": (change("nodes", 2, "bias", to=None), "node 2 .*bias_norm"),
    "axis": (change("nodes", 3, "axis", to=3), "node 3 .*expected an integer from 0 to 2"),
    "kernel": (change("nodes", 5, "kernel", to=[1, 2]), "node 5 .*lipschitz"),
    "pool dilation": (change("nodes", 4, "dilation", to=[2, 1]), "node 4 .*expected shape"),
    "pool stride": (change("nodes", 5, "stride", to=[1, 1]), "node 5 .*expected shape"),
    "no pixel": (change("nodes", 4, "padding", to=[9, 1]), "holds no pixel"),
    "pool scale": (change("nodes", 5, "scale", to=text(0.7)), "node 5 .*lipschitz"),
    "factor": (change("nodes", 8, "factor", to=text(-0.3)), "node 8 .*lipschitz"),
    "mean": (change("nodes", 1, "mean", to="t1"), "node 1 .*norm"),
    "count of channels": (change("nodes", 14, "count", to=2), "node 14 .*expected shape"),
    "shape": (change("nodes", 10, "shape", to=[16, 2]), r"node 10 .*expected shape \(32,\)"),
    "missing": (lambda content: content["nodes"][2].pop("bound"), r"node 2 .*\['bound'\] missing"),
    "bias of another": (change("nodes", 2, "bias", to="t8"), "node 2 .*expected a bias of 4"),
    "vector for a kernel": (change("nodes", 2, "weight", to="t3"), "node 2 .*weight"),
    "image into linear": (change("nodes", 11, "inputs", to=[9]), "node 11 .*expected an input of 1 axes"),
    "three groups": (change("nodes", 2, "groups", to=3), "3 groups do not divide 4"),
    "transposed circle": (lambda c: c["nodes"][2].update(mode="circular", transposed=True), "cannot be circular"),
    "absurd shape": (change("nodes", 10, "shape", to=[2**20, 2**20]), "too large"),
    "padding of one axis": (change("nodes", 2, "padding", to=[[1, 1]]), "node 2 .*expected padding for each axis"),
    "scale of cholesky": (change("nodes", 6, "bound", "scale", to=[[1] * 4]), "for schur alone"),
    "decimal square": (change("nodes", 2, "bound", "square", to="1.5"), "no fraction"),
    "two groups of scale": (change("nodes", 2, "bound", "scale", by=lambda q: q * 2), "expected scale for 1 groups"),
    "kernel too large": (change("nodes", 5, "kernel", to=[5, 5]), "larger than the input"),
    "mean too short": (lambda c: c["nodes"][1].update(mean="t7"), "a mean and a std for each channel"),
    "sum of two shapes": (change("nodes", 7, "inputs", to=[4, 6]), "expected equal shapes"),
    "second input": (lambda c: c["nodes"].insert(1, c["nodes"][0]), "the input at node 0 and nowhere else"),
    "huge factor": (change("nodes", 8, "factor", to=text(2.0**500)), "factor beyond"),
    "huge scale": (change("nodes", 5, "scale", to=text(2.0**500)), "scale beyond"),
    "no nodes": (change("nodes", to=[]), "nodes: expected a list of two"),
    "dtype unknown": (change("images", "dtype", to="int8"), "unknown dtype"),
    "short logits": (change("results", 0, "logits", by=lambda v: v[:2]), "result 0: expected 3 logits"),
    "short table": (change("head", "loss", by=lambda v: v[:2]), "head, loss: expected a list of 3"),
    "path": (change("weights", "file", to="../plain.safetensors"), "name of a file beside"),
}


@pytest.fixture(scope="module")
def right(tmp_path_factory):
    net = everything()
    return json.loads(files(net, tmp_path_factory.mktemp("right")).read_text()), net


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_missed(name, right, tmp_path):
    content, net = right
    edit, reason = CHANGES[name]
    content = copy.deepcopy(content)
    edit(content)
    rejected(write(tmp_path, content, safetensors(net.tensors)), reason)


def test_a_change_without_its_digest_is_missed(right, tmp_path):
    content, net = right
    path = write(tmp_path, copy.deepcopy(content), safetensors(net.tensors))
    path.write_text(path.read_text().replace('"words"', '"other words"', 1))
    rejected(path, "digest")


# ---- files


def test_other_weights(right, tmp_path):
    content, net = right
    path = write(tmp_path, copy.deepcopy(content), safetensors(net.tensors))
    data = bytearray((tmp_path / "plain.safetensors").read_bytes())
    data[-3] ^= 1
    (tmp_path / "plain.safetensors").write_bytes(data)
    rejected(path, "weights: another file")
    rejected(write(tmp_path, copy.deepcopy(content), bytes(data)), "node 13|head")
    other = {name: (-2 * array if name == "t2" else array, kind) for name, (array, kind) in net.tensors.items()}
    rejected(write(tmp_path, copy.deepcopy(content), safetensors(other)), "node 2 .*another square")


def test_other_config(right, tmp_path):
    content, net = right
    path = write(tmp_path, copy.deepcopy(content), safetensors(net.tensors))
    (tmp_path / "config.json").write_text('{"other": 1}')
    rejected(path, "config: another file")
    (tmp_path / "config.json").rename(tmp_path / "elsewhere")
    with pytest.raises(Unreadable, match="config"):
        check(path)
    rejected(path, "config: another file", config=tmp_path / "elsewhere")


def test_missing_files(right, tmp_path):
    content, net = right
    path = write(tmp_path, copy.deepcopy(content), safetensors(net.tensors))
    (tmp_path / "plain.safetensors").rename(tmp_path / "elsewhere")
    with pytest.raises(Unreadable, match="plain"):
        check(path)
    assert check(path, weights=tmp_path / "elsewhere")["accepted"]
    with pytest.raises(Unreadable, match="none"):
        check(tmp_path / "none")


@pytest.mark.parametrize("part", [0, 1, 10, 0.5, 0.99])
def test_truncated_certificate(part, right, tmp_path):
    content, net = right
    path = write(tmp_path, copy.deepcopy(content), safetensors(net.tensors))
    data = path.read_bytes()
    path.write_bytes(data[: int(part * len(data)) if part < 1 else part])
    rejected(path, "broken or truncated")


def file_of(header, body=bytes(8)):
    top = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(top).to_bytes(8, "little") + top + body


def entry(dtype="F32", shape=(2,), offsets=(0, 8)):
    return {"dtype": dtype, "shape": list(shape), "data_offsets": list(offsets)}


BROKEN_WEIGHTS = {
    "empty": (b"", "truncated"),
    "short": (b"\x01\x00\x00", "truncated"),
    "huge header": ((2**62).to_bytes(8, "little") + b"{}", "truncated"),
    "beyond the end": (file_of({"a": entry()})[:-1], "integer from 0 to 7"),
    "rest": (file_of({"a": entry()}, bytes(9)), "holes"),
    "hole": (file_of({"a": entry(offsets=(4, 12))}, bytes(12)), "holes"),
    "overlap": (file_of({"a": entry(), "b": entry(offsets=(4, 12))}, bytes(12)), "overlap"),
    "twice": (file_of(b'{"a": 1, "a": 2}'), "a key occurs twice"),
    "size": (file_of({"a": entry(shape=(3,))}), "do not fit the shape"),
    "half": (file_of({"a": entry("F16", (4,))}), "expected F32 or F64"),
    "integers": (file_of({"a": entry("I64", (1,))}), "expected F32 or F64"),
    "negative": (file_of({"a": entry(shape=(-2,))}), "shape: expected an integer from 0"),
    "backwards": (file_of({"a": entry(offsets=(8, 0))}), "do not fit the shape"),
    "nan": (file_of({"a": entry()}, np.array([1, np.nan], np.float32).tobytes()), "NaN or infinity"),
    "infinity": (file_of({"a": entry()}, np.array([1, -np.inf], np.float32).tobytes()), "NaN or infinity"),
    "a list": (file_of([]), "expected an object"),
    "pickle": (b"\x80\x04\x95\x00\x00\x00\x00\x00\x00\x00\x00}q\x00.", "truncated"),
}


@pytest.mark.parametrize("name", BROKEN_WEIGHTS)
def test_broken_weights(name):
    data, reason = BROKEN_WEIGHTS[name]
    with pytest.raises(Rejected, match=reason):
        read_tensors(data)


BROKEN_JSON = {
    "twice": b'{"format": "onelip certificate", "format": "onelip certificate"}',
    "nan": b'{"format": NaN}',
    "infinity": b'{"format": -Infinity}',
    "deep": b'{"format": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "many digits": b'{"version": 1' + b"0" * 5000 + b"}",
    "large integer": b'{"version": 1' + b"0" * 50 + b"}",
    "latin": b'{"format": "\xe9"}',
    "list": b"[]",
    "null": b"null",
    "true for one": b'{"format": "onelip certificate", "version": true}',
    "one point nought": b'{"format": "onelip certificate", "version": 1.0}',
}


@pytest.mark.parametrize("name", BROKEN_JSON)
def test_broken_json(name, tmp_path, capsys):
    (tmp_path / "cert.json").write_bytes(BROKEN_JSON[name])
    assert report(tmp_path / "cert.json") == 1
    assert "REJECTED: " in (said := capsys.readouterr().out)
    assert "malformed" not in said


WORDS = {"onelip", "created", "statement", "arithmetic", "source", "label"}
IMAGES_ONLY = {("images", "sha256"), ("images", "file")}


def places(content, path=()):
    yield path
    if isinstance(content, dict | list):
        for key, part in content.items() if isinstance(content, dict) else enumerate(content):
            yield from places(part, (*path, key))


def test_no_place_takes_rubbish(tmp_path, capsys):
    """Every number, word, list and object of a certificate replaced by others: always a verdict, never accepted."""
    net = Builder((2,))
    net.map(dyadic(2, 2), dyadic(2))
    images = pixels((2,), 1)
    content = net.build(images, [0])
    weights, path = safetensors(net.tensors), tmp_path / "cert.json"
    write(tmp_path, content, weights)
    assert report(path) == 0
    malformed = []
    for place in places(content):
        if not place or place[-1] in WORDS or place in IMAGES_ONLY:
            continue
        old = at(content, *place)
        for rubbish in (None, True, -1, 7, 0.5, "x", [[]], {"x": 1}):
            if (rubbish == old and type(rubbish) is type(old)) or (place == ("config",) and rubbish is None):
                continue
            change(*place, to=rubbish)(changed := copy.deepcopy(content))
            path.write_text(json.dumps(sealed(changed)))
            code = report(path)
            out = capsys.readouterr().out
            unread = place[-1] == "file" and isinstance(rubbish, str)  # another name: a file that is not there
            assert code == (2 if unread else 1), (place, rubbish, out)
            if "malformed" in out:
                malformed.append((place, rubbish, out))
    assert not malformed


# ---- images


def test_images(tmp_path):
    net = small()
    path, images = files(net, tmp_path), tmp_path / "images.npy"
    good = np.load(images)
    for wrong, reason in (
        (good[::-1], "not the images"),
        (good[:2], "expected 3 images"),
        (good.astype(np.float64), "got float64"),
        (good.astype(">f4"), "got >f4"),
    ):
        np.save(images, wrong)
        rejected(path, reason, images=images)
    images.write_bytes(b"no array")
    rejected(path, "not a .npy file", images=images)
    np.save(images, np.array([{}]), allow_pickle=True)
    rejected(path, "not a .npy file", images=images)
    with pytest.raises(Unreadable):
        check(path, images=tmp_path / "none.npy")


def test_images_out_of_range(tmp_path):
    net = small()
    for value in (1.5, -0.5, np.nan):
        path = files(net, tmp_path, images=np.full((1, 6), value) if value == value else np.zeros((1, 6)))
        if value != value:
            np.save(tmp_path / "images.npy", bad := np.full((1, 6), np.nan))
            content = json.loads(path.read_text())
            content["images"]["sha256"] = hashlib.sha256(bad.tobytes()).hexdigest()
            path.write_text(json.dumps(sealed(content)))
        rejected(path, "expected values from 0 to 1", images=tmp_path / "images.npy")


@pytest.mark.parametrize("size", [1e-6, 1e-3])
@pytest.mark.parametrize("pairs", [True, False])
def test_logits_that_are_not_those_of_the_images(size, pairs, tmp_path):
    """Radii fit the false logits, so only a run of the program can tell."""

    class Liar(Builder):
        def logits(self, x):
            return super().logits(x) + np.array([size, 0.0, 0.0])

    net = small()
    net.__class__ = Liar
    path = files(net, tmp_path, pairs=pairs)
    assert check(path)["accepted"]
    rejected(path, "more than rounding explains", images=tmp_path / "images.npy")


@pytest.mark.parametrize(
    ("edit", "make"),
    [
        (without_node(2), small),
        (change("nodes", 2, "op", to="relu"), small),
        (change("nodes", 2, "mode", to="circular"), everything),
        (change("nodes", 3, "axis", to=1), everything),
    ],
)
def test_another_program_with_the_same_numbers(edit, make, tmp_path):
    """The numbers hold for that program too; its logits are others."""

    def both(content):
        edit(content)
        node = content["nodes"][2]
        if node["op"] == "relu":
            del node["axis"]

    net = make()
    path = files(net, tmp_path, edit=both, images=pixels(net.states[0][0], 6))
    rejected(path, "more than rounding explains", images=tmp_path / "images.npy")


# ---- what the format's first draft got wrong


def test_no_pairs_around_a_circle(tmp_path):
    """Three taps fold onto the one pixel: the row is longer than its taps."""
    net = Builder((2, 1))
    net.map(dyadic(2, 2, 3), dyadic(2), padding=[[1, 1]], mode="circular")
    net.exact("flatten", (2,), np.ravel)
    rejected(files(net, tmp_path), "zero padding")
    check(files(net, tmp_path, pairs=False), images=tmp_path / "images.npy")


def test_no_pairs_with_groups_or_positions(tmp_path):
    net = Builder((2, 1))
    net.map(dyadic(2, 1, 1), groups=2)
    net.exact("flatten", (2,), np.ravel)
    rejected(files(net, tmp_path), "one output position, one group")
    net = Builder((1, 2))
    net.map(dyadic(2, 1, 1))
    net.exact("flatten", (4,), np.ravel)
    net.exact("first_channels", (2,), lambda x: x[:2], count=2)
    rejected(files(net, tmp_path), "one output position, one group")


def test_circular_padding_that_repeats_outputs(tmp_path):
    net = Builder((2, 4))
    net.map(dyadic(2, 2, 3), padding=[[2, 1]], mode="circular")
    net.exact("flatten", (10,), np.ravel)
    net.map(dyadic(2, 10), kind="cholesky", side="outputs")
    rejected(files(net, tmp_path), "circular padding is too wide")


@pytest.mark.parametrize(("mean", "std"), [(0.5, 2.0**-501), (0.5, 0.0), (0.5, -1.0), (2.0**500, 1.0)])
def test_normalisation_out_of_range(mean, std, tmp_path):
    net = small()
    index = net.normalize([mean] * 3, [abs(std) or 1.0] * 3)
    name = net.nodes[index]["std"]
    net.tensors[name] = (np.full(3, std), "F64")
    with np.errstate(all="ignore"):
        rejected(files(net, tmp_path, pairs=False), "expected .mean. < 2.500 and a std")


def test_weights_that_may_overflow(tmp_path):
    net = Builder((2,))
    net.map(dyadic(2, 2))
    for name in net.tensors:
        net.tensors[name] = (np.full(net.tensors[name][0].shape, 2.0**500), "F64")
    rejected(files(net, tmp_path), "weights beyond 2.500")


# ---- the command


def test_stands_alone():
    """Standard library, numpy, flint: no torch, nothing of onelip."""
    parts = [node for file in SOURCE.glob("*.py") for node in ast.walk(ast.parse(file.read_text()))]
    names = {a.name for node in parts if isinstance(node, ast.Import) for a in node.names}
    names |= {str(node.module) for node in parts if isinstance(node, ast.ImportFrom) and node.level == 0}
    assert all(node.level <= 1 for node in parts if isinstance(node, ast.ImportFrom))
    assert {n.split(".")[0] for n in names} - sys.stdlib_module_names == {"numpy", "flint"}


def test_as_a_file_and_as_a_module(tmp_path):
    path = files(small(), tmp_path)

    def run(*command):
        return subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True, cwd=tmp_path)

    shutil.copytree(SOURCE, tmp_path / "checker")
    done = run("-W", "error", "-m", "checker", path, "--images", tmp_path / "images.npy", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["accepted"]
    assert "node 3" in done.stderr
    done = run("-W", "error", "-m", "onelip.checker", path, "--quiet")
    assert (done.returncode, done.stderr) == (0, "")
    assert "taken from the file" in done.stdout
    code = (
        "import sys, pathlib, onelip.checker as c; c.check(pathlib.Path(sys.argv[1])); sys.exit('torch' in sys.modules)"
    )
    done = run("-c", code, path)
    assert done.returncode == 0, done.stderr
    assert run("-m", "onelip.checker").returncode == 2


def test_verb(tmp_path, capsys):
    from onelip.cli.check import run

    path = files(small(), tmp_path)
    assert run([str(path), "--images", str(tmp_path / "images.npy")]) == 0
    said = capsys.readouterr()
    assert "ACCEPTED: 3 of 3" in said.out
    assert "node 2 (maxmin)" in said.err
    assert run([str(path), "--json", "--quiet"]) == 0
    assert json.loads(capsys.readouterr().out)["certified"] == 3
    assert run([str(tmp_path / "none.json"), "--quiet"]) == 2
    assert "NOT CHECKED: cannot read" in capsys.readouterr().out
    path.write_text("{")
    assert run([str(path), "--quiet", "--json"]) == 1
    assert not json.loads(capsys.readouterr().out)["accepted"]


def test_no_margin_and_no_slope():
    """Where no perturbation matters, a margin that only equals its loss certifies nothing."""
    zero, one = Fraction(0), Fraction(1)
    head = proof.Head([[zero, zero], [zero, zero]], [[zero, one], [one, zero]], [])
    assert proof.radius_of([one, zero], 0, head, Fraction(5)) == 0
    assert proof.radius_of([Fraction(2), zero], 0, head, Fraction(5)) == 5


def test_dilated_max_pool(tmp_path):
    """With stride 2 and dilation 2 both taps read a pixel."""
    net = Builder((2, 6))
    sizes = {"kernel": [2], "stride": [2], "padding": [0], "dilation": [2]}
    net.scaled("max_pool", (2, 2), lambda x: np.maximum(x[:, :-2:2], x[:, 2::2]), up_root(Fraction(2)), **sizes)
    net.exact("flatten", (4,), np.ravel)
    net.map(dyadic(2, 4))
    check(files(net, tmp_path), images=tmp_path / "images.npy")


def test_numbers_that_may_overflow(tmp_path):
    net = small()
    for _ in range(2):
        scale(net, 2.0**260)
    rejected(files(net, tmp_path, pairs=False), "numbers beyond 2.500")


def test_ties_and_margins_within_the_loss_are_not_certified(tmp_path):
    net = Builder((2,))
    net.map([[0.5, 0.0], [0.5, 0.0], [0.0, 0.25]])
    path = files(net, tmp_path, images=np.array([[200, 100], [0, 9]], np.uint8))
    content = json.loads(path.read_text())
    assert [r["radius"] for r in content["results"]] == ["0x0.0p+0", content["results"][1]["radius"]]
    assert content["results"][0]["pixels"] is None
    assert check(path, images=tmp_path / "images.npy")["certified"] == 1
    content["results"][0]["class"] = 1
    content["summary"] = summary_of(content["results"])
    path.write_text(json.dumps(sealed(content)))
    rejected(path, "not the first of the largest")


@pytest.mark.parametrize("lie", ["x\nACCEPTED: 3 of 3", "\x1b[2J", "\ud800", "\r"])
@pytest.mark.parametrize("place", [("nodes", 2, "op"), ("weights", "file"), ("head", "x"), ("config", "file")])
def test_a_file_cannot_print_a_verdict(lie, place, tmp_path, capsysbinary):
    path = files(small(), tmp_path, edit=change(*place, to=lie))
    assert report(path, quiet=True) in (1, 2)
    said = capsysbinary.readouterr().out
    assert said.startswith((b"REJECTED", b"NOT CHECKED"))
    assert said.count(b"\n") == 1
    assert b"\x1b" not in said
    assert b"\r" not in said


@pytest.mark.parametrize("pairs", [True, False])
def test_margins_are_compared_more_closely_than_logits(pairs, tmp_path):
    """Each logit is moved by less than its own tolerance, but their difference by more than two runs can differ."""
    net = small()
    content = net.build(pixels((6,)), pairs=pairs)
    loss = max(float.fromhex(v) for v in content["head"]["loss"][content["results"][0]["class"]])
    row = np.linalg.norm(net.tensors[net.nodes[3]["weight"]][0], axis=1)
    rounding = [float.fromhex(v) for v in content["head"]["rounding"]] if pairs else None
    before, last = float(net.states[2][3]), float(net.states[3][3])
    allowed = [2 * (row[k] * before + rounding[k]) if rounding else 2 * last for k in range(3)]

    class Liar(Builder):
        def logits(self, x):
            true = super().logits(x)
            y = int(np.argmax(true))
            return true + np.array([(0.98 if k == y else -0.98) * allowed[k] for k in range(3)])

    net.__class__ = Liar
    path = files(net, tmp_path, pairs=pairs)
    assert loss < 0.98 * 2 * max(allowed)
    rejected(path, "more than rounding explains", images=tmp_path / "images.npy")


@pytest.mark.parametrize("value", ["0x1.0000000000000p+9999", "0x1.0000000000000p+1024", "-nan", "0x1p0", "1e400"])
def test_numbers_that_are_none(value, tmp_path, capsys):
    path = files(small(), tmp_path, edit=change("results", 0, "logits", 0, to=value))
    assert report(path, quiet=True) == 1
    assert "expected a finite float.hex()" in capsys.readouterr().out


def test_pipes_are_not_read(tmp_path):
    path = files(small(), tmp_path)
    (tmp_path / "plain.safetensors").unlink()
    os.mkfifo(tmp_path / "plain.safetensors")
    with pytest.raises(Unreadable, match="no such file"):
        check(path)


# ---- certificates of the library


def layers_of_every_kind():
    from torch import nn

    from onelip import nn as lip

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b, self.act = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 1), lip.MaxMin()

        def forward(self, x):
            import torch

            y = x + self.b(self.act(self.a(x)))
            return torch.cat([x, y], 1)

    circular = {"padding": 1, "padding_mode": "circular"}
    return {
        "tiling": [nn.Conv2d(4, 6, 2, stride=2), lip.GroupSort(3)],
        "circular strided": [nn.Conv2d(4, 6, 3, stride=2, **circular)],
        "circular not closing": [nn.Conv2d(4, 6, 3, stride=4, **circular)],
        "dilated strided": [nn.Conv2d(4, 6, 3, dilation=2, stride=(2, 3), padding=2)],
        "transposed grouped": [nn.ConvTranspose2d(4, 6, 3, stride=(1, 2), groups=2, dilation=(2, 1))],
        "global average": [lip.LipschitzAvgPool2d(None)],
        "maximum": [nn.MaxPool2d(3, stride=2, padding=1)],
        "channels": [lip.ConcatenationPool2d(2), lip.PadChannels(18), lip.MaxMin(), lip.FirstChannels(5), lip.Abs()],
        "residual": [Block()],
        "aol": [lip.AOLConv2d(4, 8, 3, padding=1), lip.MaxMin()],
    }


@pytest.mark.parametrize("name", layers_of_every_kind())
def test_certificates_of_the_library(name, tmp_path):
    import torch
    from safetensors.torch import save_file
    from torch import nn

    import onelip
    from onelip.certify.certificate import WeightFile, write_certificate
    from onelip.certify.predict import certify

    torch.manual_seed(0)
    layers = layers_of_every_kind()[name]
    size = math.prod(nn.Sequential(*layers)(torch.zeros(1, 4, 6, 6)).shape)
    model = onelip.bake(nn.Sequential(*layers, nn.Flatten(), nn.Linear(size, 3))).double().eval()
    images = torch.randint(0, 256, (3, 4, 6, 6), dtype=torch.uint8)
    save_file(model.state_dict(), tmp_path / "plain.safetensors")
    np.save(tmp_path / "images.npy", images.numpy())
    found = certify(model, images, torch.tensor([0, 1, 2]), proof="exact")
    path = tmp_path / "cert.json"
    write_certificate(path, found, images, WeightFile(tmp_path / "plain.safetensors"), source="random")
    verdict = check(path, images=tmp_path / "images.npy")
    assert verdict["certified"] == int((found.radii > 0).sum())
