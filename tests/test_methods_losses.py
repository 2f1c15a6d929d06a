"""LMT, GloRo, CR, OCNN, gradient penalty: each against its formula written out, and the constants that they use."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import onelip
from onelip.certify.margins import margins
from onelip.methods._method import Step
from onelip.methods._tracking import (
    NotAChain,
    PairConstants,
    estimated_constant,
    head_rows,
    links,
    pair_distances,
    split_head,
    track,
)
from onelip.methods.certificate_regularisation import CertificateRegularisation
from onelip.methods.gloro import GloRoLoss, bottom_score
from onelip.methods.gradient_penalty import MarginGradientPenalty, gradient_penalty
from onelip.methods.lmt import LipschitzMargin, lmt_scores
from onelip.methods.ocnn import OrthogonalityPenalty, orthogonality_residual, penalty
from onelip.nn import FirstChannels, LipschitzAvgPool2d, MaxMin
from onelip.testing import exact_jacobian, exact_norm

SHAPE = (2, 6, 6)


def network():
    """A chain with a strided convolution, an average and more rows than classes."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Sequential(nn.Conv2d(2, 4, 3, padding=1), MaxMin()),
        nn.Conv2d(4, 6, 2, stride=2),
        MaxMin(),
        nn.Conv2d(6, 5, 1),
        LipschitzAvgPool2d(None),
        FirstChannels(3),
        nn.Flatten(),
    ).double()


def tracked():
    return onelip.constrain(
        network(), "lmt", verbose=False, example=torch.zeros(1, *SHAPE, dtype=torch.float64), iterations=400
    )


def step_of(model, images=None, labels=None, progress=1.0):
    images = torch.rand(5, *SHAPE, dtype=torch.float64) if images is None else images
    labels = torch.tensor([0, 1, 2, 0, 1]) if labels is None else labels
    return Step(model, images, labels, model(images), progress, lambda s, y: F.cross_entropy(s, y, reduction="none"))


def test_norms_are_followed_on_images_that_hold_the_kernel_three_times_however_small_the_real_ones_are():
    model = tracked()
    shapes = [tuple(m.v.shape[1:]) for m in model.modules() if hasattr(m, "v")]
    assert shapes == [(2, 9, 9), (4, 6, 6), (6, 3, 3)]
    assert model.training


def test_tracked_constants_are_the_norms_of_the_layers():
    model = tracked()
    parts = split_head(model)
    assert parts is not None
    features, head = parts
    assert [type(m).__name__ for m in head][1:] == ["LipschitzAvgPool2d", "FirstChannels", "Flatten"]
    plain = network()
    expected = exact_norm(plain[0][0], (2, 9, 9)) * exact_norm(plain[1], (4, 6, 6))
    assert float(estimated_constant(features).detach()) == pytest.approx(expected, rel=1e-3)
    rows = exact_jacobian(nn.Sequential(*list(plain)[3:]), (6, 3, 3))  # (3, 54)
    assert torch.allclose(head_rows(head, (6, 3, 3), rows).flatten(1), rows)
    distances = torch.tensor([[float((a - b).norm()) for a in rows] for b in rows], dtype=torch.float64)
    found = PairConstants()(model, torch.zeros(1, *SHAPE))
    assert torch.allclose(found, expected * distances, rtol=1e-3)
    found.sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)
    assert model[3].parametrizations.weight.original.grad.any()


def test_looking_at_the_constants_leaves_no_trace():
    model = tracked().eval()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    PairConstants()(model, torch.zeros(1, *SHAPE))
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert not any(m.training for m in model.modules())


def test_what_is_no_chain_is_refused():
    with pytest.raises(NotAChain, match="ends with a linear layer"):
        PairConstants()(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), torch.zeros(1, 2))
    with pytest.raises(NotAChain, match=r"Linear.*onelip\.constrain"):
        PairConstants()(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)), torch.zeros(1, 2))


def test_methods_with_a_proof_bring_their_own_constant():
    model = nn.Sequential(onelip.aol(nn.Linear(3, 3), lipschitz=0.5), nn.ReLU())
    assert float(estimated_constant(list(links(model)))) == 0.5


def test_lmt_adds_what_the_sample_can_bear():
    scores = torch.tensor([[3.0, 0.0, 1.0], [1.0, 0.5, 0.0], [0.0, 1.0, 0.0]])
    labels = torch.tensor([0, 0, 0])
    added = torch.tensor([[9.0, 1.0, 1.0]]).expand(3, 3)  # the 9 is on the right class and must not matter
    expected = torch.tensor([[3.0, 1.0, 2.0], [1.0, 1.0, 0.5], [0.0, 1.0, 0.0]])
    assert torch.allclose(lmt_scores(scores, labels, added), expected)


def test_lmt_of_zero_distances_is_the_plain_loss():
    scores, labels = torch.randn(4, 3), torch.tensor([0, 1, 2, 0])
    assert torch.equal(lmt_scores(scores, labels, torch.zeros(4, 3)), scores)


def test_lmt_certifies_what_it_says():
    """A decision that survives the addition survives every perturbation of that norm: tried on a linear network."""
    torch.manual_seed(0)
    model = nn.Sequential(track(nn.Linear(4, 3), iterations=300)).double()
    loss = LipschitzMargin(radius=0.3, ramp=0.0)
    images = torch.randn(200, 4, dtype=torch.float64)
    labels = model(images).argmax(1)
    step = step_of(model, images, labels)
    reach = 0.3 * PairConstants()(model, images)[labels]
    survives = lmt_scores(step.scores, labels, reach).argmax(1) == labels
    W = model[0].weight.detach()
    for other in range(3):
        direction = W[other] - W[labels]
        size = direction.norm(dim=1, keepdim=True)
        moved = images + 0.2999 * direction / size.clamp(min=1e-9)
        certain = (
            (step.scores.gather(1, labels[:, None]) - step.scores > reach).scatter(1, labels[:, None], True).all(1)
        )
        assert certain.any()
        assert (model(moved).argmax(1) == labels)[certain].all()
    assert survives.any()
    assert loss(step).shape == (200,)


