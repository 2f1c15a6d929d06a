"""Pictures: crops of J^T J, the most and the least robust images, and images that an attack found."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from onelip.attacks.result import AttackResult
from onelip.certification.predict import Certification
from onelip.core.errors import UnsupportedLayer
from onelip.core.geometry import LINEAR_LAYERS
from onelip.core.images import to_float
from onelip.gram.jacobian import center_crop, jtj as crop_of, reached_layers
from onelip.plots.canvas import INK, SERIES, SOFT, Run, certified, drawing, loaded, middle_image, new_figure, shade
from onelip.training.build import LoadedRun

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_SIDE = 288  # of a crop: 3 x 3 pixels of 32 channels
_PIXELS = 3


class Crop(NamedTuple):
    """A crop of $J^T J$, and two blocks of it that are drawn again.

    Attributes:
        matrix: (n, n) float64.
        first: rows and columns of the first block, and rows of the second.
        second: columns of the second block.
        titles: titles of the matrix and of the two blocks.
    """

    matrix: Tensor
    first: slice
    second: slice
    titles: tuple[str, str, str]


def crop_of_layer(layer: nn.Module, input_size: int | Sequence[int] = ()) -> Crop:
    """The crop that `jtj` draws, of a linear layer.

    Examples:
        >>> crop = crop_of_layer(nn.Conv2d(4, 4, 3, padding=1), 8)
        >>> len(crop.matrix), crop.first, crop.second
        (36, slice(16, 20, None), slice(20, 24, None))
    """
    if isinstance(layer, nn.Linear):
        side = min(_SIDE, layer.in_features)
        half = max(1, min(32, side // 2))
        titles = (f"first {side} inputs", f"{half} inputs", "and the next")
        first, second = slice(0, half), slice(half, min(2 * half, side))
        return Crop(crop_of(layer, rows=[slice(0, side)]), first, second if side > half else first, titles)
    assert isinstance(layer, LINEAR_LAYERS)
    dims = layer.weight.dim() - 2
    sizes = [input_size] * dims if isinstance(input_size, int) else list(input_size)
    channels = min(layer.in_channels, _SIDE // _PIXELS**dims or 1)
    whole = center_crop(sizes, _PIXELS, channels)
    matrix = crop_of(layer, sizes, whole)
    pixels = [min(_PIXELS, n) for n in sizes]
    middle = 0
    for n in pixels:
        middle = middle * n + n // 2
    beside = middle + 1 if pixels[-1] // 2 + 1 < pixels[-1] else middle
    first, second = (slice(pixel * channels, (pixel + 1) * channels) for pixel in (middle, beside))
    return Crop(matrix, first, second, (f"centre, {len(matrix)} inputs", "A: one pixel", "B: and its neighbour"))


@drawing
def jtj(source: nn.Module | Run, input_size: int | Sequence[int] = (), *, layer: str | None = None) -> "Figure":
    """Draw three crops of $J^T J$ of a layer, each with its own colour scale; the identity is an isometry.

    The first is the centre crop of 3 x 3 pixels, the second its centre pixel with itself, the third the centre pixel
    with its neighbour. Of layers with more than 32 channels, the first 32 are drawn; of dense layers, the first 288
    inputs, and smaller parts of them.

    Args:
        source: a linear layer, or a run.
        input_size: spatial size of the input of the layer; not used for a run or a dense layer.
        layer: name of the layer of the run. Default: the first convolution with overlapping windows and 32 channels
            or more, if there is one.

    Returns:
        The figure.

    Raises:
        ImportError: if matplotlib is not installed.
        UnsupportedLayer: if the layer, or every layer of the run, is not a linear layer of torch.

    Examples:
        >>> figure = jtj(nn.Conv2d(4, 4, 3, padding=1), 8)
        >>> [axes.get_title(loc="left") for axes in figure.axes]
        ['centre, 36 inputs', 'A: one pixel', 'B: and its neighbour']
    """
    module, size, name = _layer(source, input_size, layer)
    figure = draw_crops({"": crop_of_layer(module, size)})
    if name:
        figure.suptitle(f"{name}: {described_layer(module)}", fontsize=8, color=SOFT)
    return figure


@drawing
def draw_crops(crops: Mapping[str, Crop]) -> "Figure":
    """Draw crops and their blocks, a row of three pictures for each name, each picture with its own colour scale."""
    from matplotlib.patches import Rectangle

    figure, places = new_figure(0.15 + 2.2 * len(crops), len(crops), 3, squeeze=False)
    for row, (name, crop) in zip(places, crops.items(), strict=True):
        matrix, first, second = crop.matrix, crop.first, crop.second
        for axes, title, part in zip(
            row, crop.titles, (matrix, matrix[first, first], matrix[first, second]), strict=True
        ):
            _signed(axes, part.numpy())
            axes.set_title(title)
        row[0].set_ylabel(name, color=INK)
        for columns in (first, second):
            corner = (columns.start - 0.5, first.start - 0.5)
            size = (columns.stop - columns.start, first.stop - first.start)
            row[0].add_patch(Rectangle(corner, *size, fill=False, edgecolor=INK, linewidth=0.8))
    return figure


def _layer(source: Any, input_size: int | Sequence[int], name: str | None) -> tuple[Any, int | Sequence[int], str]:
    """A layer, the size of its input, and its name."""
    if isinstance(source, nn.Module):
        if not isinstance(source, LINEAR_LAYERS):
            raise UnsupportedLayer(f"expected a linear layer of torch, got {type(source).__name__}")
        return source, input_size, ""
    found = linear_layers(loaded(source))
    if name is not None and name not in found:
        raise ValueError(f"expected the name of a linear layer, got {name!r}; known: {', '.join(found)}")
    if not found:
        raise UnsupportedLayer("the network has no linear layer of torch")
    chosen = name or max(found, key=lambda place: _interest(found[place][0]))  # the first of the best
    return *found[chosen], chosen


def linear_layers(run: LoadedRun) -> dict[str, tuple[nn.Module, tuple[int, ...]]]:
    """The linear layers of torch in a network by name, in the order of execution, with the size of their input."""
    return {
        place: (module, tuple(x.shape[2:]))
        for place, module, x in reached_layers(run.plain, middle_image(run))
        if isinstance(module, LINEAR_LAYERS)
    }


def _interest(module: nn.Module) -> tuple[bool, int]:
    """Whether the windows of a layer overlap, and the number of channels to draw; one group of channels is drawn."""
    if not isinstance(module, nn.modules.conv._ConvNd):
        return False, 0
    spans = zip(module.kernel_size, module.stride, module.dilation, strict=True)
    overlaps = any(d * (k - 1) >= s for k, s, d in spans)
    return overlaps and module.groups == 1, min(32, module.in_channels // module.groups)


def described_layer(module: nn.Module) -> str:
    """A layer in a few words.

    Examples:
        >>> described_layer(nn.Conv2d(64, 128, 2, stride=2)), described_layer(nn.Linear(4, 2))
        ('Conv2d 2x2, stride 2, 64 to 128 channels', 'Linear, 4 to 2')
    """
    if isinstance(module, nn.Linear):
        return f"Linear, {module.in_features} to {module.out_features}"
    assert isinstance(module, nn.modules.conv._ConvNd)
    kernel = "x".join(map(str, module.kernel_size))
    stride = f", stride {max(module.stride)}" if max(module.stride) > 1 else ""
    return f"{type(module).__name__} {kernel}{stride}, {module.in_channels} to {module.out_channels} channels"


def _signed(axes: Any, values: Any) -> None:
    """A matrix with positive entries in one colour and negative ones in another, and its scale."""
    scale = max(float(np.abs(values).max()), 1e-300)
    axes.imshow(shade(SERIES[0], values / scale))
    if (values < 0).any():
        axes.imshow(shade(SERIES[3], -values / scale))
    axes.set(xticks=[], yticks=[])
    axes.grid(visible=False)
    low, high = float(values.min()), float(values.max())
    axes.set_xlabel(f"{low:.2g} to {high:.3g}", fontsize=8)


@drawing
def robust_images(
    found: Certification | Run,
    images: Tensor | None = None,
    class_names: Sequence[str] | None = None,
    *,
    count: int = 6,
) -> "Figure":
    """Draw the images with the largest and the smallest certified radii, with decisions and radii.

    Args:
        found: a certification, or a run.
        images: the certified images; by default those of the run.
        class_names: names of the classes; by default those of the run, or numbers.
        count: number of images of each kind.

    Returns:
        The figure.

    Raises:
        ImportError: if matplotlib is not installed.
        ValueError: if images are missing.
    """
    source = certified(found, images, class_names)
    if source.images is None:
        raise ValueError("expected the certified images, got none; pass images=")
    order = source.certification.radii.argsort(descending=True).tolist()
    count = min(count, len(order))
    figure, places = new_figure(3.3, 2, count, squeeze=False)
    for name, row, chosen in (("most robust", 0, order[:count]), ("least robust", 1, order[-count:])):
        places[row, 0].set_title(name, color=SOFT)
        for axes, index in zip(places[row], chosen, strict=True):
            decision, radius = int(source.certification.classes[index]), float(source.certification.radii[index])
            labels = source.certification.labels
            label = decision if labels is None else int(labels[index])
            text = source.name(decision) + ("" if label == decision else f"\n(is {source.name(label)})")
            _picture(axes, source.images[index], f"{text}\n{radius:.2g}")
    return figure


@drawing
def adversarial_images(found: AttackResult, class_names: Sequence[str] | None = None, *, count: int = 6) -> "Figure":
    """Draw images, the nearest image with another decision that an attack found, and their difference.

    Args:
        found: the result of `onelip.attack`.
        class_names: names of the classes; by default numbers.
        count: number of images; they are chosen from the smallest to the largest distance.

    Returns:
        The figure.

    Raises:
        ImportError: if matplotlib is not installed.
        ValueError: if the attack found nothing.
    """
    distances = found.distances
    # A distance of 0 is a tie: there is no difference to draw.
    order = [i for i in distances.argsort().tolist() if 0 < float(distances[i]) < torch.inf]
    chosen = [order[(2 * i + 1) * len(order) // (2 * count)] for i in range(count)] if len(order) > count else order
    if not chosen:
        raise ValueError("the attack found no image with another decision")
    names = {k: str(k) if class_names is None else class_names[k] for k in range(found.logits.shape[1])}
    figure, places = new_figure(3.9, 3, max(len(chosen), 3), squeeze=False)
    for axes in places[:, len(chosen) :].flatten():
        axes.axis("off")
    for row, title in enumerate(("image", "nearest image found", "difference, enlarged")):
        places[row, 0].set_title(title, color=SOFT)
    for column, index in enumerate(chosen):
        image = to_float(found.images[index], torch.float64)
        other = to_float(found.adversarials[index], torch.float64)
        claim = "" if found.radii is None else f"\ncertified {float(found.radii[index]):.2g}"
        _picture(places[0, column], image, f"{names[int(found.classes[index])]}{claim}")
        to = names[int(found.found_classes[index])]
        _picture(places[1, column], other, f"{to}\nat {float(distances[index]):.2g}")
        difference = other - image
        factor = 0.5 / max(float(difference.abs().max()), 1e-300)
        _picture(places[2, column], 0.5 + factor * difference, f"× {factor:.2g}")
    return figure


def _picture(axes: Any, image: Tensor, text: str) -> None:
    """One image (C, H, W) with a text below it."""
    pixels = to_float(image, torch.float64).clamp(0, 1)
    shown = pixels.permute(1, 2, 0) if len(pixels) in (3, 4) else pixels[0][..., None].expand(-1, -1, 3)
    axes.imshow((255 * shown).round().to(torch.uint8).numpy())
    axes.set(xticks=[], yticks=[])
    axes.grid(visible=False)
    axes.set_xlabel(text, fontsize=7.5, color=INK)
