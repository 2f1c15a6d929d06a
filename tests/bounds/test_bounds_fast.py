"""Bounds in float64: never below the same proof in rational arithmetic, tolerance zero; each error term is needed."""

import itertools
from fractions import Fraction

import numpy as np
import pytest
import torch
from _layer_cases import layer_cases
from _rational_norms import layer_square_from_below, square_from_below
from hypothesis import HealthCheck, given, settings
from torch import nn

import onelip
from onelip.bounds import (
    NonFiniteWeight,
    _gram,
    bound_layer,
    bound_weight,
    exact_bound,
    fast,
)
from onelip.bounds._gram import Gram, gram, half_of_offsets, lay_out
from onelip.bounds.fast import candidates
from onelip.core import floats as floats
from onelip.core.errors import UnsupportedLayer
from onelip.core.geometry import geometry_of
from onelip.testing import exact_norm

SLOW = settings(
    max_examples=60, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)
U = Fraction(1, 2**53)


def layer_with(layer, weight):
    layer.weight = nn.Parameter(torch.as_tensor(weight))
    return layer


# ---------------------------------------------------------------------------------------------- against the exact proof


def check_all(layer, effort="normal"):
    """All candidates are at least what the same witness proves exactly."""
    geometry = geometry_of(layer)
    found = candidates(layer.weight, geometry, effort)
    for name, candidate in found.items():
        exact = exact_bound(layer.weight, geometry, candidate.witness)
        assert candidate.square >= exact.square, name
        assert candidate.square <= exact.square * (1 + Fraction(1, 10**8)), name
    return found


@given(case=layer_cases(padding_modes=("zeros", "circular", "reflect", "replicate")))
@settings(SLOW, max_examples=40)
def test_bound_of_any_layer_is_above_the_truth(case):
    layer = case.build()
    for size in (None, case.size):
        bound = bound_layer(layer, size)
        assert Fraction(bound.value) ** 2 >= layer_square_from_below(layer, case.input_shape)
        assert bound.value == min(bound.candidates.values())


def test_column_whose_gram_matrix_underflows_in_float32():
    layer = layer_with(nn.Linear(1, 1000), torch.tensor([[4.5e-23]] + [[2.6e-23]] * 999))
    check_all(layer)
    assert bound_layer(layer).value == pytest.approx(float(layer.weight.detach().double().norm()), rel=1e-9)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("flush", [False, True])
def test_subnormal_weights(dtype, flush):
    tiny = torch.finfo(dtype).smallest_normal
    layer = layer_with(nn.Linear(3, 3), (torch.randn(3, 3, dtype=torch.float64) * tiny / 8).to(dtype))
    expected = bound_layer(layer).value
    assert 0 < expected < tiny
    truth = square_from_below(layer.weight.detach().double().numpy())
    assert Fraction(expected) ** 2 >= truth
    if not torch.set_flush_denormal(flush):
        pytest.skip("this processor does not flush")
    try:
        # Under flushing even the comparison of floats is off, so compare what they are made of.
        assert bound_layer(layer).value.hex() == expected.hex()
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize("scale", [1e-300, 1e-200, 1e200, 1e300])
def test_any_scale_gives_the_same_proof(scale):
    torch.manual_seed(0)
    power = 2.0 ** round(np.log2(scale))
    weight = torch.randn(4, 4, 3, dtype=torch.float64)
    layer = nn.Conv1d(4, 4, 3)
    plain, big = (candidates(w, geometry_of(layer)) for w in (weight, weight * power))
    for name in set(plain) & set(big):
        assert big[name].square == plain[name].square * Fraction(power) ** 2
    assert {"schur inputs", "schur outputs"} <= set(plain) & set(big)


def test_exponents_far_apart():
    weight = torch.tensor([[1e300, 1e-300], [1.0, 5e-324]], dtype=torch.float64)
    check_all(layer_with(nn.Linear(2, 2), weight))
    assert bound_layer(layer_with(nn.Linear(2, 2), weight)).value == pytest.approx(1e300)


def test_what_leaves_the_range():
    weight = torch.full((2, 2), torch.finfo(torch.float64).max, dtype=torch.float64)
    with pytest.raises(OverflowError, match="scale the weights down"):
        bound_layer(layer_with(nn.Linear(2, 2), weight))
    least = torch.full((1, 1), 5e-324, dtype=torch.float64)
    assert 5e-324 <= bound_layer(layer_with(nn.Linear(1, 1), least)).value <= 1e-323


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_refuses_what_is_not_finite(value):
    layer = nn.Linear(2, 2)
    with torch.no_grad():
        layer.weight[1, 1] = value
    with pytest.raises(NonFiniteWeight, match="expected finite weights, got 1 NaN or infinite of 4"):
        bound_layer(layer)


