"""The checker trusts no proof: it detects every omitted error term and every bound that is too small.

Each rejection is identified by its reason, so that a test fails if only its own check is removed.
"""

from fractions import Fraction

import numpy as np
import pytest
from _certificates import Builder
from _certified_networks import (
    dyadic,
    everything,
    files,
    less,
    more,
    no_head,
    pixels,
    quiet,
    rejected,
    scale,
    small,
)
from _exact_layers import up, up_power_root, up_root

from onelip.checker import Rejected, check, norms
from onelip.checker.program import Layer

EVERYTHING = {
    "domain": r"node 0 .*norm",
    "input rounding": r"node 0 .*error",
    "input underflow": r"node 0 .*error",
    "mean in norm": r"node 1 .*mean_norm",
    "normalize rounding": r"node 1 .*error",
    "bias positions": r"node 2 .*bias_norm",
    "error carried": r"node 2 .*error",
    "product rounding": r"node 2 .*error",
    "bias rounding": r"node 2 .*error",
    "bias in norm": r"node 2 .*norm",
    "max factor": r"node 4 .*constant",
    "sum factor": r"node 5 .*constant",
    "sum rounding": r"node 5 .*error",
    "add rounding": r"node 7 .*error",
    "scale rounding": r"node 8 .*error",
    "scale factor": r"node 8 .*lipschitz",
    "output error": r"result 0: radius",
    "logits of the file": r"result 0: radius",
    "strictly below": r"result 0: radius",
}

QUIET = {
    "underflow": r"node 1 .*error",
    "normalize underflow": r"node 2 .*error",
    "sum underflow": r"node 4 .*error",
    "scale underflow": r"node 6 .*error",
    "add underflow": r"node 7 .*error",
    "error in rounding": r"node 8 .*error",
    "cap": r"result 0: radius",
}

DROPPED = [(everything, *item) for item in EVERYTHING.items()] + [(quiet, *item) for item in QUIET.items()]
DROPPED.append((no_head, "output error", "result 0: radius"))


@pytest.mark.parametrize(("make", "term", "reason"), DROPPED, ids=lambda v: v if isinstance(v, str) else "")
def test_a_term_left_out_is_missed(make, term, reason, tmp_path):
    rejected(files(make({term}), tmp_path, pairs=make is not no_head), reason)


def test_every_term_of_the_writer_is_left_out_once(tmp_path):
    nets = [everything(), quiet(), no_head()]
    for net in nets:
        net.build(pixels(net.states[0][0]), pairs=net is not nets[2])
    # A factor of 1 is no change in the last two of them; "max_pool" neither rounds nor underflows.
    named = {term for net in nets for term in net.used} - {"max rounding", "max underflow"}
    assert named == {term for _, term, _ in DROPPED}


def lower(value):
    return up(value * (1 - Fraction(1, 10**6)))


def a_float_less(value):
    return Fraction(less(str(value)))


def a_float_more(value):
    return Fraction(more(str(value)))


@pytest.mark.parametrize(("kind", "reason"), [("schur", "sigma: not the smallest"), ("cholesky", "sigma: not proved")])
def test_sigma_too_small(kind, reason, tmp_path):
    """Everything after it is consistent."""
    for claim in (lower, a_float_less, a_float_more) if kind == "schur" else (lower,):
        for steps in (1, 2, 3) if kind == "schur" else (1,):
            net = Builder((6,))
            net.map(dyadic(6, 6), kind=kind, steps=steps, claim=claim)
            net.map(dyadic(2, 6))
            rejected(files(net, tmp_path), f"node 1 .*{reason}")


def test_cholesky_is_tight(tmp_path):
    """One part in 2^33 below the true norm is too small already; a claim of any size above is proved."""
    W = dyadic(6, 6)
    largest = Fraction(float(np.linalg.norm(W, 2)))
    for factor, good in ((1 - Fraction(1, 2**34), False), (1 + Fraction(1, 2**29), True), (Fraction(10**5), True)):
        net = Builder((6,))
        net.map(W, kind="cholesky", claim=lambda _, factor=factor: up(largest * factor))
        net.map(dyadic(2, 6))
        path = files(net, tmp_path)
        check(path) if good else rejected(path, "not proved")


