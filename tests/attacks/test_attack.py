"""The attack against ground truth: linear classifiers with a known exact radius, and the definition of a flip."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from _classifiers import linear
from torch import nn

import onelip
from onelip import AttackResult
from onelip.attacks import search
from onelip.attacks.flips import has_flipped
from onelip.core.floats import squared_distance

SHIFT = 160


def fractions(tensor):
    return [Fraction(value) for value in tensor.detach().flatten().tolist()]


def integers(tensor):
    """Every number times 2^SHIFT as Python integers: sums of products are exact and fast."""
    ratios = [value.as_integer_ratio() for value in tensor.detach().flatten().tolist()]
    assert all(2**SHIFT % denominator == 0 for _, denominator in ratios)
    whole = [numerator * (2**SHIFT // denominator) for numerator, denominator in ratios]
    return np.array(whole, dtype=object).reshape(tensor.shape)


def exact_margins(model, image, label):
    """(margin of real arithmetic, ||w_y - w_j||²) for each other class j, as rationals."""
    w, b, x = integers(model.weight), integers(model.bias), integers(image)
    scores = w @ x + b * 2**SHIFT
    apart = ((w[label] - w) ** 2).sum(1)
    unit = Fraction(1, 4**SHIFT)
    return [(int(scores[label] - scores[j]) * unit, int(apart[j]) * unit) for j in range(len(b)) if j != label]


def exact_radius_square(model, image, label):
    """The squared distance to the boundary of real arithmetic."""
    return min(m**2 / d for m, d in exact_margins(model, image, label))


def squares(found):
    """The exact squared distances; every image must have a flip."""
    assert None not in found.squares
    return [square for square in found.squares if square is not None]


# Distances.


def test_distance_has_no_rounding():
    """Against fractions, over magnitudes whose squares float64 cannot hold."""
    torch.manual_seed(0)
    scales = 10.0 ** torch.randint(-300, 150, (40,)).double()
    one, other = torch.randn(40).double() * scales, torch.randn(40).double() * scales
    one[0], other[0] = 5e-324, 0.0
    true = sum((a - b) ** 2 for a, b in zip(fractions(one), fractions(other), strict=True))
    assert squared_distance(one, other) == true
    assert squared_distance(one[:1], other[:1]) == Fraction(5e-324) ** 2 > 0


def test_distance_of_neighbouring_floats():
    x = torch.rand(5, dtype=torch.float64) + 1
    assert squared_distance(torch.nextafter(x, x + 1), x) == 5 * Fraction(2) ** -104
    with pytest.raises(ValueError, match="the same shape"):
        squared_distance(x, x[:2])
    with pytest.raises(ValueError, match="finite"):
        squared_distance(x * math.nan, x)


# Linear classifiers: the boundary is known.


@pytest.mark.parametrize(("dims", "classes"), [(10, 2), (10, 10), (300, 10), (3072, 2), (3072, 10)])
def test_linear_boundary_is_found(dims, classes):
    """Found to 1e-11; nearer than the boundary only by the rounding of the program."""
    model = linear(dims, classes, seed=dims + classes)
    images = torch.rand(6, dims, dtype=torch.float64)
    found = onelip.attack(model, images)
    for i in range(len(images)):
        label = int(found.classes[i])
        true = exact_radius_square(model, images[i], label)
        square = squares(found)[i]
        assert square <= true * (1 + Fraction(1, 10**11)) ** 2
        assert square >= true * (1 - Fraction(1, 10**11)) ** 2
        # Where real arithmetic flips too, Cauchy-Schwarz allows nothing below the boundary: no tolerance.
        if any(m <= 0 for m, _ in exact_margins(model, found.adversarials[i], label)):
            assert square >= true


@pytest.mark.parametrize("dims", [10, 3072])
def test_wrong_certificate_is_broken_everywhere(dims):
    model = linear(dims, 10)
    images = torch.rand(5, dims, dtype=torch.float64)
    classes = model(images).argmax(1)
    roots = [float(exact_radius_square(model, x, int(y))) ** 0.5 for x, y in zip(images, classes, strict=True)]
    radii = torch.tensor(roots, dtype=torch.float64)
    assert onelip.attack(model, images, radii=radii * 1.01).broken.all()
    assert onelip.attack(model, images, radii=radii * (1 + 1e-9)).broken.all()
    assert not onelip.attack(model, images, radii=radii * (1 - 1e-9)).broken.any()


def test_rounding_is_exploited():
    """Biases of 1e6 (Murray): the margins of the program are coarse, so radii of real arithmetic are refuted."""
    model = linear(20, 3)
    model.bias.data += 1e6
    images = torch.rand(20, 20, dtype=torch.float64)
    classes = model(images).argmax(1)
    true = [exact_radius_square(model, x, int(y)) for x, y in zip(images, classes, strict=True)]
    found = onelip.attack(model, images, classes)
    inside = [s < t for s, t in zip(squares(found), true, strict=True)]
    assert sum(inside) > 10
    assert all(float(s) ** 0.5 >= float(t) ** 0.5 - 1e-7 for s, t in zip(squares(found), true, strict=True))


def test_neighbouring_floats_bring_flips_nearer(monkeypatch):
    model, images = linear(30, 3), torch.rand(30, 30, dtype=torch.float64)
    with_walk = onelip.attack(model, images)
    monkeypatch.setattr(search, "NEIGHBOURS", 0)
    without = onelip.attack(model, images)
    assert all(a <= b for a, b in zip(squares(with_walk), squares(without), strict=True))
    assert sum(a < b for a, b in zip(squares(with_walk), squares(without), strict=True)) > 15


def test_box_is_respected_and_optimal():
    """With clip=True the nearest flip solves a small quadratic program, here by bisection of its multiplier."""
    model = linear(12, 2)
    images = torch.rand(10, 12, dtype=torch.float64)
    classes = model(images).argmax(1)
    found = onelip.attack(model, images, classes, clip=True)
    for i, x in enumerate(images):
        w = (model.weight[classes[i]] - model.weight[1 - classes[i]]).detach()
        margin = float((w @ x + model.bias[classes[i]] - model.bias[1 - classes[i]]).detach())
        low, high = 0.0, 1e4
        for _ in range(200):
            middle = (low + high) / 2
            if float(w @ ((x - middle * w).clamp(0, 1) - x)) > -margin:
                low = middle
            else:
                high = middle
        best = ((x - high * w).clamp(0, 1) - x).norm()
        reachable = float(w @ ((x - 1e4 * w).clamp(0, 1) - x)) < -margin
        assert (found.squares[i] is not None) == reachable
        if reachable:
            torch.testing.assert_close(found.distances[i], best, rtol=1e-6, atol=0)
    assert (found.adversarials >= 0).all()
    assert (found.adversarials <= 1).all()


def test_integers_are_attacked_as_integers():
    """Two pixels: the nearest integer flip by exhaustive search. A claim that is too large by one is broken."""
    model = nn.Sequential(nn.Flatten(), linear(2, 2)).eval()
    model[1].weight.data = torch.tensor([[1.0, 0.3], [0.2, 0.9]], dtype=torch.float64)
    model[1].bias.data.zero_()
    images = torch.randint(0, 256, (12, 1, 1, 2), dtype=torch.uint8)
    classes = model(images.double() / 255).argmax(1)
    grid = torch.cartesian_prod(torch.arange(256), torch.arange(256))
    flips = has_flipped(model((grid.double() / 255)[:, None, None]), torch.zeros(len(grid), dtype=torch.int64))
    others = has_flipped(model((grid.double() / 255)[:, None, None]), torch.ones(len(grid), dtype=torch.int64))
    found = onelip.attack(model, images, classes, integers=True)
    assert found.adversarials.dtype == torch.uint8
    sums = [int(square * 255**2) for square in squares(found)]
    for i in range(len(images)):
        region = grid[flips if classes[i] == 0 else others]
        true = int((region - images[i].flatten().long()).square().sum(1).min())
        assert true <= sums[i] <= true + 2 * math.isqrt(true) + 2  # the next integer along the ray
        assert sums[i] == int((found.adversarials[i].long() - images[i].long()).square().sum())
    again = onelip.attack(model, images, classes, integers=True, pixels=sums)
    assert again.broken.all()
    assert not onelip.attack(model, images, classes, integers=True, pixels=[s - 1 for s in sums]).broken.any()


# Definition of a flip.


def test_ties_and_nans_are_flips():
    tied = linear(4, 2)
    tied.weight.data[1] = tied.weight.data[0]
    tied.bias.data[:] = 0
    images = torch.rand(3, 4, dtype=torch.float64)
    found = onelip.attack(tied, images, radii=torch.ones(3))
    assert found.squares == (0, 0, 0)
    assert found.broken.all()

    class Fragile(nn.Module):
        def forward(self, x):
            return torch.stack([2 - (1.5 - x.sum(1)).sqrt(), 0 * x.sum(1)], 1)

    images = torch.full((1, 2), 0.5, dtype=torch.float64)
    found = onelip.attack(Fragile().eval(), images, radii=torch.ones(1))
    assert found.broken.all()  # the scores are NaN beyond a sum of 1.5
    torch.testing.assert_close(found.distances[0], torch.tensor(0.5 / math.sqrt(2)).double(), rtol=0.5, atol=0)


def test_overflow_is_a_flip():
    logits = torch.tensor([[math.inf, 1.0], [2.0, -math.inf], [2.0, 1.0]])
    assert has_flipped(logits, torch.zeros(3, dtype=torch.int64)).tolist() == [True, True, False]


def test_constant_networks_have_no_flips():
    model = linear(4, 3)
    model.weight.data[:] = 0
    found = onelip.attack(model, torch.rand(3, 4, dtype=torch.float64), radii=torch.ones(3))
    assert found.squares == (None, None, None)
    assert not found.broken.any()
    assert found.distances.isinf().all()
    assert (found.found_classes == -1).all()


def test_vanishing_gradients_are_survived():
    """A step function has no gradient anywhere: the segment to an image of the other class crosses its boundary."""

    class Steps(nn.Module):
        def forward(self, x):
            return torch.stack([(x[:, 0] > 0.3).double(), (x[:, 0] <= 0.3).double()], 1) + 0 * x[:, :1]

    images = torch.tensor([[0.1, 0.5], [0.9, 0.5]], dtype=torch.float64)
    found = onelip.attack(Steps().eval(), images)
    torch.testing.assert_close(found.distances, torch.tensor([0.2, 0.6]).double(), rtol=1e-3, atol=0)


def test_float32_programs_are_attacked_in_float32():
    model, images = linear(50, 4).float(), torch.rand(10, 50)
    found = onelip.attack(model, images)
    assert found.adversarials.dtype == torch.float32
    assert has_flipped(found.logits, found.classes).all()
    assert (found.distances > 0).all()
    with pytest.raises(ValueError, match="convert the model"):
        onelip.attack(model, images.double())


# Results and errors.


def test_broken_is_an_exact_comparison():
    """A radius equal to the distance is broken, the next smaller float is not; NaN counts as broken."""
    image, flip = torch.zeros(6, 1, dtype=torch.float64), torch.full((6, 1), 0.1, dtype=torch.float64)
    claims = [0.1, math.nextafter(0.1, 0), math.nextafter(0.1, 1), 0.0, math.inf, math.nan]
    found = AttackResult(
        images=image,
        classes=torch.zeros(6, dtype=torch.int64),
        adversarials=flip,
        logits=torch.tensor([[0.0, 1.0]] * 6),
        squares=tuple(squared_distance(a, b) for a, b in zip(flip, image, strict=True)),
        radii=torch.tensor(claims, dtype=torch.float64),
    )
    assert found.broken.tolist() == [True, False, True, False, True, True]
    assert found.accuracy(torch.zeros(6, dtype=torch.int64), 0.11) == 0
    assert found.accuracy(torch.zeros(6, dtype=torch.int64), 0.1) == 1  # the float is beyond the decimal that is meant
    assert found.accuracy(torch.zeros(6, dtype=torch.int64), 0.09) == 1
    assert found.accuracy(torch.tensor([0, 1, 1, 1, 1, 1]), 0.09) == pytest.approx(1 / 6)


def test_certified_accuracy_compares_rationals():
    """A radius that rounds to 36/255 from below does not reach it; NaN reaches nothing."""
    share = math.nextafter(36 / 255, 1) if Fraction(36 / 255) < Fraction(36, 255) else 36 / 255
    found = AttackResult(
        images=torch.zeros(4, 1),
        classes=torch.zeros(4, dtype=torch.int64),
        adversarials=torch.zeros(4, 1),
        logits=torch.zeros(4, 2),
        squares=(None,) * 4,
        radii=torch.tensor([share, math.nextafter(share, 0), math.nan, math.inf], dtype=torch.float64),
    )
    labels = torch.zeros(4, dtype=torch.int64)
    assert found.certified_accuracy(labels, 36 / 255) == 2 / 4
    assert found.certified_accuracy(1 - labels, 36 / 255) == 0
    with pytest.raises(ValueError, match="a label for each of 4"):
        found.certified_accuracy(labels[:3])
    with pytest.raises(ValueError, match="no radii were attacked"):
        onelip.attack(linear(4, 3), torch.rand(2, 4)).certified_accuracy(labels[:2])


def test_result_is_saved_and_printed(tmp_path):
    model, images = linear(4, 3), torch.rand(7, 4, dtype=torch.float64)
    found = onelip.attack(model, images, radii=torch.tensor([10.0] * 3 + [1e-9] * 4))
    assert "7 certified, 3 broken" in str(found)
    found.save(tmp_path / "broken.npz", only_broken=True)
    with np.load(tmp_path / "broken.npz", allow_pickle=False) as saved:
        assert saved["index"].tolist() == [0, 1, 2]
        assert [Fraction(text) for text in saved["squares"]] == list(found.squares[:3])
        logits = model(torch.from_numpy(saved["adversarials"]))
        assert logits.argmax(1).shape == (3,)
        assert (saved["found_classes"] != saved["classes"]).all()
    assert found.to_json()["broken"] == 3


def test_same_seed_same_flips_and_progress():
    model, images = linear(4, 3), torch.rand(7, 4, dtype=torch.float64)
    seen = []
    one = onelip.attack(model, images, batch_size=3, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(3, 7), (6, 7), (7, 7)]
    assert one.squares == onelip.attack(model, images, batch_size=3).squares


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": nn.Linear(4, 3)}, "eval"),
        ({"images": torch.rand(7, 4).long()}, "uint8 or floating"),
        ({"images": torch.full((7, 4), math.nan)}, "finite images"),
        ({"images": torch.rand(0, 4)}, "batch of images"),
        ({"classes": torch.zeros(3, dtype=torch.int64)}, "a class for each of 7"),
        ({"classes": torch.zeros(7)}, "int64"),
        ({"radii": torch.ones(2)}, "a radius for each of 7"),
        ({"radii": torch.full((7,), math.nan)}, "radii of at least 0"),
        ({"radii": -torch.ones(7)}, "radii of at least 0"),
        ({"integers": True}, "uint8 images for integers=True"),
        ({"pixels": [1] * 7}, "integers=True"),
        ({"model": nn.Linear(4, 1).double().eval()}, "two or more classes"),
        ({"steps": 0}, "steps to be an integer of at least 1"),
        ({"restarts": -1}, "restarts to be an integer of at least 0"),
        ({"batch_size": 0}, "batch_size to be an integer of at least 1"),
    ],
)
def test_bad_input_is_refused(change, message):
    given = {"model": linear(4, 3), "images": torch.rand(7, 4), **change}
    with pytest.raises(ValueError, match=message):
        onelip.attack(given.pop("model"), given.pop("images"), **given)