def test_refuses_what_is_not_a_float_and_unknown_layers():
    with pytest.raises(TypeError, match=r"got torch\.int64"):
        bound_weight(torch.ones(2, 2, dtype=torch.int64), geometry_of(nn.Linear(2, 2)))
    with pytest.raises(ValueError, match="expected effort"):
        bound_weight(torch.ones(2, 2), geometry_of(nn.Linear(2, 2)), effort="none")  # type: ignore[arg-type]
    with pytest.raises(UnsupportedLayer, match="got Bilinear"):
        bound_layer(nn.Bilinear(2, 2, 2))


def test_zero_and_empty_are_zero():
    for shape in ((0, 3), (3, 0), (2, 2)):
        layer = layer_with(nn.Linear(2, 2), torch.zeros(shape))
        bound = bound_layer(layer)
        assert (bound.value, bound.witness.kind) == (0, "zero")
    assert bound_layer(layer_with(nn.Conv2d(1, 1, 3), -torch.zeros(1, 1, 3, 3))).value == 0


def test_autocast_changes_nothing():
    layer = nn.Conv2d(4, 4, 3)
    expected = bound_layer(layer)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert bound_layer(layer) == expected


def test_a_parametrized_layer_is_bounded_as_it_computes():
    layer = onelip.aol(nn.Conv2d(4, 4, 3))
    assert bound_layer(layer).value == bound_layer(onelip.bake(layer)).value <= 1 + 1e-6


# --------------------------------------------------------------------------------------------------------- tightness


def test_matrices_come_out_as_their_norm():
    torch.manual_seed(0)
    for shape in ((300, 220), (64, 64)):
        layer = nn.Linear(*shape)
        nn.init.orthogonal_(layer.weight)
        with torch.no_grad():
            layer.weight += 1e-3 * torch.randn_like(layer.weight)
        bound = bound_layer(layer)
        assert bound.witness.kind == "cholesky"
        assert bound.value <= exact_norm(layer, (shape[0],)) * (1 + 1e-8)


def test_more_gram_steps_come_closer(monkeypatch):
    """Where there are too many channels for frequencies."""
    monkeypatch.setitem(fast._FREQUENCIES, "high", 0.0)
    monkeypatch.setattr(fast, "_FREQUENCIES_EXACT", 0.0)
    torch.manual_seed(0)
    layer = nn.Conv2d(3, 3, 3, padding=1)
    found = check_all(layer, "high")
    values = [found[name].square for name in found if name.startswith("gram")]
    values.insert(0, min(found[name].square for name in found if name.startswith("schur")))
    assert len(values) == 4
    assert values[0] > values[1] > values[2] > values[3] > exact_norm(layer, (3, 16, 16)) ** 2
    limited = candidates(layer.weight, geometry_of(layer), "high", exact=True)
    assert [name for name in found if name not in limited] == [name for name in found if name.startswith("gram 4")]


def test_stride_is_seen():
    layer = layer_with(nn.Conv2d(1, 4, 2, stride=2), torch.eye(4).reshape(4, 1, 2, 2))
    assert bound_layer(layer).value == pytest.approx(1, abs=1e-9)


def test_constant_kernel():
    layer = layer_with(nn.Conv2d(1, 1, 3), torch.full((1, 1, 3, 3), 1 / 3))
    assert bound_layer(layer).value == pytest.approx(3, abs=1e-6)


def test_channels_that_meet_in_turns():
    """A bipartite absolute Gram matrix: power iteration without damping would swing for ever."""
    weight = torch.tensor([[1.0, 1.0, 0.0, 0.0], [0.0, 1.0, 3.0, 0.0], [0.0, 0.0, 1.0, 2.0]])
    found = candidates(weight, geometry_of(nn.Linear(4, 3)), "quick")
    G = (weight.T @ weight).abs().double()
    rho = float(torch.linalg.eigvalsh(G)[-1])
    assert float(found["schur inputs"].square) == pytest.approx(rho, rel=1e-9)


def test_blocks_of_channels_have_scalings_of_their_own():
    """Two blocks that never meet, the weaker one with the more uneven Perron vector."""
    weight = torch.block_diag(3 * torch.eye(1), torch.tensor([[1.0, 1e-3], [1.0, -1e-3], [0, 1e-3]]))
    found = candidates(weight, geometry_of(nn.Linear(3, 4)), "quick")
    assert float(found["schur inputs"].square) == pytest.approx(9, rel=1e-9)


