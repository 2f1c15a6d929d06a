"""Every value of a certificate is changed, with a matching digest: the checker must reject it.

Each rejection is identified by its reason, so that a test fails if only its own check is removed.
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
    report,
    small,
    without_node,
)
from _exact_layers import text


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
    content["pairs"] = False


def swap_class(content):
    content["results"][0]["class"] = (content["results"][0]["class"] + 1) % 3


def swap_label(content):
    result = content["results"][0]
    result["label"] = (result["class"] + (result["class"] == result["label"])) % 3


def raise_logit(content):
    result = content["results"][0]
    change("logits", result["class"], by=lambda v: text(float.fromhex(v) + 1e-9))(result)


def doubled(fraction):
    numerator, denominator = fraction.split("/")
    return f"{2 * int(numerator)}/{2 * int(denominator)}"


CHANGES = {
    "version": (change("version", to=4), "expected version 3, got 4; use the onelip that wrote it"),
    "version 1": (change("version", to=1), "expected version 3, got 1; certify again"),
    "version 2": (change("version", to=2), "expected version 3, got 2; certify again"),
    "format": (change("format", to="another"), "expected a onelip certificate"),
    "unknown part": (change("more", to=1), "unknown keys .'more'.; written by a newer version"),
    "unknown op": (change("nodes", 1, "op", to="conv4d"), "node 1 .*unknown op .conv4d."),
    "unknown setting": (change("nodes", 2, "ceil", to=1), "unknown keys .'ceil'."),
    "unknown kind": (change("nodes", 2, "bound", "kind", to="svd"), "node 2 .*expected one of .*cholesky"),
    "scale": (change("nodes", 2, "bound", "scale", 0, to="3 7 9 1"), "node 2 .*sigma: not the smallest"),
    "scale 0": (change("nodes", 2, "bound", "scale", 0, to="3 7 0 1"), "node 2 .*scale: expected 4 integers above 0"),
    "scale negative": (
        change("nodes", 2, "bound", "scale", 0, to="3 7 -9 1"),
        "node 2 .*scale: expected 4 integers above",
    ),
    "scale short": (
        change("nodes", 2, "bound", "scale", 0, to="3 7 9"),
        "node 2 .*scale: expected 4 integers above 0 for each of 1 groups",
    ),
    "steps": (change("nodes", 2, "bound", "steps", to=1), "node 2 .*sigma: not the smallest"),
    "side": (change("nodes", 2, "bound", "side", to="outputs"), "node 2 .*sigma: not the smallest"),
    "no side": (
        change("nodes", 2, "bound", "side", to="left"),
        "node 2 .*bound: expected .*inputs",
    ),
    "sigma 1": (change("nodes", 2, "sigma", to="1"), "node 2 .*sigma: not the smallest"),
    "sigma larger": (change("nodes", 2, "sigma", by=more), "node 2 .*sigma: not the smallest"),
    "cholesky sigma": (change("nodes", 6, "sigma", to="1/1024"), "node 6 .*sigma: not proved"),
    "cholesky sigma larger": (change("nodes", 6, "sigma", by=more), "node 6 .*(lipschitz|norm): not the smallest"),
    "sigma": (change("nodes", 2, "sigma", by=less), "node 2 .*sigma"),
    "absolute": (change("nodes", 2, "absolute", by=less), "node 2 .*absolute"),
    "bias_norm": (change("nodes", 2, "bias_norm", by=less), "node 2 .*bias_norm"),
    "lipschitz": (change("nodes", 9, "lipschitz", by=less), "node 9 .*lipschitz"),
    "norm": (change("nodes", 13, "norm", by=more), "node 13 .*norm"),
    "error": (change("nodes", 12, "error", by=less), "node 12 .*error"),
    "not in lowest terms": (
        change("nodes", 12, "error", by=doubled),
        "node 12 .*error: expected a float64 in lowest terms",
    ),
    "input norm": (change("nodes", 0, "norm", by=less), "node 0 .*norm: not the smallest"),
    "input error": (change("nodes", 0, "error", by=less), "node 0 .*error: not the smallest"),
    "input lipschitz": (change("nodes", 0, "lipschitz", by=less), "node 0 .*lipschitz: not the smallest"),
    "input shape": (change("nodes", 0, "shape", to=[64]), r"certificate: shape: expected \[64\], got \[4, 4, 4\]"),
    "input of another size": (
        change("nodes", 0, "shape", to=[4, 4, 3]),
        r"shape: expected \[4, 4, 3\], got \[4, 4, 4\]",
    ),
    "images shape": (change("images", "shape", to=[64]), r"certificate: shape: expected \[4, 4, 4\]"),
    "pairs": (change("pairs", to=False), "result 0: radius"),
    "pairs as a word": (change("pairs", to="yes"), "pairs: expected true or false"),
    "more classes": (change("nodes", 14, "shape", to=[4]), "result 0: logits: expected 4, got 3"),
    "fewer classes": (change("nodes", 14, "shape", to=[2]), "result 0: logits: expected 2, got 3"),
    "one class": (change("nodes", 14, "shape", to=[1]), "expected 2 to 4096 logits, got 1"),
    "the cut left out": (lambda c: c["nodes"].pop(), "result 0: logits: expected 4, got 3"),
    "steps as true": (change("nodes", 6, "bound", "steps", to=True), "unknown keys .'steps'."),
    "no results": (change("results", to=[]), "results: expected a list, not empty"),
    "many axes": (change("nodes", 10, "shape", to=[9999999999] * 200), "node 10 .*shape: expected 1 to 8 axes"),
    "digits that look like others": (change("summary", "cra", "\u09ea/255", to=3), "expected a fraction"),
    "spaces in a radius": (change("summary", "cra", " 0", to=3), "expected a fraction"),
    "a radius below nothing": (change("summary", "cra", "0/-7", to=3), "expected a fraction"),
    "circular as a text": (change("nodes", 11, "circular", to=""), "node 11 .*circular: expected true or false"),
    "radius": (change("results", 0, "radius", by=more), "result 0: radius: not the largest"),
    "radius smaller": (change("results", 0, "radius", by=less), "result 0: radius: not the largest"),
    "no radius": (change("results", 0, "radius", to=text(0.0)), "result 0: radius: not the largest"),
    "radius negative": (change("results", 0, "radius", by=lambda v: "-" + v), "result 0: radius: not the largest"),
    "pixels": (change("results", 0, "pixels", by=lambda n: n + 1), "result 0: pixels: expected"),
    "class": (swap_class, "result 0: class: expected"),
    "label": (swap_label, "certificate: 0: expected"),
    "logits": (raise_logit, "result 0: radius"),
    "logits nan": (change("results", 0, "logits", 0, to="nan"), "result 0: malformed value .ValueError"),
    "logits inf": (change("results", 0, "logits", 0, to="inf"), "result 0: malformed value .OverflowError"),
    "logits decimal": (change("results", 0, "logits", 0, to="0.5"), "result 0: expected a float.hex.., got 0.5"),
    "radius decimal": (change("results", 0, "radius", to="0.9"), "result 0: expected a float.hex.., got 0.9"),
    "index": (change("results", 1, "index", to=0), "result 1: index: expected 1, got 0"),
    "result gone": (change("results", by=lambda r: r[:-1]), "count: expected 2, got 3"),
    "result and count": (change("images", "count", to=2), "count: expected 3, got 2"),
    "certified": (change("summary", "certified", by=lambda n: n - 1), "certified: expected 3, got 2"),
    "count": (change("summary", "count", to=4), "count: expected 3, got 4"),
    "cra": (change("summary", "cra", "36/255", by=lambda v: v + 1), "36/255: expected"),
    "cra as a share": (change("summary", "cra", "36/255", to=0.5), "expected an integer, got 0.5"),
    "cra of less than nothing": (change("summary", "cra", "-1", to=3), "expected a fraction"),
    "words elsewhere": (change("summary", "source", to="verified by all"), "unknown keys .'source'."),
    "true for one": (
        change("nodes", 2, "groups", to=True),
        "node 2 .*integers from 1 to 2.34, got .True",
    ),
    "true for a pixel": (change("nodes", 5, "take", 0, 0, to=False), "node 5 .*expected integers from -1"),
    "no table": (change("summary", "cra", to=[]), "cra: expected an object"),
    "a long number": (change("summary", "cra", "1e-99999999", to=0), "expected a fraction"),
    "true for a label": (change("results", 1, "label", to=True), "result 1: expected integers"),
    "sigma as a number": (change("nodes", 6, "sigma", to=1), "node 6 .*TypeError"),
    "sigma as a decimal": (change("nodes", 6, "sigma", to="1.0"), "node 6 .*expected a fraction"),
    "sigma that is no float": (change("nodes", 6, "sigma", to="4/3"), "node 6 .*sigma: expected a float64"),
    "sigma with a space": (change("nodes", 6, "sigma", to=" 1"), "node 6 .*expected a fraction"),
    "cra radius": (change("summary", "cra", "half", to=1), "expected a fraction"),
    "one more radius": (change("summary", "cra", "1/7", to=3), "1/7: expected"),
    "accuracy": (change("summary", "cra", "0", by=lambda v: v + 1), "certificate: 0: expected"),
    "preprocessing": (change("preprocessing", "divide_by", to=1), "divide_by: expected 255, got 1"),
    "dtype": (change("images", "dtype", to="float64"), "result 0: pixels: expected None"),
    "node removed": (without_node(8), "node 8 .*lipschitz"),
    "nodes swapped": (swap(2, 3), "node 2 .*inputs: expected 1 earlier nodes"),
    "input later": (change("nodes", 3, "inputs", to=[3]), "node 3 .*inputs: expected 1 earlier nodes"),
    "negative input": (
        change("nodes", 3, "inputs", to=[-1]),
        "node 3 .*integers from 0 to 2.34, got .-1",
    ),
    "two inputs": (change("nodes", 3, "inputs", to=[2, 2]), "node 3 .*inputs: expected 1 earlier nodes, got .2, 2."),
    "another input": (change("nodes", 7, "inputs", to=[5, 5]), "unused nodes: .6."),
    "stride": (change("nodes", 2, "stride", to=[2, 1]), "node 2 .*scale: expected 8 integers"),
    "no stride": (change("nodes", 2, "stride", to=[0, 1]), "node 2 .*expected integers from 1 to 2.34, got"),
    "no dilation": (change("nodes", 2, "dilation", to=[1, 0]), "node 2 .*expected integers from 1 to 2.34, got"),
    "stride of linear": (change("nodes", 11, "stride", to=[1]), "node 11 .*axes: expected 0"),
    "dilation": (change("nodes", 2, "dilation", to=[2]), "node 2 .*axes: expected 2"),
    "offset": (change("nodes", 2, "offset", to=[1, 1, 1]), "node 2 .*axes: expected 2"),
    "more pixels": (change("nodes", 2, "shape", to=[4, 4, 5]), "node 2 .*bias_norm"),
    "more channels": (change("nodes", 2, "shape", to=[5, 4, 4]), r"node 2 .*shape: expected 4 channels"),
    "around twice": (
        lambda c: c["nodes"][2].update(circular=[True, False], shape=[4, 8, 4]),
        "circular: expected one turn at most",
    ),
    "groups": (change("nodes", 2, "groups", to=2), "node 2 .*weight: expected an input of 8 channels, got 4"),
    "circular": (change("nodes", 2, "circular", to="reflect"), "node 2 .*circular: expected true or false"),
    "circular as numbers": (change("nodes", 2, "circular", to=[2, 0]), "node 2 .*circular: expected true or false"),
    "transposed": (change("nodes", 2, "transposed", to=True), "node 2 .*sigma: not the smallest"),
    "transposed as a word": (change("nodes", 2, "transposed", to="no"), "node 2 .*transposed, circular: expected true"),
    "weight name": (change("nodes", 2, "weight", to="t99"), "node 2 .*'t99' is missing"),
    "bias gone": (change("nodes", 2, "bias", to=None), "node 2 .*bias_norm"),
    "axis": (change("nodes", 3, "axis", to=3), "node 3 .*axis: expected 0 to 2, got 3"),
    "axis from behind": (change("nodes", 3, "axis", to=-1), "node 3 .*expected integers from 0"),
    "groups of all": (change("nodes", 3, "group_size", to=3), "node 3 .*group_size: expected a divisor of 4, got 3"),
    "smaller window": (change("nodes", 5, "take", by=lambda t: t[:2]), "node 5 .*constant"),
    "fewer windows": (
        change("nodes", 4, "take", by=lambda t: [row[1:] for row in t]),
        "node 4 .*shape: expected 60 entries",
    ),
    "uneven windows": (
        change("nodes", 4, "take", 0, by=lambda row: row[1:]),
        "node 4 .*take: expected lists of equal length",
    ),
    "pixel twice": (change("nodes", 5, "take", 1, 0, by=lambda i: i + 1), "node 5 .*constant"),
    "no such pixel": (change("nodes", 5, "take", 0, 0, to=16), "node 5 .*take: expected pixels below 16, got 16"),
    "no window": (change("nodes", 5, "take", to=[]), "node 5 .*"),
    "pool scale": (change("nodes", 5, "factor", to=text(0.7)), "node 5 .*constant"),
    "constant": (change("nodes", 4, "constant", by=more), "node 4 .*constant: not the smallest"),
    "mean_norm": (change("nodes", 1, "mean_norm", by=less), "node 1 .*mean_norm: not the smallest"),
    "factor": (change("nodes", 8, "factor", to=text(-0.3)), "node 8 .*lipschitz"),
    "mean": (change("nodes", 1, "mean", to="t1"), "node 1 .*mean_norm"),
    "count of channels": (change("nodes", 13, "shape", to=[3]), "node 13 .*shape: expected 4 channels"),
    "shape": (change("nodes", 10, "shape", to=[16, 2]), "node 11 .*weight: expected an input of 32 channels, got 16"),
    "shape of a sum": (change("nodes", 7, "shape", to=[16]), r"node 7 .*shape: expected \[4, 2, 2\], got \[16\]"),
    "missing": (lambda content: content["nodes"][2].pop("bound"), "node 2 .*'bound' is missing"),
    "bias of another": (change("nodes", 2, "bias", to="t8"), "node 2 .*bias: expected 4 numbers"),
    "vector for a kernel": (change("nodes", 2, "weight", to="t3"), "node 2 .*weight: expected at least two axes"),
    "image into linear": (change("nodes", 11, "inputs", to=[9]), "unused nodes: .10."),
    "three groups": (change("nodes", 2, "groups", to=3), "node 2 .*groups: expected a divisor of 4, got 3"),
    "transposed circle": (
        lambda c: c["nodes"][2].update(circular=[True, False], transposed=True),
        "circular: expected one turn at most",
    ),
    "absurd shape": (change("nodes", 10, "shape", to=[2**20, 2**20]), "node 10 .*2.26 entries"),
    "no shape": (change("nodes", 10, "shape", to=[]), "node 10 .*shape: expected"),
    "empty shape": (change("nodes", 10, "shape", to=[32, 0]), "node 10 .*expected integers from 1"),
    "scale of cholesky": (change("nodes", 6, "bound", "scale", to=["1 1 1 1"]), "unknown keys .'scale'."),
    "more of a bound": (change("nodes", 6, "bound", "more", to=1), "unknown keys .'more'."),
    "two groups of scale": (
        change("nodes", 2, "bound", "scale", by=lambda q: q * 2),
        "node 2 .*scale: expected 4 integers above 0 for each of 1 groups",
    ),
    "mean too short": (lambda c: c["nodes"][1].update(mean="t7"), "node 1 .*mean, std: expected 4 numbers each"),
    "sum of two shapes": (change("nodes", 7, "inputs", to=[4, 6]), "expected equal shapes"),
    "second input": (lambda c: c["nodes"].insert(1, c["nodes"][0]), "expected op input at node 0 and nowhere else"),
    "huge factor": (change("nodes", 8, "factor", to=text(2.0**500)), "node 8 .*factor beyond"),
    "huge scale": (change("nodes", 5, "factor", to=text(2.0**500)), "node 5 .*factor beyond"),
    "no nodes": (change("nodes", to=[]), "nodes: expected a list"),
    "dtype unknown": (change("images", "dtype", to="int8"), "images, dtype: expected one of"),
    "short logits": (change("results", 0, "logits", by=lambda v: v[:2]), "result 0: logits: expected 3, got 2"),
    "many logits": (pad_logits, "expected 2 to 4096 logits"),
    "no cra": (lambda content: content["summary"].pop("cra"), "certificate: .cra. is missing"),
    "true for one, derived": (change("results", 1, "index", to=True), "result 1: index: expected 1, got True"),
    "one point nought": (change("summary", "count", to=3.0), "expected an integer, got 3.0"),
    "many digits": (change("nodes", 2, "offset", to=[1, 10**20]), "expected an integer, got 10000"),
    "a large offset": (change("nodes", 2, "offset", to=[1, 2**34]), "node 2 .*expected integers from 0 to 2.34"),
    "join of others": (change("nodes", 9, "inputs", to=[4, 8]), "node 9 .*lipschitz"),
    "join of one": (change("nodes", 9, "inputs", to=[7]), "unused nodes: .8."),
    "join of none": (change("nodes", 9, "inputs", to=[]), "node 9 .*inputs: expected 1 earlier nodes"),
    "more of a file": (change("weights", "more", to=1), "unknown keys .'more'."),
    "more of a result": (change("results", 1, "radius_linf", to="0x1p0"), "unknown keys .'radius_linf'."),
    "no hash": (change("images", "sha256", to=""), "sha256: expected 64 digits"),
    "statement": (change("statement", to="All is well."), "statement: expected"),
    "arithmetic": (change("arithmetic", to="real"), "arithmetic: expected"),
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


@pytest.mark.parametrize("part", ["weights", "config"])
def test_a_file_without_a_hash_is_no_file(part, right, tmp_path):
    path = changed(right, tmp_path, lambda content: None)
    content = json.loads(path.read_text())
    for rubbish in (None, "", 0):
        content[part]["sha256"] = rubbish
        path.write_text(json.dumps(sealed(content)))
        rejected(path, "not the file that was certified")


@pytest.mark.parametrize("value", ["0x1.0000000000000p+9999", "0x1.0000000000000p+1024", "-nan", "1e400", "x", "0x"])
def test_numbers_that_are_none(value, tmp_path):
    path = files(small(), tmp_path, edit=change("results", 0, "logits", 0, to=value))
    said, code = report(path)
    assert code == 1
    assert "result 0: " in said


WORDS = {"onelip", "created", "source", "place"}  # for people

NOT_DERIVED = {("images", "sha256"), ("images", "file")}  # of images that are not there


def places(content, path=()):
    yield path
    if isinstance(content, dict | list):
        for key, part in content.items() if isinstance(content, dict) else enumerate(content):
            yield from places(part, (*path, key))


def test_no_place_takes_rubbish(tmp_path):
    """Every number, word, list and object of a certificate replaced by others: always a verdict, never accepted.

    True is 1 and false is 0, also in Python; no label and a label that is no class are the same, no hit.
    """
    net = Builder((2,))
    net.map(dyadic(2, 2), dyadic(2))
    images = pixels((2,), 1)
    content = net.build(images, [0])
    assert content["summary"]["cra"]["0"] == 1  # the label counts
    weights, path = safetensors(net.tensors), tmp_path / "cert.json"
    write(tmp_path, content, weights)
    assert report(path)[1] == 3  # without images
    for place in places(content):
        if not place or place[-1] in WORDS or place in NOT_DERIVED:
            continue
        old = at(content, *place)
        for rubbish in (None, True, -1, 7, 0.5, "x", [[]], {"x": 1}):
            if rubbish == old or (place == ("config",) and rubbish is None):
                continue
            change(*place, to=rubbish)(changed := copy.deepcopy(content))
            path.write_text(json.dumps(sealed(changed)))
            said, code = report(path)
            renamed = place[-1] == "file" and isinstance(rubbish, str)  # not there under this name, nor the suffix
            assert code == (2 if renamed else 1), (place, rubbish, said)
