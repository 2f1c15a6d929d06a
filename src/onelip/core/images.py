"""Images as the certified program reads them: pixels in [0, 1], stored as uint8 (divided by 255) or float."""

import hashlib

import numpy as np
import torch
from torch import Tensor

DTYPES = {torch.uint8: "uint8", torch.float32: "float32", torch.float64: "float64"}


def check_images(images: Tensor) -> None:
    """Check that a tensor is a batch of images with all values in [0, 1].

    Raises:
        ValueError: for other types and shapes, for an empty batch, and for values outside [0, 1], including NaN.
    """
    if not isinstance(images, Tensor):
        raise ValueError(f"expected images as a tensor, got {type(images).__name__}; use torch.as_tensor(images)")
    if images.layout != torch.strided or images.is_nested:
        raise ValueError("expected a dense tensor of images, got a sparse or nested one; use images.to_dense()")
    if images.dtype not in DTYPES:
        raise ValueError(
            f"expected images of dtype uint8, float32 or float64, got {images.dtype}; "
            "use images.to(torch.uint8) for values 0..255"
        )
    if images.dim() >= 2 and len(images) == 0:
        raise ValueError(f"expected at least one image, got none (shape {tuple(images.shape)}); pass a batch of images")
    if images.dim() < 2 or images.numel() == 0:
        raise ValueError(
            f"expected images of shape (N, channels, height, width), got {tuple(images.shape)}; "
            "for a single image, add a batch axis with image[None]"
        )
    if images.dtype == torch.uint8:
        return
    low, high = float(images.min()), float(images.max())  # both are NaN if any value is
    if not (low >= 0 and high <= 1):
        advice = "divide by 255, or pass uint8" if 1 < high <= 255 and low >= 0 else "rescale them to [0, 1]"
        raise ValueError(
            f"expected images in [0, 1], got values from {low:g} to {high:g}; {advice} (put a normalisation into "
            "the model: onelip.nn.Normalize)"
        )


def check_labels(labels: Tensor, classes: int, what: str = "", error: type[ValueError] = ValueError) -> None:
    """Check that all labels are from 0 to `classes` - 1.

    Args:
        labels: (N), any integer type.
        classes: number of classes.
        what: start of the message.
        error: class of the error.
    """
    if len(wrong := ((labels < 0) | (labels >= classes)).nonzero()):
        where = int(wrong[0])
        raise error(
            f"{what}expected labels 0 to {classes - 1} ({classes} classes), got {int(labels[where])} at index {where}; "
            "number the classes from 0"
        )


def to_float(images: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Convert images to floats: integer pixels k become k / 255, rounded once; floats are only cast.

    This is the only scaling of images in the library. Training, evaluation, certification, attacks and export use it.

    Args:
        images: integer or floating-point images of any shape.
        dtype: dtype of the result.

    Returns:
        The images in `dtype`, of the same shape.

    Examples:
        >>> to_float(torch.tensor([255, 51], dtype=torch.uint8))
        tensor([1.0000, 0.2000])
    """
    floats = images.to(dtype)
    return floats if images.is_floating_point() else floats / 255


def images_hash(images: Tensor) -> str:
    """Return the SHA-256 of all values in order (little-endian, C order), as a .npy file stores them after its header.

    Examples:
        >>> images_hash(torch.zeros(1, 1, dtype=torch.uint8)) == hashlib.sha256(bytes(1)).hexdigest()
        True
    """
    array = images.detach().cpu().contiguous().numpy()
    return hashlib.sha256(
        np.ascontiguousarray(array.astype(array.dtype.newbyteorder("<"), copy=False)).data
    ).hexdigest()
