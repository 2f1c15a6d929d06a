"""Bounds in rational arithmetic: never below the truth, at tolerance zero, and equal to what is known by hand."""

import builtins
import dataclasses
import math
import random
from fractions import Fraction

import numpy as np
import pytest
import torch
from _layer_cases import layer_cases
from _rational_norms import integers, layer_square_from_below, square_from_below
from hypothesis import HealthCheck, given, settings, strategies as st
from torch import nn

from onelip.bounds import ProofFailed, Witness, exact, exact_bound, exact_bound_layer
from onelip.bounds.exact import absolute_gram_sums, coprime_bases
from onelip.bounds.fast import candidates
from onelip.core.errors import UnsupportedLayer
from onelip.core.geometry import geometry_of
from onelip.core.rounding import up_root, up_root_of_power

SLOW = settings(
    max_examples=50, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)


def layer_with(layer, weight):
    layer.weight = nn.Parameter(torch.as_tensor(weight))
    return layer


@given(st.fractions(min_value=0), st.integers(-1200, 900))
@settings(max_examples=100, deadline=None, derandomize=True, database=None)
def test_root_is_the_smallest_float_above(x, e):
    x *= Fraction(2) ** e
    root = up_root(x)
    assert Fraction(root) ** 2 >= x
    assert root == 0 or Fraction(math.nextafter(root, 0)) ** 2 < x


def test_root_of_the_range():
    largest = Fraction(np.finfo(float).max)
    assert up_root(largest**2) == float(largest)
    with pytest.raises(OverflowError, match="range of float64"):
        up_root(largest**2 + 1)
    assert up_root(Fraction(1, 10**900)) == 5e-324
    with pytest.raises(ValueError, match="expected a non-negative number"):
        up_root(Fraction(-1))


@given(case=layer_cases(with_wide=False, dtypes=(torch.float16, torch.bfloat16, torch.float32, torch.float64)))
@SLOW
def test_exact_is_above_the_truth_and_below_fast(case):
    layer = case.build()
    try:
        geometry = geometry_of(layer, case.size)
    except UnsupportedLayer:
        return
    truth = layer_square_from_below(layer, case.input_shape)
    for name, candidate in candidates(layer.weight, geometry, "high").items():
        exact = exact_bound(layer.weight, geometry, candidate.witness)
        assert candidate.square >= exact.square >= truth, name
        assert Fraction(exact.value) ** 2 >= exact.square


