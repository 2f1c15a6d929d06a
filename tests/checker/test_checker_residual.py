"""The checker and the nodes `potential`, x - 2 V^T relu(V x + b), and `exponential`, the series of a skew convolution.

A second writer derives them independently; a certificate that leaves out one term, or changes one number, is rejected.
"""

import copy
import math
from fractions import Fraction
from functools import reduce

import numpy as np
import pytest
from _certificate_files import safetensors, write
from _certificates import Builder
from _certified_networks import (
    built,
    change,
    changed,
    dyadic,
    files,
    gain_squared,
    less,
    more,
    pixels,
    potential,
    rejected,
    scale,
    series,
    skew,
)

from onelip.checker import check
from onelip.checker.program import gain

SAME = [[1, 1], [1, 1]]


def residual(drop=()):
    """||V|| > 1 at first, then not, around a circle and in groups."""
    net = Builder((4, 4, 4), drop)
    potential(net, 2 * dyadic(6, 4, 3, 3), dyadic(6, seed=1), padding=SAME, steps=2)
    potential(net, dyadic(6, 2, 3, 1), padding=[[2, 2], [0, 0]], dilation=[2, 1], groups=2, mode="circular")
    net.exact("join", (64,), np.ravel)
    net.map(dyadic(3, 64), dyadic(3), side="outputs")
    return net


def rotated(drop=()):
    """More channels, then fewer in groups and around a circle, with dilation."""
    net = Builder((3, 4, 4), drop)
    series(net, skew(5, 5, 3, 3), dyadic(4, seed=1), kept=4, terms=3, padding=SAME, steps=2)
    net.exact("relu", (4, 4, 4), lambda x: np.maximum(x, 0))
    around = {"padding": [[2, 2], [0, 0]], "dilation": [2, 1], "mode": "circular"}
    series(net, skew(6, 3, 3, 1), kept=2, terms=6, factor=-0.75, groups=2, **around)
    net.exact("join", (32,), np.ravel)
    net.map(dyadic(3, 32), dyadic(3), side="outputs")
    return net


def faint(drop, add, *given, **settings):
    """Nothing but underflow comes to the node."""
    net = Builder((4,), drop)
    net.map(np.zeros((4, 4)))
    net.exact("join", (2, 2), lambda x: x.reshape(2, 2))
    add(net, *given, padding=[[1, 1]], **settings)
    net.exact("join", (4,), np.ravel)
    net.map(dyadic(3, 4), [0.5, -0.25, 0.0])
    return net


def faint_residual(drop=()):
    return faint(drop, potential, dyadic(3, 2, 3))


def faint_rotated(drop=()):
    return faint(drop, series, skew(2, 2, 3), kept=2, terms=2)


# For each kind of node: a network with it as node 1, and one with it as node 3.
NETWORKS = {"potential": (residual, faint_residual), "exponential": (rotated, faint_rotated)}


@pytest.mark.parametrize("make", [make for both in NETWORKS.values() for make in both])
def test_two_derivations_agree(make, tmp_path):
    net = make()
    verdict = check(files(net, tmp_path), images=tmp_path / "images.npy")
    assert verdict["logits_checked"]
    assert verdict["logits_apart"] < 1e-13
    assert verdict["lipschitz"] == float(net.states[-1][1])


# Terms of the error analysis, by the reason for which a certificate without them is rejected.
DROPPED = {
    "potential": {
        "node 1 .*lipschitz": ["factor"],
        "node 1 .*norm": ["value at 0"],
        "node 1 .*error": [
            "products of V",
            "bias",
            "V x",
            "bias inside",
            "rounding inside",
            "products of the adjoint",
            "x",
            "what is taken away",
            "error carried",
            "rounding of V",
            "of the adjoint",
            "difference",
        ],
        "node 3 .*error": [
            "underflow of V",
            "underflow of the adjoint",
            "rounding of it",
            "underflow of the difference",
        ],
    },
    "exponential": {
        "node 1 .*gain": ["gain"],
        "node 1 .*norm": ["bias in norm"],
        "node 1 .*error": [
            "error in the size",
            "products",
            "error in the products",
            "x",
            "S v",
            "error in the sum",
            "sum",
            "error carried by S",
            "rounding of S",
            "rounding of the sum",
            "length",
            "value",
            "error of the value",
            "bias",
            "rounding of the series",
            "rounding at the end",
            "error",
        ],
        "node 3 .*error": ["underflow of products", "underflow of the sum", "underflow at the end"],
    },
}
CASES = [(kind, term, reason) for kind, groups in DROPPED.items() for reason, terms in groups.items() for term in terms]


@pytest.mark.parametrize(("kind", "term", "reason"), CASES)
def test_a_term_left_out_is_missed(kind, term, reason, tmp_path):
    make = NETWORKS[kind]["node 3" in reason]
    rejected(files(make({f"{kind}: {term}"}), tmp_path), reason)


