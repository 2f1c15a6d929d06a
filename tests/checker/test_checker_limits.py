"""Files that are small but expensive to check are rejected by an estimate, before anything is computed."""

import hashlib
import json
import math
import os
import subprocess
import sys
import time
import types
from fractions import Fraction

import numpy as np
import pytest
from _certificate_files import safetensors, sealed, write
from _certificates import Builder
from _certified_networks import dyadic, everything, files, pixels, rejected, small

from onelip.checker import Rejected, certificate, check, norms, program
from onelip.checker.reading import TrackedDict

ONE = {"lipschitz": "1", "norm": "1", "error": "1", "place": ""}


def node(op, inputs, shape, **settings):
    return {"op": op, "inputs": inputs, "shape": shape, **ONE, **settings}


def layer(inputs, shape, weight="w", *, op="affine", axes=0, kind="schur", side="inputs", steps=1, **settings):
    bound = {"kind": kind, "side": side} | ({"steps": steps, "scale": ["1"]} if kind == "schur" else {})
    each = {"stride": [1] * axes, "dilation": [1] * axes, "offset": [0] * axes, "circular": [False] * axes}
    same = {"weight": weight, "bias": None, "groups": 1, "transposed": False, "bound": bound}
    numbers = {"sigma": "1", "absolute": "1", "bias_norm": "0"}
    return node(op, inputs, shape, **(same | each | numbers | settings))


def last(nodes):
    """With two logits, whatever the nodes are."""
    return [*nodes, node("join", [len(nodes) - 1], [2])]


def chain(*nodes):
    """Nodes (op, shape, settings), each with the one before as its input; the input has 4 pixels."""
    found = [node("input", [], [1, 4])]
    for op, shape, *settings in nodes:
        found.append(node(op, [len(found) - 1] * (2 if op == "add" else 1), shape, **(settings[0] if settings else {})))
    return last(found)


def wide(op, **settings):
    """2^25 entries from 4, through 150 nodes of a kind."""
    return chain(("join", [2, 2**24]), *[(op, [2, 2**24], settings)] * 150)


def weights(*shape, kind="F32", spread=0):
    rng = np.random.default_rng(0)
    return {"w": (rng.normal(size=shape) * 2.0 ** rng.integers(-spread, 1 + min(spread, 400), shape), kind)}


def image(size, channels=1):
    return [node("input", [], [1, 4]), node("join", [0], [channels, *size])]


