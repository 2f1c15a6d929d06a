"""Kantorovich-Rubinstein losses against their definition, written out with means."""

import pytest
import torch

import onelip
from onelip.losses import HKRLoss, KRLoss


def test_the_gap_of_means():
    scores, labels = torch.randn(9, dtype=torch.float64), torch.tensor([0, 1, 1, 0, 0, 1, 0, 0, 0])
    gap = scores[labels == 1].mean() - scores[labels == 0].mean()
    for given in (scores, scores[:, None]):
        assert float(KRLoss()(given, labels)) == pytest.approx(-float(gap))
    assert float(KRLoss()(scores, labels == 1)) == pytest.approx(-float(gap))


def test_one_critic_for_each_class():
    scores, labels = torch.randn(12, 3), torch.arange(12) % 3
    gaps = [scores[labels == c, c].mean() - scores[labels != c, c].mean() for c in range(3)]
    assert float(KRLoss()(scores, labels)) == pytest.approx(-float(sum(gaps)) / 3, abs=1e-6)


def test_the_hinge_counts_samples_within_the_margin():
    scores, labels = torch.randn(10), torch.tensor([0, 1] * 5)
    signs = torch.tensor([-1.0, 1.0] * 5)
    hinge = (0.5 - signs * scores).clamp(min=0).mean()
    wanted = KRLoss()(scores, labels) + 7 * hinge
    assert float(HKRLoss(margin=0.5, weight=7)(scores, labels)) == pytest.approx(float(wanted), abs=1e-6)


@pytest.mark.parametrize("loss", [KRLoss(reduction="none"), HKRLoss(reduction="none")])
def test_values_of_samples_have_the_loss_as_their_mean(loss):
    scores, labels = torch.randn(8, 4), torch.arange(8) % 4
    values = loss(scores, labels)
    loss.reduction = "mean"
    assert values.shape == (8,)
    assert float(values.mean()) == pytest.approx(float(loss(scores, labels)), abs=1e-6)


def test_a_side_without_samples_is_finite_and_has_a_gradient():
    scores = torch.randn(4, requires_grad=True)
    loss = HKRLoss()(scores, torch.ones(4))
    loss.backward()
    assert bool(torch.isfinite(loss) & torch.isfinite(scores.grad).all())


@pytest.mark.parametrize(
    ("scores", "labels", "message"),
    [
        (torch.zeros(3), torch.tensor([0, 1, 2]), "expected labels 0 and 1"),
        (torch.zeros(3), torch.tensor([-1, 1, 1]), "expected labels 0 and 1"),
        (torch.zeros(3, 2), torch.zeros(4), "expected scores"),
        (torch.zeros(3, 2, 2), torch.zeros(3), "expected scores"),
    ],
)
def test_wrong_shapes_and_labels_are_refused(scores, labels, message):
    with pytest.raises(ValueError, match=message):
        KRLoss()(scores, labels)


@pytest.mark.parametrize("options", [{"margin": 0}, {"margin": float("nan")}, {"weight": -1}, {"reduction": "max"}])
def test_wrong_options_are_refused(options):
    with pytest.raises(ValueError, match="expected"):
        HKRLoss(**options)


def test_a_critic_of_constant_one_never_exceeds_the_distance():
    """Two points at a distance of 2: the estimate is below 2 and, trained, next to it."""
    torch.manual_seed(0)
    critic = torch.nn.Sequential(onelip.nn.AOLLinear(2, 8), onelip.nn.MaxMin(), onelip.nn.AOLLinear(8, 1))
    points, labels = torch.tensor([[-1.0, 0.0], [1.0, 0.0]]), torch.tensor([0, 1])
    optimizer = torch.optim.Adam(critic.parameters(), lr=0.02)
    for _ in range(150):
        optimizer.zero_grad()
        loss = KRLoss()(critic(points), labels)
        loss.backward()
        optimizer.step()
        assert -loss.item() <= 2 + 1e-5
    assert -KRLoss()(critic(points), labels).item() > 1.8
