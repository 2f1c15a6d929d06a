"""Penalties of OCNN and WGAN-GP: against the dense operator, and against gradients of single images."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from onelip.losses import (
    GradientPenaltyLoss,
    OrthogonalityLoss,
    gradient_penalty,
    orthogonality_penalty,
    orthogonality_residual,
)
from onelip.nn import MaxMin
from onelip.testing import exact_jacobian

LABELS = torch.tensor([0, 1, 2, 0, 1])


def network():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), MaxMin(), nn.Conv2d(4, 6, 2, stride=2), nn.Flatten(), nn.Linear(54, 3)
    ).double()


def test_gradient_penalty_is_zero_at_slope_one_and_has_second_derivatives():
    w = torch.tensor([0.6, 0.8], dtype=torch.float64, requires_grad=True)
    x = torch.randn(3, 2, dtype=torch.float64)
    assert float(gradient_penalty(lambda x: x @ w, x, x + 1).detach()) == pytest.approx(0, abs=1e-20)
    assert float(gradient_penalty(lambda x: 0.5 * x @ w, x, x, one_sided=True).detach()) == 0
    v = torch.randn(2, dtype=torch.float64, requires_grad=True)
    generator = torch.Generator()
    assert torch.autograd.gradcheck(
        lambda v: gradient_penalty(lambda x: (x @ v).tanh(), x, -x, generator=generator.manual_seed(0)), (v,)
    )


def test_gradient_penalty_of_a_classifier():
    model = network()
    images = torch.rand(5, 2, 6, 6, dtype=torch.float64, requires_grad=True)
    scores = model(images)
    loss = GradientPenaltyLoss(weight=2.0, one_sided=False, offset=0.0, temperature=1.0, reduction="none")
    found = loss(scores, LABELS, images=images) - F.cross_entropy(scores, LABELS, reduction="none")
    for i, y in enumerate(LABELS.tolist()):
        x = images[i : i + 1].detach().requires_grad_()
        own = model(x)[0]
        margin = own[y] - max(own[k] for k in range(3) if k != y)
        (gradient,) = torch.autograd.grad(margin / math.sqrt(2), x)
        assert float(found[i].detach()) == pytest.approx(2 * (float(gradient.norm()) - 1) ** 2)
    found.sum().backward()
    assert model[0].weight.grad.any()
    with pytest.raises(ValueError, match="requires_grad_"):
        loss(scores, LABELS, images=images.detach())


@pytest.mark.parametrize(("channels", "stride"), [((2, 3), 1), ((3, 2), 1), ((2, 3), 2), ((1, 4), 3)])
def test_the_residual_is_that_of_the_operator(channels, stride):
    torch.manual_seed(0)
    layer = nn.Conv1d(*channels, 3, stride=stride, padding=1, padding_mode="circular").double()
    J = exact_jacobian(layer, (channels[0], 12))
    rows, columns = J.shape
    pixels = 12 // stride
    G = J @ J.T if rows <= columns else J.T @ J
    expected = (G - torch.eye(len(G), dtype=G.dtype)).norm() / math.sqrt(pixels)
    plain = nn.Conv1d(*channels, 3, stride=stride, padding=1).double()  # circular phases need a promised size
    plain.weight = layer.weight
    assert float(orthogonality_residual(plain).detach()) == pytest.approx(float(expected))


def test_the_penalty_sums_the_layers():
    model = network()
    layers = [model[0], model[2], model[4]]
    total = sum(orthogonality_residual(layer) for layer in layers)
    assert torch.allclose(orthogonality_penalty(model, weight=0.3), 0.3 * total)
    rest = total - orthogonality_residual(layers[0])
    assert torch.allclose(orthogonality_penalty(model, weight=1.0, skip_first=True), rest)
    scores = model(torch.rand(5, 2, 6, 6, dtype=torch.float64))
    loss = OrthogonalityLoss(weight=0.3, offset=0.0, temperature=1.0)
    assert torch.allclose(loss(scores, LABELS, model=model), F.cross_entropy(scores, LABELS) + 0.3 * total)
    with pytest.raises(ValueError, match="no linear layer"):
        orthogonality_penalty(nn.ReLU())


@pytest.mark.parametrize("make", [lambda: GradientPenaltyLoss(weight=math.nan), lambda: OrthogonalityLoss(weight=-0.1)])
def test_invalid_settings_are_refused(make):
    with pytest.raises(ValueError, match="expected"):
        make()
