"""Radii against the truth: linear classifiers whose distance to the boundary is known, and poisoned networks."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import nn

from onelip.certification import certify, prove
from onelip.certification.radius import Head, certified_radii, pixel_distance, real_radii
from onelip.nn import MaxMin


def linear_model(weight, bias=None):
    classes, inputs = weight.shape
    model = nn.Sequential(nn.Linear(inputs, classes, bias=bias is not None)).double().eval()
    model[0].weight.data.copy_(weight)
    if bias is not None:
        model[0].bias.data.copy_(bias)
    return model


def exact_square(weight, bias, image):
    """The class in real arithmetic, and the exact square of the distance to the nearest other; weights are floats."""
    w = [[Fraction(v) for v in row] for row in weight.tolist()]
    x = [Fraction(v) for v in image.tolist()]
    f = [sum(a * b for a, b in zip(row, x, strict=True)) + Fraction(c) for row, c in zip(w, bias.tolist(), strict=True)]
    y = f.index(max(f))
    apart = [
        (f[y] - f[j]) ** 2 / sum((a - b) ** 2 for a, b in zip(w[y], w[j], strict=True)) for j in range(len(f)) if j != y
    ]
    nearest = min(range(len(apart)), key=apart.__getitem__)
    return y, apart[nearest], [j for j in range(len(f)) if j != y][nearest]


@pytest.mark.parametrize(("classes", "inputs"), [(2, 5), (10, 40)])
def test_linear_classifiers(classes, inputs):
    generator = torch.Generator().manual_seed(classes)
    weight = torch.randn(classes, inputs, generator=generator, dtype=torch.float64)
    bias = torch.randn(classes, generator=generator, dtype=torch.float64) / 10
    images = torch.rand(10, inputs, generator=generator, dtype=torch.float64)
    model = linear_model(weight, bias)
    found = certify(model, images)
    for i, image in enumerate(images):
        y, square, other = exact_square(weight, bias, image)
        radius = float(found.radii[i])
        assert found.classes[i] == y
        assert Fraction(radius) ** 2 < square  # tolerance zero
        capped = square >= inputs
        assert capped or radius > math.sqrt(square) - 1e-9  # and no larger gap than that
        direction = weight[other] - weight[y]
        step = direction / direction.norm() * math.sqrt(square)
        assert int(model((image + step * (1 + 1e-6))[None]).argmax()) != y
        assert int(model((image + step * (radius / math.sqrt(square)) * (1 - 1e-15))[None]).argmax()) == y


def test_pairs_instead_of_the_root_of_two():
    """Rows (1, 0) and (1, 1) are 1 apart, and ||W|| is 1.6: the pair knows, the norm does not."""
    weight = torch.tensor([[1.0, 0.0], [1.0, 1.0]], dtype=torch.float64)
    model = linear_model(weight, torch.tensor([0.5, 0.0], dtype=torch.float64))
    found = certify(model, torch.tensor([[0.3, 0.2]], dtype=torch.float64))
    assert abs(float(found.radii[0]) - 0.3) < 1e-12
    assert found.constant == pytest.approx((1 + 5**0.5) / 2)


def poisoned():
    """Murray's attack: biases of 1e6 that cancel in real arithmetic and shift the sums by rounding."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).double().eval()
    for layer, sign in zip(model, (1.0, -1.0), strict=True):
        layer.weight.data.copy_(torch.eye(2))
        layer.bias.data.copy_(sign * torch.tensor([1e6, 7e6]))
    return model


def test_biases_that_cancel_are_seen_through():
    """Where rounding alone decides, the computed class is wrong, its margin positive, and nothing is certified."""
    model = poisoned()
    generator = torch.Generator().manual_seed(0)
    base = torch.rand(4000, 1, generator=generator, dtype=torch.float64)
    images = (base + torch.tensor([[0.0, 1e-10]])).clamp(0, 1)  # the second is larger by a hair
    found = certify(model, images)
    wrong = (found.classes == 0) & (images[:, 0] < images[:, 1])
    assert int(wrong.sum()) > 100
    assert not bool((found.radii[wrong] > 0).any())
    clear = certify(model, torch.tensor([[0.2, 0.9]], dtype=torch.float64))
    assert abs(float(clear.radii[0]) - 0.7 / 2**0.5) < 1e-7