def test_lmt_ramp_and_both_forms():
    loss = LipschitzMargin(radius=1.0, ramp=0.5)
    assert [loss.radius_at(t) for t in (0.0, 0.25, 0.5, 1.0)] == [0.0, 0.5, 1.0, 1.0]
    model = tracked()
    step = step_of(model)
    pairs, whole = LipschitzMargin(ramp=0.0)(step), LipschitzMargin(ramp=0.0, per_pair=False)(step)
    assert (whole >= pairs - 1e-12).all()  # |w_i - w_j| <= sqrt(2) ||W||
    assert (pairs >= step.ordinary(step.scores, step.labels) - 1e-12).all()


def test_gloro_bottom_class_written_out():
    torch.manual_seed(0)
    scores, reach = torch.randn(50, 4), torch.rand(4, 4)
    for row, bottom in zip(scores, bottom_score(scores, reach), strict=True):
        j = int(row.argmax())
        assert float(bottom) == pytest.approx(max(float(row[i] + reach[j, i]) for i in range(4) if i != j))


def test_gloro_trades_form_is_the_divergence_of_the_distributions():
    model = tracked()
    step = step_of(model)
    loss = GloRoLoss(epsilon=0.2, ramp=0.0, overshoot=1.0, weight=1.5)
    reach = 0.2 * PairConstants()(model, step.images)
    extended = torch.cat([step.scores, bottom_score(step.scores, reach)], 1)
    p, q = step.scores.softmax(1), extended.softmax(1)[:, :-1]
    expected = F.cross_entropy(step.scores, step.labels, reduction="none") + 1.5 * (p * (p / q).log()).sum(1)
    assert torch.allclose(loss(step), expected, rtol=1e-4)
    other = GloRoLoss(epsilon=0.2, ramp=0.0, overshoot=1.0, form="cross-entropy")
    assert torch.allclose(other(step), F.cross_entropy(extended, step.labels, reduction="none"), rtol=1e-4)


def test_gloro_epsilon_rises_evenly_in_its_logarithm():
    loss = GloRoLoss(epsilon=1.0, ramp=0.5, overshoot=1.1)
    assert [loss.epsilon_at(t) for t in (0.0, 0.25, 0.5, 1.0)] == pytest.approx([0.01, math.sqrt(0.011), 1.1, 1.1])


def test_certificate_regularisation_takes_off_the_radius():
    model = onelip.constrain(network(), "aol", verbose=False)
    step = step_of(model)
    margin = margins(step.scores, step.labels)
    radius = margin / math.sqrt(2)
    expected = step.ordinary(step.scores, step.labels) - 0.5 * radius.clamp(min=0)
    assert torch.allclose(CertificateRegularisation(0.5)(step), expected)
    per_pair = CertificateRegularisation(0.5, per_pair=True)
    rows = head_rows(split_head(model)[1], (6, 3, 3), step.scores)
    ratios = (step.scores.gather(1, step.labels[:, None]) - step.scores) / pair_distances(rows)[step.labels]
    expected = torch.stack([r[torch.arange(3) != y].min() for r, y in zip(ratios, step.labels, strict=True)])
    assert torch.allclose(per_pair.radius(step), expected)
    per_pair(step).sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


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
    images = torch.rand(5, *SHAPE, dtype=torch.float64, requires_grad=True)
    step = step_of(model, images)
    found = MarginGradientPenalty(weight=2.0, one_sided=False)(step)
    for i in range(5):
        x = images[i : i + 1].detach().requires_grad_()
        scores = model(x)[0]
        y = int(step.labels[i])
        margin = scores[y] - max(scores[k] for k in range(3) if k != y)
        (gradient,) = torch.autograd.grad(margin / math.sqrt(2), x)
        assert float(found[i].detach()) == pytest.approx(2 * (float(gradient.norm()) - 1) ** 2)
    found.sum().backward()
    assert model[1].weight.grad.any()


@pytest.mark.parametrize(("channels", "stride"), [((2, 3), 1), ((3, 2), 1), ((2, 3), 2), ((1, 4), 3)])
def test_ocnn_residual_is_that_of_the_operator(channels, stride):
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


def test_ocnn_penalty_sums_the_layers():
    model = network()
    layers = [model[0][0], model[1], model[3]]
    total = sum(orthogonality_residual(layer) for layer in layers)
    assert torch.allclose(penalty(model, weight=0.3), 0.3 * total)
    assert torch.allclose(
        OrthogonalityPenalty(1.0, skip_first=True).of(model), total - orthogonality_residual(layers[0])
    )
    with pytest.raises(ValueError, match="linear layers"):
        penalty(nn.ReLU())


@pytest.mark.parametrize(
    "make",
    [
        lambda: LipschitzMargin(radius=0.0),
        lambda: LipschitzMargin(ramp=2.0),
        lambda: GloRoLoss(epsilon=-1.0),
        lambda: GloRoLoss(form="other"),
        lambda: GloRoLoss(weight=-1.0),
        lambda: CertificateRegularisation(gamma=-1.0),
        lambda: MarginGradientPenalty(weight=math.nan),
        lambda: OrthogonalityPenalty(weight=-0.1),
    ],
)
def test_settings_are_checked(make):
    with pytest.raises(ValueError, match="expected"):
        make()
