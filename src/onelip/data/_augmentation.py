"""The augmentation of the paper (appendix, "Data augmentation"), batched and seeded.

Colour first: hue, saturation, brightness, contrast, then clipping to [0, 1]; then rotation, translation and flip. The
words mean what TensorFlow and Keras, which the paper used, mean by them (`_color.py`, `_space.py`). Every image of a
batch gets amounts of its own.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from onelip.data._color import adjust_brightness_contrast, adjust_hue_saturation
from onelip.data._errors import DataError
from onelip.data._space import flip, rotate, rotate_translate, translate

# One uniform number for each image and each of: hue, saturation, brightness, contrast, rotation, down, right, flip.
_DRAWS = 8


@dataclass(frozen=True)
class Augmentation:
    """How much to change the images of a batch; the defaults are the paper's.

    `saturation` and `contrast` are ranges of factors; one number a means the range [1 - a, 1 + a]. With all amounts 0
    (`Augmentation.none()`) images pass unchanged, bit for bit. Images of one channel skip hue and saturation.

    Example:
        >>> augmentation = Augmentation(rotation=10.0)
        >>> images = torch.rand(4, 3, 32, 32)
        >>> augmentation(images, torch.Generator().manual_seed(0)).shape
        torch.Size([4, 3, 32, 32])
    """

    hue: float = 0.02  # turned by up to this part of the circle, either way
    saturation: float | tuple[float, float] = (0.3, 2.0)  # multiplied by a factor of this range
    brightness: float = 0.1  # up to this much added or subtracted
    contrast: float | tuple[float, float] = (0.5, 2.0)  # stretched by a factor of this range about the channel's mean
    rotation: float = 5.0  # up to so many degrees, either way
    translation: float = 0.1  # up to this part of height and of width, either way
    flip: float = 0.5  # probability of mirroring left to right
    # The paper's layers interpolate twice, once for the rotation and once for the translation; "one" fuses them.
    interpolations: Literal["two", "one"] = "two"

    def __post_init__(self) -> None:
        for name, most in (("hue", 0.5), ("brightness", 1.0), ("rotation", 180.0), ("translation", 1.0), ("flip", 1.0)):
            amount = getattr(self, name)
            if not isinstance(amount, int | float) or not 0 <= amount <= most:
                raise DataError(f"expected {name} between 0 and {most:g}, got {amount!r}")
        for name in ("saturation", "contrast"):
            object.__setattr__(self, name, _factors(name, getattr(self, name)))
        if self.interpolations not in ("one", "two"):
            raise DataError(f'expected interpolations "one" or "two", got {self.interpolations!r}')

    @classmethod
    def none(cls) -> "Augmentation":
        """The augmentation that changes nothing."""
        return cls(hue=0, saturation=0, brightness=0, contrast=0, rotation=0, translation=0, flip=0)

    @property
    def is_identity(self) -> bool:
        """Whether images pass unchanged."""
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
        """The random numbers for `count` images, uniform on [0, 1): (count, 8), on the generator's device.

        Always all eight, so that switching one amount off leaves what happens by the others as it was. A process that
        holds a part of a batch takes its rows of the whole batch's numbers.
        """
        return torch.rand(count, _DRAWS, generator=generator, device=generator.device)

    @torch.no_grad()
    def apply(self, images: Tensor, draws: Tensor) -> Tensor:
        """Augment with the numbers of `draw`; the images given are never written to."""
        _check_images(images)
        if draws.shape != (len(images), _DRAWS):
            raise DataError(
                f"expected draws of shape {(len(images), _DRAWS)}, got {tuple(draws.shape)}; "
                "make them with augmentation.draw(len(images), generator)"
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
        if self.rotation and self.translation and self.interpolations == "one":
            out = rotate_translate(out, angle, down, right)
        else:
            out = rotate(out, angle) if self.rotation else out
            out = translate(out, down, right) if self.translation else out
        if self.rotation or self.translation:
            out = out.clamp_(0, 1)  # the weights of an interpolation sum to one only up to rounding
        return flip(out, mirrored < self.flip) if self.flip else out


def _about_zero(uniform: Tensor, amount: float) -> Tensor:
    return (uniform * 2 - 1) * amount


def _within(uniform: Tensor, factors: float | tuple[float, float]) -> Tensor:
    assert isinstance(factors, tuple)  # __post_init__ made it one
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
            f"got {images.dtype} {tuple(images.shape)}; make them with onelip.data.to_float"
        )