BY_HAND = {
    "all ones 3x3": (nn.Conv2d(1, 1, 3, padding=1), torch.ones(1, 1, 3, 3), 9 * 9),
    "a quarter, 3x3": (nn.Conv2d(1, 1, 3), torch.full((1, 1, 3, 3), 0.25), Fraction(81, 16)),
    "one tap": (nn.Conv2d(1, 1, 3), nn.functional.pad(torch.full((1, 1, 1, 1), 0.5), (2, 0, 0, 2)), Fraction(1, 4)),
    "zero": (nn.Conv2d(1, 1, 3), torch.zeros(1, 1, 3, 3), 0),
    "identity": (nn.Linear(3, 3), torch.eye(3), 1),
    "orthogonal 2x2, stride 2": (nn.Conv2d(1, 4, 2, stride=2), torch.eye(4).reshape(4, 1, 2, 2), 1),
    "its transpose": (nn.ConvTranspose2d(4, 1, 2, stride=2), torch.eye(4).reshape(4, 1, 2, 2), 1),
    "zero column": (nn.Linear(2, 2), torch.tensor([[2.0, 0.0], [0.0, 0.0]]), 4),
    "depthwise": (nn.Conv1d(2, 2, 2, groups=2), torch.tensor([[[1.0, 1.0]], [[2.0, 1.0]]]), 9),
    "empty": (nn.Linear(3, 1), torch.zeros(0, 3), 0),
    "least subnormal": (nn.Linear(1, 1), torch.full((1, 1), 5e-324, dtype=torch.float64), Fraction(5e-324) ** 2),
    "huge": (nn.Linear(1, 1), torch.full((1, 1), 1e300, dtype=torch.float64), Fraction(1e300) ** 2),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_known_by_hand(name):
    layer, weight, square = BY_HAND[name]
    layer = layer_with(layer, weight)
    for candidate in candidates(layer.weight, geometry_of(layer), "quick").values():
        assert exact_bound(layer.weight, geometry_of(layer), candidate.witness).square == square
    assert exact_bound_layer(layer).square >= square


def test_exponents_far_apart():
    weight = torch.tensor([[1e300, 1e-300], [1.0, 5e-324]], dtype=torch.float64)
    layer = layer_with(nn.Linear(2, 2), weight)
    exact = exact_bound_layer(layer)
    assert square_from_below(weight.numpy()) <= exact.square
    assert exact.value == pytest.approx(1e300)


def test_the_default_is_the_best_witness():
    torch.manual_seed(0)
    layer = nn.Linear(8, 8, dtype=torch.float64)
    exact = exact_bound_layer(layer)
    assert exact.witness.kind == "cholesky"
    truth = square_from_below(layer.weight.detach().numpy())
    assert truth <= exact.square <= truth * (1 + Fraction(1, 10**8))


@settings(max_examples=60)
@given(st.integers(1, 2**80), st.integers(-9000, 7000), st.integers(1, 3))
def test_roots_of_powers_are_the_smallest(numerator, exponent, times):
    """Also where the root is subnormal, or the power far beyond the range of floats."""
    x, power = numerator * Fraction(2) ** exponent, 2**times
    if x >= Fraction(2) ** (1023 * power):
        with pytest.raises(OverflowError, match="within the range of float64"):
            up_root_of_power(x * 2**power, times)
        return
    root = up_root_of_power(x, times)
    assert Fraction(root) ** power >= x > Fraction(math.nextafter(root, 0.0)) ** power


def test_scaling_is_taken_as_it_stands():
    """The value of any positive scaling, by brute force in fractions."""
    weight = torch.tensor([[1.0, -2.0], [3.0, 0.5]])
    M, e = integers(weight.numpy())
    G = M.T @ M
    q = (3, 7)
    expected = max(sum(abs(G[i, j]) * Fraction(q[j], q[i]) for j in range(2)) for i in range(2)) * Fraction(4) ** e
    G2 = G @ G
    squared = max(sum(abs(G2[i, j]) * Fraction(q[j], q[i]) for j in range(2)) for i in range(2)) * Fraction(16) ** e
    geometry = geometry_of(nn.Linear(2, 2))
    assert exact_bound(weight, geometry, Witness("schur", "inputs", 1, (q,), None)).square == expected
    twice = exact_bound(weight, geometry, Witness("schur", "inputs", 2, (q,), None))
    assert twice.square == Fraction(twice.value) ** 2
    assert Fraction(math.nextafter(twice.value, 0.0)) ** 4 < squared <= Fraction(twice.value) ** 4


@pytest.mark.parametrize("taps", [(1,), (3,), (2, 3)])
@pytest.mark.parametrize("digits", [1, 31, 32, 33, 64, 110])
def test_remainders_agree_with_long_integers(taps, digits):
    flint = pytest.importorskip("flint")
    generator = random.Random(digits)
    largest = 2**digits
    for rows, columns in ((1, 1), (3, 4)):
        choices = (largest, -largest, None)
        kernel = {}
        for tap in np.ndindex(*taps):
            drawn = [generator.choice(choices) for _ in range(rows * columns)]
            entries = [generator.randint(-largest, largest) if x is None else x for x in drawn]
            kernel[tap] = flint.fmpz_mat(rows, columns, entries)
        expected = [int(entry) for entry in exact._absolute_sums(kernel).entries()]
        assert absolute_gram_sums(kernel, rows, columns) == expected
        del kernel[next(iter(kernel))]  # taps may be missing
        if kernel:
            assert absolute_gram_sums(kernel, rows, columns) == list(map(int, exact._absolute_sums(kernel).entries()))


@pytest.mark.parametrize("inner", [1, 9, 1000, 10**6])
def test_bases_of_remainders(inner):
    for largest in (1, 10**5, 10**50):
        bases = coprime_bases(inner, largest)
        assert math.prod(bases) > 2 * largest
        assert inner * (bases[0] // 2) ** 2 <= 2**53
        assert math.lcm(*bases) == math.prod(bases)
        assert all(p % 2 and p > 1 for p in bases)
        assert bases == sorted(bases, reverse=True)


def test_remainders_are_used_for_wide_convolutions(monkeypatch):
    torch.manual_seed(0)
    layer = nn.Conv1d(64, 64, 2, dtype=torch.float64)
    witness = candidates(layer.weight, geometry_of(layer))["gram 2 inputs"].witness
    fast = exact_bound(layer.weight, geometry_of(layer), witness)
    monkeypatch.setattr(exact, "_MANY_COLUMNS", 10**9)
    assert exact_bound(layer.weight, geometry_of(layer), witness) == fast


GOOD = Witness("schur", "inputs", 1, ((1, 1),), None)


@pytest.mark.parametrize(
    "change",
    [
        {"scale": ((1, 0),)},
        {"scale": ((1, -1),)},
        {"scale": ((1, 1.0),)},
        {"scale": ((1, True),)},
        {"scale": ((1,),)},
        {"scale": ((1, 1), (1, 1))},
        {"scale": None},
        {"steps": 0},
        {"steps": True},
        {"side": "left"},
        {"kind": "faith"},
        {"kind": "zero"},
        {"kind": "cholesky"},
        {"kind": "cholesky", "square": Fraction(-1)},
        {"kind": "cholesky", "square": Fraction(4)},
        {"kind": "cholesky", "square": Fraction(4) * (1 + Fraction(1, 2**34))},
    ],
)
def test_bad_witnesses_prove_nothing(change):
    weight = torch.tensor([[2.0, 0.0], [0.0, 1.0]])
    geometry = geometry_of(nn.Linear(2, 2))
    assert exact_bound(weight, geometry, GOOD).square == 4
    with pytest.raises(ProofFailed, match="expected"):
        exact_bound(weight, geometry, dataclasses.replace(GOOD, **change))


@pytest.mark.parametrize("place", [(0, 0), (0, 1)])
@pytest.mark.parametrize(("amount", "enough"), [(0.5, True), (1.5, False), (-0.5, True), (-1.5, False)])
def test_the_residual_must_be_below_the_margin(monkeypatch, place, amount, enough):
    """S = 1, G = 1/4: an entry of R that is off by some margins makes R^T R off by about as much."""
    factor = exact._factor

    def off(*arguments):
        R = factor(*arguments)
        by = amount * 2.0**-32 / 0.75**0.5 / (2 if place == (0, 0) else 1)
        R[place] = int(R[place]) + int(by * 2**54)
        return R

    monkeypatch.setattr(exact, "_factor", off)
    weight, witness = 0.5 * torch.eye(2), Witness("cholesky", "inputs", 1, None, Fraction(1))
    if enough:
        assert exact_bound(weight, geometry_of(nn.Linear(2, 2)), witness).square == 1
    else:
        with pytest.raises(ProofFailed, match="by a Cholesky factor, got none"):
            exact_bound(weight, geometry_of(nn.Linear(2, 2)), witness)


def test_a_claim_below_the_norm_fails_for_any_scale():
    for scale in (1.0, 1e-300, 1e300):
        weight = torch.tensor([[2.0, 1.0], [0.0, 1.0]], dtype=torch.float64) * scale
        truth = square_from_below(weight.numpy())
        geometry = geometry_of(nn.Linear(2, 2))
        above, below = truth * (1 + Fraction(1, 2**30)), truth * (1 - Fraction(1, 2**30))
        assert exact_bound(weight, geometry, Witness("cholesky", "inputs", 1, None, above)).square == above
        with pytest.raises(ProofFailed):
            exact_bound(weight, geometry, Witness("cholesky", "inputs", 1, None, below))


def test_a_convolution_has_no_cholesky_certificate():
    with pytest.raises(ProofFailed, match="Schur witness"):
        exact_bound(
            torch.ones(1, 1, 2), geometry_of(nn.Conv1d(1, 1, 2)), Witness("cholesky", "inputs", 1, None, Fraction(9))
        )


def test_without_flint(monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name == "flint":
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ImportError, match=r"onelip\[exact\]"):
        exact_bound_layer(nn.Linear(2, 2))
