"""The loss of the paper, logit annealing and the generalised cross-entropy, against their formulas."""

import math

import pytest
import torch

from onelip.losses import GeneralisedCrossEntropy, LogitAnnealingLoss, OffsetCrossEntropy, call_loss


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


@pytest.mark.parametrize("exponent", [0.0, 1e-6, 0.5, 1.0])
def test_generalised_cross_entropy_is_its_formula(exponent):
    generator = torch.Generator().manual_seed(0)
    scores, labels = torch.randn(20, 7, generator=generator, dtype=torch.float64), torch.arange(20) % 7
    value = formula(scores, labels, 0.3, 0.25) / 0.25  # -log p
    expected = 0.25 * ((1 - torch.exp(-exponent * value)) / exponent if exponent else value)
    loss = GeneralisedCrossEntropy(exponent, 1.0, 0.3, reduction="none")
    torch.testing.assert_close(loss(scores, labels), expected, rtol=1e-6, atol=0)
    soft = torch.nn.functional.one_hot(labels, 7).double()
    torch.testing.assert_close(loss(scores, soft), loss(scores, labels))
    torch.testing.assert_close(
        GeneralisedCrossEntropy(exponent, 1.0, 0.3)(scores, labels), expected.mean(), rtol=1e-6, atol=0
    )


def test_generalised_cross_entropy_is_the_expected_value_for_labels_of_a_teacher():
    scores, labels = torch.tensor([[1.0, 0.0]], dtype=torch.float64), torch.tensor([[0.75, 0.25]], dtype=torch.float64)
    p = torch.softmax((scores - 0.2 * labels) / 0.5, 1)
    expected = 0.5 * (0.75 * (1 - p[0, 0] ** 0.5) + 0.25 * (1 - p[0, 1] ** 0.5)) / 0.5
    torch.testing.assert_close(GeneralisedCrossEntropy(0.5, 0.2, None, 0.5)(scores, labels), expected)


def test_generalised_cross_entropy_begins_as_the_offset_cross_entropy():
    scores, labels = torch.randn(20, 7), torch.arange(20) % 7
    loss = GeneralisedCrossEntropy(0.7, 1.0, 0.2, start=0.25, end=0.5)
    arguments = {"model": torch.nn.Identity(), "images": scores}

    def at(progress):
        return call_loss(loss, scores, labels, progress=progress, **arguments)

    torch.testing.assert_close(at(0.25), OffsetCrossEntropy(1.0)(scores, labels))
    torch.testing.assert_close(at(0.375), GeneralisedCrossEntropy(0.35, 0.6)(scores, labels))
    assert at(0.5) == at(1.0) == GeneralisedCrossEntropy(0.7, 0.2)(scores, labels)
    assert GeneralisedCrossEntropy(start=0.5, end=0.5).changed(0.4) == 0
    assert GeneralisedCrossEntropy(start=0.5, end=0.5).changed(0.5) == 1


def test_hopeless_samples_have_little_weight_in_the_generalised_cross_entropy():
    scores = torch.tensor([[0.0, 1e4], [0.0, 9.0], [0.0, 0.0], [1e4, 0.0]], requires_grad=True)
    GeneralisedCrossEntropy(1.0, 0.0, reduction="sum")(scores, torch.tensor([0, 0, 0, 0])).backward()
    assert scores.grad is not None
    assert scores.grad.isfinite().all()
    slopes = -scores.grad[:, 0]
    assert slopes[2] == 0.25
    assert slopes[[0, 1, 3]].abs().max() < 1e-6


@pytest.mark.parametrize(
    ("wrong", "message"),
    [({"exponent": 1.5}, "exponent"), ({"exponent": -0.1}, "exponent"), ({"start": 0.8}, "0.8"), ({"end": 2.0}, "end")],
)
def test_generalised_cross_entropy_refuses(wrong, message):
    with pytest.raises(ValueError, match=message):
        GeneralisedCrossEntropy(**wrong)


def test_generalised_cross_entropy_shows_its_options():
    assert "exponent=0.5, final_offset=0.2, start=0.3" in repr(GeneralisedCrossEntropy(final_offset=0.2))
