"""LMT, GloRo, EMMA and CR against their formulas, and the constants that they use."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import onelip
from onelip.certification.radius import margins
from onelip.losses import CertificateRegularisation, EMMALoss, GloRoLoss, LMTLoss, bottom_score, emma_scores, lmt_scores
from onelip.losses.chain import (
    NotAChain,
    PairConstants,
    estimated_constant,
    head_rows,
    links,
    pair_distances,
    split_head,
)
from onelip.methods.free_weights import track
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
    return onelip.constrain(network(), "lmt", example=torch.zeros(1, *SHAPE, dtype=torch.float64), iterations=400)


LABELS = torch.tensor([0, 1, 2, 0, 1])


def batch_of(model):
    """Images, and the arguments of a loss for them."""
    images = torch.rand(5, *SHAPE, dtype=torch.float64)
    return images, (model(images), LABELS), {"model": model, "images": images}


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


def test_modules_without_a_constant_are_refused():
    with pytest.raises(NotAChain, match=r"Linear.*onelip\.constrain"):
        PairConstants()(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)), torch.zeros(1, 2))


def test_a_network_without_a_linear_last_layer_has_one_constant_for_all_pairs():
    model = nn.Sequential(onelip.aol(nn.Linear(2, 3), lipschitz=0.5), nn.ReLU())
    expected = math.sqrt(2) * 0.5 * (1 - torch.eye(3))
    torch.testing.assert_close(PairConstants()(model, torch.zeros(1, 2)), expected)


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
    """A decision that survives the addition survives every perturbation of that norm: tested on a linear network."""
    torch.manual_seed(0)
    model = nn.Sequential(track(nn.Linear(4, 3), iterations=300)).double()
    images = torch.randn(200, 4, dtype=torch.float64)
    scores = model(images).detach()
    labels = scores.argmax(1)
    reach = 0.3 * PairConstants()(model, images)[labels].detach()
    right = scores.gather(1, labels[:, None])
    certain = (right - scores > reach).scatter(1, labels[:, None], True).all(1)
    assert certain.any()
    assert (lmt_scores(scores, labels, reach).argmax(1) == labels)[certain].all()
    W = model[0].weight.detach()
    for other in range(3):
        direction = W[other] - W[labels]
        moved = images + 0.2999 * direction / direction.norm(dim=1, keepdim=True).clamp(min=1e-9)
        assert (model(moved).argmax(1) == labels)[certain].all()


def test_lmt_ramp_and_both_forms():
    loss = LMTLoss(radius=1.0, ramp=0.5)
    assert [loss.radius_at(t) for t in (0.0, 0.25, 0.5, 1.0)] == [0.0, 0.5, 1.0, 1.0]
    _, batch, context = batch_of(tracked())
    pairs = LMTLoss(reduction="none")(*batch, **context)
    whole = LMTLoss(per_pair=False, reduction="none")(*batch, **context)
    assert (whole >= pairs - 1e-12).all()  # |w_i - w_j| <= sqrt(2) ||W||
    plain = F.cross_entropy(*batch, reduction="none")
    assert (pairs >= plain - 1e-12).all()
    assert torch.allclose(LMTLoss(ramp=0.3, reduction="none")(*batch, **context, progress=0.0), plain)


def test_gloro_bottom_class_written_out():
    torch.manual_seed(0)
    scores, reach = torch.randn(50, 4), torch.rand(4, 4)
    for row, bottom in zip(scores, bottom_score(scores, reach), strict=True):
        j = int(row.argmax())
        assert float(bottom) == pytest.approx(max(float(row[i] + reach[j, i]) for i in range(4) if i != j))


def test_gloro_trades_form_is_the_divergence_of_the_distributions():
    model = tracked()
    images, (scores, labels), context = batch_of(model)
    loss = GloRoLoss(epsilon=0.2, overshoot=1.0, weight=1.5, reduction="none")
    extended = torch.cat([scores, bottom_score(scores, 0.2 * PairConstants()(model, images))], 1)
    p, q = scores.softmax(1), extended.softmax(1)[:, :-1]
    expected = F.cross_entropy(scores, labels, reduction="none") + 1.5 * (p * (p / q).log()).sum(1)
    assert torch.allclose(loss(scores, labels, **context), expected, rtol=1e-4)
    other = GloRoLoss(epsilon=0.2, overshoot=1.0, form="cross-entropy")
    assert torch.allclose(other(scores, labels, **context), F.cross_entropy(extended, labels), rtol=1e-4)


def test_gloro_epsilon_rises_evenly_in_its_logarithm():
    loss = GloRoLoss(epsilon=1.0, ramp=0.5, overshoot=1.1)
    assert [loss.epsilon_at(t) for t in (0.0, 0.25, 0.5, 1.0)] == pytest.approx([0.01, math.sqrt(0.011), 1.1, 1.1])


def test_emma_is_its_formula():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 3)).double()
    track(model[0])
    images, labels = torch.randn(4, 3, dtype=torch.float64), torch.tensor([0, 2, 1, 1])
    scores = model(images).detach()
    loss = EMMALoss(epsilon=0.2, overshoot=2.0, floor=0.05, reduction="none")(
        scores, labels, model=model, images=images
    )
    rows = model[0].weight.detach()
    for n, y in enumerate(labels.tolist()):
        reach = 0.4 * torch.stack([(rows[y] - rows[i]).norm() for i in range(3)])
        kappa = [float(min(1, max(0.05, (scores[n, y] - scores[n, i]) / reach[i]))) if i != y else 0 for i in range(3)]
        shifted = scores[n] + torch.tensor(kappa, dtype=torch.float64) * reach
        torch.testing.assert_close(loss[n], shifted.logsumexp(0) - shifted[y])


def test_emma_has_a_finite_gradient_where_rows_are_alike():
    scores = torch.zeros(1, 3, requires_grad=True)
    emma_scores(scores, torch.tensor([1]), torch.zeros(1, 3)).logsumexp(1).sum().backward()
    assert bool(scores.grad.isfinite().all())


def test_certificate_regularisation_takes_off_the_radius():
    model = onelip.constrain(network(), "aol")
    _, (scores, labels), context = batch_of(model)
    plain = F.cross_entropy(scores, labels, reduction="none")
    settings = {"gamma": 0.5, "offset": 0.0, "temperature": 1.0, "reduction": "none"}
    radius = margins(scores, labels) / math.sqrt(2)
    found = CertificateRegularisation(**settings)(scores, labels, **context)
    assert torch.allclose(found, plain - 0.5 * radius.clamp(min=0))
    per_pair = CertificateRegularisation(per_pair=True, **settings)
    rows = head_rows(split_head(model)[1], (6, 3, 3), scores)
    ratios = (scores.gather(1, labels[:, None]) - scores) / pair_distances(rows)[labels]
    expected = torch.stack([r[torch.arange(3) != y].min() for r, y in zip(ratios, labels, strict=True)])
    assert torch.allclose(per_pair.radius(scores, labels, **context), expected)
    per_pair(scores, labels, **context).sum().backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("make", [LMTLoss, GloRoLoss, EMMALoss, CertificateRegularisation])
def test_the_mean_is_that_of_the_images(make):
    _, batch, context = batch_of(tracked().eval())  # in eval mode the estimates stay the same from call to call
    each = make(reduction="none")(*batch, **context)
    assert each.shape == (5,)
    torch.testing.assert_close(make()(*batch, **context), each.mean())
    torch.testing.assert_close(make(reduction="sum")(*batch, **context), each.sum())


def test_one_loss_serves_networks_of_different_shapes():
    """The shape of the features is stored per network, not per loss."""
    loss, images = EMMALoss(), torch.rand(2, 4)
    for width in (3, 5):
        model = nn.Sequential(onelip.nn.AOLLinear(4, width), onelip.nn.AOLLinear(width, 2))
        assert loss(model(images), torch.tensor([0, 1]), model=model, images=images).isfinite()


def test_wrapped_networks_are_unwrapped():
    model = nn.Sequential(onelip.nn.AOLLinear(4, 3))
    assert list(links(nn.DataParallel(model))) == list(links(torch.compile(model, backend="eager"))) == [model[0]]


@pytest.mark.parametrize(
    "make",
    [
        lambda: LMTLoss(radius=0.0),
        lambda: LMTLoss(ramp=2.0),
        lambda: GloRoLoss(epsilon=-1.0),
        lambda: GloRoLoss(form="other"),
        lambda: GloRoLoss(weight=-1.0),
        lambda: EMMALoss(epsilon=0.0),
        lambda: EMMALoss(overshoot=math.nan),
        lambda: EMMALoss(ramp=2.0),
        lambda: EMMALoss(floor=-1.0),
        lambda: CertificateRegularisation(gamma=-1.0),
        lambda: LMTLoss(reduction="max"),
    ],
)
def test_invalid_settings_are_refused(make):
    with pytest.raises(ValueError, match="expected"):
        make()


@pytest.mark.parametrize("loss", [EMMALoss(), GloRoLoss()], ids=lambda loss: type(loss).__name__)
def test_networks_with_fixed_patches(loss):
    # Overlapping patches are a convolution with fixed weights, which no method bounds.
    model = onelip.create_model("aol-fast-small").train()
    images = torch.rand(4, 3, 32, 32)
    value = loss(model(images), torch.tensor([0, 1, 2, 3]), model=model, images=images)
    value.backward()
    assert torch.isfinite(value)