@pytest.mark.parametrize("kind", NETWORKS)
def test_every_term_of_the_writer_is_left_out_once(kind):
    used = set().union(*(make().used for make in NETWORKS[kind]))
    named = sorted(term for term in used if term.startswith(f"{kind}: "))
    assert named == sorted(f"{kind}: {term}" for other, term, _ in CASES if other == kind)


COMMON = {
    "no bound": (lambda content: content["nodes"][1].pop("bound"), "node 1 .*'bound' is missing"),
    "sigma": (change("nodes", 1, "sigma", by=less), "node 1 .*sigma"),
    "absolute": (change("nodes", 1, "absolute", by=less), "node 1 .*absolute"),
    "bias_norm": (change("nodes", 1, "bias_norm", by=less), "node 1 .*bias_norm"),
    "lipschitz": (change("nodes", 1, "lipschitz", by=less), "node 1 .*lipschitz"),
    "norm": (change("nodes", 1, "norm", by=less), "node 1 .*norm"),
    "error": (change("nodes", 1, "error", by=less), "node 1 .*error"),
    "two inputs": (change("nodes", 2, "inputs", to=[0, 1]), "node 2 .*inputs: expected 1 earlier nodes"),
}
CHANGES = {
    "potential": {
        **COMMON,
        "sigma 1": (change("nodes", 1, "sigma", to="1"), "node 1 .*sigma: not the smallest"),
        "steps": (change("nodes", 1, "bound", "steps", to=1), "node 1 .*sigma: not the smallest"),
        "a convolution": (change("nodes", 1, "op", to="affine"), "node 1 .*shape: expected 6 channels, got .4, 4, 4"),
        "a potential": (change("nodes", 4, "op", to="potential"), r"node 4 .*shape: expected 64 channels, got \[3\]"),
        "of a newer version": (
            change("nodes", 1, "op", to="potential2"),
            "node 1 .*unknown op .potential2.; written by a newer version",
        ),
        "unknown setting": (change("nodes", 1, "factor", to=2), "unknown keys .'factor'"),
        "shape": (change("nodes", 1, "shape", to=[4, 4, 3]), "node 1 .*bias_norm|node 1 .*shape"),
        "around": (change("nodes", 2, "stride", to=[2, 1]), "node 2 .*circular: expected one turn at most"),
        "reflect": (change("nodes", 1, "circular", to="reflect"), "node 1 .*circular: expected true or false"),
        "stride": (change("nodes", 1, "stride", to=[2, 2]), "node 1 .*scale: expected 16 integers above 0"),
        "groups": (change("nodes", 2, "groups", to=1), "node 2 .*weight: expected an input of 2 channels, got 4"),
    },
    "exponential": {
        **COMMON,
        "no gain": (lambda content: content["nodes"][1].pop("gain"), "node 1 .*'gain' is missing"),
        "no terms": (lambda content: content["nodes"][1].pop("terms"), "node 1 .*'terms' is missing"),
        "no factor": (lambda content: content["nodes"][1].pop("factor"), "node 1 .*'factor' is missing"),
        "gain": (change("nodes", 1, "gain", by=less), "node 1 .*gain"),
        "gain 1": (change("nodes", 1, "gain", to="1"), "node 1 .*gain"),
        "more gain": (change("nodes", 1, "gain", by=more), "node 1 .*gain"),
        "terms": (change("nodes", 1, "terms", to=4), "node 1 .*(gain|error|lipschitz)"),
        "no terms at all": (change("nodes", 1, "terms", to=0), "node 1 .*expected integers from 1"),
        "many terms": (change("nodes", 1, "terms", to=31), "node 1 .*terms: expected 1 to 30"),
        "terms as a number": (change("nodes", 1, "terms", to=True), "node 1 .*expected integers"),
        "factor": (change("nodes", 3, "factor", to=(0.5).hex()), "node 3 .*lipschitz"),
        "factor as a fraction": (change("nodes", 3, "factor", to="1/2"), "node 3 .*malformed value"),
        "infinite factor": (change("nodes", 3, "factor", to="inf"), "node 3 .*malformed value"),
        "huge factor": (change("nodes", 3, "factor", to=(2.0**501).hex()), "node 3 .*factor below 2.500"),
        "a convolution": (change("nodes", 1, "op", to="affine"), "node 1 .*expected an input of 5 channels, got 3"),
        "a potential": (change("nodes", 1, "op", to="potential"), "node 1 .*expected an input of 5 channels, got 3"),
        "shape": (change("nodes", 1, "shape", to=[4, 4, 3]), "node 1 .*(bias_norm|outputs of the size)"),
        "more channels": (change("nodes", 1, "shape", to=[6, 4, 4]), "node 1 .*weight"),
        "channels that are no groups": (change("nodes", 3, "shape", to=[3, 4, 4]), "node 3 .*weight"),
        "stride": (change("nodes", 3, "stride", to=[1, 2]), "node 3 .*"),
        "not centred": (change("nodes", 1, "offset", to=[0, 1]), "node 1 .*centred"),
        "dilation": (change("nodes", 1, "dilation", to=[2, 1]), "node 1 .*centred"),
        "transposed": (change("nodes", 1, "transposed", to=True), "node 1 .*centred"),
        "groups": (change("nodes", 3, "groups", to=1), "node 3 .*"),
        "unknown setting": (change("nodes", 1, "series", to=2), "unknown keys .'series'"),
    },
}


