"""The attack against ground truth: linear classifiers with their exact radius; what counts as a flip."""

import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import nn

from onelip.attack import AttackResult, find_adversarials
from onelip.attack.distance import exact_square
from onelip.attack.program import has_flipped

SHIFT = 160


def linear(dims, classes, seed=0):
    torch.manual_seed(seed)
    return nn.Linear(dims, classes).double().eval()


def fractions(tensor):
    return [Fraction(value) for value in tensor.detach().flatten().tolist()]


def integers(tensor):
    """Every number times 2^SHIFT, as integers of Python: sums of products are exact, and fast."""
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
    """The exact squared distances, all of them found."""
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
    assert exact_square(one, other) == true
    assert exact_square(one[:1], other[:1]) == Fraction(5e-324) ** 2 > 0


def test_distance_of_neighbouring_floats():
    x = torch.rand(5, dtype=torch.float64) + 1
    assert exact_square(torch.nextafter(x, x + 1), x) == 5 * Fraction(2) ** -104
    with pytest.raises(ValueError, match="one shape"):
        exact_square(x, x[:2])
    with pytest.raises(ValueError, match="finite"):
        exact_square(x * math.nan, x)


# Linear classifiers: the boundary is known.


@pytest.mark.parametrize(("dims", "classes"), [(10, 2), (10, 10), (300, 10), (3072, 2), (3072, 10)])
def test_linear_boundary_is_found(dims, classes):
    """Within 1e-6 as the issue asks (and 1e-11 in truth); nearer than the boundary only by the program's rounding."""
    model = linear(dims, classes, seed=dims + classes)
    images = torch.rand(6, dims, dtype=torch.float64)
    found = find_adversarials(model, images, neighbours=16)
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
    assert find_adversarials(model, images, radii=radii * 1.01).broken.all()
    assert find_adversarials(model, images, radii=radii * (1 + 1e-9)).broken.all()
    assert not find_adversarials(model, images, radii=radii * (1 - 1e-9)).broken.any()


def test_rounding_is_exploited():
    """Biases of 1e6 (Murray): the margins of the program are coarse, so radii of real arithmetic are refuted."""
    model = linear(20, 3)
    model.bias.data += 1e6
    images = torch.rand(20, 20, dtype=torch.float64)
    classes = model(images).argmax(1)
    true = [exact_radius_square(model, x, int(y)) for x, y in zip(images, classes, strict=True)]
    found = find_adversarials(model, images, classes)
    inside = [s < t for s, t in zip(squares(found), true, strict=True)]
    assert sum(inside) > 10
    assert all(float(s) ** 0.5 >= float(t) ** 0.5 - 1e-7 for s, t in zip(squares(found), true, strict=True))


def test_neighbouring_floats_bring_flips_nearer():
    model, images = linear(30, 3), torch.rand(30, 30, dtype=torch.float64)
    without = find_adversarials(model, images, neighbours=0)
    with_walk = find_adversarials(model, images, neighbours=64)
    assert all(a <= b for a, b in zip(squares(with_walk), squares(without), strict=True))
    assert sum(a < b for a, b in zip(squares(with_walk), squares(without), strict=True)) > 15


def test_box_is_respected_and_optimal():
    """With clip=True the nearest flip solves a small quadratic programme, here by halving its multiplier."""
    model = linear(12, 2)
    images = torch.rand(10, 12, dtype=torch.float64)
    classes = model(images).argmax(1)
    found = find_adversarials(model, images, classes, clip=True)
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
    """Two pixels: the nearest integer flip by trying all. A claim of one more than is true is broken."""
    model = nn.Sequential(nn.Flatten(), linear(2, 2)).eval()
    model[1].weight.data = torch.tensor([[1.0, 0.3], [0.2, 0.9]], dtype=torch.float64)
    model[1].bias.data.zero_()
    images = torch.randint(0, 256, (12, 1, 1, 2), dtype=torch.uint8)
    classes = model(images.double() / 255).argmax(1)
    grid = torch.cartesian_prod(torch.arange(256), torch.arange(256))
    flips = has_flipped(model((grid.double() / 255)[:, None, None]), torch.zeros(len(grid), dtype=torch.int64))
    others = has_flipped(model((grid.double() / 255)[:, None, None]), torch.ones(len(grid), dtype=torch.int64))
    found = find_adversarials(model, images, classes, integers=True)
    assert found.adversarials.dtype == torch.uint8
    sums = [int(square * 255**2) for square in squares(found)]
    for i in range(len(images)):
        region = grid[flips if classes[i] == 0 else others]
        true = int((region - images[i].flatten().long()).square().sum(1).min())
        assert true <= sums[i] <= true + 2 * math.isqrt(true) + 2  # the next integer along the ray
        assert sums[i] == int((found.adversarials[i].long() - images[i].long()).square().sum())
    again = find_adversarials(model, images, classes, integers=True, pixels=sums)
    assert again.broken.all()
    assert not find_adversarials(model, images, classes, integers=True, pixels=[s - 1 for s in sums]).broken.any()


