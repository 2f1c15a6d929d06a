"""Margins, radii, certified robust accuracy: the definition of the paper, and its edges."""

import math

import pytest
import torch

from onelip.certify.margins import PAPER_RADII, certified, certified_accuracy, margins, radii


def test_margin_is_the_difference_to_the_best_other_score():
    generator = torch.Generator().manual_seed(0)
    scores, labels = torch.randn(50, 6, generator=generator), torch.arange(50) % 6
    expected = [
        float(s[y]) - max(float(v) for i, v in enumerate(s) if i != y)
        for s, y in zip(scores.double(), labels.tolist(), strict=True)
    ]
    torch.testing.assert_close(margins(scores, labels), torch.tensor(expected, dtype=torch.float64))
    top = scores.double().topk(2).values
    torch.testing.assert_close(margins(scores), top[:, 0] - top[:, 1])


def test_radius_is_margin_over_sqrt_two_l():
    torch.testing.assert_close(
        radii(torch.tensor([1.0, 0.0, -3.0, math.nan]), 2.0),
        torch.tensor([1 / (2 * math.sqrt(2)), 0.0, 0.0, 0.0]),
    )


def test_a_linear_network_is_certified_exactly_up_to_its_distance():
    """f(x) = (x, -x)/sqrt 2 has constant 1, and at x > 0 the decision changes at distance x."""
    scores = torch.tensor([[3.0, -3.0]], dtype=torch.float64) / math.sqrt(2)
    assert float(radii(margins(scores, torch.tensor([0])))) == pytest.approx(3.0)


def test_the_inequality_is_strict():
    threshold = math.sqrt(2) * (36 / 255)
    margin = torch.tensor([threshold, math.nextafter(threshold, 1)], dtype=torch.float64)
    assert certified(margin, 36 / 255).tolist() == [False, True]
    assert certified(torch.zeros(1), 0.0).tolist() == [False]  # a tie is not right


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", [0, 1])
def test_what_is_not_finite_is_never_certified(bad, where):
    scores = torch.tensor([[5.0, 0.0, 0.0]])
    scores[0, where] = bad
    margin = margins(scores, torch.tensor([0]))
    assert margin.isnan().all()
    assert [certified_accuracy(margin, r) for r in (0.0, *PAPER_RADII)] == [0.0] * 5


def test_certified_accuracy_falls_with_radius_and_constant():
    margin = torch.linspace(-1, 3, 100, dtype=torch.float64)
    shares = [certified_accuracy(margin, r) for r in (0.0, *PAPER_RADII)]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] == 75 / 100
    assert certified_accuracy(margin, 0.5, 2.0) == certified_accuracy(margin, 1.0)


def test_what_has_no_sense_is_refused():
    with pytest.raises(ValueError, match="two classes"):
        margins(torch.zeros(3, 1))
    with pytest.raises(ValueError, match="label for each"):
        margins(torch.zeros(3, 2), torch.zeros(2, dtype=torch.int64))
    with pytest.raises(ValueError, match="Lipschitz constant"):
        radii(torch.zeros(1), 0.0)
    with pytest.raises(ValueError, match="radius"):
        certified(torch.zeros(1), math.nan)
    with pytest.raises(ValueError, match="at least one"):
        certified_accuracy(torch.zeros(0), 1.0)
