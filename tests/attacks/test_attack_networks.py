"""The attack on networks, compared with brute force in two dimensions, sound certificates and foolbox."""

import math
import sys

import pytest
import torch
from _classifiers import linear
from torch import nn

import onelip
from onelip.attacks import with_foolbox
from onelip.attacks.search import FOOLBOX_ATTACKS


def small_network(seed, classes, dims=2, width=16, constrained=False):
    torch.manual_seed(seed)
    layers = [nn.Linear(dims, width), onelip.nn.MaxMin(), nn.Linear(width, width), onelip.nn.MaxMin()]
    model = nn.Sequential(*layers, nn.Linear(width, classes))
    for layer in model.children():
        if not isinstance(layer, nn.Linear):
            continue
        nn.init.normal_(layer.weight, std=layer.in_features**-0.5)
        nn.init.normal_(layer.bias, std=0.3)
    return onelip.bake(onelip.constrain(model, "aol")).double().eval() if constrained else model.double().eval()


@torch.no_grad()
def brute_force(model, image, label, limit, angles=720, circles=40):
    """The nearest flip on a dense set of rays, each taken to its boundary."""
    angle = torch.arange(angles, dtype=torch.float64) * (2 * math.pi / angles)
    unit = torch.stack([angle.cos(), angle.sin()], 1)
    radius = torch.linspace(0, limit, circles + 1, dtype=torch.float64)[1:]
    points = image + unit[:, None] * radius[:, None]  # (angles, circles, 2)
    flips = (model(points.flatten(0, 1)).argmax(1) != label).view(angles, circles)
    if not flips.any():
        return limit
    crossing = flips.any(1)
    high = radius[flips.int().argmax(1)[crossing]]
    low = high - radius[0]
    for _ in range(30):
        middle = (low + high) / 2
        flipped = model(image + middle[:, None] * unit[crossing]).argmax(1) != label
        low, high = torch.where(flipped, low, middle), torch.where(flipped, middle, high)
    return float(high.min())


@pytest.mark.parametrize(("seed", "classes"), [(0, 2), (1, 4), (2, 4)])
def test_piecewise_linear_boundary_against_brute_force(seed, classes):
    model = small_network(seed, classes)
    images = 4 * torch.rand(6, 2, dtype=torch.float64) - 2
    labels = model(images).argmax(1)
    found = onelip.attack(model, images, labels, restarts=8, steps=30)
    checked = 0
    for i, distance in enumerate(found.distances.tolist()):
        limit = min(1.05 * distance, 10.0)
        assert distance <= brute_force(model, images[i], labels[i], limit) * (1 + 1e-3) or limit == 10.0
        checked += limit < 10
    assert checked >= 3


def test_certified_radii_hold():
    """Attacked distances of AOL networks are never within the sound radii, and not far beyond them."""
    model = nn.Sequential(nn.Flatten(), small_network(3, 4, dims=12, constrained=True)).eval()
    images = torch.rand(40, 3, 2, 2, dtype=torch.float64)
    certified = onelip.certify(model, images)
    found = onelip.attack(model, images, certified.classes, radii=certified.radii)
    assert int(found.attacked.sum()) > 30
    assert not found.broken.any()
    assert found.ratios.min() > 1
    assert onelip.attack(model, images, certified.classes, radii=certified.radii * 30).broken.any()


def test_sound_radius_of_a_linear_classifier_is_nearly_touched():
    model = nn.Sequential(nn.Flatten(), linear(12, 3)).eval()
    images = torch.rand(20, 3, 2, 2, dtype=torch.float64)
    certified = onelip.certify(model, images)
    found = onelip.attack(model, images, certified.classes, radii=certified.radii)
    kept = certified.radii > 0
    assert not found.broken.any()
    assert (found.distances / certified.radii)[kept].max() < 1.5  # the constants of a single layer are nearly exact


# foolbox.


@pytest.mark.parametrize("attack", FOOLBOX_ATTACKS)
def test_foolbox_finds_the_linear_boundary(attack):
    """With our bisection at the end, foolbox is close to the true distance and never below it."""
    model = nn.Sequential(nn.Flatten(), linear(12, 2)).eval()
    images = 0.3 + 0.4 * torch.rand(6, 3, 2, 2, dtype=torch.float64)
    options = {"CarliniWagner": {"steps": 60, "binary_search_steps": 4}, "DeepFool": {"steps": 20}}
    classes = model(images).argmax(1)
    w = (model[1].weight[0] - model[1].weight[1]).detach()
    logits = model(images).detach()
    radius = (logits[:, 0] - logits[:, 1]).abs() / w.norm()
    found = with_foolbox(model, images, classes, attack, radii=radius * 1.5, **options.get(attack, {"steps": 60}))
    inside = found.distances.isfinite()
    assert (found.distances >= radius * (1 - 1e-12)).all()
    assert int((found.distances <= radius * 1.2)[inside].sum()) >= 4
    assert found.broken.any()
    assert ((found.adversarials >= 0) & (found.adversarials <= 1)).all()


def test_foolbox_agrees_with_the_certificate():
    model = nn.Sequential(nn.Flatten(), small_network(3, 4, dims=12, constrained=True)).eval()
    images = torch.randint(0, 256, (10, 3, 2, 2), dtype=torch.uint8)
    certified = onelip.certify(model, images)
    seen = []
    found = with_foolbox(
        model,
        images,
        attack="FMN",
        radii=certified.radii,
        batch_size=6,
        steps=30,
        progress=lambda *done: seen.append(done),
    )
    assert seen == [(6, 10), (10, 10)]
    assert not found.broken.any()
    ours = onelip.attack(model, images, radii=certified.radii, clip=True)
    assert (ours.distances <= found.distances * (1 + 1e-3)).all()


def test_foolbox_refusals(monkeypatch):
    model, images = linear(4, 3), torch.rand(2, 4, dtype=torch.float64)
    with pytest.raises(ValueError, match="unknown attack 'PGD'; expected one of FMN, DeepFool"):
        with_foolbox(model, images, attack="PGD")
    with pytest.raises(ValueError, match="divide by 255"):
        with_foolbox(model, images * 255)
    monkeypatch.setitem(sys.modules, "foolbox", None)
    with pytest.raises(ValueError, match="pip install 'onelip"):
        with_foolbox(model, images)
