r"""The matrix of a linear layer: crops of $J^\top J$, and singular values.

Input pixel $p$ reaches output $o$ through tap $t$ of the kernel or not: $S_{p,t,o}$ counts how often, and depends on
size, stride, dilation and padding only. With the weights $W_t$ (outputs, inputs) of the taps,

$$ (J^\top J)_{p,q} = \sum_{t,u} \Bigl(\sum_o S_{p,t,o} S_{q,u,o}\Bigr) W_t^\top W_u . $$

$S$ is the output of the same layer with one channel and one output channel for each tap, so that borders, circular
padding and transposed layers need no rule of their own.
"""

import copy
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from onelip.core.bake import bake
from onelip.core.errors import UnsupportedLayer
from onelip.core.geometry import LINEAR_LAYERS, geometry_of, sizes_per_axis

Crop = Sequence[slice]


@torch.no_grad()
def jtj(
    layer: nn.Module,
    input_size: int | Sequence[int] = (),
    rows: Crop | None = None,
    columns: Crop | None = None,
) -> Tensor:
    r"""Return a crop of $J^\top J$, for $J$ the matrix (Jacobian) of a linear layer with its stored weights.

    The identity means that the layer preserves distances. The crop includes the effects of the borders. Its cost does
    not depend on the size of the whole matrix: the centre crop of 3 x 3 pixels and 32 channels of a convolution on 32 x
    32 pixels, 288 x 288 of 32768 x 32768 entries, takes milliseconds.

    Args:
        layer: Linear, Conv1d to Conv3d or ConvTranspose1d to ConvTranspose3d with any settings, plain or parametrized.
        input_size: spatial size of the input; not used for Linear.
        rows: slices of the inputs that are the rows of the crop: one for each spatial axis, then one for the channels.
            Slices that are left out select everything.
        columns: the same for the columns of the crop; by default those of the rows.

    Returns:
        (rows, columns) float64. The order of inputs is channels-last: pixel by pixel, the channels of each in turn.

    Raises:
        UnsupportedLayer: for other layers.
        ValueError: if a crop is empty or has too many slices.

    Examples:
        >>> layer = nn.Conv1d(1, 1, 3, padding=1)
        >>> _ = layer.weight.data.copy_(torch.tensor([[[0.0, 1.0, 1.0]]]))
        >>> jtj(layer, 4)  # the first pixel reaches one output only
        tensor([[1., 1., 0., 0.],
                [1., 2., 1., 0.],
                [0., 1., 2., 1.],
                [0., 0., 1., 2.]], dtype=torch.float64)
        >>> jtj(layer, 4, rows=[slice(0, 1)], columns=[slice(0, 2)])
        tensor([[1., 1.]], dtype=torch.float64)
    """
    plain: Any = bake(layer)
    kind = next((kind for kind in LINEAR_LAYERS if isinstance(plain, kind)), None)
    if kind is None:
        names = ", ".join(layer.__name__ for layer in LINEAR_LAYERS)
        raise UnsupportedLayer(f"expected one of {names}, got {type(layer).__name__}")
    size = () if kind is nn.Linear else _size(input_size, plain.weight.dim() - 2)
    weights = _taps(plain)  # (outputs, inputs, taps)
    pixels, channels = _split(rows, size, weights.shape[1])
    pixels_too, channels_too = (pixels, channels) if columns is None else _split(columns, size, weights.shape[1])
    ours, theirs = weights[:, channels], weights[:, channels_too]
    reached = _reached(plain, kind, size, pixels)  # (pixels, taps, outputs)
    reached_too = reached if columns is None else _reached(plain, kind, size, pixels_too)
    crop = weights.new_zeros(len(reached), ours.shape[1], len(reached_too), theirs.shape[1])
    for t in range(weights.shape[2]):
        counts = torch.einsum("po,quo->pqu", reached[:, t], reached_too)
        products = torch.einsum("kc,kdu->ucd", ours[..., t], theirs)
        crop += torch.einsum("pqu,ucd->pcqd", counts, products)
    return crop.flatten(2).flatten(0, 1)


