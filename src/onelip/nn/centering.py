"""Centering: subtract a mean without dividing by a standard deviation, which keeps the Lipschitz constant at 1."""

from typing import Any

import torch
from torch import Tensor, distributed as dist
from torch.autograd import Function

from onelip.core.arguments import check_integer
from onelip.core.lipschitz_module import LipschitzModule
from onelip.nn._base import along_axis, axis_length, check_channels
from onelip.nn.normalize import Normalize


class _Centred(Function):
    """x minus the mean of each channel over all samples of all processes; returns the mean and the count too.

    The map is an orthogonal projection of the whole batch, so it is its own derivative.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
        ctx.dtype = dtype
        total = _channel_sums(x).to(dtype)
        count = total.new_full((1,), x.numel() // x.shape[1])
        if dist.is_available() and dist.is_initialized():
            # One message for sums and count, in float64, which represents larger counts exactly.
            packed = torch.cat([total, count]).double()
            dist.all_reduce(packed)
            total, count = packed.to(dtype).split([len(total), 1])
        mean = total / count.clamp(min=1)
        ctx.mark_non_differentiable(mean, count)
        return x - along_axis(mean.to(x.dtype), x, 1), mean, count

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        return _Centred.apply(grad_outputs[0], ctx.dtype)[0], None  # pyright: ignore[reportOptionalSubscript]


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

    With torch.distributed initialised, the mean is that of the samples of all processes together.

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

    Raises:
        ValueError: if `momentum` is not in [0, 1].

    Examples:
        >>> layer = BatchCentering(1)
        >>> layer(torch.tensor([[1.0], [3.0]])).T, layer.running_mean
        (tensor([[-1.,  1.]]), tensor([0.2000]))
    """

    proved_constant = 1.0

    running_mean: Tensor

    def __init__(
        self,
        num_features: int,
        momentum: float = 0.1,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not 0.0 <= momentum <= 1.0:
            raise ValueError(f"expected momentum in [0, 1], got {momentum!r}; it is the weight of the new batch")
        self.num_features = check_integer("num_features", num_features)
        self.momentum = momentum
        self.register_buffer("running_mean", torch.zeros(num_features, device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        check_channels(x, 1, self.num_features, "BatchCentering", "num_features")
        mean = self.running_mean
        if self.training:
            out, mean, count = _Centred.apply(x, torch.promote_types(x.dtype, mean.dtype))  # pyright: ignore
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
