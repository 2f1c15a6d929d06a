"""Each transformation against an independent formula, and the chain: its order, seed, range and identity."""

import colorsys
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from onelip.data import Augmentation, DataError
from onelip.data.augmentation import (
    adjust_brightness_contrast,
    adjust_hue_saturation,
    flip,
    move_pixels,
    rotate,
    rotate_translate,
    translate,
)

AMOUNTS = ("hue", "saturation", "brightness", "contrast", "rotation", "translation", "flip")
NONE: dict[str, Any] = dict.fromkeys(AMOUNTS, 0)


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def images(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(shape, generator=seeded(seed), dtype=torch.float64)


def exact(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def awkward_images() -> Tensor:
    """Grey, black, white, primary and mixed colours, equal largest channels: all the corners of HSV."""
    corners = torch.cartesian_prod(*[torch.tensor([0.0, 0.5, 1.0, 1e-9], dtype=torch.float64)] * 3)  # (64, 3)
    return corners.T.reshape(1, 3, 8, 8)


def hsv_pixel(rgb: list[float], delta: float, factor: float) -> tuple[float, float, float]:
    hue, saturation, value = colorsys.rgb_to_hsv(*rgb)
    return colorsys.hsv_to_rgb((hue + delta) % 1.0, min(1.0, saturation * factor), value)


@pytest.mark.parametrize(
    ("delta", "factor"), [(0.0, 1.0), (0.02, 1.0), (-0.02, 0.3), (0.0, 2.0), (0.3, 0.0), (-0.5, 1.7)]
)
def test_hue_and_saturation_are_those_of_hsv(delta, factor):
    for x in (images(2, 3, 5, 4), awkward_images()):
        n = len(x)
        got = adjust_hue_saturation(x, exact(*[delta] * n), exact(*[factor] * n))
        pixels = x.permute(0, 2, 3, 1).reshape(-1, 3).tolist()
        want = torch.tensor([hsv_pixel(p, delta, factor) for p in pixels], dtype=torch.float64)
        torch.testing.assert_close(got.permute(0, 2, 3, 1).reshape(-1, 3), want, atol=1e-12, rtol=0)


def test_float32_colours_stay_close_and_within_range():
    x = images(50, 3, 8, 8).float()
    same = adjust_hue_saturation(x, torch.zeros(50), torch.ones(50))
    torch.testing.assert_close(same, x, atol=2e-6, rtol=0)
    assert same.min() >= -1e-7
    assert same.max() <= 1


def test_contrast_is_about_the_mean_of_each_channel_and_brightness_adds():
    x = images(3, 3, 6, 5)
    delta, factor = exact(0.1, -0.1, 0.05), exact(0.5, 2.0, 1.3)
    got = adjust_brightness_contrast(x, delta, factor).numpy()
    for n in range(3):
        for c in range(3):
            brighter = x[n, c].numpy() + delta[n].item()
            mean = np.sum(brighter) / brighter.size
            np.testing.assert_allclose(got[n, c], (brighter - mean) * factor[n].item() + mean, atol=1e-12)


def sample(image: np.ndarray, y: float, x: float) -> float:
    """Bilinear at (y, x) in pixels, from an image mirrored about its edges: d c b a | a b c d | d c b a."""
    height, width = image.shape

    def pixel(row: int, column: int) -> float:
        row, column = row % (2 * height), column % (2 * width)
        return image[min(row, 2 * height - 1 - row), min(column, 2 * width - 1 - column)]

    top, left = math.floor(y), math.floor(x)
    v, u = y - top, x - left
    upper = (1 - u) * pixel(top, left) + u * pixel(top, left + 1)
    lower = (1 - u) * pixel(top + 1, left) + u * pixel(top + 1, left + 1)
    return (1 - v) * upper + v * lower


def keras_transform(image: np.ndarray, a: tuple[float, ...]) -> np.ndarray:
    """Keras: the output pixel (x, y) is taken from (a0 x + a1 y + a2, a3 x + a4 y + a5)."""
    height, width = image.shape
    return np.array(
        [
            [sample(image, a[3] * x + a[4] * y + a[5], a[0] * x + a[1] * y + a[2]) for x in range(width)]
            for y in range(height)
        ]
    )


def keras_rotation(image: np.ndarray, angle: float) -> np.ndarray:
    h, w, c, s = image.shape[0] - 1, image.shape[1] - 1, math.cos(angle), math.sin(angle)
    return keras_transform(image, (c, -s, (w - (c * w - s * h)) / 2, s, c, (h - (s * w + c * h)) / 2))


def keras_translation(image: np.ndarray, down: float, right: float) -> np.ndarray:
    return keras_transform(image, (1, 0, -right * image.shape[1], 0, 1, -down * image.shape[0]))


@settings(max_examples=25, deadline=None)
@given(
    height=st.integers(1, 7),
    width=st.integers(1, 7),
    angle=st.floats(-math.pi, math.pi),
    down=st.floats(-1, 1),
    right=st.floats(-1, 1),
)
def test_rotation_and_translation_are_those_of_keras(height, width, angle, down, right):
    x = images(1, 2, height, width)
    a, d, r = exact(angle), exact(down), exact(right)
    for channel in range(2):
        image = x[0, channel].numpy()
        rotated = keras_rotation(image, angle)
        np.testing.assert_allclose(rotate(x, a)[0, channel].numpy(), rotated, atol=1e-9)
        np.testing.assert_allclose(
            translate(x, d, r)[0, channel].numpy(), keras_translation(image, down, right), atol=1e-9
        )
        both = translate(rotate(x, a), d, r)[0, channel].numpy()
        np.testing.assert_allclose(both, keras_translation(rotated, down, right), atol=1e-9)


def test_one_interpolation_samples_the_original_at_the_composed_place():
    x = images(1, 1, 6, 9)
    angle, down, right = 0.2, 0.1, -0.15
    a, d, r = exact(angle), exact(down), exact(right)
    c, s, cx, cy = math.cos(angle), math.sin(angle), 4.0, 2.5
    tx, ty = right * 9, down * 6
    # p -> R(p - t - middle) + middle
    want = keras_transform(
        x[0, 0].numpy(), (c, -s, cx - c * (tx + cx) + s * (ty + cy), s, c, cy - s * (tx + cx) - c * (ty + cy))
    )
    np.testing.assert_allclose(rotate_translate(x, a, d, r)[0, 0].numpy(), want, atol=1e-9)


def test_whole_pixels_move_exactly_and_content_moves_down_and_right():
    x = images(1, 1, 10, 10)
    moved = translate(x, exact(0.2), exact(0.1))
    torch.testing.assert_close(moved[0, 0, 2:, 1:], x[0, 0, :-2, :-1], atol=1e-12, rtol=0)
    torch.testing.assert_close(moved[0, 0, 1, 1:], x[0, 0, 0, :-1], atol=1e-12, rtol=0)  # mirrored: b a | a b


def test_flip_mirrors_only_the_chosen():
    x = images(2, 3, 4, 5)
    got = flip(x, torch.tensor([True, False]))
    np.testing.assert_array_equal(got[0].numpy(), x[0].numpy()[:, :, ::-1])
    assert torch.equal(got[1], x[1])


def test_the_chain_is_colour_clip_rotation_translation_flip():
    augmentation = Augmentation()
    x = images(6, 3, 8, 8)
    draws = augmentation.draw(6, seeded(1))
    u = draws.double().T
    y = adjust_hue_saturation(x, (u[0] * 2 - 1) * 0.02, 0.3 + u[1] * 1.7)
    y = adjust_brightness_contrast(y, (u[2] * 2 - 1) * 0.1, 0.5 + u[3] * 1.5).clamp(0, 1)
    y = translate(rotate(y, (u[4] * 2 - 1) * math.radians(5)), (u[5] * 2 - 1) * 0.1, (u[6] * 2 - 1) * 0.1)
    y = flip(y, u[7] < 0.5)
    torch.testing.assert_close(augmentation.apply(x, draws), y, atol=1e-12, rtol=0)


def test_amounts_cover_their_ranges_evenly():
    augmentation = Augmentation()
    u = augmentation.draw(4000, seeded())
    assert u.shape == (4000, 8)
    assert 0 <= u.min() < 0.01
    assert 0.99 < u.max() < 1
    torch.testing.assert_close(u.mean(0), torch.full((8,), 0.5), atol=0.03, rtol=0)
    # By effect: a grey image with brightness alone shows the delta itself, and half of the images are mirrored.
    x = torch.full((4000, 1, 1, 1), 0.5)
    delta = Augmentation(**{**NONE, "brightness": 0.1})(x, seeded()).flatten() - 0.5
    assert -0.1 <= delta.min() < -0.099
    assert 0.099 < delta.max() <= 0.1
    ramp = torch.tensor([0.0, 1.0]).expand(4000, 1, 1, 2)
    mirrored = Augmentation(**{**NONE, "flip": 0.5})(ramp, seeded())[:, 0, 0, 0].mean()
    assert 0.46 < mirrored < 0.54


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("interpolations", ["one", "two", "none"])
def test_range_type_and_shape_and_the_input_is_left_alone(channels, interpolations):
    x = torch.rand(40, channels, 9, 12, generator=seeded()).round(decimals=1)
    before = x.clone()
    y = Augmentation(interpolations=interpolations)(x, seeded())
    assert torch.equal(x, before)
    assert y.shape == x.shape
    assert y.dtype == x.dtype
    assert y.min() >= 0
    assert y.max() <= 1
    assert not torch.equal(y, x)


def test_same_seed_same_images_and_a_part_of_a_batch_is_a_part_of_its_result():
    augmentation = Augmentation()
    x = torch.rand(7, 3, 8, 8, generator=seeded())
    y = augmentation(x, seeded(5))
    assert torch.equal(y, augmentation(x, seeded(5)))
    assert not torch.equal(y, augmentation(x, seeded(6)))
    draws = augmentation.draw(7, seeded(5))
    torch.testing.assert_close(augmentation.apply(x[2:5], draws[2:5]), y[2:5], atol=1e-6, rtol=0)


def test_images_of_a_batch_are_changed_differently():
    x = torch.rand(1, 3, 8, 8, generator=seeded()).expand(4, 3, 8, 8)
    y = Augmentation()(x, seeded())
    assert all(not torch.equal(y[i], y[j]) for i in range(4) for j in range(i))


def test_all_amounts_zero_is_the_identity():
    x = torch.rand(4, 3, 8, 8, generator=seeded())
    assert Augmentation(**NONE) == Augmentation.none()
    assert Augmentation.none().is_identity
    assert torch.equal(Augmentation.none()(x, seeded()), x)


@pytest.mark.parametrize("name", AMOUNTS)
def test_switching_one_off_leaves_the_others_as_they_were(name):
    x = images(3, 3, 8, 8)
    on = {"saturation": 0.5, "contrast": 0.5, "flip": 1.0}
    alone = Augmentation(**{**NONE, name: on.get(name, 0.1)})
    assert not alone.is_identity
    # The draws of one amount do not depend on what else is switched on.
    assert torch.equal(alone.draw(3, seeded()), Augmentation().draw(3, seeded()))
    assert not torch.equal(alone(x, seeded()), x)


def test_grey_images_skip_hue_and_saturation():
    x = torch.rand(4, 1, 8, 8, generator=seeded())
    assert torch.equal(Augmentation(**{**NONE, "hue": 0.1, "saturation": (0.3, 2.0)})(x, seeded()), x)


def test_one_number_is_a_range_about_one_and_lists_of_a_config_are_tuples():
    assert Augmentation(contrast=0.25).contrast == (0.75, 1.25)
    assert Augmentation(saturation=[0.3, 2]) == Augmentation()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"hue": 0.6}, "hue between 0 and 0.5"),
        ({"flip": -0.1}, "flip between 0 and 1"),
        ({"rotation": float("nan")}, "rotation between"),
        ({"translation": "much"}, "translation between"),
        ({"saturation": (2.0, 0.3)}, "low <= high"),
        ({"contrast": -0.1}, "low <= high"),
        ({"contrast": (1.0, 2.0, 3.0)}, "range of factors"),
        ({"interpolations": "three"}, "got 'three'"),
    ],
)
def test_wrong_amounts_are_refused(wrong, message):
    with pytest.raises(DataError, match=message):
        Augmentation(**wrong)