# ---------------------------------------------------------------------------------- each error term, where it is needed


def test_terms_that_are_lost_one_by_one():
    """1 + 4000 * 2^-54: each small product is rounded away, all of them are a thousand units in the last place."""
    column = torch.full((4001, 1), 2.0**-27, dtype=torch.float64)
    column[0] = 1
    for layer in (nn.Linear(1, 4001), nn.Conv1d(1, 4001, 1)):
        check_all(layer_with(layer, column.reshape(layer.weight.shape)))


def test_row_sums_are_rounded_up():
    """Sums of a thousand numbers just above 1: each addition loses the digits that are above."""
    n = 512
    for x in (1 + 2.0**-49, 1 + 2.0**-50, 1 + 2.0**-50 - 2.0**-52):
        sums = torch.full((1, n, n), x, dtype=torch.float64)
        q = torch.ones(1, n, dtype=torch.float64)
        assert _gram._row_sums(Gram(sums, None, 1, 1), q) >= n * Fraction(x)


def test_worst_case_of_the_rounding_model_is_covered_exactly():
    """W = 1 with all errors as large as the model allows: the recursion gives 1 back, not a term can be left out."""
    one, q = torch.ones(1, 1, 1, dtype=torch.float64), torch.ones(1, 1, dtype=torch.float64)
    m, n = 2**40, 2**41
    assert _gram.gamma(m) == m * U / (1 - m * U)
    first = float(1 - _gram.gamma(m))
    second = float(Fraction(first) ** 2 * (1 - _gram.gamma(n)))
    third = float(Fraction(second) ** 2 * (1 - _gram.gamma(n)))
    fourth = float(Fraction(third) ** 2 * (1 - _gram.gamma(n)))
    sizes = [(first, m), (second, n), (third, n), (fourth, n)]
    grams = [Gram(one * size, None, inner, 1) for size, inner in sizes]
    for steps in (1, 2, 3, 4):
        assert 1 <= _gram.norm_of_square(one, grams[:steps], q) <= 1 + 1e-12


def exact_residual(W, A, R, S):
    """max_i sum_j |(S - delta) I - W^T W - R^T R| in fractions; A is not used."""
    W, R = ([[Fraction(x) for x in row] for row in X[0].tolist()] for X in (W, R))
    n = len(R)

    def entry(i, j):
        target = Fraction(S) - _gram.margin(Fraction(S)) if i == j else 0
        return target - sum(row[i] * row[j] for row in W) - sum(row[i] * row[j] for row in R if row[i] and row[j])

    return max(sum(abs(entry(i, j)) for j in range(n)) for i in range(n))


def computed(W, S):
    """A as cholesky_bound makes it."""
    H = gram(W, keep=True).kernel
    assert H is not None
    A = -H
    A.diagonal(dim1=1, dim2=2).add_(float(Fraction(S) - _gram.margin(Fraction(S))))
    return A


def test_residual_counts_the_diagonal():
    """Found by search: S - delta, and S - delta - G, both round by nearly as much as they can."""
    S = float.fromhex("0x1.0fa3d65f587ffp+0")
    W = torch.full((1, 1, 1), float.fromhex("0x1.f4720314ce74dp-3"), dtype=torch.float64)
    A = computed(W, S)
    R = A.sqrt()
    assert _gram._residual(W, A, R, S) >= exact_residual(W, A, R, S) > Fraction(5, 2) * U


def test_residual_counts_the_gram_matrix():
    """G = 1 + 4000 * 2^-54, and the model allows all small products to be lost."""
    W = torch.full((1, 4001, 1), 2.0**-27, dtype=torch.float64)
    W[0, 0] = 1
    S = 1 + 2.0**-30
    A = torch.full((1, 1, 1), float(Fraction(S) - _gram.margin(Fraction(S))) - 1, dtype=torch.float64)
    R = A.sqrt()
    assert _gram._residual(W, A, R, S) >= exact_residual(W, A, R, S) > 1000 * U


def test_residual_counts_the_product_and_the_difference():
    """The last column of R is 1 and many small numbers, whose squares the product may lose."""
    n = 400
    W = torch.zeros(1, 1, n, dtype=torch.float64)
    S = 1 / (1 - 2.0**-32)  # S - delta rounds to 1
    R = torch.zeros(1, n, n, dtype=torch.float64)
    R[0, 1:, -1] = 2.0**-27
    R[0, 0, -1] = 1
    A = R.mT @ R
    lost = 1 + (n - 1) * Fraction(1, 2**54) - Fraction(float(A[0, -1, -1]))
    assert _gram._residual(W, A, R, S) >= abs(lost)
    wrong = R * 1.5
    assert _gram._residual(W, A, wrong, S) >= Fraction(float((A - wrong.mT @ wrong).abs().sum(2).max()))


