"""The checker believes no proof: every error term left out by a writer is missed, and so is every bound too small.

Each rejection is told from the others by its reason, so that a test fails if just its own check is taken away.
"""

from fractions import Fraction

import numpy as np
import pytest
from _certificates import Builder, up_root
from _certified_networks import change, dyadic, everything, files, no_head, pixels, quiet, rejected, scale, small

from onelip.checker import Rejected, check, norms
from onelip.checker.layers import Map
from onelip.checker.reading import Part

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


def lower(value):
    return value * (1 - Fraction(1, 10**6))


@pytest.mark.parametrize(("kind", "reason"), [("schur", "bound, square: expected"), ("cholesky", "not proved")])
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
    rejected(files(net, tmp_path), "expected weights to be zero")
    net = Builder((2, 3, 3))
    net.map(dyadic(2, 2, 3, 3), kind="cholesky")
    net.exact("flatten", (2,), np.ravel)
    rejected(files(net, tmp_path), "one tap")


def square_of(bound, square, layer):
    bound = Part(bound | {"square": f"{square.numerator}/{square.denominator}"}, "bound")
    return norms.square_of(bound, layer, *norms.to_integers(layer.weight))


def test_extreme_weights(tmp_path):
    """Products that under- and overflow float64 are exact here."""
    tiny = np.array([[4.5e-23] + [2.6e-23] * 5] * 2, np.float32).astype(float) * 2.0**-900
    for W in (tiny, np.ldexp(tiny.T, 1300), np.array([[2.0**-1074, 1.0], [2.0**480, 0.0]])):
        layer = Map(W[None], np.zeros(len(W)), False, False, (), (), (), (), W.shape[1], (len(W),))
        q = [1] * W.shape[1]
        G = [[sum(Fraction(a) * Fraction(b) for a, b in zip(x, y, strict=True)) for x in W.T] for y in W.T]
        square = max(sum(map(abs, row)) for row in G)
        bound = {"kind": "schur", "side": "inputs", "steps": 1, "scale": [q]}
        assert square_of(bound, square, layer) == square
        with pytest.raises(Rejected, match="square: expected"):
            square_of(bound, square + 1, layer)
        assert square_of({"kind": "cholesky", "side": "inputs", "steps": 1}, square * 2, layer) == square * 2


@pytest.mark.parametrize("kind", ["schur", "cholesky", "zero"])
def test_steps(kind):
    """The powers of the Gram operator end at (W^T W)^8; the other kinds have none."""
    W = np.zeros((2, 2)) if kind == "zero" else np.array([[0.5, 0.25], [0.0, 0.5]])
    layer = Map(W[None], np.zeros(2), False, False, (), (), [], (), 2, (2,))
    bound = {"kind": kind, "side": "inputs"} | ({"scale": [[2, 3]]} if kind == "schur" else {})
    gram = [[Fraction(float(v)) for v in row] for row in W.T @ W]
    last, square = 4 if kind == "schur" else 1, Fraction(0)
    for steps in range(1, last + 1):
        sums = [
            sum(abs(v) * q for v, q in zip(row, (2, 3), strict=True)) / p for row, p in zip(gram, (2, 3), strict=True)
        ]
        square = max(sums)
        for _ in range(steps - 1):
            square = up_root(square)
        assert square_of(bound | {"steps": steps}, square, layer) == square >= np.linalg.norm(W, 2) ** 2 * (1 - 1e-14)
        gram = [[sum(a * b for a, b in zip(x, y, strict=True)) for x in gram] for y in gram]  # it is symmetric
    for steps in (last + 1, 0, -1):
        with pytest.raises(Rejected, match=f"steps: expected an integer from 1 to {last}"):
            square_of(bound | {"steps": steps}, square, layer)


def test_witnesses_of_four_and_five_steps(tmp_path):
    """Both are true; the format ends at four."""
    for steps in (4, 5):
        net = Builder((2,))
        net.map(np.array([[1, 1], [0, 1]]) / 64, steps=steps)
        path = files(net, tmp_path)
        if steps == 4:
            check(path, images=tmp_path / "images.npy")
        else:
            rejected(path, "steps: expected an integer from 1 to 4, got 5")


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


def test_numbers_that_may_overflow(tmp_path):
    net = small()
    for _ in range(2):
        scale(net, 2.0**260)
    rejected(files(net, tmp_path, pairs=False), "numbers beyond 2.500")


def test_sums_that_may_overflow(tmp_path):
    """|W| may be much longer than W."""
    net = Builder((2,))
    for power in (260, 236):
        scale(net, 2.0**power)
    net.map([[64, 64], [64, -64]])
    rejected(files(net, tmp_path), "node 3 .*might overflow")


def test_nodes_that_do_not_fit_their_input(tmp_path):
    net = Builder((1, 3))
    net.exact("concatenate", (2, 1), lambda x: x[:, :2].T, kernel=[2])
    net.exact("flatten", (2,), np.ravel)
    rejected(files(net, tmp_path, pairs=False), "node 1 .*windows of 2 do not tile 3")
    net = Builder((3,))
    net.exact("maxmin", (3,), lambda x: x, axis=0)
    rejected(files(net, tmp_path, pairs=False), "node 1 .*groups of 2 do not divide axis 0")
    path = files(quiet(), tmp_path, edit=change("nodes", 3, "shape", to=[1, 2, 3]))
    rejected(path, "node 3 .*expected a shape of 4 entries")
