"""Layers of the Fourier and residual methods as plain real torch layers, for `onelip.bake`."""

import math
from collections import OrderedDict
from typing import Any

import torch
from torch import Tensor, nn

from onelip.core.lipschitz_module import ImageSizeGuard
from onelip.methods.fourier.frequencies import real_form, real_waves
from onelip.methods.numerics import widest_type
from onelip.nn.activations import MaxMin


class LayerSizeGuard(ImageSizeGuard):
    """Forward pre-hook that raises an error for inputs of another size than the layer was built for."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = args[0] if args else kwargs.get("input")
        if isinstance(x, Tensor):
            check_shape(x, self.shape)


def check_shape(x: Tensor, shape: tuple[int, ...]) -> None:
    """Raise a ValueError unless x is a batch of samples of this shape."""
    if tuple(x.shape[1:]) != shape:
        raise ValueError(
            f"expected an input (batch, {', '.join(map(str, shape))}), the size that the layer was built for, "
            f"got shape {tuple(x.shape)}; rebuild it with the input_size of your images, or resize them"
        )


def plain_periodic(
    matrices: Tensor,
    bias: Tensor | None,
    *,
    input_size: tuple[int, ...],
    size: tuple[int, ...],
    spacing: tuple[int, ...] | None = None,
) -> nn.Sequential:
    r"""Return a circular convolution, given by its matrices, as plain real torch layers.

    With the real basis $\Phi$ of `onelip.methods.fourier.frequencies.real_waves` and the `real_form` of each matrix,

    $$\mathrm{irfft}(M\,\mathrm{rfft}(x)) = \Phi^\top (\text{real blocks of } M)\, \Phi\, x.$$

    These are three linear layers without complex numbers and without FFT. The norm of each can be proved from the
    stored weights, and their product is $\max_f \|M_f\|$ up to rounding. They are convolutions whose windows do not
    overlap:

    | layer | input | output | kernel |
    |---|---|---|---|
    | $\Phi$ | (1, c, n) | (2 f, c, 1) | (1, n) |
    | blocks | (2 f, c, 1) | (2 f c', 1, 1) | (c, 1), one group per frequency |
    | $\Phi^\top$ | (2 f, c', 1) | (1, c', n) | (1, n), transposed |

    Columns of $\Phi$ for zero-padded pixels are omitted. The bias is added to frequency 0. Interleaved images (ECO) are
    separated and joined by strided convolutions with kernels of zeros and ones, whose padding is the zero padding; as a
    circular convolution commutes with shifts, the side of the zeros does not matter.

    Args:
        matrices: (frequencies, rows, columns, 2), real and imaginary parts, of the kept frequencies.
        bias: (rows,), or None.
        input_size: spatial size of inputs and outputs.
        size: period of the convolution.
        spacing: distance of the pixels of one of several interleaved images, for each axis.

    Returns:
        The layers; inputs of another size raise an error.

    Examples:
        >>> M = torch.randn(3, 2, 2, 2)
        >>> x = torch.randn(5, 2, 4)
        >>> y = torch.fft.irfft(torch.einsum("foi,bif->bof", torch.view_as_complex(M), torch.fft.rfft(x)), 4)
        >>> bool((plain_periodic(M, None, input_size=(4,), size=(4,))(x) - y).abs().max() < 1e-5)
        True
    """
    spaces = spacing or (1,) * len(size)
    frequencies, rows, columns = matrices.shape[:3]
    images = math.prod(spaces)
    # Without interleaved images, zero-padded pixels are omitted.
    seen = tuple(n if d == 1 else k for n, k, d in zip(input_size, size, spaces, strict=True))
    place: dict[str, Any] = {"dtype": matrices.dtype, "device": matrices.device}
    pixels = math.prod(seen)
    parts: OrderedDict[str, nn.Module] = OrderedDict()
    if images > 1:
        parts["apart"] = _interleaved(columns, input_size, size, spaces, False, place)
    parts["lines"] = nn.Flatten(2)
    parts["pixels"] = nn.Unflatten(1, (1, columns * images))
    analysis = nn.Conv2d(1, 2 * frequencies, (1, pixels), stride=(1, pixels), bias=False, **place)
    parts["analysis"] = analysis
    if images > 1:
        parts["coefficients"] = nn.Flatten(2)
        parts["channels"] = nn.Unflatten(2, (columns, images))
    blocks = nn.Conv2d(
        2 * frequencies,
        2 * frequencies * rows,
        (columns, 1),
        stride=(columns, 1),
        groups=frequencies,
        bias=bias is not None,
        **place,
    )
    parts["frequencies"] = blocks
    parts["products"] = nn.Flatten(1)
    parts["waves"] = nn.Unflatten(1, (2 * frequencies, rows * images, 1))
    synthesis = nn.ConvTranspose2d(2 * frequencies, 1, (1, pixels), stride=(1, pixels), bias=False, **place)
    parts["synthesis"] = synthesis
    parts["sums"] = nn.Flatten(1, 2)
    parts["image"] = nn.Unflatten(2, seen)
    if images > 1:
        parts["together"] = _interleaved(rows, input_size, size, spaces, True, place)
    made = nn.Sequential(parts)
    with torch.no_grad():
        _fill(blocks, matrices, bias, size)
        if not matrices.is_meta:
            Phi = real_waves(size, seen)[:, None, None]  # (2 f, 1, 1, pixels)
            analysis.weight.copy_(Phi)
            synthesis.weight.copy_(Phi)
    for fixed in (analysis, synthesis):
        fixed.requires_grad_(False)
    made.register_forward_pre_hook(LayerSizeGuard((columns, *input_size)), with_kwargs=True)
    return made


def _fill(blocks: nn.Conv2d, matrices: Tensor, bias: Tensor | None, size: tuple[int, ...]) -> None:
    blocks.weight.copy_(real_form(matrices).reshape(blocks.weight.shape))
    if bias is not None and blocks.bias is not None:
        blocks.bias.zero_()
        # The coefficient of a constant image at frequency 0 is its value times sqrt(n).
        blocks.bias[: len(bias)].copy_(bias.double() * math.sqrt(math.prod(size)))


def _interleaved(
    channels: int,
    input_size: tuple[int, ...],
    size: tuple[int, ...],
    spacing: tuple[int, ...],
    transposed: bool,
    place: dict[str, Any],
) -> nn.Module:
    """Map (c, *input_size) to (c * images, *size) with zero padding; transposed: back, without the padding."""
    images = math.prod(spacing)
    missing = [k * d - n if d > 1 else 0 for n, k, d in zip(input_size, size, spacing, strict=True)]
    padding = [-(-m // 2) for m in missing]
    settings: dict[str, Any] = {"stride": spacing, "padding": padding, "groups": channels, "bias": False, **place}
    axes = len(size)
    if transposed:
        settings["output_padding"] = [2 * p - m for p, m in zip(padding, missing, strict=True)]
        kind: Any = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[axes - 1]
        layer = kind(channels * images, channels, spacing, **settings)
    else:
        kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[axes - 1]
        layer = kind(channels, channels * images, spacing, **settings)
    with torch.no_grad():
        if not layer.weight.is_meta:
            layer.weight.copy_(torch.eye(images).reshape(images, 1, *spacing).repeat(channels, *(1,) * (axes + 1)))
    return layer.requires_grad_(False)


def reflected(V: Tensor, inputs: slice, outputs: slice) -> tuple[Tensor, Tensor]:
    r"""Return the matrices before and after MaxMin for the layer $x - 2 V^* \mathrm{relu}(V x + b)$.

    The triangle inequality would bound the layer by $1 + 2\|V\|^2$, three times too much. But for $\|V\| \le 1$, with
    $\mathrm{relu}(q) = (q + |q|) / 2$ and $S = (I - V^* V)^{1/2}$,

    $$x - 2 V^* \mathrm{relu}(V x + b) = S p - V^* |q| - V^* b, \qquad p = S x,\ q = V x + b,$$

    and $\begin{pmatrix} S \\ V \end{pmatrix}$ has orthonormal columns. MaxMin of $(p + q, p - q)/\sqrt 2$ is
    $(p + |q|, p - |q|)/\sqrt 2$. So the layer is a matrix of norm 1, MaxMin, and another matrix of norm 1, whose norms
    can be proved like those of linear layers.

    `inputs` and `outputs` select columns of $x$ (the others are zero) and rows of the result: with $V = (A\ B)$, inputs
    $B$ and outputs $A$ this is a Sandwich layer. The rows of $p$ are reduced to as few as there are inputs or outputs
    by a $Q$ with orthonormal columns: $S_{out} Q Q^* S_{in} = S_{out} S_{in}$.

    If rounding made $\|V\|$ larger than 1, negative eigenvalues of $I - V^* V$ are set to zero; the error is of the
    size of that rounding. The bounds are proved from the stored layers, so this does not affect soundness.

    Args:
        V: (b, hidden, n), real or complex.
        inputs: columns of the input.
        outputs: rows of the output.

    Returns:
        (b, 2 k, inputs) and (b, outputs, 2 k), with k = max(hidden, min(inputs, outputs)).

    Examples:
        >>> V = torch.eye(3, dtype=torch.float64)[None, :2] * 0.6
        >>> before, after = reflected(V, slice(None), slice(None))
        >>> x = torch.randn(3, dtype=torch.float64)
        >>> one, other = (before[0] @ x).chunk(2)
        >>> y = after[0] @ torch.cat([torch.maximum(one, other), torch.minimum(one, other)])
        >>> bool((y - (x - 2 * V[0].T @ (V[0] @ x).relu())).abs().max() < 1e-14)
        True
    """
    S = _root_of_rest(V)
    into, out = S[..., inputs], S[:, outputs]  # (b, n, inputs), (b, outputs, n)
    if into.shape[-1] <= out.shape[-2] and into.shape[-1] < S.shape[-1]:
        Q = torch.linalg.qr(into).Q
        into, out = Q.mH @ into, out @ Q
    elif out.shape[-2] < S.shape[-1]:
        Q = torch.linalg.qr(out.mH).Q
        into, out = Q.mH @ into, out @ Q
    q_in, q_out = V[..., inputs], V.mH[:, outputs]
    k = max(into.shape[-2], V.shape[-2])
    into, q_in = (_rows(M, k) for M in (into, q_in))
    out, q_out = (_rows(M.mT, k).mT for M in (out, q_out))
    before = torch.cat([into + q_in, into - q_in], -2)
    after = torch.cat([out - q_out, out + q_out], -1)
    return before * math.sqrt(0.5), after * math.sqrt(0.5)


def plain_dense(
    V: Tensor, bias: Tensor | None, inputs: slice, outputs: slice, factor: float, *, axes: int
) -> nn.Sequential:
    """Return `factor` times the layer of `reflected` for a matrix V, as Linear or 1x1 convolution layers.

    Args:
        V: (hidden, n).
        bias: (hidden,), or None.
        inputs: columns of the input.
        outputs: rows of the output.
        factor: factor of the output.
        axes: number of spatial axes; 0 for Linear.
    """
    wide = V.to(widest_type(V))
    before, after = (M[0] for M in reflected(wide[None], inputs, outputs))
    after = after * factor
    added = None if bias is None else _biases(wide, bias.to(wide.dtype), len(before) // 2, outputs, factor)
    kind: Any = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)[axes]
    taps: tuple[int, ...] = (1,) * (axes > 0)

    def layer(M: Tensor, number: int) -> nn.Module:
        made = kind(*reversed(M.shape), *taps, bias=added is not None, dtype=V.dtype, device=V.device)
        if not V.is_meta:
            made.weight.copy_(M.reshape(made.weight.shape))
            if added is not None:
                made.bias.copy_(added[number])
        return made

    with torch.no_grad():
        parts = (("before", layer(before, 0)), ("maxmin", MaxMin(1 if axes else -1)), ("after", layer(after, 1)))
    return nn.Sequential(OrderedDict(parts))


def plain_by_frequency(
    matrices: Tensor, bias: Tensor | None, inputs: slice, outputs: slice, factor: float, *, size: tuple[int, ...]
) -> nn.Sequential:
    """Return `factor` times the layer of `reflected` for a circular convolution V.

    Args:
        matrices: (frequencies, hidden, n, 2), real and imaginary parts of V at the kept frequencies.
        bias: (hidden,), or None.
        inputs: channels of the input.
        outputs: channels of the output.
        factor: factor of the output.
        size: spatial size of the images.
    """
    wide = matrices.to(widest_type(matrices))
    V = torch.view_as_complex(wide)
    before, after = reflected(V, inputs, outputs)
    after = after * factor
    one = two = None
    if bias is not None:
        # A constant image only has frequency 0, where V is real.
        one, two = _biases(wide[0, ..., 0], bias.to(wide.dtype), before.shape[1] // 2, outputs, factor)

    def layer(M: Tensor, added: Tensor | None) -> nn.Module:
        parts = torch.view_as_real(M.resolve_conj().contiguous()).to(matrices.dtype)
        return plain_periodic(parts, added, input_size=size, size=size)

    parts = (("before", layer(before, one)), ("maxmin", MaxMin()), ("after", layer(after, two)))
    return nn.Sequential(OrderedDict(parts))


def _biases(V: Tensor, bias: Tensor, k: int, outputs: slice, factor: float) -> tuple[Tensor, Tensor]:
    """Return the biases before MaxMin (2 k,) and of the output, for a real V (hidden, n)."""
    half = _rows(bias[:, None], k)[:, 0] * math.sqrt(0.5)
    return torch.cat([half, -half]), -factor * (V.T[outputs] @ bias)


def _root_of_rest(V: Tensor) -> Tensor:
    """Return (I - V* V)^(1/2), Hermitian, (b, n, n)."""
    if V.is_meta:
        return V.mH @ V
    rest = torch.eye(V.shape[-1], dtype=V.dtype, device=V.device) - V.mH @ V
    if not bool(rest.isfinite().all()):  # bake() reports the weight
        return torch.full_like(rest, math.nan)
    values, vectors = torch.linalg.eigh(rest)
    return (vectors * values.clamp(min=0).sqrt()[:, None, :]) @ vectors.mH


def _rows(M: Tensor, count: int) -> Tensor:
    """Append rows of zeros."""
    missing = M.new_zeros(*M.shape[:-2], count - M.shape[-2], M.shape[-1])
    return torch.cat([M, missing], -2)
