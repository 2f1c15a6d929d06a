"""Rounding in the safe direction, by the smallest step; sums without any."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, strategies as st

from onelip.core.errors import ProofError
from onelip.core.floats import integers, is_below, largest_sum, squared_distances, squared_norm
from onelip.core.rounding import LIMIT, gamma, root_below, up, up_root

POSITIVE = st.builds(
    lambda n, d, e: Fraction(n, d) * Fraction(2) ** e,
    st.integers(1, 2**120),
    st.integers(1, 2**120),
    st.integers(-900, 600),
)


@given(POSITIVE)
def test_up_is_the_smallest_float_not_below(x):
    value = up(x)
    assert Fraction(math.nextafter(value, -math.inf)) < x <= Fraction(value)


@given(POSITIVE)
def test_roots(square):
    value = up_root(square)
    assert Fraction(math.nextafter(value, 0.0)) ** 2 < square <= Fraction(value) ** 2
    value = root_below(square)
    assert Fraction(value) ** 2 < square <= Fraction(math.nextafter(value, math.inf)) ** 2


def test_floats_stay_what_they_are():
    assert up(Fraction(0.1)) == 0.1
    assert up_root(Fraction(0)) == 0.0
    assert up_root(Fraction(0.1) ** 2) == 0.1
    assert root_below(Fraction(9)) == math.nextafter(3.0, 0)


def test_the_ends_of_the_range():
    tiny = Fraction(1, 2**2000)
    assert up(tiny) == 5e-324
    assert up_root(tiny) == 2.0**-1000
    with pytest.raises(ProofError, match="within the range"):
        up(Fraction(2) ** 1100)


def test_gamma():
    assert gamma(2) == Fraction(2, 2**53 - 2)
    with pytest.raises(ProofError, match="2\\^50 roundings"):
        gamma(2**52)


FLOATS = st.floats(allow_nan=False, allow_infinity=False, width=64)


@given(st.lists(FLOATS, min_size=1, max_size=8))
def test_integers_are_exact(values):
    numbers, exponent = integers(torch.tensor(values, dtype=torch.float64))
    assert [Fraction(n, 2**exponent) for n in numbers] == [Fraction(v) for v in values]
    assert squared_norm(torch.tensor(values, dtype=torch.float64)) == sum(Fraction(v) ** 2 for v in values)


@given(st.lists(st.lists(FLOATS, min_size=3, max_size=3), min_size=1, max_size=5))
def test_the_largest_sum_is_found_among_all_rows(rows):
    wanted = max(sum(abs(Fraction(v)) for v in row) for row in rows)
    assert largest_sum(torch.tensor(rows, dtype=torch.float64)) == wanted


def test_rows_that_differ_in_the_last_place_only():
    """Float64 sums cannot tell these rows apart; the exact ones can."""
    rows = torch.full((3, 1000), 0.1, dtype=torch.float64)
    rows[1, 500] = math.nextafter(0.1, 1)
    assert largest_sum(rows) == 999 * Fraction(0.1) + Fraction(math.nextafter(0.1, 1))


def test_distances():
    rows = torch.tensor([[1e300, 1.0], [1e300, 1.0 + 2.0**-52], [0.0, 5e-324]], dtype=torch.float64)
    table = squared_distances(rows)
    assert table[0][1] == table[1][0] == Fraction(1, 2**104)
    assert table[2][0] == Fraction(1e300) ** 2 + (1 - Fraction(5e-324)) ** 2
    assert [table[i][i] for i in range(3)] == [0, 0, 0]


def test_limits_refuse_what_is_no_number():
    assert is_below(None, LIMIT)
    assert is_below(torch.tensor([-1e150], dtype=torch.float64), LIMIT)
    assert not is_below(torch.tensor([1.0, math.nan]), LIMIT)
    assert not is_below(torch.tensor([math.inf]), LIMIT)
    assert not is_below(torch.tensor([2.0**500], dtype=torch.float64), LIMIT)