# What counts as a flip.


def test_ties_and_nans_are_flips():
    tied = linear(4, 2)
    tied.weight.data[1] = tied.weight.data[0]
    tied.bias.data[:] = 0
    images = torch.rand(3, 4, dtype=torch.float64)
    found = find_adversarials(tied, images, radii=torch.ones(3))
    assert found.squares == (0, 0, 0)
    assert found.broken.all()

    class Fragile(nn.Module):
        def forward(self, x):
            return torch.stack([2 - (1.5 - x.sum(1)).sqrt(), 0 * x.sum(1)], 1)

    images = torch.full((1, 2), 0.5, dtype=torch.float64)
    found = find_adversarials(Fragile().eval(), images, radii=torch.ones(1))
    assert found.broken.all()  # the scores are NaN beyond a sum of 1.5
    torch.testing.assert_close(found.distances[0], torch.tensor(0.5 / math.sqrt(2)).double(), rtol=0.5, atol=0)


def test_overflow_is_a_flip():
    logits = torch.tensor([[math.inf, 1.0], [2.0, -math.inf], [2.0, 1.0]])
    assert has_flipped(logits, torch.zeros(3, dtype=torch.int64)).tolist() == [True, True, False]


def test_constant_networks_have_no_flips():
    model = linear(4, 3)
    model.weight.data[:] = 0
    found = find_adversarials(model, torch.rand(3, 4, dtype=torch.float64), radii=torch.ones(3))
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
    found = find_adversarials(Steps().eval(), images)
    torch.testing.assert_close(found.distances, torch.tensor([0.2, 0.6]).double(), rtol=1e-3, atol=0)


def test_float32_programs_are_attacked_in_float32():
    model, images = linear(50, 4).float(), torch.rand(10, 50)
    found = find_adversarials(model, images)
    assert found.adversarials.dtype == torch.float32
    assert has_flipped(found.logits, found.classes).all()
    assert (found.distances > 0).all()
    with pytest.raises(ValueError, match="convert the model"):
        find_adversarials(model, images.double())


# Results and errors.


def test_broken_is_an_exact_comparison():
    """One float decides: a radius equal to the distance is broken, its lower neighbour is not; NaN is no excuse."""
    image, flip = torch.zeros(6, 1, dtype=torch.float64), torch.full((6, 1), 0.1, dtype=torch.float64)
    claims = [0.1, math.nextafter(0.1, 0), math.nextafter(0.1, 1), 0.0, math.inf, math.nan]
    found = AttackResult(
        images=image,
        classes=torch.zeros(6, dtype=torch.int64),
        adversarials=flip,
        logits=torch.tensor([[0.0, 1.0]] * 6),
        squares=tuple(exact_square(a, b) for a, b in zip(flip, image, strict=True)),
        radii=torch.tensor(claims, dtype=torch.float64),
    )
    assert found.broken.tolist() == [True, False, True, False, True, True]
    assert found.accuracy(torch.zeros(6, dtype=torch.int64), 0.11) == 0
    assert found.accuracy(torch.zeros(6, dtype=torch.int64), 0.1) == 1  # the float is beyond the decimal that is meant
    assert found.accuracy(torch.zeros(6, dtype=torch.int64), 0.09) == 1
    assert found.accuracy(torch.tensor([0, 1, 1, 1, 1, 1]), 0.09) == pytest.approx(1 / 6)


def test_result_is_saved_and_told(tmp_path):
    model, images = linear(4, 3), torch.rand(7, 4, dtype=torch.float64)
    found = find_adversarials(model, images, radii=torch.tensor([10.0] * 3 + [1e-9] * 4))
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
    one = find_adversarials(model, images, batch_size=3, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(3, 7), (6, 7), (7, 7)]
    assert one.squares == find_adversarials(model, images, batch_size=3).squares


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
        ({"integers": True}, "uint8 images for an attack in integers"),
        ({"pixels": [1] * 7}, "integers=True"),
        ({"model": nn.Linear(4, 1).double().eval()}, "two classes or more"),
    ],
)
def test_bad_input_is_refused(change, message):
    given = {"model": linear(4, 3), "images": torch.rand(7, 4), **change}
    with pytest.raises(ValueError, match=message):
        find_adversarials(given.pop("model"), given.pop("images"), **given)
