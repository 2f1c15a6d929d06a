"""Checks of what a model is asked to be, before any layer is made."""

from collections.abc import Sequence

ImageSize = int | Sequence[int]


def check_count(name: str, value: object, minimum: int = 1) -> int:
    """An integer of at least `minimum`, or an error that says what came."""
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise ValueError(f"expected {name} to be an integer of at least {minimum}, got {value!r}")
    return value


def check_even(name: str, value: object) -> int:
    """An even integer of at least 2: MaxMin sorts channels in pairs."""
    number = check_count(name, value, 2)
    if number % 2:
        raise ValueError(
            f"expected {name} to be even, because MaxMin sorts channels in pairs, got {number}; "
            f"take {number - 1} or {number + 1}"
        )
    return number


def height_and_width(image_size: ImageSize) -> tuple[int, int]:
    """One number for square images, or (height, width).

    Example:
        >>> height_and_width(32), height_and_width((28, 32))
        ((32, 32), (28, 32))
    """
    sizes = tuple(image_size) if isinstance(image_size, Sequence) else (image_size, image_size)
    if len(sizes) != 2 or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in sizes):
        raise ValueError(f"expected image_size to be a positive integer or (height, width), got {image_size!r}")
    return sizes[0], sizes[1]


def check_multiple(sizes: tuple[int, int], unit: int, why: str, otherwise: str) -> None:
    """Refuse sizes that are not multiples of `unit`, and name the nearest that are."""
    if not any(n % unit for n in sizes):
        return
    below = [max(n // unit, 1) * unit for n in sizes]
    above = [-(-n // unit) * unit for n in sizes]
    nearest = " or ".join(dict.fromkeys(f"{h}x{w}" for h, w in (below, above)))
    raise ValueError(
        f"expected an image size that is a multiple of {unit} ({why}), got {sizes[0]}x{sizes[1]}; "
        f"resize, crop or zero-pad the images to {nearest} (the last two are 1-Lipschitz), or {otherwise}"
    )