def test_cholesky_believes_no_factor(monkeypatch):
    """The factor is a guess: with a wrong one, or one of another matrix, the residual says no."""
    W = np.eye(3)
    whole, e = norms.to_integers(W)
    assert norms.is_bounded(Fraction(2), whole, e)
    monkeypatch.setattr(np.linalg, "cholesky", lambda guess: np.eye(3) * 2.0**-30)
    assert not norms.is_bounded(Fraction(2), whole, e)
    almost = 1 - Fraction(1, 2**20)
    monkeypatch.setattr(np.linalg, "cholesky", lambda guess: np.sqrt(np.maximum(guess, 0.0) + np.eye(3) * 2.0**-60))
    assert not norms.is_bounded(almost, whole, e)


def test_every_row_and_every_group_is_bounded(tmp_path, monkeypatch):
    """Of a matrix whose other rows fit; of a layer whose other group does."""
    weight = np.append(dyadic(2, 2, 1), 2 * dyadic(2, 2, 1), 0)
    for group, good in ((0, False), (1, True)):
        largest = np.linalg.norm(weight[2 * group : 2 * group + 2, :, 0], 2)
        net = Builder((4, 1))
        claim = up(Fraction(float(largest)) * (1 + Fraction(1, 2**29)))
        net.map(weight, groups=2, kind="cholesky", claim=lambda _, claim=claim: claim)
        net.exact("join", (4,), np.ravel)
        path = files(net, tmp_path, pairs=False)
        check(path) if good else rejected(path, "not proved")
    monkeypatch.setattr(np.linalg, "cholesky", lambda guess: np.sqrt(np.maximum(guess, 0.0)))
    for entries, good in (([0.5, 0.5, 2.0], False), ([2.0, 0.5, 0.5], False), ([0.5, 0.5, 0.5], True)):
        assert norms.is_bounded(Fraction(1), *norms.to_integers(np.diag(entries))) == good


def test_zero_and_other_kinds(tmp_path):
    net = Builder((6,))
    net.map(dyadic(6, 6), claim=lambda _: Fraction(0))
    net.map(dyadic(2, 6))
    rejected(files(net, tmp_path), "node 1 .*sigma: not the smallest")
    net = Builder((6,))
    net.map(dyadic(6, 6), kind="cholesky", claim=lambda sigma: -sigma)  # whose square would do
    net.map(dyadic(2, 6))
    rejected(files(net, tmp_path), "node 1 .*expected a fraction")
    net = Builder((2, 3, 3))
    net.map(dyadic(2, 2, 3, 3), kind="cholesky")
    net.exact("join", (2,), np.ravel)
    rejected(files(net, tmp_path), "node 1 .*cholesky: expected a kernel of one tap")  # cholesky is for one tap


def sigma_of(bound, sigma, W):
    node = {"op": "affine", "shape": [len(W)], "weight": "w", "bias": None, "groups": 1, "transposed": False}
    node |= {key: [] for key in ("stride", "dilation", "offset", "circular")} | {"bound": bound}
    layer = Layer(node | {"sigma": str(sigma)}, [W.shape[1]], {"w": W})
    return norms.prove_sigma(node | {"sigma": str(sigma)}, layer, *norms.to_integers(layer.weight))


