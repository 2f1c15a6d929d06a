"""Every place of a certificate changed, its digest made to fit: the checker misses what was there.

Each rejection is told from the others by its reason, so that a test fails if just its own check is taken away.
"""

import copy
import json

import pytest
from _certificate_files import safetensors, sealed, write
from _certificates import Builder
from _certified_networks import (
    at,
    built,
    change,
    changed,
    dyadic,
    everything,
    files,
    less,
    more,
    pixels,
    rejected,
    small,
    without_node,
)
from _exact_layers import text

from onelip.checker import report


def swap(i, j):
    def edit(content):
        nodes = content["nodes"]
        nodes[i], nodes[j] = nodes[j], nodes[i]

    return edit


def pad_logits(content):
    """Logits without end, which cost a file nothing and a table of all pairs much."""
    last = content["nodes"][-1]
    numbers = {key: last[key] for key in ("lipschitz", "norm", "error", "place")}
    content["nodes"].append({"op": "join", "inputs": [len(content["nodes"]) - 1], "shape": [2**20], **numbers})


def swap_class(content):
    content["results"][0]["class"] = (content["results"][0]["class"] + 1) % 3


def swap_label(content):
    result = content["results"][0]
    result["label"] = (result["class"] + (result["class"] == result["label"])) % 3


def raise_logit(content):
    result = content["results"][0]
    change("logits", result["class"], by=lambda v: text(float.fromhex(v) + 1e-9))(result)