def center_crop(input_size: Sequence[int], pixels: int = 3, channels: int | None = None) -> list[slice]:
    """Return the slices of the pixels in the centre of an input, and of its first channels.

    Args:
        input_size: spatial size of the input.
        pixels: number of pixels along each axis.
        channels: number of channels; None for all.

    Examples:
        >>> center_crop((32, 32), 3, 8)
        [slice(15, 18, None), slice(15, 18, None), slice(0, 8, None)]
    """
    starts = [max(0, (n - pixels + 1) // 2) for n in input_size]
    return [*(slice(start, start + pixels) for start in starts), slice(0, channels)]


def _size(input_size: int | Sequence[int], dims: int) -> tuple[int, ...]:
    sizes = [] if input_size == () else sizes_per_axis(input_size, dims)
    if not sizes or not all(isinstance(n, int) and n > 0 for n in sizes):
        raise ValueError(f"expected the spatial size of the input, {dims} positive integers, got {input_size!r}")
    return tuple(n for n in sizes if n is not None)


def _split(crop: Crop | None, size: tuple[int, ...], channels: int) -> tuple[Tensor, slice]:
    """The pixels of a crop, as indices into the flat image, and its channels."""
    parts = list(crop or ())
    if len(parts) > len(size) + 1:
        raise ValueError(f"expected at most {len(size) + 1} slices (spatial axes, channels), got {len(parts)}")
    parts += [slice(None)] * (len(size) + 1 - len(parts))
    pixels = torch.arange(math.prod(size)).reshape(size)[tuple(parts[:-1])].flatten()
    if not len(pixels) or not len(range(channels)[parts[-1]]):
        raise ValueError(f"expected a crop of an input of size {size} with {channels} channels, got none of it: {crop}")
    return pixels, parts[-1]


def _taps(plain: Any) -> Tensor:
    """The weights (outputs, inputs, taps) of a layer in float64; zero between different groups."""
    weight = plain.weight.detach().double()
    if isinstance(plain, nn.Linear):
        return weight[..., None]
    parts = weight.unflatten(0, (plain.groups, -1)).flatten(3)  # (g, first, second, taps)
    parts = parts.transpose(1, 2) if plain.transposed else parts
    groups, outputs, inputs, taps = parts.shape
    dense = parts.new_zeros(groups, outputs, groups, inputs, taps)
    every = torch.arange(groups)
    dense[every, :, every] = parts
    return dense.flatten(2, 3).flatten(0, 1)


def _reached(plain: Any, kind: Any, size: tuple[int, ...], pixels: Tensor) -> Tensor:
    """How often each tap connects each of some pixels with each output: (pixels, taps, outputs)."""
    device = plain.weight.device
    if kind is nn.Linear:
        return torch.ones(1, 1, 1, dtype=torch.float64, device=device)
    taps = math.prod(plain.kernel_size)
    names = ("kernel_size", "stride", "padding", "dilation", "padding_mode")
    settings = {name: getattr(plain, name) for name in names}
    if plain.transposed:
        settings["output_padding"] = plain.output_padding
    probe = kind(1, taps, bias=False, dtype=torch.float64, device=device, **settings)
    probe._reversed_padding_repeated_twice = plain._reversed_padding_repeated_twice  # what torch pads by
    probe.weight.copy_(torch.eye(taps, dtype=torch.float64).reshape(probe.weight.shape))
    units = torch.zeros(len(pixels), math.prod(size), dtype=torch.float64, device=device)
    units[torch.arange(len(pixels)), pixels] = 1.0
    return probe(units.reshape(len(pixels), 1, *size)).flatten(2)


# ---- The singular values of a network's layers, as the layers act on the images that reach them
#
# Computed in float64, not proved. They show how close a layer is to an isometry (mean |s - 1|). The first of these
# methods that applies is used and reported:
#
#     matrix      a dense layer: its weight
#     Jacobian    a layer with few inputs and outputs: its Jacobian at the input that an image gives
#     Fourier     a convolution of stride 1 on large images: one matrix per frequency. These are the values of the
#                 convolution with circular padding; with zero padding they differ at the border
#     Lanczos     any other layer: Gauss quadrature of the spectral density of J^T J from random vectors, an estimate


_ENTRIES = 2**21  # of a dense Jacobian: 1448 x 1448
_DENSE_SIDE = 4096
_LANCZOS_STEPS, _LANCZOS_VECTORS = 16, 2
QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)
# Edges of the histogram; 1 is in the middle of a bin, so that rounding does not split isometries between two.
BINS = (0.0, *((2 * i + 1) / 80 for i in range(50)))


@dataclass(frozen=True)
class Spectrum:
    """Singular values of one layer with their weights, which add up to 1."""

    name: str
    kind: str
    how: str
    values: Tensor  # (n) float64
    shares: Tensor  # (n) float64

    def to_json(self) -> dict[str, Any]:
        """Return the layer, the method of computation and the numbers of `summarise`."""
        return {"layer": self.name, "kind": self.kind, "how": self.how, **summarise(self.values, self.shares)}


def summarise(values: Tensor, shares: Tensor) -> dict[str, Any]:
    """Largest, smallest, mean, mean |s - 1|, quantiles and histogram of weighted values.

    Examples:
        >>> found = summarise(torch.tensor([0.5, 1.0]), torch.tensor([0.5, 0.5]))
        >>> found["largest"], found["mean"], found["mean_distance_from_1"]
        (1.0, 0.75, 0.25)
    """
    values, order = values.double().sort()
    shares = shares.double()[order] / shares.double().sum()
    reached = shares.cumsum(0)
    # The first value at which the cumulated weight reaches q; rounding must not push the last one out.
    places = [min(int(torch.searchsorted(reached, q - 1e-12)), len(values) - 1) for q in QUANTILES]
    edges = torch.tensor(BINS, dtype=torch.float64)
    bins = torch.searchsorted(edges, values, right=True) - 1  # len(edges) - 1 is above the last edge
    counts = torch.zeros(len(BINS), dtype=torch.float64).index_add_(0, bins.clamp(0, len(BINS) - 1), shares)
    return {
        "largest": float(values[-1]),
        "smallest": float(values[0]),
        "mean": float((values * shares).sum()),
        "mean_distance_from_1": float(((values - 1).abs() * shares).sum()),
        "quantiles": {f"{q:g}": float(values[i]) for q, i in zip(QUANTILES, places, strict=True)},
        "histogram": {"edges": list(BINS), "shares": counts[:-1].tolist(), "above": float(counts[-1])},
    }


def spectrum_of_network(plain: nn.Module, images: Tensor, seconds: float = math.inf) -> dict[str, Any]:
    """Singular values of each layer of a baked network, and of all together with the same weight for each layer.

    Args:
        plain: the baked network; it is not changed.
        images: (N, C, H, W) float; layers that are not linear are differentiated at the first.
        seconds: after this time no further layer is started. Small layers come first; `left_out` has the names of the
            others.

    Examples:
        >>> layer = nn.Linear(4, 4)
        >>> _ = nn.init.eye_(layer.weight)
        >>> spectrum_of_network(nn.Sequential(nn.Flatten(), layer), torch.rand(1, 1, 2, 2))["mean_distance_from_1"]
        0.0
    """
    reached = list(reached_layers(plain, images[:1]))
    if not reached:
        raise ValueError("the network has no layer with weights")
    end = time.monotonic() + seconds
    by_name: dict[str, Spectrum] = {}
    for name, layer, x in sorted(reached, key=lambda one: _cost(one[1], one[2])):
        if not by_name or time.monotonic() < end:
            by_name[name] = spectrum_of_layer(name, layer, x)
    found = [by_name[name] for name, _, _ in reached if name in by_name]
    left_out = [name for name, _, _ in reached if name not in by_name]
    values = torch.cat([s.values for s in found])
    shares = torch.cat([s.shares / len(found) for s in found])
    return {**summarise(values, shares), "layers": [s.to_json() for s in found], "left_out": left_out}


def _cost(layer: nn.Module, x: Tensor) -> int:
    """A number that grows with the time for the singular values of a layer."""
    return sum(p.numel() for p in layer.parameters()) * x[0, 0].numel()


def reached_layers(plain: nn.Module, image: Tensor) -> Iterator[tuple[str, nn.Module, Tensor]]:
    """Layers with the first input of each, in float64, in the order of execution."""
    model = copy.deepcopy(plain).cpu().double().eval().requires_grad_(False)
    seen: dict[str, Tensor] = {}
    layers = dict(_layers("", model))

    def remember(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Any, ...]) -> None:
            seen.setdefault(name, args[0].detach())

        return hook

    handles = [layer.register_forward_pre_hook(remember(name)) for name, layer in layers.items()]
    with torch.no_grad():
        model(image.detach().cpu().double())
    for handle in handles:
        handle.remove()
    for name, x in seen.items():
        yield name, layers[name], x


