"""Margins, radii in real arithmetic, certified robust accuracy: the definition of the paper, and its edges."""

import math
from fractions import Fraction

import pytest
import torch

from onelip.certification.radius import (
    PAPER_RADII,
    certified_accuracy,
    margins,
    radius_fraction,
    radius_name,
    real_radii,
)

ROOT_TWO = math.sqrt(2)


def test_margin_is_the_difference_to_the_best_other_score():
    generator = torch.Generator().manual_seed(0)
    scores, labels = torch.randn(50, 6, generator=generator), torch.arange(50) % 6
    expected = [
        float(s[y]) - max(float(v) for i, v in enumerate(s) if i != y)
        for s, y in zip(scores.double(), labels.tolist(), strict=True)
    ]
    torch.testing.assert_close(margins(scores, labels), torch.tensor(expected, dtype=torch.float64))


def test_radius_is_margin_over_slope():
    scores = torch.tensor([[3.0, 1.0, 2.5], [1.0, 1.0, 0.0], [0.0, 0.0, 2.0]])
    torch.testing.assert_close(real_radii(scores, 2.0), torch.tensor([0.25, 0.0, 1.0]).double())
    slopes = torch.tensor([[0.0, 1.0, 0.25], [1.0, 0.0, 1.0], [4.0, 0.5, 0.0]])
    torch.testing.assert_close(real_radii(scores, slopes), torch.tensor([2.0, 0.0, 0.5]).double())


def test_a_linear_network_is_certified_exactly_up_to_its_distance():
    """f(x) = (x, -x)/sqrt 2 has constant 1, and at x > 0 the decision changes at distance x."""
    scores = torch.tensor([[3.0, -3.0]], dtype=torch.float64) / ROOT_TWO
    assert float(real_radii(scores, ROOT_TWO)) == pytest.approx(3.0)


def test_a_slope_of_zero_keeps_the_order_of_two_scores():
    scores = torch.tensor([[2.0, 1.0, 0.0], [1.0, 1.0, 0.0]])
    assert real_radii(scores, 0.0).tolist() == [math.inf, 0.0]
    slopes = torch.zeros(3, 3)
    slopes[0, 2] = 4.0
    assert real_radii(scores, slopes).tolist() == [0.5, 0.0]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1.0])
def test_slopes_that_are_no_bound_certify_nothing(bad):
    scores = torch.tensor([[5.0, 0.0, 0.0]])
    slopes = torch.ones(3, 3)
    slopes[0, 2] = bad
    assert real_radii(scores, slopes).tolist() == [0.0]
    assert real_radii(scores, bad).tolist() == [0.0]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", [0, 1])
def test_scores_that_are_not_finite_are_never_certified(bad, where):
    scores = torch.tensor([[5.0, 0.0, 0.0]])
    scores[0, where] = bad
    assert margins(scores, torch.tensor([0])).isnan().all()
    assert real_radii(scores, 1.0).tolist() == [0.0]


def test_radii_are_compared_as_rational_numbers():
    """36/255 is not a float64; its lower and upper neighbours differ, and a radius of exactly 1/2 counts at 1/2."""
    right = torch.tensor([True])
    nearest = 36 / 255
    for radius in (nearest, math.nextafter(nearest, 0), math.nextafter(nearest, 1)):
        reached = Fraction(radius) > Fraction(36, 255)
        for inclusive in (True, False):
            found = certified_accuracy(right, torch.tensor([radius], dtype=torch.float64), nearest, inclusive=inclusive)
            assert found == float(reached)
    half = torch.tensor([0.5], dtype=torch.float64)
    assert certified_accuracy(right, half, 0.5, inclusive=True) == 1.0
    assert certified_accuracy(right, half, 0.5, inclusive=False) == 0.0


def test_only_right_decisions_count_and_nan_never_does():
    right = torch.tensor([True, False, True, True])
    radii = torch.tensor([1.0, 1.0, math.nan, math.inf])
    assert certified_accuracy(right, radii, 0.5, inclusive=False) == 0.5
    assert certified_accuracy(right, radii, 0.5, inclusive=True) == 0.5


def test_certified_accuracy_falls_with_the_radius():
    radii = torch.linspace(0, 2, 100, dtype=torch.float64)
    shares = [certified_accuracy(radii > 0.5, radii, r, inclusive=False) for r in (0.0, *PAPER_RADII)]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] == 0.75


def test_names_of_radii():
    names = [radius_name(r) for r in (*PAPER_RADII, 0.0, 0.25, 0.1, math.pi)]
    assert names == ["36/255", "72/255", "108/255", "1", "0", "1/4", "1/10", "3.141592653589793"]
    assert radius_fraction(72 / 255) * 255 == 72


def test_invalid_arguments_are_refused():
    with pytest.raises(ValueError, match="two classes"):
        margins(torch.zeros(3, 1), torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ValueError, match="two classes"):
        real_radii(torch.zeros(3, 1), 1.0)
    with pytest.raises(ValueError, match="label for each"):
        margins(torch.zeros(3, 2), torch.zeros(2, dtype=torch.int64))
    for radius in (math.nan, math.inf, -1.0):
        with pytest.raises(ValueError, match="finite radius of at least 0"):
            certified_accuracy(torch.tensor([True]), torch.ones(1), radius, inclusive=True)
    with pytest.raises(ValueError, match="one or more images"):
        certified_accuracy(torch.zeros(0, dtype=torch.bool), torch.zeros(0), 1.0, inclusive=True)