@pytest.fixture(scope="module")
def right(tmp_path_factory):
    """For each kind of node, a right certificate."""
    return {kind: built(make(), tmp_path_factory.mktemp(kind)) for kind, (make, _) in NETWORKS.items()}


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, changes in CHANGES.items() for name in changes])
def test_a_change_is_noticed(kind, name, right, tmp_path):
    edit, reason = CHANGES[kind][name]
    rejected(changed(right[kind], tmp_path, edit), reason)


@pytest.mark.parametrize(("kind", "channels"), [("potential", 4), ("exponential", 3)])
def test_another_border_has_other_logits(kind, channels, right, tmp_path):
    """The numbers are those of every border, so only the images tell; which program is certified, the file says."""
    content, net = right[kind]
    change("nodes", 1, "circular", to=[True, True])(content := copy.deepcopy(content))
    path = write(tmp_path, content, safetensors(net.tensors), images=pixels((channels, 4, 4)))
    check(path)
    rejected(path, "more than rounding explains", images=tmp_path / "images.npy")


# Potentials.

KERNELS = [
    ((2, 5), (4, 2, 3), {"padding": [[2, 0]]}),
    ((2, 5), (4, 2, 3), {"padding": [[2, 0]], "mode": "circular"}),
    ((2, 5), (4, 2, 4), {"padding": [[1, 2]], "mode": "circular", "side": "outputs"}),
    ((2, 2), (2, 2, 3), {"padding": [[0, 2]], "mode": "circular"}),
    ((2, 1), (2, 2, 3), {"padding": [[1, 1]], "mode": "circular"}),
    ((2, 4, 3), (2, 2, 1, 3), {"padding": [[0, 0], [1, 1]], "mode": "circular"}),
    ((4, 3, 4), (6, 2, 3, 3), {"padding": [[2, 2], [1, 1]], "dilation": [2, 1], "groups": 2}),
    ((2, 2, 3, 2), (3, 2, 3, 1, 2), {"padding": [[1, 1], [0, 0], [0, 1]], "mode": "circular"}),
    ((3, 4), (2, 3, 1), {"kind": "cholesky", "side": "outputs"}),
    ((3, 4), (3, 1, 1), {"groups": 3}),
    ((3, 4), (2, 3, 3), {"padding": [[1, 1]]}),
]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("shape", "kernel", "given"), KERNELS, ids=str)
def test_kernels_and_their_adjoints(shape, kernel, given, bias, tmp_path):
    """Against the transpose of a matrix that is made entry by entry."""
    net = Builder(shape)
    weight = dyadic(*kernel) * (kernel != (2, 3, 3))  # none at all, there
    potential(net, weight, dyadic(kernel[0]) if bias else None, **given)
    n = int(np.prod(shape))
    net.exact("join", (n,), np.ravel)
    net.map(dyadic(2, n), kind="cholesky", side="outputs")
    assert check(files(net, tmp_path), images=tmp_path / "images.npy")["logits_apart"] < 1e-13


def test_a_potential_is_not_transposed(tmp_path):
    """Also where shapes fit, and everything else is as it would be."""
    net = Builder((2, 4))
    potential(net, dyadic(2, 2, 3), transposed=True, padding=[[1, 1]])
    net.exact("join", (8,), np.ravel)
    net.map(dyadic(2, 8), kind="cholesky", side="outputs")
    rejected(files(net, tmp_path), "node 1 .*transposed: expected false")


HADAMARD = reduce(np.kron, [np.array([[1.0, 1.0], [1.0, -1.0]])] * 4)


@pytest.mark.parametrize(
    ("power", "weight", "reason"),
    [
        (497, np.eye(2), "node 3 .*may overflow"),  # x - 2 x
        (480, 2.0**15 * np.eye(2), "node 3 .*may overflow"),  # V^T
        (490, 2.0**15 * np.eye(2), "node 3 .*may overflow"),  # V
        (491, HADAMARD, "node 3 .*may overflow"),  # V^T, though V^T V is short: |V| is longer than V
        (496, np.eye(2), None),
    ],
)
def test_potentials_that_may_overflow(power, weight, reason, tmp_path):
    net = Builder((len(weight), 1))
    scale(net, 2.0**260)
    scale(net, 2.0 ** (power - 260))
    potential(net, weight[..., None])
    scale(net, 2.0**-490)
    net.exact("join", (len(weight),), np.ravel)
    path = files(net, tmp_path, pairs=False)
    rejected(path, reason) if reason else check(path, images=tmp_path / "images.npy")