CHANGES = {
    "version": (change("version", to=3), "expected version 2, got 3"),
    "version 1": (change("version", to=1), "expected version 2, got 1; certify again"),
    "format": (change("format", to="another"), "expected a onelip certificate"),
    "unknown part": (change("more", to=1), "certificate, unknown 'more'; of a newer version"),
    "unknown op": (change("nodes", 1, "op", to="conv4d"), "no rule for it"),
    "unknown setting": (change("nodes", 2, "ceil", to=1), "node 2 .*unknown"),
    "unknown kind": (change("nodes", 2, "bound", "kind", to="svd"), "node 2 .*bound, kind: expected schur or cholesky"),
    "scale": (change("nodes", 2, "bound", "scale", 0, 1, by=lambda q: q + 1), "node 2 .*bound, square: expected"),
    "scale 0": (
        change("nodes", 2, "bound", "scale", 0, 1, to=0),
        "node 2 .*scale: expected lists of integers from 1 to 2.2000",
    ),
    "scale short": (
        change("nodes", 2, "bound", "scale", 0, by=lambda q: q[1:]),
        "node 2 .*scale: expected 4 integers for each of 1 groups",
    ),
    "steps": (change("nodes", 2, "bound", "steps", to=1), "node 2 .*bound, square: expected"),
    "side": (change("nodes", 2, "bound", "side", to="outputs"), "node 2 .*bound, square: expected"),
    "square": (change("nodes", 2, "bound", "square", to="1/1"), "node 2 .*bound, square: expected"),
    "lowest terms": (change("nodes", 2, "bound", "square", to="4/2"), "node 2 .*bound, square: expected .*, got '4/2'"),
    "cholesky square": (change("nodes", 6, "bound", "square", to="1/999"), "node 6 .*not proved"),
    "sigma": (change("nodes", 2, "sigma", by=less), "node 2 .*sigma"),
    "absolute": (change("nodes", 2, "absolute", by=less), "node 2 .*absolute"),
    "bias_norm": (change("nodes", 2, "bias_norm", by=less), "node 2 .*bias_norm"),
    "lipschitz": (change("nodes", 9, "lipschitz", by=less), "node 9 .*lipschitz"),
    "norm": (change("nodes", 13, "norm", by=more), "node 13 .*norm"),
    "error": (change("nodes", 14, "error", by=less), "node 14 .*error"),
    "input norm": (change("nodes", 0, "norm", by=less), "node 0 .*norm: expected"),
    "input error": (change("nodes", 0, "error", by=less), "node 0 .*error: expected"),
    "input lipschitz": (change("nodes", 0, "lipschitz", by=less), "node 0 .*lipschitz: expected"),
    "input shape": (change("nodes", 0, "shape", to=[64]), r"node 1 .*cannot reshape"),
    "input of another size": (change("nodes", 0, "shape", to=[4, 4, 3]), r"node 0 .*norm: expected"),
    "images shape": (change("images", "shape", to=[64]), r"images, shape: expected \[4, 4, 4\]"),
    "head node": (change("head", "node", to=11), "not the linear map"),
    "head other": (change("head", "node", to=14), "not the linear map"),
    "pairs": (change("head", "node", to=None), "head, distance: expected"),
    "classes": (change("nodes", 14, "shape", to=[4]), "head: expected tables for 4 logits"),
    "distance": (change("head", "distance", 0, 1, by=less), "head, distance"),
    "rounding": (change("head", "rounding", 2, by=less), "head, rounding"),
    "slope": (change("head", "slope", 0, 1, by=less), "head, slope"),
    "loss": (change("head", "loss", 2, 1, by=less), "head, loss"),
    "diagonal": (change("head", "loss", 1, 1, by=more), "head, loss"),
    "radius": (change("results", 0, "radius", by=more), "result 0, radius"),
    "radius smaller": (change("results", 0, "radius", by=less), "result 0, radius"),
    "pixels": (change("results", 0, "pixels", by=lambda n: n + 1), "result 0, pixels: expected"),
    "class": (swap_class, "result 0, class: expected"),
    "label": (swap_label, "summary: expected .*accuracy"),
    "labels": (change("results", 0, "label", to=None), "labels for all of them or for none"),
    "logits": (raise_logit, "result 0, radius"),
    "logits nan": (change("results", 0, "logits", 0, to="nan"), "finite float.hex"),
    "logits inf": (change("results", 0, "logits", 0, to="inf"), "finite float.hex"),
    "logits decimal": (change("results", 0, "logits", 0, to="0.5"), "finite float.hex"),
    "index": (change("results", 1, "index", to=0), "result 1, index: expected 1, got 0"),
    "result gone": (change("results", by=lambda r: r[:-1]), "images, count: expected 2, got 3"),
    "result and count": (change("images", "count", to=2), "images, count: expected 3, got 2"),
    "certified": (
        change("summary", "certified", by=lambda n: n - 1),
        "summary: expected .*.certified.: 3, .* got .*.certified.: 2",
    ),
    "count": (change("summary", "count", to=4), "summary: expected .*.count.: 3, .* got .*.count.: 4"),
    "cra": (change("summary", "cra", "36/255", by=lambda v: v + 0.125), "summary: expected .*36/255"),
    "cra radius": (change("summary", "cra", "0x1/2", to=1.0), "summary, cra: expected at most 1000 radii as 36/255"),
    "accuracy": (change("summary", "accuracy", to=0.9), "summary: expected .*accuracy"),
    "preprocessing": (change("preprocessing", "divide_by", to=1), "preprocessing: expected .*255.*, got .*1"),
    "dtype": (
        change("images", "dtype", to="float64"),
        "result 0, pixels: expected None",
    ),
    "node removed": (without_node(8), "node 8 .*lipschitz"),
    "nodes swapped": (swap(2, 3), "node 2 .*inputs: expected 1 of the nodes before, got .2"),
    "input later": (change("nodes", 3, "inputs", to=[3]), "node 3 .*inputs: expected 1 of the nodes before, got .3"),
    "two inputs": (change("nodes", 3, "inputs", to=[2, 2]), "node 3 .*inputs: expected 1 of the nodes"),
    "another input": (change("nodes", 7, "inputs", to=[5, 5]), "node 7 "),
    "stride": (change("nodes", 2, "stride", to=[2, 1]), "node 2 .*scale: expected 8 integers"),
    "stride of linear": (change("nodes", 11, "stride", to=[1]), "node 11 .*ValueError"),
    "dilation": (change("nodes", 2, "dilation", to=[2]), "node 2 .*ValueError"),
    "offset": (change("nodes", 2, "offset", to=[1, 1, 1]), "node 2 .*ValueError"),
    "more pixels": (change("nodes", 2, "shape", to=[4, 4, 5]), "node 2 .*bias_norm"),
    "more channels": (change("nodes", 2, "shape", to=[5, 4, 4]), r"node 2 .*shape: expected 4 channels"),
    "around twice": (lambda c: c["nodes"][2].update(circular=[True, False], shape=[4, 8, 4]), "more than once around"),
    "groups": (change("nodes", 2, "groups", to=2), "node 2 .*scale: expected 4 integers for each of 2 groups"),
    "circular": (change("nodes", 2, "circular", to="reflect"), "node 2 .*circular: expected true or false .*'reflect'"),
    "circular as numbers": (change("nodes", 2, "circular", to=[1, 0]), "node 2 .*circular: expected true or false"),
    "transposed": (change("nodes", 2, "transposed", to=True), "node 2 .*bound, square: expected"),
    "transposed as a number": (change("nodes", 2, "transposed", to=0), "node 2 .*transposed: expected true or false"),
    "weight name": (
        change("nodes", 2, "weight", to="t99"),
        "node 2 .*expected tensors of the weight file, got .*t99",
    ),
    "bias gone": (change("nodes", 2, "bias", to=None), "node 2 .*bias_norm"),
    "axis": (change("nodes", 3, "axis", to=3), "node 3 .*IndexError"),
    "groups of all": (change("nodes", 3, "group_size", to=3), "node 3 .*cannot reshape"),
    "smaller window": (change("nodes", 5, "take", by=lambda t: t[:2]), "node 5 .*lipschitz"),
    "fewer windows": (change("nodes", 4, "take", by=lambda t: [row[1:] for row in t]), "node 4 .*shape: expected"),
    "uneven windows": (change("nodes", 4, "take", 0, by=lambda row: row[1:]), "node 4 .*ValueError"),
    "pixel twice": (change("nodes", 5, "take", 1, 0, by=lambda i: i + 1), "node 5 .*lipschitz"),
    "no such pixel": (change("nodes", 5, "take", 0, 0, to=16), "node 5 .*IndexError"),
    "negative pixel": (change("nodes", 5, "take", 0, 0, to=-2), "node 5 .*take: expected lists of integers from -1"),
    "no pixel": (lambda c: [change(4, "take", k, 5, to=-1)(c["nodes"]) for k in range(9)], "holds no pixel"),
    "no window": (change("nodes", 5, "take", to=[]), "node 5 .*"),
    "pool scale": (change("nodes", 5, "factor", to=text(0.7)), "node 5 .*lipschitz"),
    "factor": (change("nodes", 8, "factor", to=text(-0.3)), "node 8 .*lipschitz"),
    "mean": (change("nodes", 1, "mean", to="t1"), "node 1 .*norm"),
    "count of channels": (change("nodes", 14, "shape", to=[2]), "head: expected tables for 2 logits"),
    "shape": (change("nodes", 10, "shape", to=[16, 2]), "node 11 .*ValueError"),
    "shape of a sum": (change("nodes", 7, "shape", to=[16]), r"node 7 .*shape: expected \[4, 2, 2\], got \[16\]"),
    "missing": (lambda content: content["nodes"][2].pop("bound"), "node 2 .*bound is missing"),
    "bias of another": (change("nodes", 2, "bias", to="t8"), "node 2 .*cannot reshape"),
    "vector for a kernel": (change("nodes", 2, "weight", to="t3"), "node 2 .*ValueError"),
    "image into linear": (change("nodes", 11, "inputs", to=[9]), "node 11 .*ValueError"),
    "three groups": (change("nodes", 2, "groups", to=3), "node 2 .*cannot reshape"),
    "transposed circle": (
        lambda c: c["nodes"][2].update(circular=[True, False], transposed=True),
        "circular, but transposed",
    ),
    "absurd shape": (change("nodes", 10, "shape", to=[2**20, 2**20]), "node 10 .*at most 2.28 entries in all nodes"),
    "no shape": (change("nodes", 10, "shape", to=[]), "node 10 .*shape: expected 1 to 8 axes"),
    "empty shape": (change("nodes", 10, "shape", to=[32, 0]), "node 10 .*shape: expected 1 to 8 axes"),
    "scale of cholesky": (change("nodes", 6, "bound", "scale", to=[[1] * 4]), "node 6 .*bound: cholesky is for"),
    "more of a bound": (change("nodes", 6, "bound", "more", to=1), "node 6 .*bound, unknown 'more'"),
    "decimal square": (
        change("nodes", 2, "bound", "square", to="1.5"),
        "node 2 .*bound, square: expected .*, got '1.5'",
    ),
    "two groups of scale": (
        change("nodes", 2, "bound", "scale", by=lambda q: q * 2),
        "node 2 .*scale: expected 4 integers for each of 1 groups",
    ),
    "mean too short": (lambda c: c["nodes"][1].update(mean="t7"), "node 1 .*cannot reshape"),
    "sum of two shapes": (change("nodes", 7, "inputs", to=[4, 6]), "expected equal shapes"),
    "second input": (lambda c: c["nodes"].insert(1, c["nodes"][0]), "the input at node 0 and nowhere else"),
    "huge factor": (change("nodes", 8, "factor", to=text(2.0**500)), "node 8 .*factor beyond"),
    "huge scale": (change("nodes", 5, "factor", to=text(2.0**500)), "node 5 .*factor beyond"),
    "no nodes": (change("nodes", to=[]), "nodes: expected two or more"),
    "dtype unknown": (change("images", "dtype", to="int8"), "images, dtype: expected one of"),
    "short logits": (change("results", 0, "logits", by=lambda v: v[:2]), "result 0: expected 3 logits"),
    "short table": (change("head", "loss", by=lambda v: v[:2]), "head: expected tables for 3 logits"),
    "many logits": (pad_logits, "head: expected 2 to 4096 logits"),
    "many radii": (
        change("summary", "cra", to=dict.fromkeys(map(str, range(1001)), 0.0)),
        "summary, cra: expected at most 1000 radii",
    ),
    "no cra": (lambda content: content["summary"].pop("cra"), "summary, cra is missing"),
    "place": (change("nodes", 2, "place", to=1), "node 2 .*place: expected a text"),
    "word": (change("created", to=None), "created: expected a text"),
    "true for one": (change("nodes", 2, "groups", to=True), "node 2 .*groups: expected an integer"),
    "true for one, derived": (change("results", 1, "index", to=True), "result 1, index: expected 1, got True"),
    "one point nought": (change("summary", "count", to=3.0), "summary: expected .*.count.: 3, .* got .*.count.: 3.0"),
    "true for a node": (change("head", "node", to=True), "head, node: expected an integer"),
    "label too high": (change("results", 0, "label", to=3), "result 0: .*a label below 3"),
    "short hexadecimal": (change("nodes", 8, "factor", to="-0x1.9p-2"), "node 8 .*factor: expected a finite float.hex"),
    "join of others": (change("nodes", 9, "inputs", to=[4, 8]), "node 9 .*lipschitz"),
    "join of one": (change("nodes", 9, "inputs", to=[7]), "node 9 .*lipschitz"),
    "join of none": (change("nodes", 9, "inputs", to=[]), "node 9 .*inputs: expected 1 of the nodes before"),
    "negative offset": (change("nodes", 2, "offset", to=[1, -1]), "node 2 .*offset: expected integers from 0"),
    "more of a file": (change("weights", "more", to=1), "weights, unknown 'more'"),
    "no results": (change("results", to=[]), "results: expected one or more"),
    "path": (change("weights", "file", to="/plain.safetensors"), "weights, file: expected a relative path"),
}


