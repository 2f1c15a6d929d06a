"""The augmentation of the paper (appendix, "Data augmentation"), batched and seeded.

First colour: hue, saturation, brightness, contrast, then clipping to [0, 1]. Then rotation, translation and flip. Every
image of a batch gets its own random amounts. The operations are those of TensorFlow and Keras, which the paper used.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from onelip.core.errors import DataError

# One uniform number for each image and each of: hue, saturation, brightness, contrast, rotation, down, right, flip.
_DRAWS = 8


@dataclass(frozen=True)
class Augmentation:
    """Random augmentation of a batch of images. The defaults are those of the paper.

    With all amounts 0 (`Augmentation.none()`) images are unchanged, bit for bit. Images of one channel skip hue and
    saturation.

    Args:
        hue: maximum rotation of the hue in either direction, as a fraction of the circle.
        saturation: range of factors of the saturation; one number a means [1 - a, 1 + a].
        brightness: maximum amount to add or subtract.
        contrast: range of factors of the contrast about the mean of each channel; one number a means [1 - a, 1 + a].
        rotation: maximum rotation in either direction, in degrees.
        translation: maximum translation in either direction, as a fraction of the height and the width.
        flip: probability of a horizontal flip.
        interpolations: "two" interpolates once for the rotation and once for the translation, as the paper does; "one"
            fuses them; "none" translates by whole pixels, without interpolation, which is faster. A rotation always
            interpolates.

    Shape:
        - images: (N, C, H, W) float32 or float64 in [0, 1], C = 1 or 3. The output has the same shape.

    Raises:
        DataError: if an amount is out of range.

    Examples:
        >>> augmentation = Augmentation(rotation=10.0)
        >>> images = torch.rand(4, 3, 32, 32)
        >>> augmentation(images, torch.Generator().manual_seed(0)).shape
        torch.Size([4, 3, 32, 32])
    """

    hue: float = 0.02
    saturation: float | tuple[float, float] = (0.3, 2.0)
    brightness: float = 0.1
    contrast: float | tuple[float, float] = (0.5, 2.0)
    rotation: float = 5.0
    translation: float = 0.1
    flip: float = 0.5
    interpolations: Literal["two", "one", "none"] = "two"

    def __post_init__(self) -> None:
        for name, most in (("hue", 0.5), ("brightness", 1.0), ("rotation", 180.0), ("translation", 1.0), ("flip", 1.0)):
            amount = getattr(self, name)
            if not isinstance(amount, int | float) or not 0 <= amount <= most:
                raise DataError(f"expected {name} between 0 and {most:g}, got {amount!r}")
        for name in ("saturation", "contrast"):
            object.__setattr__(self, name, _factors(name, getattr(self, name)))
        if self.interpolations not in ("two", "one", "none"):
            raise DataError(f'expected interpolations "two", "one" or "none", got {self.interpolations!r}')

    @classmethod
    def none(cls) -> "Augmentation":
        """Return the augmentation that does not change images."""
        return cls(hue=0, saturation=0, brightness=0, contrast=0, rotation=0, translation=0, flip=0)

    @property
    def is_identity(self) -> bool:
        """Whether images are not changed."""
        return not (self._changes_hue or self._changes_light or self.rotation or self.translation or self.flip)

    @property
    def _changes_hue(self) -> bool:
        return bool(self.hue) or self.saturation != (1.0, 1.0)

    @property
    def _changes_light(self) -> bool:
        return bool(self.brightness) or self.contrast != (1.0, 1.0)

    def __call__(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """Augment float images (N, C, H, W) in [0, 1], with random amounts from the generator."""
        return self.apply(images, self.draw(len(images), generator))

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        """Draw the random numbers for `count` images, uniform on [0, 1): (count, 8), on the device of the generator.

        All eight are always drawn, so setting one amount to 0 does not change the effect of the others. In distributed
        training, each process uses its rows of the numbers of the global batch.
        """
        return torch.rand(count, _DRAWS, generator=generator, device=generator.device)

    @torch.no_grad()
    def apply(self, images: Tensor, draws: Tensor) -> Tensor:
        """Augment images with the numbers returned by `draw`. The input is not changed."""
        _check_images(images)
        if draws.shape != (len(images), _DRAWS):
            raise DataError(
                f"expected draws of shape {(len(images), _DRAWS)}, got {tuple(draws.shape)}; "
                "use augmentation.draw(len(images), generator)"
            )
        if self.is_identity or not len(images):
            return images
        hue, saturation, brightness, contrast, rotation, down, right, mirrored = draws.to(images).unbind(1)
        out = images
        if self._changes_hue and images.shape[1] == 3:
            out = adjust_hue_saturation(out, _about_zero(hue, self.hue), _within(saturation, self.saturation))
        if self._changes_light:
            delta = _about_zero(brightness, self.brightness)
            out = adjust_brightness_contrast(out, delta, _within(contrast, self.contrast))
        if out is not images:
            out = out.clamp_(0, 1)
        angle = _about_zero(rotation, math.radians(self.rotation))
        down, right = _about_zero(down, self.translation), _about_zero(right, self.translation)
        chosen = mirrored < self.flip
        if self.rotation and self.translation and self.interpolations == "one":
            out = rotate_translate(out, angle, down, right)
        else:
            out = rotate(out, angle) if self.rotation else out
            if self.translation and self.interpolations == "none":
                return move_pixels(out.clamp_(0, 1) if self.rotation else out, down, right, chosen)
            out = translate(out, down, right) if self.translation else out
        if self.rotation or self.translation:
            out = out.clamp_(0, 1)  # the weights of an interpolation sum to one only up to rounding
        return flip(out, chosen) if self.flip else out


def _about_zero(uniform: Tensor, amount: float) -> Tensor:
    return (uniform * 2 - 1) * amount


def _within(uniform: Tensor, factors: float | tuple[float, float]) -> Tensor:
    assert isinstance(factors, tuple)  # converted by __post_init__
    return uniform * (factors[1] - factors[0]) + factors[0]


def _factors(name: str, amount: object) -> tuple[float, float]:
    if isinstance(amount, int | float):
        low, high = 1.0 - amount, 1.0 + amount
    elif isinstance(amount, tuple | list) and len(amount) == 2 and all(isinstance(a, int | float) for a in amount):
        low, high = float(amount[0]), float(amount[1])
    else:
        raise DataError(f"expected {name} as a range of factors (low, high), got {amount!r}")
    if not 0 <= low <= high < math.inf:
        raise DataError(f"expected {name} as factors 0 <= low <= high, got low {low:g} and high {high:g}")
    return low, high


def _check_images(images: Tensor) -> None:
    if images.dtype not in (torch.float32, torch.float64) or images.dim() != 4 or images.shape[1] not in (1, 3):
        raise DataError(
            "expected float32 or float64 images (N, C, H, W) of 1 or 3 channels with values in [0, 1], "
            f"got {images.dtype} {tuple(images.shape)}; convert them with onelip.data.to_float"
        )


# Colour, as `tf.image.adjust_*`: float images (N, C, H, W) in [0, 1] and tensors of N amounts. The results are new
# tensors and not clipped, except that saturation stays in [0, 1], as in TensorFlow.


def adjust_hue_saturation(images: Tensor, delta: Tensor, factor: Tensor) -> Tensor:
    """Rotate the hue by `delta` (1 is the full circle), then multiply the saturation by `factor`, up to 1 (HSV).

    With V the largest channel and C the largest minus the smallest, hue is linear within each of six sectors, and
        channel = V - C · min(1, max(0, 2 - |k - 2|)),  k = (6·hue + n) mod 6,  n = 5, 3, 1 for red, green, blue.
    The value V does not change and C = V · saturation, so the new C is min(V, factor · C), without a division by V.
    """
    red, green, blue = images.unbind(1)  # (N, H, W) each
    value = torch.maximum(torch.maximum(red, green), blue)
    chroma = value - torch.minimum(torch.minimum(red, green), blue)
    # The largest channel determines the sector (the first of equal ones). Grey pixels have hue 0.
    over = chroma.clamp_min(torch.finfo(images.dtype).tiny).reciprocal_()
    hue = torch.where(
        red == value,
        green.sub(blue).mul_(over),
        torch.where(green == value, blue.sub(red).mul_(over).add_(2), red.sub(green).mul_(over).add_(4)),
    )
    hue += _each(delta * 6, hue)
    chroma = torch.minimum(chroma.mul_(_each(factor, chroma)), value)
    n = torch.tensor([5.0, 3.0, 1.0], dtype=images.dtype, device=images.device).view(1, 3, 1, 1)
    k = hue.unsqueeze(1) + n  # (N, 3, H, W)
    k -= torch.floor(k / 6).mul_(6)
    tent = k.sub_(2).abs_().neg_().add_(2).clamp_(0, 1)
    return torch.addcmul(value.unsqueeze(1), tent, chroma.unsqueeze(1), value=-1, out=tent)


def adjust_brightness_contrast(images: Tensor, delta: Tensor, factor: Tensor) -> Tensor:
    """Add `delta`, then stretch by `factor` about the mean of each channel of each image.

    In one pass: with x' = x + d, (x' - mean x')·f + mean x' = f·x + (1 - f)·mean x + d.
    """
    factor, delta = _each(factor, images), _each(delta, images)
    mean = images.mean(dim=(2, 3), keepdim=True)  # (N, C, 1, 1)
    return torch.addcmul(mean * (1 - factor) + delta, images, factor)


def _each(amounts: Tensor, images: Tensor) -> Tensor:
    """Reshape amounts (N) to broadcast over N images."""
    return amounts.view(-1, *[1] * (images.dim() - 1))


# Rotation, translation and flip, as Keras' `RandomRotation` and `RandomTranslation`: bilinear interpolation. Beyond its
# border the image is mirrored (d c b a | a b c d | d c b a), which Keras calls 'reflect' and torch 'reflection' with
# align_corners=False. All functions take float images (N, C, H, W) and N amounts.


def rotate(images: Tensor, angle: Tensor) -> Tensor:
    """Rotate about the centre by `angle` in radians: pixel (x, y) from the centre is read at (cx - sy, sx + cy)."""
    zero = torch.zeros_like(angle)
    return _warp(images, _rotation(images, angle), zero, zero)


def translate(images: Tensor, down: Tensor, right: Tensor) -> Tensor:
    """Translate by `down` and `right`, as fractions of height and width, with interpolation between pixels."""
    one = torch.eye(2, dtype=images.dtype, device=images.device).expand(len(images), 2, 2)
    return _warp(images, one, -2 * right, -2 * down)


def move_pixels(images: Tensor, down: Tensor, right: Tensor, chosen: Tensor) -> Tensor:
    """`translate` by the nearest number of whole pixels, and `flip`: values are moved, never computed."""
    count, channels, height, width = images.shape
    rows, columns = _mirrored(height, down * height), _mirrored(width, right * width)  # (N, H), (N, W)
    columns = torch.where(chosen[:, None], columns.flip(1), columns)
    # Whole rows first: to gather both indices at once takes five times as long.
    planes = torch.arange(count * channels, device=images.device)[:, None] * height
    taken = (planes + rows.repeat_interleave(channels, 0)).flatten()
    out = images.reshape(-1, width).index_select(0, taken).reshape(images.shape)
    return out.gather(3, columns[:, None, None].expand(images.shape))


def _mirrored(size: int, shift: Tensor) -> Tensor:
    """Where the pixels 0 to size - 1 of an axis come from, (N, size), for shifts (N) in pixels."""
    places = torch.arange(size, device=shift.device) - shift.round().long()[:, None]
    places = places.remainder(2 * size)
    return torch.minimum(places, 2 * size - 1 - places)


def rotate_translate(images: Tensor, angle: Tensor, down: Tensor, right: Tensor) -> Tensor:
    """Compute `translate(rotate(images))` with one interpolation instead of two: sharper, at half the cost.

    The pixel p is read at R(p - d).
    """
    rotation = _rotation(images, angle)
    shift = torch.stack([right, down], dim=1).mul_(-2)  # (N, 2)
    x, y = (rotation @ shift.unsqueeze(2)).squeeze(2).unbind(1)
    return _warp(images, rotation, x, y)


def flip(images: Tensor, chosen: Tensor) -> Tensor:
    """Flip the chosen images (bool, N) horizontally; exact."""
    return torch.where(chosen.view(-1, 1, 1, 1), images.flip(3), images)


def _rotation(images: Tensor, angle: Tensor) -> Tensor:
    """Rotation matrices (N, 2, 2) in torch's coordinates, where both axes of every image run from -1 to 1."""
    height, width = images.shape[-2:]
    cos, sin = torch.cos(angle), torch.sin(angle)
    rows = torch.stack([cos, -sin * (height / width), sin * (width / height), cos], dim=1)
    return rows.view(-1, 2, 2)


def _warp(images: Tensor, matrix: Tensor, x: Tensor, y: Tensor) -> Tensor:
    theta = torch.cat([matrix, torch.stack([x, y], dim=1).unsqueeze(2)], dim=2)  # (N, 2, 3)
    grid = F.affine_grid(theta, list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="reflection", align_corners=False)