def test_no_flip_within_the_radius_of_a_poisoned_network():
    """A walk over neighbouring floats at the end of the radius, towards the boundary."""
    model = poisoned()
    images = torch.tensor([[0.5, 0.5 + gap] for gap in (1e-9, 3e-8, 4e-8, 1e-7, 1e-3)], dtype=torch.float64)
    found = certify(model, images)
    assert bool((found.radii > 0).any())
    generator = np.random.default_rng(0)
    for image, radius, y in zip(images, found.radii.tolist(), found.classes.tolist(), strict=True):
        step = torch.tensor([1.0, -1.0]).double() / 2**0.5 * radius
        end = (image + step).numpy()
        walk = np.nextafter(end, end + generator.choice([-1.0, 1.0], (500, 2)))
        inside = [
            p
            for p in walk
            if sum((Fraction(a) - Fraction(b)) ** 2 for a, b in zip(p, image.tolist(), strict=True))
            <= Fraction(radius) ** 2
        ]
        if inside:
            assert model(torch.tensor(np.array(inside))).argmax(1).tolist() == [y] * len(inside)


def test_no_attack_within_the_radius():
    """Gradient steps to the edge of the ball, from several starts, on a small MaxMin network."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), MaxMin(), nn.Linear(8, 8), MaxMin(), nn.Linear(8, 4)).double().eval()
    images = torch.rand(20, 6, dtype=torch.float64)
    found = certify(model, images)
    assert found.certified() == 20
    radii, classes = found.radii[:, None], found.classes
    for restart in range(3):
        x = images + restart * 0.3 * radii * torch.randn(20, 6).double()
        for _ in range(30):
            x = x.detach().requires_grad_(True)
            logits = model(x)
            own = logits.gather(1, classes[:, None])[:, 0]
            rest = logits.scatter(1, classes[:, None], -math.inf).amax(1)
            (gradient,) = torch.autograd.grad((own - rest).sum(), x)
            x = x.detach() - 0.2 * radii * gradient / gradient.norm(dim=1, keepdim=True)
            offset = x - images
            x = images + offset * (radii / offset.norm(dim=1, keepdim=True)).clamp(max=1) * (1 - 1e-14)
            assert torch.equal(model(x).argmax(1), classes)


def test_ties_and_rows_alike():
    weight = torch.tensor([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    assert float(certify(linear_model(weight), torch.tensor([[0.9, 0.1]]).double()).radii[0]) == 0.0
    # With biases apart no perturbation exchanges two equal rows: only the third limits the radius.
    model = linear_model(weight, torch.tensor([0.5, 0.0, 0.0]).double())
    assert float(certify(model, torch.tensor([[0.9, 0.1]]).double()).radii[0]) == pytest.approx(1.3 / 2**0.5)
    # Nothing limits it at all: it stays below sqrt(n), where the proof ends.
    constant = linear_model(torch.zeros(2, 2).double(), torch.tensor([1.0, 0.0]).double())
    radius = float(certify(constant, torch.zeros(1, 2).double()).radii[0])
    assert radius == math.nextafter(2**0.5, 0) or Fraction(radius) ** 2 < 2
    assert Fraction(math.nextafter(radius, 2)) ** 2 >= 2


def test_zero_images():
    model = linear_model(torch.eye(2).double(), torch.tensor([0.1, 0.0]).double())
    found = certify(model, torch.zeros(1, 2, dtype=torch.uint8))
    assert float(found.radii[0]) == pytest.approx(0.1 / 2**0.5)
    assert found.pixels[0] == math.floor((255 * Fraction(float(found.radii[0]))) ** 2)


def test_integer_distances():
    """uint8 neighbours up to the integer are within the radius; one more is not."""
    model = linear_model(torch.tensor([[1.0, 0.0], [0.0, 1.0]]).double())
    found = certify(model, torch.tensor([[200, 100]], dtype=torch.uint8))
    (pixels,) = found.pixels
    assert pixels is not None
    radius = Fraction(float(found.radii[0]))
    assert Fraction(pixels, 255**2) <= radius**2 < Fraction(pixels + 1, 255**2)
    # The nearest image of the other side or on the boundary is (150, 150), at 5000; rounding costs that one only.
    assert pixels == 4999
    for a in range(-75, 76):
        for b in range(-75, 76):
            if a * a + b * b <= pixels:
                assert 200 + a > 100 + b
    assert pixel_distance(math.nextafter(1 / 255, 0)) == 0


def head(slope, rounding, classes=3):
    slopes = [[0.0 if i == j else slope for j in range(classes)] for i in range(classes)]
    return Head(None, squared(slopes), slopes, rounding)


def squared(slopes):
    return [[Fraction(slope) ** 2 for slope in row] for row in slopes]


def naive(logits, tables, entries):
    """The formula itself, for all pairs."""
    radii = []
    for row in logits.tolist():
        if not all(map(math.isfinite, row)):
            radii.append(0.0)
            continue
        y = row.index(max(row))
        limits = [
            (Fraction(row[y]) - Fraction(v) - Fraction(tables.rounding)) / Fraction(tables.slope[y][j])
            for j, v in enumerate(row)
            if j != y
        ]
        value = float(min(limits)) if min(limits) > 0 else 0.0
        value = min(value, math.sqrt(entries) * (1 + 1e-15))
        while value > 0 and not (Fraction(value) < min(limits) and Fraction(value) ** 2 < entries):
            value = math.nextafter(value, 0.0)
        radii.append(value)
    return radii


def test_the_shortcut_gives_the_numbers_of_the_formula():
    generator = np.random.default_rng(0)
    logits = generator.standard_normal((300, 3))
    logits[50:100, 1] = np.nextafter(logits[50:100, 0], 1)  # margins of one unit in the last place
    logits[100:150] *= 1e-200
    logits[150:200] = np.round(logits[150:200], 1)  # ties
    logits[200:220] *= 1e5
    logits[220] = [math.nan, 0, 1]
    logits[221] = [math.inf, 0, 1]
    for slope, rounding in ((1.7, 1e-10), (0.3, 0.25), (1e-12, 2.0**-400)):
        tables = head(slope, rounding)
        assert certified_radii(logits, logits.argmax(1), tables, 4).tolist() == naive(logits, tables, 4)


def test_real_arithmetic_leaves_rounding_out():
    tables = head(2.0, 0.5)
    logits = np.array([[3.0, 1.0, 0.0], [1.0, 1.0, 0.0], [math.nan, 0.0, 1.0]])
    slopes = torch.tensor(tables.slope, dtype=torch.float64)
    assert real_radii(torch.from_numpy(logits), slopes).tolist() == [1.0, 0.0, 0.0]
    assert certified_radii(logits, logits.argmax(1), tables, 9)[0] == math.nextafter(0.75, 0)


def test_a_proof_serves_many_images():
    model = linear_model(torch.eye(3).double())
    proof = prove(model, (3,), exact=True)
    images = torch.rand(4, 3).double()
    assert torch.equal(certify(model, images, proof=proof).radii, certify(model, images, exact=True).radii)
    assert proof.constant == pytest.approx(1.0, rel=1e-8)
    assert "exact" in str(proof)


def test_a_margin_equal_to_its_rounding_is_not_above_it():
    logits = np.array([[1.25, 1.0, 0.0]])
    assert certified_radii(logits, logits.argmax(1), head(0.0, 0.25), 4)[0] == 0.0
    assert certified_radii(logits, logits.argmax(1), head(0.0, 0.125), 4)[0] == math.nextafter(2.0, 0)
    assert certified_radii(logits, logits.argmax(1), head(1.0, 0.25), 4)[0] == 0.0


def test_the_shortcut_keeps_classes_that_floats_cannot_tell_apart():
    """Two classes at the same distance but for the last place, through other slopes: estimates order them wrongly."""
    table, rounding = [[0.0, 1.1, 1.7], [1.0, 0.0, 1.0], [1.0, 1.0, 0.0]], 1.3  # margins nearly cancel against it
    tables = Head(None, squared(table), table, rounding)
    distance = 1e-6 * np.random.default_rng(0).random((400, 1))
    logits = np.concatenate([np.ones((400, 1)), -(distance * table[0][1:] + rounding - 1)], 1)
    assert certified_radii(logits, logits.argmax(1), tables, 4).tolist() == naive(logits, tables, 4)