@pytest.fixture(scope="module")
def right(tmp_path_factory):
    return built(everything(), tmp_path_factory.mktemp("right"))


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_noticed(name, right, tmp_path):
    edit, reason = CHANGES[name]
    rejected(changed(right, tmp_path, edit), reason)


def test_a_change_without_its_digest_is_noticed(right, tmp_path):
    content, net = right
    path = write(tmp_path, copy.deepcopy(content), safetensors(net.tensors))
    path.write_text(path.read_text().replace('"made"', '"other words"', 1))
    rejected(path, "digest")


@pytest.mark.parametrize("value", ["0x1.0000000000000p+9999", "0x1.0000000000000p+1024", "-nan", "0x1p0", "1e400"])
def test_numbers_that_are_none(value, tmp_path, capsys):
    path = files(small(), tmp_path, edit=change("results", 0, "logits", 0, to=value))
    assert report(path, quiet=True) == 1
    assert "expected a finite float.hex()" in capsys.readouterr().out


WORDS = {"onelip", "created", "source", "label", "place"}

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
    assert report(path) == 3  # without images
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
            renamed = place[-1] == "file" and isinstance(rubbish, str)  # another name: found by its hash
            assert code == (3 if renamed else 1), (place, rubbish, out)
            if "malformed" in out:
                malformed.append((place, rubbish, out))
    assert not malformed