def _layers(name: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Linear layers of torch, and modules that own matrices or kernels (SOC, SLL, ...)."""
    own = isinstance(module, LINEAR_LAYERS) or any(p.dim() >= 2 for p in module.parameters(recurse=False))
    if own:
        yield name, module
        return
    for child, below in module.named_children():
        yield from _layers(f"{name}.{child}" if name else child, below)


def spectrum_of_layer(name: str, layer: nn.Module, x: Tensor) -> Spectrum:
    """Singular values of the derivative of a layer (float64, eval) at its input x (1, ...)."""
    with torch.no_grad():
        outputs, inputs = layer(x).numel(), x.numel()
    shares = None
    if isinstance(layer, nn.Linear) and max(layer.weight.shape) <= _DENSE_SIDE:
        how, values = "matrix", torch.linalg.svdvals(layer.weight)
    elif outputs * inputs <= _ENTRIES:
        jacobian: Any = torch.autograd.functional.jacobian(layer, x, vectorize=True)
        how, values = "Jacobian", torch.linalg.svdvals(jacobian.reshape(outputs, inputs))
    elif isinstance(layer, nn.Conv2d) and (parts := _fourier(layer, (x.shape[2], x.shape[3]))) is not None:
        how, values, shares = parts
    else:
        how = "Lanczos (estimate)"
        values, shares = _lanczos(layer, x, outputs < inputs)
    values = values.flatten().double()
    shares = torch.ones_like(values) if shares is None else shares
    return Spectrum(name, type(layer).__name__, how, values, shares / shares.sum())


def _fourier(layer: nn.Conv2d, size: tuple[int, int]) -> tuple[str, Tensor, Tensor] | None:
    """Return method, values and weights; None for a stride, unless the windows tile the image."""
    try:
        geometry = geometry_of(layer, size)
    except UnsupportedLayer:
        return None
    tiles = layer.stride == layer.kernel_size and layer.dilation == (1, 1) and layer.padding == (0, 0)
    kernel = geometry.to_kernel(layer.weight, "inputs")  # (g, rows, columns, taps, taps)
    if tiles or layer.kernel_size == (1, 1) == layer.stride:
        values = torch.linalg.svdvals(kernel[..., 0, 0])
        return "matrix of a window", values, torch.ones(values.numel(), dtype=torch.float64)
    if layer.stride != (1, 1):
        return None
    height, width = size
    # M_f = sum_t K_t exp(2 pi i <f, d t> / n): singular values do not depend on the origin of t. The kernel is real, so
    # frequencies -f give the same values: half of the last axis, counted twice where f and -f differ.
    rows = _waves(torch.arange(height), height, kernel.shape[3], layer.dilation[0])
    half = torch.arange(width // 2 + 1)
    columns = _waves(half, width, kernel.shape[4], layer.dilation[1])
    matrices = torch.einsum("grcab,ya,xb->yxgrc", kernel.to(rows.dtype), rows, columns)
    values = torch.linalg.svdvals(matrices)  # (height, width // 2 + 1, g, n)
    twice = torch.where((half == 0) | (2 * half == width), 1.0, 2.0).double()
    exact = layer.padding_mode == "circular"
    return (
        "Fourier" if exact else "Fourier (as if circular)",
        values,
        twice[None, :, None, None].expand(values.shape).flatten(),
    )


def _waves(frequencies: Tensor, size: int, taps: int, dilation: int) -> Tensor:
    phases = torch.outer(frequencies.double(), torch.arange(taps).double() * dilation) * (2 * math.pi / size)
    return torch.polar(torch.ones_like(phases), phases)  # (frequencies, taps)


def _lanczos(layer: nn.Module, x: Tensor, is_wide: bool) -> tuple[Tensor, Tensor]:
    """Nodes sqrt(theta) and weights of Gauss quadrature for J^T J, or J J^T if that is smaller."""

    x = x.detach().requires_grad_()
    y = layer(x)
    is_affine = _is_affine(layer, x.shape)

    def forward(v: Tensor) -> Tensor:
        if is_affine:
            with torch.no_grad():
                return layer(x + v) - y
        return torch.autograd.functional.jvp(layer, x, v)[1]  # type: ignore[return-value]  tensors in, tensors out

    def backward(u: Tensor) -> Tensor:
        return torch.autograd.grad(y, x, u, retain_graph=True)[0]

    def gram(v: Tensor) -> Tensor:
        return forward(backward(v)) if is_wide else backward(forward(v))

    shape = y.shape if is_wide else x.shape
    generator = torch.Generator().manual_seed(0)
    nodes, weights = [], []
    for _ in range(_LANCZOS_VECTORS):
        v = torch.randn(shape, dtype=torch.float64, generator=generator)
        T = _tridiagonal(gram, v / v.norm())
        theta, U = torch.linalg.eigh(T)
        nodes.append(theta.clamp_min(0).sqrt())
        weights.append(U[0] ** 2)
    return torch.cat(nodes), torch.cat(weights)


@torch.no_grad()
def _is_affine(layer: nn.Module, shape: torch.Size) -> bool:
    """Whether f(a + b) = f(a) + f(b) - f(0) for two random points: then one pass gives J v. Tested, not proved."""
    a, b = torch.randn((2, *shape), dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    found, wanted = layer(a + b), layer(a) + layer(b) - layer(torch.zeros_like(a))
    return bool((found - wanted).norm() <= 1e-10 * found.norm())


def _tridiagonal(gram: Callable[[Tensor], Tensor], v: Tensor) -> Tensor:
    """The tridiagonal matrix of a symmetric operator in the Krylov space of the unit vector v, orthogonalised twice."""
    basis, diagonal, off = [v.flatten()], [], []
    for _ in range(_LANCZOS_STEPS):
        w = gram(basis[-1].reshape(v.shape)).flatten()
        diagonal.append(float(w @ basis[-1]))
        B = torch.stack(basis)  # (k, n)
        for _ in range(2):
            w = w - B.T @ (B @ w)
        size = float(w.norm())
        if not size > 1e-10 * max(1.0, abs(diagonal[0])):  # the space is invariant: for an isometry after one step
            break
        off.append(size)
        basis.append(w / size)
    k = len(diagonal)
    beside = torch.tensor(off[: k - 1], dtype=torch.float64)
    return torch.diag(torch.tensor(diagonal, dtype=torch.float64)) + torch.diag(beside, 1) + torch.diag(beside, -1)