# Exponentials.


@pytest.mark.parametrize("terms", [1, 2, 3, 4, 5, 7, 12, 30])
@pytest.mark.parametrize("sigma", [Fraction(0), Fraction(1, 3), Fraction(2), Fraction(8)])
def test_gain(terms, sigma):
    if terms < 10 or sigma < 3:  # fractions are slow
        assert gain(terms, sigma) == gain_squared(terms, sigma)
    a = np.linspace(0, float(sigma), 1001)
    seen = np.abs(sum((1j * a) ** j / math.factorial(j) for j in range(terms + 1))).max() ** 2
    assert seen <= float(gain(terms, sigma)) * (1 + 1e-12)
    assert float(gain(terms, sigma)) <= seen * 1.1


def one_layer(weight, sizes=(4,), kept=2, **given):
    net = Builder((kept, *sizes))
    series(net, weight, kept=kept, **given)
    net.exact("join", (kept * math.prod(sizes),), np.ravel)
    net.map(dyadic(2, kept * math.prod(sizes)), kind="cholesky", side="outputs")
    return net


def test_only_skew_kernels(tmp_path):
    """All else is as it would be: the series of these kernels may have any norm."""
    kernels = {"skew": skew(2, 2, 3), "symmetric": np.abs(skew(2, 2, 3)), "one entry": skew(2, 2, 3)}
    kernels["one entry"][0, 1, 0] += 1 / 64
    kernels["not reversed"] = skew(2, 2, 1).repeat(3, axis=2) * np.array([1, 0, 2])
    for name, weight in kernels.items():
        path = files(one_layer(weight, padding=[[1, 1]]), tmp_path)
        check(path) if name == "skew" else rejected(path, "node 1 .*weight: expected a skew kernel")
    rejected(files(one_layer(skew(2, 1, 3), groups=2, kept=2, padding=[[0, 2]]), tmp_path), "node 1 .*centred")
    wide = np.concatenate([skew(2, 2, 3), np.zeros((2, 1, 3))], axis=1)
    net = one_layer(skew(2, 2, 3), padding=[[1, 1]])
    net.tensors[net.nodes[1]["weight"]] = wide, "F32"
    rejected(files(net, tmp_path), "node 1 ")


def test_even_kernels(tmp_path):
    """They have no middle on the grid of pixels, unless dilation gives them one."""
    rejected(files(one_layer(skew(2, 2, 2), padding=[[1, 0]]), tmp_path), "node 1 .*centred")
    check(files(one_layer(skew(2, 2, 2), padding=[[1, 1]], dilation=[2]), tmp_path), images=tmp_path / "images.npy")


def test_an_output_of_another_size(tmp_path):
    """A last pixel less: S is no longer square, so it has no exponential."""
    net = one_layer(skew(2, 2, 3), padding=[[1, 1]])
    content = net.build(pixels((2, 4)))
    content["nodes"][1]["shape"] = [2, 3]
    rejected(write(tmp_path, content, safetensors(net.tensors)), "node 1 .*outputs of the size")


def test_large_kernels_are_refused(tmp_path):
    """Of a norm of 9, by a witness that proves it; one of norm 8 is accepted."""
    for norm in (8.0, 9.0):
        path = files(one_layer(norm * np.array([[0.0, 1.0], [-1.0, 0.0]])[..., None], q=[[1, 1]]), tmp_path)
        check(path) if norm == 8 else rejected(path, "node 1 .*sigma <= 8")


@pytest.mark.parametrize(
    ("power", "entry", "factor", "fits"),
    [
        (490, 0.5, 1.0, True),
        (497, 4.0, 2.0**-9, False),  # products
        (498, 0.875, 0.25, False),  # x + S x on the way, not at the end
        (300, 0.5, 2.0**250, False),  # the end
    ],
)
def test_exponentials_that_may_overflow(power, entry, factor, fits, tmp_path):
    net = Builder((2, 1))
    scale(net, 2.0**260)
    scale(net, 2.0 ** (power - 260))
    series(net, np.array([[0.0, entry], [-entry, 0.0]])[..., None], kept=2, terms=4, factor=factor)
    scale(net, 2.0**-490)
    net.exact("join", (2,), np.ravel)
    path = files(net, tmp_path, pairs=False)
    check(path, images=tmp_path / "images.npy") if fits else rejected(path, "node 3 .*may overflow")