HALF = {"factor": (0.5).hex()}
WINDOWS = {"take": [[0, 1, 2, 3] * 100] * 10, "constant": "1"}
ROWS, COLUMNS = (
    [node("input", [], [1, 4]), node("join", [0], [20_000])],
    [node("input", [], [1, 4]), node("join", [0], [1])],
)
# Nodes and tensors; each file is smaller than 100 kB.
EXPENSIVE = {
    "many columns": (last([*ROWS, layer([1], [1])]), weights(1, 20_000)),
    "many columns by cholesky": (last([*ROWS, layer([1], [1], kind="cholesky")]), weights(1, 20_000)),
    "many rows": (last([*COLUMNS, layer([1], [20_000], side="outputs")]), weights(20_000, 1)),
    "many taps": (last([*image([4, 4]), layer([1], [1, 4, 4], axes=2, steps=4)]), weights(1, 1, 50, 50)),
    "many taps on one axis": (last([*image([4]), layer([1], [1, 4], axes=1, steps=2)]), weights(1, 1, 20_000)),
    "many steps": (last([*image([4, 4], 24), layer([1], [24, 4, 4], axes=2, steps=4)]), weights(24, 24, 3, 3)),
    "long integers": (
        last([*image([4, 4], 10), layer([1], [10, 4, 4], axes=2, steps=4)]),
        weights(10, 10, 3, 3, kind="F64", spread=1000),
    ),
    "phases": (
        last([*image([4]), layer([1], [1, 1], axes=1, stride=[10**9])]),
        weights(1, 1, 20_000),
    ),
    "potential": (
        last([*image([4, 4], 24), layer([1], [24, 4, 4], op="potential", axes=2, steps=4)]),
        weights(24, 24, 3, 3),
    ),
    "padding": (
        last([*image([1, 1]), layer([1], [1, 2**13, 2**13], axes=2, offset=[2**12, 2**12])]),
        weights(1, 1, 20, 20),
    ),
    "transposed": (
        last([*image([1, 1]), layer([1], [1, 2**13, 2**13], axes=2, stride=[2**13] * 2, transposed=True)]),
        weights(1, 1, 20, 20),
    ),
    "groups": (
        last([*image([2**10], 2**14), layer([1], [2**14, 2**10], axes=1, groups=2**14)]),
        weights(2**14, 1, 1),
        300,
    ),
    "one weight many times": (
        last([node("input", [], [1, 4]), node("join", [0], [64]), *(layer([i], [64], steps=4) for i in range(1, 150))]),
        weights(64, 64, kind="F64", spread=1000),
    ),
    "one input many times": (
        [node("input", [], [1, 4]), node("join", [0], [2**20]), node("join", [1] * 5000, [2])],
        {},
    ),
    "joins": (last([*image([2**24]), *(node("join", [i] * 8, [2**26]) for i in range(1, 13))]), {}),
    "long chain": (chain(*[("relu", [1, 4])] * 10, ("join", [2**24]), *[("relu", [2**24])] * 600), {}),
    "windows": (last([*image([4], 2**17), node("max", [1], [2**17, 400], **WINDOWS)]), {}),
    "sums": (last([*image([4], 2**17), node("sum", [1], [2**17, 400], **HALF, **WINDOWS)]), {}),
    "relu": (wide("relu"), {}),
    "abs": (wide("abs"), {}),
    "add": (wide("add"), {}),
    "scale": (wide("scale", **HALF), {}),
    "sort": (wide("sort", axis=0, group_size=2), {}),
    "normalize": (wide("normalize", mean="w", std="w", mean_norm="0"), weights(2)),
}


def forged(directory, nodes, tensors, results=1):
    """Complete files, of which only the numbers are wrong."""
    content = {
        "format": certificate.FORMAT,
        "version": certificate.VERSION,
        "onelip": "0",
        "created": "",
        "statement": certificate.STATEMENT,
        "arithmetic": certificate.ARITHMETIC,
        "weights": {"file": "plain.safetensors", "sha256": ""},
        "config": None,
        "images": {"source": "", "file": "images.npy", "sha256": "0" * 64, "dtype": "uint8"}
        | {"count": results, "shape": [1, 4]},
        "preprocessing": {"divide_by": 255},
        "nodes": nodes,
        "pairs": False,
        "results": [
            {"index": i, "label": None, "class": 0, "logits": ["0x0.0p+0"] * 2, "radius": "0x0.0p+0", "pixels": None}
            for i in range(results)
        ],
        "summary": {"count": results, "certified": 0, "cra": {}},
    }
    return write(directory, content, safetensors(tensors), images=np.zeros((results, 1, 4), np.uint8))


@pytest.fixture
def nothing_is_computed(monkeypatch):
    def fail(*given):
        raise AssertionError("computed")

    for module, name in ((program, "prove"), (norms, "to_integers"), (norms, "matrix"), (program.Layer, "run")):
        monkeypatch.setattr(module, name, fail)


@pytest.mark.parametrize("name", EXPENSIVE)
def test_rejected_before_anything_is_computed(name, tmp_path, nothing_is_computed):
    path = forged(tmp_path, *EXPENSIVE[name])
    assert sum(file.stat().st_size for file in tmp_path.iterdir()) < 150_000
    with pytest.raises(
        Rejected, match=r"estimated (work|memory) .*, limit .* for node \d+ .*; --max-(minutes|memory) "
    ):
        check(path)


# Kilobytes that the process has held at most. Not ru_maxrss, which starts with that of the process that started it.
PEAK = """
import re
from pathlib import Path

def peak():
    return int(re.findall(r"VmHWM:\\s*(\\d+)", Path("/proc/self/status").read_text())[0])
"""

