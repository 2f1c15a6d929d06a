"""The loss of the paper and logit annealing, against their formulas."""

import math

import pytest
import torch

from onelip.losses import LogitAnnealingLoss, OffsetCrossEntropy


def formula(scores, labels, u, t):
    """t · crossentropy(y, softmax((s - u y) / t)), computed directly."""
    losses = []
    for s, y in zip(scores.double().tolist(), labels.tolist(), strict=True):
        z = [(v - u * (i == y)) / t for i, v in enumerate(s)]
        losses.append(-t * math.log(math.exp(z[y]) / sum(map(math.exp, z))))
    return torch.tensor(losses, dtype=torch.float64)


@pytest.mark.parametrize(("u", "t"), [(math.sqrt(2), 0.25), (0.0, 1.0), (2.0, 0.5)])
def test_formula(u, t):
    generator = torch.Generator().manual_seed(0)
    scores, labels = torch.randn(20, 7, generator=generator, dtype=torch.float64), torch.arange(20) % 7
    expected = formula(scores, labels, u, t)
    torch.testing.assert_close(OffsetCrossEntropy(u, t, "none")(scores, labels), expected)
    torch.testing.assert_close(OffsetCrossEntropy(u, t, "sum")(scores, labels), expected.sum())
    torch.testing.assert_close(OffsetCrossEntropy(u, t)(scores, labels), expected.mean())


@pytest.mark.parametrize(("u", "t"), [(math.sqrt(2), 0.25), (0.0, 1.0)])
def test_labels_can_be_probabilities(u, t):
    generator = torch.Generator().manual_seed(0)
    scores, labels = torch.randn(20, 7, generator=generator, dtype=torch.float64), torch.arange(20) % 7
    loss = OffsetCrossEntropy(u, t, "none")
    certain = torch.eye(7, dtype=torch.float64)[labels]
    torch.testing.assert_close(loss(scores, certain), loss(scores, labels))
    probabilities = torch.rand(20, 7, generator=generator, dtype=torch.float64).softmax(1)
    expected = [
        -t * sum(q * math.log(math.exp(z) / total) for q, z in zip(row, shifted, strict=True))
        for row, shifted, total in (
            (row, shifted, sum(map(math.exp, shifted)))
            for row, values in zip(probabilities.tolist(), scores.tolist(), strict=True)
            for shifted in [[(v - u * q) / t for v, q in zip(values, row, strict=True)]]
        )
    ]
    torch.testing.assert_close(loss(scores, probabilities), torch.tensor(expected, dtype=torch.float64))
    with pytest.raises(ValueError, match="or probabilities"):
        loss(scores, certain[:, :5])
    with pytest.raises(ValueError, match="in floating point"):
        loss(scores, certain.long())


def test_defaults_are_the_papers():
    loss = OffsetCrossEntropy()
    assert (loss.offset, loss.temperature, loss.reduction) == (math.sqrt(2), 0.25, "mean")
    assert "offset=1.41421" in repr(loss)


def test_gradient_stays_near_one_below_the_margin():
    """The paper: the gradient stays close to 1 as long as the margin is less than 1/2."""
    scores = torch.tensor([[0.5, 0.0]], requires_grad=True)
    OffsetCrossEntropy()(scores, torch.tensor([0])).backward()
    assert scores.grad is not None
    assert 0.95 < scores.grad.abs().max() <= 1


def test_low_precision_is_widened_and_parts_add_up():
    scores, labels = torch.randn(6, 3, generator=torch.Generator().manual_seed(1)), torch.tensor([0, 1, 2, 0, 1, 2])
    loss = OffsetCrossEntropy(reduction="sum")
    assert loss(scores.bfloat16(), labels).dtype == torch.float32
    torch.testing.assert_close(loss(scores[:2], labels[:2]) + loss(scores[2:], labels[2:]), loss(scores, labels))
    assert float(loss(scores[:0], labels[:0])) == 0.0


@pytest.mark.parametrize(
    "settings", [{"offset": math.nan}, {"temperature": 0.0}, {"temperature": math.inf}, {"reduction": "max"}]
)
def test_invalid_settings_are_refused(settings):
    with pytest.raises(ValueError, match="expected"):
        OffsetCrossEntropy(**settings)


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"expected scores \(N, classes\)"):
        OffsetCrossEntropy()(torch.zeros(3), torch.tensor([0, 1, 2]))


@pytest.mark.parametrize("beta", [0.0, 0.5, 1.0, 5.0])
def test_logit_annealing_is_its_formula(beta):
    generator = torch.Generator().manual_seed(0)
    scores, labels = torch.randn(20, 7, generator=generator, dtype=torch.float64), torch.arange(20) % 7
    value = formula(scores, labels, 1.0, 0.25)
    expected = (1 - torch.exp(-value / 0.25)) ** beta * value
    torch.testing.assert_close(LogitAnnealingLoss(beta, 1.0, reduction="none")(scores, labels), expected)
    torch.testing.assert_close(LogitAnnealingLoss(beta, 1.0)(scores, labels), expected.mean())


@pytest.mark.parametrize("beta", [0.0, 0.5, 3.0])
def test_logit_annealing_has_finite_gradients(beta):
    """The derivative of x ** 0.5 is infinite at zero, where the margin is large."""
    scores = torch.tensor([[1e4, 0.0], [0.0, 1e4], [0.0, 0.0]], requires_grad=True)
    LogitAnnealingLoss(beta)(scores, torch.tensor([0, 0, 0])).backward()
    assert scores.grad is not None
    assert scores.grad.isfinite().all()
    assert scores.grad[0].abs().max() < 1e-3
    assert scores.grad[1].abs().max() > 0.3


def test_logit_annealing_refuses_a_negative_exponent():
    with pytest.raises(ValueError, match="beta"):
        LogitAnnealingLoss(-1.0)