def test_residual_of_random_matrices():
    generator = torch.Generator().manual_seed(0)
    for _ in range(30):
        W = torch.randn(1, 3, 3, dtype=torch.float64, generator=generator)
        S = float(torch.rand((), generator=generator)) * 30 + float(torch.linalg.matrix_norm(W[0], 2)) ** 2
        A = computed(W, S)
        R = torch.linalg.cholesky(A, upper=True)
        assert _gram._residual(W, A, R, S) >= exact_residual(W, A, R, S)


def test_large_residual_is_added_to_the_claim(monkeypatch):
    W = torch.eye(3, dtype=torch.float64)[None]
    monkeypatch.setattr(_gram, "_residual", lambda *_: Fraction(1))
    proved = _gram.cholesky_bound(W, W.mT @ W)
    assert proved is not None
    square, claim = proved
    assert square == claim + 1 - claim / 2**32


def test_decomposition_that_does_not_exist(monkeypatch):
    monkeypatch.setattr(_gram, "_largest_eigenvalue", lambda H: 0.5)  # below the truth
    layer = layer_with(nn.Linear(3, 3), torch.eye(3))
    assert bound_layer(layer).witness.kind == "schur"
    monkeypatch.setattr(_gram, "_largest_eigenvalue", lambda H: 1 - 1e-7)  # nearly right: a wider gap fixes it
    assert "cholesky inputs" in bound_layer(layer).candidates


# ------------------------------------------------------------------------------------------------------------ parts


def test_read_is_exact():
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        limits = torch.finfo(dtype)
        weight = torch.tensor(
            [0, -0.0, limits.max, limits.min, limits.smallest_normal, 1 / 3, -limits.eps], dtype=dtype
        )
        weight = torch.cat([weight, weight[4:5] / 4, torch.randn(50).to(dtype)])
        numbers = floats.read(weight)
        for x, m, e in zip(weight.tolist(), numbers.mantissa.tolist(), numbers.exponent.tolist(), strict=True):
            assert Fraction(x) == m * Fraction(2) ** e
        assert Fraction(2) ** numbers.top <= Fraction(limits.max) < Fraction(2) ** (numbers.top + 1)
        K, e = floats.scaled(numbers)
        assert 1 <= float(K.abs().max()) < 2
        for x, k in zip(weight.tolist(), K.tolist(), strict=True):
            true = Fraction(x) / Fraction(2) ** e
            assert k == true or (k == 0 and abs(true) < Fraction(1, 2**940))


@pytest.mark.parametrize("taps", [(), (3,), (2, 3), (2, 1, 2)])
def test_gram_kernel(taps):
    torch.manual_seed(0)
    P = torch.randn(2, 3, 4, *taps, dtype=torch.float64)
    G = gram(lay_out(P), keep=True)
    assert G.kernel is not None
    offsets = list(itertools.product(*(range(1 - k, k) for k in taps)))
    assert G.offsets == len(offsets) == 2 * len(list(half_of_offsets(taps))) - 1
    for delta in offsets:
        expected = torch.zeros(2, 4, 4, dtype=torch.float64)
        for tap in itertools.product(*(range(k) for k in taps)):
            other = tuple(t + d for t, d in zip(tap, delta, strict=True))
            if all(0 <= t < k for t, k in zip(other, taps, strict=True)):
                expected += P[(..., *other)].mT @ P[(..., *tap)]
        at = tuple(d + k - 1 for d, k in zip(delta, taps, strict=True))
        mirrored = tuple(k - 1 - d for d, k in zip(delta, taps, strict=True))
        assert torch.allclose(G.kernel[(slice(None), *at)], expected)
        assert torch.equal(G.kernel[(slice(None), *at)], G.kernel[(slice(None), *mirrored)].mT)
    assert torch.allclose(G.sums, G.kernel.abs().reshape(2, -1, 4, 4).sum(1))


def test_gram_matrix_is_symmetric_to_the_last_bit():
    """Which the product of floats itself is not for most sizes."""
    torch.manual_seed(0)
    for rows, columns in ((37, 53), (64, 31), (301, 129)):
        H = gram(torch.randn(1, rows, columns, dtype=torch.float64), keep=True).kernel
        assert H is not None
        assert torch.equal(H, H.mT)
