"""Layers that act on the channels: select, pad, normalise and centre them; checks of the axis of channels."""

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, distributed as dist
from torch.autograd import Function
from torch.nn import functional as F

from onelip.core.errors import check_integer, check_number
from onelip.core.lipschitz_module import Bound, LipschitzModule
from onelip.core.modes import is_scripting
from onelip.graph import kinds
from onelip.graph.kinds import Join
from onelip.graph.lowering import Lowering, lowers


def axis_length(x: Tensor, dim: int, layer: str) -> int:
    """Return the length of axis `dim` of `x`; the error message for a missing axis names the layer."""
    if not -x.dim() <= dim < x.dim():
        raise ValueError(
            f"{layer} expected an input that has axis {dim}, got shape {tuple(x.shape)}; "
            "add the missing axes (a batch axis?) or pass another `dim`"
        )
    return x.shape[dim]


def check_channels(x: Tensor, dim: int, channels: int, layer: str, argument: str = "channels") -> None:
    """Raise an error unless axis `dim` of `x` has the number of channels that the layer was built for."""
    length = axis_length(x, dim, layer)
    if length != channels:
        raise ValueError(
            f"{layer} expected {channels} channels on axis {dim}, got {length} (input of shape {tuple(x.shape)}); "
            f"build the layer with {argument}={length}"
        )


def along_axis(values: Tensor, x: Tensor, dim: int) -> Tensor:
    """View a vector (c,) so that it broadcasts along axis `dim` of `x`; (..., c) keeps its leading axes."""
    trailing = x.dim() - 1 - dim % x.dim()
    return values.reshape(*values.shape, *(1,) * trailing)


class _Channels(LipschitzModule):
    """Base of the layers below: the number of channels of the output and their axis."""

    def __init__(self, out_channels: int, dim: int = 1) -> None:
        super().__init__()
        self.out_channels = check_integer("out_channels", out_channels)
        self.dim = dim

    def extra_repr(self) -> str:
        return f"{self.out_channels}, dim={self.dim}"


class FirstChannels(_Channels):
    r"""Keep the first `out_channels` channels and drop the others.

    This is an orthogonal projection, $\|x_{1..n}\|_2 \le \|x\|_2$, hence 1-Lipschitz, and exact in floating point. The
    networks of AOL (Prach, Lampert, ECCV 2022) use it to obtain the logits from the last layer.

    Args:
        out_channels: number of channels to keep.
        dim: axis of the channels.

    Shape:
        - Input: $(N, C, *)$, or any shape whose axis `dim` has length `out_channels` or more.
        - Output: the shape of the input, with `out_channels` on axis `dim`.

    Examples:
        >>> import torch
        >>> FirstChannels(2)(torch.tensor([[1.0, 2.0, 3.0]]))
        tensor([[1., 2.]])
    """

    proved_constant = 1.0
    is_scriptable = True

    def forward(self, x: Tensor) -> Tensor:
        n = self.out_channels
        length = x.shape[self.dim] if is_scripting() else axis_length(x, self.dim, "FirstChannels")
        if not is_scripting() and length < n:
            raise ValueError(
                f"FirstChannels expected at least {n} channels on axis {self.dim}, got {length} "
                f"(input of shape {tuple(x.shape)}); keep fewer, or add zero channels with PadChannels({n}, {self.dim})"
            )
        return x.narrow(self.dim, 0, n)


class PadChannels(_Channels):
    r"""Append zero channels until there are `out_channels`.

    This is an isometry, $\|(x, 0)\|_2 = \|x\|_2$, hence 1-Lipschitz, and exact in floating point.

    Args:
        out_channels: number of channels of the output.
        dim: axis of the channels.

    Shape:
        - Input: $(N, C, *)$, or any shape whose axis `dim` has length `out_channels` or less.
        - Output: the shape of the input, with `out_channels` on axis `dim`.

    Examples:
        >>> import torch
        >>> PadChannels(4)(torch.tensor([[1.0, 2.0]]))
        tensor([[1., 2., 0., 0.]])
    """

    proved_constant = 1.0
    is_scriptable = True

    def forward(self, x: Tensor) -> Tensor:
        n = self.out_channels
        length = x.shape[self.dim] if is_scripting() else axis_length(x, self.dim, "PadChannels")
        if not is_scripting() and length > n:
            raise ValueError(
                f"PadChannels expected at most {n} channels on axis {self.dim}, got {length} "
                f"(input of shape {tuple(x.shape)}); use a larger number, or drop channels with "
                f"FirstChannels({n}, {self.dim})"
            )
        # F.pad counts axes from the last one, two numbers each.
        later_axes = x.dim() - 1 - self.dim % x.dim()
        return F.pad(x, [0, 0] * later_axes + [0, n - length])


@lowers(FirstChannels, PadChannels)
def _lower_channels(low: Lowering) -> int:
    return low.emit(Join, low.source) if low.sample_axis == 0 else low.refuse()