def test_extreme_weights(tmp_path):
    """Products that under- and overflow float64 are exact here."""
    tiny = np.array([[4.5e-23] + [2.6e-23] * 5] * 2, np.float32).astype(float) * 2.0**-900
    for W in (tiny, np.ldexp(tiny.T, 1300), np.array([[2.0**-1074, 1.0], [2.0**480, 0.0]])):
        G = [[sum(Fraction(a) * Fraction(b) for a, b in zip(x, y, strict=True)) for x in W.T] for y in W.T]
        square = max(sum(map(abs, row)) for row in G)
        # Roots of what floats cannot hold are taken in another unit.
        unit = Fraction(2) ** ((square.numerator.bit_length() - square.denominator.bit_length()) // 2)
        sigma = up_root(square / unit**2) * unit
        bound = {"kind": "schur", "side": "inputs", "steps": 1, "scale": [" ".join("1" * W.shape[1])]}
        if W is not tiny:  # whose norm is subnormal: there floats are farther apart
            assert sigma_of(bound, sigma, W) == sigma
        with pytest.raises(Rejected, match="sigma: not the smallest"):
            sigma_of(bound, sigma * 2, W)
        bound = {"kind": "cholesky", "side": "inputs"}
        assert sigma_of(bound, sigma * 2, W) == sigma * 2


@pytest.mark.parametrize("weights", ["some", "none"])
def test_steps(weights):
    """The powers of the Gram operator end at (W^T W)^8."""
    W = np.zeros((2, 2)) if weights == "none" else np.array([[0.5, 0.25], [0.0, 0.5]])
    bound = {"kind": "schur", "side": "inputs", "scale": ["2 3"]}
    gram = [[Fraction(float(v)) for v in row] for row in W.T @ W]
    sigma = Fraction(0)
    for steps in range(1, 5):
        sums = [
            sum(abs(v) * q for v, q in zip(row, (2, 3), strict=True)) / p for row, p in zip(gram, (2, 3), strict=True)
        ]
        sigma = up_power_root(max(sums), 2**steps)
        assert sigma_of(bound | {"steps": steps}, sigma, W) == sigma >= np.linalg.norm(W, 2) * (1 - 1e-14)
        gram = [[sum(a * b for a, b in zip(x, y, strict=True)) for x in gram] for y in gram]  # it is symmetric
    for steps in (5, 0, -1):
        with pytest.raises(Rejected, match=r"steps: expected 1 to 4|expected integers from 1"):
            sigma_of(bound | {"steps": steps}, sigma, W)


def test_witnesses_of_four_and_five_steps(tmp_path):
    """Both are true; the format ends at four."""
    for steps in (4, 5):
        net = Builder((2,))
        net.map(np.array([[1, 1], [0, 1]]) / 64, steps=steps)
        path = files(net, tmp_path)
        if steps == 4:
            check(path, images=tmp_path / "images.npy")
        else:
            rejected(path, "steps: expected 1 to 4")


def test_circular_padding_that_repeats_outputs(tmp_path):
    net = Builder((2, 4))
    net.map(dyadic(2, 2, 3), padding=[[2, 1]], mode="circular")
    net.exact("join", (10,), np.ravel)
    net.map(dyadic(2, 10), kind="cholesky", side="outputs")
    rejected(files(net, tmp_path), "circular: expected one turn at most")


@pytest.mark.parametrize(("mean", "std"), [(0.5, 2.0**-501), (0.5, 0.0), (0.5, -1.0), (2.0**500, 1.0)])
def test_normalisation_out_of_range(mean, std, tmp_path):
    """One of them is enough."""
    net = small()
    index = net.normalize([0.5, 0.5, mean], [1.0, 1.0, abs(std) or 1.0])
    name = net.nodes[index]["std"]
    net.tensors[name] = (np.array([1.0, 1.0, std]), "F64")
    with np.errstate(all="ignore"):
        rejected(files(net, tmp_path, pairs=False), "std: expected at least 2.-500|expected numbers below 2.500")


def test_weights_that_may_overflow(tmp_path):
    net = Builder((2,))
    net.map(dyadic(2, 2))
    for name in net.tensors:
        net.tensors[name] = (np.full(net.tensors[name][0].shape, 2.0**500), "F64")
    rejected(files(net, tmp_path), "expected numbers below 2.500")


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
    rejected(files(net, tmp_path), "node 3 .*may overflow")
