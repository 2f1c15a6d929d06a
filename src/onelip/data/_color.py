"""Colour changes with the meaning of `tf.image.adjust_*`: batched, one amount for each image.

All take float images (N, C, H, W) in [0, 1] and tensors of N amounts, and return new tensors. They do not clip, except
that saturation stays in [0, 1], as TensorFlow's does.
"""

import torch
from torch import Tensor


def adjust_hue_saturation(images: Tensor, delta: Tensor, factor: Tensor) -> Tensor:
    """Turn the hue by `delta` (1 is the full circle), then multiply the saturation by `factor` and cap it at 1, in HSV.

    With V the largest channel and C the largest minus the smallest, hue is linear within each of six sectors, and
        channel = V - C · min(1, max(0, 2 - |k - 2|)),  k = (6·hue + n) mod 6,  n = 5, 3, 1 for red, green, blue.
    The value V does not change and C = V · saturation, so that the new C is min(V, factor · C): no division by V.
    """
    red, green, blue = images.unbind(1)  # (N, H, W) each
    value = torch.maximum(torch.maximum(red, green), blue)
    chroma = value - torch.minimum(torch.minimum(red, green), blue)
    # The largest channel decides the sector; of equal ones the first, as everywhere. Grey pixels have hue 0.
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
    """The amounts (N) shaped so that they broadcast over images of N."""
    return amounts.view(-1, *[1] * (images.dim() - 1))