class Normalize(LipschitzModule):
    r"""Standardise each channel with fixed numbers: $y_c = (x_c - \mathrm{mean}_c) / \mathrm{std}_c$.

    The Lipschitz constant is $1 / \min_c \mathrm{std}_c$, attained by images that differ only in the channel with the
    smallest std. For the usual numbers of CIFAR-10 it is about 4.1: a network that is 1-Lipschitz on standardised
    images is not 1-Lipschitz on images. With this layer inside the network, the constant is part of each bound.

    Args:
        mean: one mean per channel (axis 1).
        std: one standard deviation per channel, each above 0.
        device: device of the buffers; that of `mean` and `std` by default.
        dtype: type of the buffers; that of `mean` and `std` by default.

    Shape:
        - Input: $(N, C, *)$, with $C$ the number of means.
        - Output: same shape as the input.

    Attributes:
        mean: buffer `(C,)`.
        std: buffer `(C,)`.

    Raises:
        ValueError: if the numbers of means and stds differ, or for values that are not finite, or stds that are not
            above 0.

    Examples:
        >>> layer = Normalize((0.5, 0.5, 0.5), (0.25, 0.5, 0.5))
        >>> layer(torch.ones(1, 3, 1, 1)).flatten(), layer.lipschitz_constant
        (tensor([2., 1., 1.]), 4.0)
    """

    is_scriptable = True
    mean: Tensor
    std: Tensor

    def __init__(
        self,
        mean: Sequence[float] | Tensor,
        std: Sequence[float] | Tensor,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        means, stds = (_buffer(value, device, dtype) for value in (mean, std))
        if len(means) != len(stds) or not len(means):
            raise ValueError(
                f"expected one mean and one std per channel, got {len(means)} means and {len(stds)} stds; "
                "pass as many means as stds"
            )
        is_known = not (means.is_meta or stds.is_meta)
        if is_known and not bool((stds > 0).all() and torch.isfinite(stds).all() and torch.isfinite(means).all()):
            raise ValueError(f"expected finite means and stds above 0, got {means.tolist()} and {stds.tolist()}")
        self.register_buffer("mean", means)
        self.register_buffer("std", stds)

    @property
    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        return {"mean": (len(self.mean),), "std": (len(self.mean),)}

    def bound(self) -> Bound:
        r"""$1 / \min_c \mathrm{std}_c$ of the stored buffer, rounded up."""
        smallest = float(self.std.min())
        if not (smallest > 0 and bool(torch.isfinite(self.std).all())):  # loaded from a state dict, or NaN
            return Bound(None, f"its stds are {self.std.tolist()}, not all finite and above 0")
        inverse = 1 / smallest
        is_enough = Fraction(inverse) * Fraction(smallest) >= 1
        return Bound(inverse if is_enough else math.nextafter(inverse, math.inf), "smallest std")

    def forward(self, x: Tensor) -> Tensor:
        if not is_scripting():
            check_channels(x, 1, len(self.mean), "Normalize", "len(mean)")
        shape = [-1] + [1] * (x.dim() - 2)
        return (x - self.mean.to(x.dtype).reshape(shape)) / self.std.to(x.dtype).reshape(shape)

    def extra_repr(self) -> str:
        return f"mean={self.mean.tolist()}, std={self.std.tolist()}"


def _buffer(values: Sequence[float] | Tensor, device: torch.device | str | None, dtype: torch.dtype | None) -> Tensor:
    tensor = torch.as_tensor(values).detach().clone().flatten()
    if dtype is None and not tensor.is_floating_point():
        dtype = torch.get_default_dtype()
    return tensor.to(device=device, dtype=dtype)


@lowers(Normalize)
def _lower_normalize(low: Lowering) -> int:
    mean, std = (low.tensor(getattr(low.module, role), role) for role in ("mean", "std"))
    return low.emit(kinds.Normalize, low.source, mean=mean, std=std)


class _Centred(Function):
    """x minus the mean of each channel over all samples; returns the mean and the count too.

    The map is an orthogonal projection of the whole batch, so it is its own derivative.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype, of_all_processes: bool) -> tuple[Tensor, Tensor, Tensor]:
        ctx.settings = dtype, of_all_processes
        total = _channel_sums(x).to(dtype)
        count = total.new_full((1,), x.numel() // x.shape[1])
        if of_all_processes and dist.is_available() and dist.is_initialized():
            # One message for sums and count, in float64, which represents larger counts exactly.
            packed = torch.cat([total, count]).double()
            dist.all_reduce(packed)
            total, count = packed.to(dtype).split([len(total), 1])
        mean = total / count.clamp(min=1)
        ctx.mark_non_differentiable(mean, count)
        return x - along_axis(mean.to(x.dtype), x, 1), mean, count

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        out = _Centred.apply(grad_outputs[0], *ctx.settings)[0]  # pyright: ignore[reportOptionalSubscript]
        return out, None, None


def _channel_sums(x: Tensor) -> Tensor:
    """Sums over all axes but 1."""
    rows = x.movedim(1, -1)
    if x.dtype == torch.bfloat16 and rows.is_contiguous():
        # torch converts the whole tensor to float32 to sum it; a product of matrices accumulates in float32 as well.
        rows = rows.reshape(-1, x.shape[1])
        return (rows.new_ones(1, len(rows)) @ rows)[0]
    return x.sum([i for i in range(x.dim()) if i != 1], dtype=torch.promote_types(x.dtype, torch.float32))


class BatchCentering(LipschitzModule):
    r"""Subtract the mean of each channel: the mean of the batch in training, the running mean in evaluation.

    In eval mode the layer is the translation $x - m$ with the stored mean $m$, so
    $\|f(x) - f(y)\|_2 = \|x - y\|_2$. In training the output of a sample depends on the other samples of the batch: the
    map of the whole batch is an orthogonal projection, hence 1-Lipschitz, but no statement about a single sample holds.
    The constant 1 is that of eval mode; certify in eval mode. `onelip.bake` adds the layer to the bias of the linear
    layer before it.

    With torch.distributed initialised, the mean is that of the samples of all processes together; all of them must then
    run the layer equally often. Set the attribute `of_all_processes` to False for the mean of each process.

    It is the normalisation of LiResNet (Hu et al., "Unlocking Deterministic Robustness Certification on ImageNet",
    NeurIPS 2023).

    Args:
        num_features: number of channels (axis 1).
        momentum: weight of the new batch in the running mean, from 0 to 1.
        device: device of the running mean.
        dtype: type of the running mean.

    Shape:
        - Input: $(N, C, *)$ with $C$ = num_features.
        - Output: same shape as the input.

    Attributes:
        running_mean: buffer `(num_features,)`, initialised with zeros.
        of_all_processes: whether the mean of a batch is that of all processes.

    Raises:
        ValueError: if `momentum` is not in [0, 1].

    Examples:
        >>> layer = BatchCentering(1)
        >>> layer(torch.tensor([[1.0], [3.0]])).T, layer.running_mean
        (tensor([[-1.,  1.]]), tensor([0.2000]))
    """

    proved_constant = 1.0
    of_all_processes = True

    running_mean: Tensor

    def __init__(
        self,
        num_features: int,
        momentum: float = 0.1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.num_features = check_integer("num_features", num_features)
        self.momentum = check_number("momentum", momentum, 0, 1)
        self.register_buffer("running_mean", torch.zeros(num_features, device=device, dtype=dtype))

    @property
    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        return {"running_mean": (self.num_features,)}

    def forward(self, x: Tensor) -> Tensor:
        check_channels(x, 1, self.num_features, "BatchCentering", "num_features")
        mean = self.running_mean
        if self.training:
            dtype = torch.promote_types(x.dtype, mean.dtype)
            out, mean, count = _Centred.apply(x, dtype, self.of_all_processes)  # pyright: ignore
            with torch.no_grad():  # an empty batch does not change the mean
                weight = self.momentum * (count > 0).to(self.running_mean.dtype)
                self.running_mean += weight * (mean.to(self.running_mean.dtype) - self.running_mean)
            return out
        return x - along_axis(mean.to(x.dtype), x, 1)

    def plain_shift(self) -> Normalize:
        """The layer in eval mode; `onelip.bake` adds it to the bias of the layer before, or puts it in its place."""
        return Normalize(self.running_mean, torch.ones_like(self.running_mean))

    def extra_repr(self) -> str:
        return f"{self.num_features}, momentum={self.momentum}"


class LayerCentering(LipschitzModule):
    r"""Subtract from each sample its own mean over the axes `dim`.

    This is the orthogonal projection along the vector of ones, hence 1-Lipschitz, in training as in evaluation.

    Args:
        dim: axis or axes of the mean, without the batch axis 0.

    Shape:
        - Input: $(N, *)$, any shape that has the axes `dim`.
        - Output: same shape as the input.

    Raises:
        ValueError: if `dim` is empty.

    Examples:
        >>> LayerCentering(1)(torch.tensor([[1.0, 2.0, 6.0]]))
        tensor([[-2., -1.,  3.]])
    """

    proved_constant = 1.0

    def __init__(self, dim: int | tuple[int, ...] = 1) -> None:
        super().__init__()
        self.dim = (dim,) if isinstance(dim, int) else tuple(dim)
        if not self.dim:
            raise ValueError("expected at least one axis, got (); pass the axes of the mean, such as (1, 2, 3)")

    def forward(self, x: Tensor) -> Tensor:
        for dim in self.dim:
            axis_length(x, dim, "LayerCentering")
            if dim % x.dim() == 0:
                raise ValueError(
                    f"LayerCentering expected axes of one sample, got the batch axis 0 among {self.dim} for an input "
                    f"of shape {tuple(x.shape)}; remove it, or use BatchCentering"
                )
        return x - x.mean(self.dim, keepdim=True)

    def extra_repr(self) -> str:
        return f"dim={self.dim}"
