"""The checker and the node x - 2 V^T relu(V x + b): as a second writer derives it, and not with a term less."""

import copy
from functools import reduce

import numpy as np
import pytest
from _certificate_files import safetensors, write
from _certificates import Builder
from _certified_networks import built, change, changed, dyadic, files, less, pixels, potential, rejected, scale

from onelip.checker import check

SAME = [[1, 1], [1, 1]]


def residual(drop=()):
    """||V|| > 1 at first, then not, around a circle and in groups."""
    net = Builder((4, 4, 4), drop)
    potential(net, 2 * dyadic(6, 4, 3, 3), dyadic(6, seed=1), padding=SAME, steps=2)
    potential(net, dyadic(6, 2, 3, 1), padding=[[2, 2], [0, 0]], dilation=[2, 1], groups=2, mode="circular")
    net.exact("join", (64,), np.ravel)
    net.map(dyadic(3, 64), dyadic(3), side="outputs")
    return net


def faint(drop=()):
    """Nothing but underflow comes to the node."""
    net = Builder((4,), drop)
    net.map(np.zeros((4, 4)))
    net.exact("join", (2, 2), lambda x: x.reshape(2, 2))
    potential(net, dyadic(3, 2, 3), padding=[[1, 1]])
    net.exact("join", (4,), np.ravel)
    net.map(dyadic(3, 4), [0.5, -0.25, 0.0])
    return net


@pytest.mark.parametrize("make", [residual, faint])
def test_two_derivations_agree(make, tmp_path):
    net = make()
    verdict = check(files(net, tmp_path), images=tmp_path / "images.npy")
    assert verdict["logits_apart"] < 1e-13
    assert verdict["lipschitz"] == float(net.states[-1][1])


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


DROPPED = {
    "factor": "node 1 .*lipschitz",
    "value at 0": "node 1 .*norm",
    "products of V": "node 1 .*error",
    "bias": "node 1 .*error",
    "V x": "node 1 .*error",
    "bias inside": "node 1 .*error",
    "rounding inside": "node 1 .*error",
    "products of the adjoint": "node 1 .*error",
    "x": "node 1 .*error",
    "what is taken away": "node 1 .*error",
    "error carried": "node 1 .*error",
    "rounding of V": "node 1 .*error",
    "of the adjoint": "node 1 .*error",
    "difference": "node 1 .*error",
    "underflow of V": "node 3 .*error",
    "underflow of the adjoint": "node 3 .*error",
    "rounding of it": "node 3 .*error",
    "underflow of the difference": "node 3 .*error",
}


@pytest.mark.parametrize("term", DROPPED)
def test_a_term_left_out_is_missed(term, tmp_path):
    make = faint if "node 3" in DROPPED[term] else residual
    rejected(files(make({f"potential: {term}"}), tmp_path), DROPPED[term])


def test_every_term_of_the_writer_is_left_out_once():
    named = {term for term in residual().used | faint().used if term.startswith("potential: ")}
    assert named == {f"potential: {term}" for term in DROPPED}


CHANGES = {
    "no bound": (lambda content: content["nodes"][1].pop("bound"), "node 1 .*'bound' is missing"),
    "sigma 1": (change("nodes", 1, "sigma", to="1"), "node 1 .*sigma: not the smallest"),
    "steps": (change("nodes", 1, "bound", "steps", to=1), "node 1 .*sigma: not the smallest"),
    "sigma": (change("nodes", 1, "sigma", by=less), "node 1 .*sigma"),
    "absolute": (change("nodes", 1, "absolute", by=less), "node 1 .*absolute"),
    "bias_norm": (change("nodes", 1, "bias_norm", by=less), "node 1 .*bias_norm"),
    "lipschitz": (change("nodes", 1, "lipschitz", by=less), "node 1 .*lipschitz"),
    "norm": (change("nodes", 1, "norm", by=less), "node 1 .*norm"),
    "error": (change("nodes", 1, "error", by=less), "node 1 .*error"),
    "a convolution": (change("nodes", 1, "op", to="affine"), "node 1 .*shape: expected 6 channels, got .4, 4, 4"),
    "a potential": (change("nodes", 4, "op", to="potential"), r"node 4 .*shape: expected 64 channels, got \[3\]"),
    "of a newer version": (
        change("nodes", 1, "op", to="potential2"),
        "node 1 .*unknown op .potential2.; written by a newer version",
    ),
    "unknown setting": (change("nodes", 1, "factor", to=2), "unknown keys .'factor'"),
    "two inputs": (change("nodes", 2, "inputs", to=[0, 1]), "node 2 .*inputs: expected 1 earlier nodes"),
    "shape": (change("nodes", 1, "shape", to=[4, 4, 3]), "node 1 .*bias_norm|node 1 .*shape"),
    "around": (change("nodes", 2, "stride", to=[2, 1]), "node 2 .*circular: expected one turn at most"),
    "reflect": (change("nodes", 1, "circular", to="reflect"), "node 1 .*circular: expected true or false"),
    "stride": (change("nodes", 1, "stride", to=[2, 2]), "node 1 .*scale: expected 16 integers above 0"),
    "groups": (change("nodes", 2, "groups", to=1), "node 2 .*weight: expected an input of 2 channels, got 4"),
}


@pytest.fixture(scope="module")
def right(tmp_path_factory):
    return built(residual(), tmp_path_factory.mktemp("right"))


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_noticed(name, right, tmp_path):
    edit, reason = CHANGES[name]
    rejected(changed(right, tmp_path, edit), reason)


def test_a_potential_is_not_transposed(tmp_path):
    """Also where shapes fit, and everything else is as it would be."""
    net = Builder((2, 4))
    potential(net, dyadic(2, 2, 3), transposed=True, padding=[[1, 1]])
    net.exact("join", (8,), np.ravel)
    net.map(dyadic(2, 8), kind="cholesky", side="outputs")
    rejected(files(net, tmp_path), "node 1 .*transposed: expected false")


def test_another_border_has_other_logits(right, tmp_path):
    """The numbers are those of every border, so only the images tell; which program is certified, the file says."""
    content, net = right
    change("nodes", 1, "circular", to=[True, True])(content := copy.deepcopy(content))
    path = write(tmp_path, content, safetensors(net.tensors), images=pixels((4, 4, 4)))
    check(path)
    rejected(path, "more than rounding explains", images=tmp_path / "images.npy")


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
def test_sums_that_may_overflow(power, weight, reason, tmp_path):
    net = Builder((len(weight), 1))
    scale(net, 2.0**260)
    scale(net, 2.0 ** (power - 260))
    potential(net, weight[..., None])
    scale(net, 2.0**-490)
    net.exact("join", (len(weight),), np.ravel)
    path = files(net, tmp_path, pairs=False)
    rejected(path, reason) if reason else check(path, images=tmp_path / "images.npy")
