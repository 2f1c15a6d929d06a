"""Forward pre-hooks that check, at every call, the input shape that a bound assumes."""

from typing import Any

from torch import Tensor, nn


class InputSizeGuard:
    """Forward pre-hook that raises if the spatial size of the input is not a multiple of `multiples`.

    Args:
        multiples: for each spatial axis, the number that must divide the size.
    """

    def __init__(self, multiples: tuple[int, ...]) -> None:
        self.multiples = multiples

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = args[0] if args else kwargs.get("input")
        size = tuple(x.shape[-len(self.multiples) :]) if isinstance(x, Tensor) else ()
        if any(n % m for n, m in zip(size, self.multiples, strict=True)):
            raise ValueError(
                f"expected an input whose spatial size is a multiple of {self.multiples}, got {size}: with circular "
                "padding the stride-aware bound holds only if the stride divides the input size; apply the method "
                "without input_size to use the plain bound, which holds for every size"
            )


class ImageSizeGuard(InputSizeGuard):
    """Forward pre-hook that raises if the images do not have the shape that the network was built for.

    Without it, a convolutional network silently accepts larger images and returns several logits per class.

    Args:
        shape: (channels, height, width).
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = args[0] if args else kwargs.get("input")
        if isinstance(x, Tensor) and tuple(x.shape[1:]) != self.shape:
            wanted, got = ("x".join(map(str, shape)) for shape in (self.shape, x.shape[1:]))
            raise ValueError(
                f"expected images of shape (batch, channels, height, width) with {wanted}, got {got}; build the model "
                "with the in_channels and image_size of your images, or resize the images"
            )


def guard_image_shape(model: nn.Module, shape: tuple[int, ...]) -> None:
    """Make a network raise for images whose shape is not `shape` (channels, height, width)."""
    model.register_forward_pre_hook(ImageSizeGuard(shape), with_kwargs=True)


def guard_input_size(module: nn.Module, multiples: tuple[int, ...]) -> None:
    """Make a module raise for inputs whose spatial size is not a multiple of the given numbers."""
    module.register_forward_pre_hook(InputSizeGuard(multiples), with_kwargs=True)
