"""Read the pixels of image files with Pillow."""

import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from onelip.core.errors import DataError

if TYPE_CHECKING:
    from PIL import Image

IGNORED = ("thumbs.db", "desktop.ini")  # files that file managers create
TRAINING_FORMATS = ("PNG", "JPEG")
_NEEDS_PILLOW = "image files and --image-size need pillow: pip install 'onelip[images]'"
FORMATS = (*TRAINING_FORMATS, "BMP", "GIF", "PPM", "TIFF", "WEBP")


def read_pixels(path: Path, formats: tuple[str, ...] = TRAINING_FORMATS) -> np.ndarray:
    """Return the pixels of an image file: uint8, (H, W) if it is grey, else (H, W, 3).

    Raises:
        DataError: if the file is no complete image in one of the formats, has several frames or transparent pixels, or
            does not have 8 bits for each channel.
    """
    try:
        from PIL import Image, ImageOps, UnidentifiedImageError
    except ImportError as error:
        raise DataError(_NEEDS_PILLOW) from error
    named = " or ".join((", ".join(formats[:-1]), formats[-1]))
    try:
        with warnings.catch_warnings():
            # Small files can unpack to huge images; pillow only warns up to twice its limit.
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(path, formats=formats) as opened:
                if (frames := getattr(opened, "n_frames", 1)) > 1 and formats == FORMATS:
                    raise DataError(f"{path}: expected one image, got {frames} frames; save the frames as files")
                opened.load()
                image = ImageOps.exif_transpose(opened)  # as image viewers show it
    except DataError:
        raise
    except (Image.DecompressionBombWarning, Image.DecompressionBombError) as error:
        raise DataError(f"{path}: the image is too large: {error}") from error
    except (UnidentifiedImageError, OSError, SyntaxError, ValueError) as error:
        raise DataError(f"{path}: not a complete {named} image ({error}); replace or remove it") from error
    return _pixels(image, path)


def _pixels(image: "Image.Image", path: Path) -> np.ndarray:
    if image.mode not in ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr"):
        raise DataError(f"{path}: expected 8 bits for each channel, got mode {image.mode}; convert it")
    if image.mode in ("LA", "PA", "RGBA") or "transparency" in image.info:
        alpha = image.convert("RGBA").getchannel("A").getextrema()
        if alpha != (255, 255):
            raise DataError(f"{path}: expected an opaque image, got transparent pixels; add a background")
    return np.asarray(image.convert("L" if image.mode in ("1", "L", "LA") else "RGB"))


def resize_pixels(pixels: np.ndarray, width: int, height: int) -> np.ndarray:
    """Return uint8 pixels, (H, W) or (H, W, 3), resized with Pillow's bilinear filter; it averages when it shrinks."""
    try:
        from PIL import Image
    except ImportError as error:
        raise DataError(_NEEDS_PILLOW) from error

    return np.asarray(Image.fromarray(pixels).resize((width, height), Image.Resampling.BILINEAR))


def resize_images(images: np.ndarray, size: tuple[int, int] | None) -> np.ndarray:
    """Return images (N, C, H, W) with 1 or 3 channels, each resized to (height, width); None leaves them unchanged."""
    if size is None or images.shape[2:] == size or not len(images):
        return images
    resized = np.empty((*images.shape[:2], *size), dtype=np.uint8)
    for row, image in zip(resized, images, strict=True):
        pixels = np.ascontiguousarray(image[0] if len(image) == 1 else image.transpose(1, 2, 0))
        found = resize_pixels(pixels, size[1], size[0])
        row[:] = found if found.ndim == 2 else found.transpose(2, 0, 1)
    return resized


def to_grey(pixels: np.ndarray) -> np.ndarray:
    """Return (H, W, 3) pixels as grey (H, W), weighted by luminance (ITU-R 601); grey pixels keep their values."""
    from PIL import Image

    return np.asarray(Image.fromarray(pixels).convert("L"))
