"""Promises about the input that a bound rests on, checked at every call."""

from typing import Any

from torch import Tensor, nn


class InputSizeGuard:
    """Forward pre-hook that refuses inputs whose spatial size is not a multiple of what the bound assumed."""

    def __init__(self, multiples: tuple[int, ...]) -> None:
        self.multiples = multiples

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = args[0] if args else kwargs.get("input")
        size = tuple(x.shape[-len(self.multiples) :]) if isinstance(x, Tensor) else ()
        if any(n % m for n, m in zip(size, self.multiples, strict=True)):
            raise ValueError(
                f"expected an input whose spatial size is a multiple of {self.multiples}, got {size}: the layer's "
                "stride-aware bound holds for circular padding only where the phases close; apply the method without "
                "input_size to use the plain bound, which holds for every size"
            )


class ImageSizeGuard(InputSizeGuard):
    """Forward pre-hook of a whole network that refuses images of another shape than it was built for.

    Without it a network of convolutions takes larger images in silence, and gives several logits for each class.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = args[0] if args else kwargs.get("input")
        if isinstance(x, Tensor) and tuple(x.shape[1:]) != self.shape:
            wanted, got = ("x".join(map(str, shape)) for shape in (self.shape, x.shape[1:]))
            raise ValueError(
                f"expected images (batch, channels, height, width) of {wanted}, got {got}; build the model with "
                "in_channels and image_size of your images, or resize them"
            )


def guard_image_shape(model: nn.Module, shape: tuple[int, ...]) -> None:
    """Make a network refuse images of another shape (channels, height, width)."""
    model.register_forward_pre_hook(ImageSizeGuard(shape), with_kwargs=True)


def guard_input_size(module: nn.Module, multiples: tuple[int, ...]) -> None:
    """Make the module refuse inputs whose spatial size is not a multiple of the given numbers."""
    module.register_forward_pre_hook(InputSizeGuard(multiples), with_kwargs=True)