MEASURE = f"""{PEAK}
import resource, sys
resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30))
resource.setrlimit(resource.RLIMIT_CPU, (60, 60))
from onelip.checker import Rejected, check
import flint
before = peak()
for path in sys.argv[1:]:
    try:
        check(Path(path))
    except Rejected:
        continue
    raise SystemExit(f"{{path}} was not rejected")
print((peak() - before) * 1024)
"""


def test_rejected_in_little_memory(tmp_path):
    """All of the files one after the other, with a limit on the address space."""
    paths = []
    for name, forgery in EXPENSIVE.items():
        paths.append(forged(tmp_path / name, *forgery))
    paths.append(write_json(tmp_path / "objects", b'{"format": [' + b"{}," * 10**7 + b"{}]}"))
    paths.append(write_json(tmp_path / "deep", b"[" * 10**6))
    paths.append(write_json(tmp_path / "huge", b"{}", size=10**11))
    command = [sys.executable, "-c", MEASURE, *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 200e6


READ = f"""{PEAK}
import numpy as np
from onelip.checker.program import bit_length
from onelip.checker.reading import Rejected, read_tensors

data = bytes(64 * 2**20)
header = b'{{"a": {{"dtype": "F32", "shape": [%d], "data_offsets": [0, %d]}}}}' % (len(data) // 4, len(data))
data = len(header).to_bytes(8, "little") + header + data
try:
    read_tensors(data, 0.15)
except Rejected as error:
    print(error)
before = peak()
bit_length(read_tensors(data, 0.25)["a"])
print((peak() - before) * 1024 / len(data))
"""


def test_weights_are_read_in_the_estimated_memory():
    """Three times the file with it: float64 numbers take twice the space of float32."""
    done = subprocess.run([sys.executable, "-c", READ], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    reason, grown = done.stdout.splitlines()
    assert "estimated memory 0.2 GB, limit 0.15 GB" in reason
    assert float(grown) < 3


@pytest.mark.parametrize("size", [1, 2**20, 2**20 + 1, 3 * 2**20])
def test_bit_length_of_long_arrays(size):
    """The largest and the smallest number may be in different parts of an array."""
    array = np.zeros(size)
    array[0], array[-1] = 2.0**-30, 3.0 * 2.0**20
    assert program.bit_length(array) == (2 if size == 1 else 52)
    assert program.bit_length(np.zeros(size)) == 1


def write_json(directory, data, size=None):
    directory.mkdir()
    (directory / "cert.json").write_bytes(data)
    if size:
        os.truncate(directory / "cert.json", size)  # a sparse file
    return directory / "cert.json"


def test_unused_nodes(tmp_path):
    """Of which a network has none: they would only cost memory."""
    nodes = last([node("input", [], [1, 4]), *(node("join", [0], [2**26]) for _ in range(12))])
    rejected(forged(tmp_path, nodes, {}), r"unused nodes: \[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11\]")


def test_images_are_counted(tmp_path):
    """The same program is too expensive for many images, but not for one, nor where there are none to run."""
    nodes, tensors = last([*image([64, 64], 64), layer([1], [64, 64, 64], axes=2)]), weights(64, 64, 3, 3)
    path = forged(tmp_path, nodes, tensors, 10_000)
    rejected(path, "estimated work .* most of it for node 2")
    (tmp_path / "images.npy").unlink()
    rejected(path, "node 0 .*norm: not the smallest")
    rejected(forged(tmp_path, nodes, tensors, 1), "node 0 .*norm: not the smallest")


def test_limits_can_be_set(tmp_path):
    path = files(everything(), tmp_path)
    rejected(path, r"estimated work .* min of one core, limit 0 min .*--max-minutes 1 allows it", max_minutes=0)
    rejected(path, r"estimated memory .* GB, limit 0\.05 GB.*--max-memory 0\.1 allows it", max_memory=0.05)
    rejected(path, "estimated work", max_minutes=math.nan)
    assert check(path, max_minutes=1, max_memory=0.1)["accepted"]


def test_the_advice_is_enough(tmp_path):
    """With the limits that the rejections name the file passes."""
    path, given = forged(tmp_path, *EXPENSIVE["many columns"]), {}
    for flag, key in (("--max-minutes", "max_minutes"), ("--max-memory", "max_memory")):
        with pytest.raises(Rejected, match=flag) as found:
            check(path, **given)
        given[key] = float(str(found.value).split(flag)[1].split()[0])
    rejected(path, "node 0 .*norm: not the smallest", **given)


def test_flags(tmp_path, capsys):
    from onelip.cli.check import run

    path = files(small(), tmp_path)
    assert run([str(path), "--max-minutes", "0"]) == 1
    assert "REJECTED: certificate: estimated work" in capsys.readouterr().out
    assert run([str(path), "--max-memory", "0.01"]) == 1
    assert "--max-memory 0.1 allows it" in capsys.readouterr().out
    done = subprocess.run(
        [sys.executable, "-m", "onelip.checker", str(path), "--max-minutes", "0"], capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "estimated work" in json.loads(done.stdout)["reason"]


def real(width, convolutions, dense, count):
    """Estimates for a network with the layers of AOL-Small, in which all layers of a kind share one weight."""
    rng = np.random.default_rng(0)
    tensors = {"c": rng.normal(size=(192, 192, 3, 3)), "d": rng.normal(size=(width, width))}
    tensors = TrackedDict([(name, array.astype(np.float32).astype(np.float64)) for name, array in tensors.items()])
    nodes = [node("input", [], [3, 32, 32]), node("join", [0], [192, 8, 8])]
    for _ in range(convolutions):
        nodes += [layer([len(nodes) - 1], [192, 8, 8], "c", axes=2, steps=2)]
    nodes.append(node("join", [len(nodes) - 1], [width]))
    for _ in range(dense):
        nodes += [layer([len(nodes) - 1], [width], "d", kind="cholesky")]
    return program.estimate(
        [TrackedDict([(k, tracked(v)) for k, v in n.items()]) for n in last(nodes)], tensors, count, count
    )


def tracked(value):
    return TrackedDict([*value.items()]) if isinstance(value, dict) else value


def test_real_networks_pass():
    """AOL-Small takes about four minutes, and as long again for 10,000 images (results/cifar10_certificate.json)."""
    seconds, memory, batch, *_ = real(1024, 12, 14, 10_000)
    assert 300 < seconds < 2000
    assert memory < 2e9
    assert batch == 100


def test_bit_lengths():
    assert program.bit_length(np.array([0.0, 1.0, -3.0, 0.5])) == 3  # 0, 2, -6, 1
    assert program.bit_length(np.array([2.0**100, 2.0**90])) == 11
    assert program.bit_length(np.array([1.0, 2.0**-1074])) == 1075
    assert program.bit_length(np.zeros(3)) == 1
    for seed in range(20):
        array = np.random.default_rng(seed).normal(size=50) * 2.0 ** np.random.default_rng(seed).integers(-60, 60, 50)
        whole, _ = norms.to_integers(array)
        assert program.bit_length(array) == max(abs(int(v)) for v in whole).bit_length()


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_products_are_counted(steps, monkeypatch):
    """The estimate has as many products of matrices as are computed, and as many of row sums."""
    weight, settings = dyadic(2, 2, 2, 3), {"axes": 2, "steps": steps, "sigma": "1"}
    tensors = TrackedDict([("w", weight)])
    given = layer([0], [2, 4, 4], **settings)
    given["bound"]["scale"] = ["1 1"]
    made = program.Layer(given, [2, 4, 4], tensors)
    calls = {"estimated": 0.0, "taps": 0}
    monkeypatch.setattr(program, "seconds_of_product", lambda *sizes: 1e6)
    calls["estimated"] = program.cost_of_sigma(given, made, 9.0)[0] / 1e6
    rows, product = norms.row_sums, norms.product

    def count(one, other):
        calls["taps"] += len(one) * len(other)
        return product(one, other)

    monkeypatch.setattr(norms, "product", count)
    monkeypatch.setattr(norms, "row_sums", rows)
    with pytest.raises(Rejected, match="sigma"):
        norms.prove_sigma(given, made, *norms.to_integers(made.weight))
    assert calls["estimated"] == pytest.approx(calls["taps"] / 2, rel=1e-3)


def test_radii_of_the_summary_cost_one_comparison_each(tmp_path, monkeypatch):
    path = files(small(), tmp_path, images=pixels((6,), 50))
    content = json.loads(path.read_text())
    content["summary"]["cra"] = dict.fromkeys((f"{i}/9999" for i in range(1, 500)), 0)
    path.write_text(json.dumps(sealed(content)))
    calls, fraction = [], norms.fraction
    monkeypatch.setattr(certificate, "fraction", lambda text: calls.append(text) or fraction(text))
    rejected(path, "certificate: ")
    assert len(calls) <= 499


def test_phases_are_split_once(monkeypatch):
    """A stride as long as the kernel makes one channel of each tap, in one array."""
    weight = dyadic(1, 1, 500)
    made = program.Layer(layer([0], [1, 1], axes=1, stride=[500]), [1, 500], TrackedDict([("w", weight)]))
    calls, zeros = [], np.zeros
    monkeypatch.setattr(np, "zeros", lambda *given: calls.append(given) or zeros(*given))
    (part,) = norms.kernels(made.weight, made, "inputs").values()
    assert len(calls) == 1
    assert (part.ravel() == weight.ravel()).all()


def test_values_are_freed_after_their_last_use(tmp_path):
    """A chain needs the memory of its largest node, not of all."""
    short, long = (
        program.estimate([TrackedDict([*n.items()]) for n in chain(*[("relu", [1, 2**20])] * n)], TrackedDict([]), 1, 1)
        for n in (5, 500)
    )
    assert short[1] == long[1]
    assert long[0] > 50 * short[0]
    net = Builder((6,))
    first = net.map(dyadic(6, 6))
    net.exact("relu", (6,), lambda x: np.maximum(x, 0))
    net.exact("abs", (6,), np.abs)
    net.add(first, len(net.nodes) - 1)
    net.add(0, len(net.nodes) - 1)
    net.map(dyadic(3, 6))
    assert check(files(net, tmp_path), images=tmp_path / "images.npy")["logits_checked"]


def seconds_of_logits(tmp_path, count):
    """CPU time of running `count` nodes that one join reads, so that all of them stay in memory."""
    images = np.zeros((1, 2), dtype=np.uint8)
    np.save(tmp_path / "images.npy", images)
    nodes = [{"inputs": []}, *({"inputs": [0]} for _ in range(count)), {"inputs": [*range(1, count + 1)]}]
    data = {"dtype": "uint8", "shape": [2], "count": 1, "sha256": hashlib.sha256(images.tobytes()).hexdigest()}
    content = {"images": data, "results": [{"logits": [(0.0).hex()] * 2}], "nodes": nodes}
    proved = [types.SimpleNamespace(run=lambda x, *others: x, error=0)] * len(nodes)
    start = time.process_time()
    assert certificate.check_logits(tmp_path / "images.npy", content, proved, 1, lambda topic, message: None) == 0
    return time.process_time() - start


def test_the_time_of_a_wide_program_is_linear(tmp_path):
    short, long = (min(seconds_of_logits(tmp_path, count) for _ in range(3)) for count in (1000, 8000))
    assert long < 24 * short  # 8 times as many nodes; it was the square of that


def test_deep_trees_of_frequencies_are_rejected_before_their_points_are_computed(monkeypatch):
    """Each halving adds a bit to a point, and powers multiply the bits: 900 halvings took minutes."""
    kernel = np.ones((400, 1, 1, 1))
    monkeypatch.setattr(norms, "powers", lambda *_: pytest.fail("a point was computed"))
    assert not norms.is_covered(kernel, Fraction(800), "0" * 900 + "1")


def test_powers_of_points_are_exact():
    t = Fraction(3, 1024)
    a = 2 * math.atan(t) + math.pi / 2
    found = norms.powers(t, 1, 50)
    assert np.allclose(found, np.exp(1j * a * np.arange(50)), rtol=0, atol=1e-14)
    assert max(abs(abs(z) - 1) for z in found) < 2**-51