@pytest.mark.parametrize(
    "wrong",
    [
        torch.zeros(2, 3, 4, 4, dtype=torch.uint8),
        torch.zeros(3, 4, 4),
        torch.zeros(2, 4, 4, 4),
        torch.zeros(2, 3, 4, 4, dtype=torch.bfloat16),
    ],
)
def test_wrong_images_are_refused(wrong):
    with pytest.raises(DataError, match=r"expected float32 or float64 images .* got .*to_float"):
        Augmentation()(wrong, seeded())


def test_wrong_draws_are_refused_and_an_empty_batch_passes():
    with pytest.raises(DataError, match=r"expected draws of shape \(2, 8\)"):
        Augmentation().apply(torch.zeros(2, 3, 4, 4), torch.zeros(3, 8))
    assert Augmentation()(torch.zeros(0, 3, 4, 4), seeded()).shape == (0, 3, 4, 4)


def test_whole_pixels_are_moved_and_mirrored_at_the_edge():
    x = torch.arange(2 * 3 * 4 * 5, dtype=torch.float64).reshape(2, 3, 4, 5)
    down, right = torch.tensor([1 / 4, 0.0]), torch.tensor([-2 / 5, 1 / 5])
    y = move_pixels(x, down, right, torch.tensor([False, True]))
    assert torch.equal(y[0, :, 1:, :3], x[0, :, :-1, 2:])
    assert torch.equal(y[0, :, 0], y[0, :, 1])  # a | a b c
    assert torch.equal(y[0, :, :, 3:], y[0, :, :, 1:3].flip(2))  # c d e | e d
    assert torch.equal(y[1].flip(2)[:, :, 1:], x[1, :, :, :-1])
    # The same as interpolation at whole pixels.
    moved = flip(translate(x, down, right), torch.tensor([False, True]))
    torch.testing.assert_close(y, moved)


def test_no_interpolation_leaves_values_as_they_are():
    x = torch.rand(20, 3, 8, 8)
    y = Augmentation(hue=0, saturation=0, brightness=0, contrast=0, rotation=0, interpolations="none")(x, seeded())
    assert not torch.equal(y, x)
    assert all(set(b.flatten().tolist()) <= set(a.flatten().tolist()) for a, b in zip(x, y, strict=True))
