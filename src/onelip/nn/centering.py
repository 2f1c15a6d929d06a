"""Centering: subtract a mean and never divide, which keeps the constant where batch normalisation loses it.

BatchCentering: the normalisation of LiResNet (Hu et al., "Unlocking deterministic robustness certification on
ImageNet", NeurIPS 2023).  In eval mode it is a translation, x - m with the stored m: ||f(x) - f(y)||_2 = ||x - y||_2.
In training m is the mean of the batch, so samples depend on each other: then the map of the *whole batch* is
1-Lipschitz (an orthogonal projection), but no statement about one sample holds.  Certify in eval mode.

LayerCentering: x - mean(x) over axes of one sample, the orthogonal projection along the vector of ones:
||f(x) - f(y)||_2 <= ||x - y||_2, in training as in eval.  Assumes that none of the axes is the batch.
"""

from typing import Any

import torch
from torch import Tensor, distributed as dist
from torch.autograd import Function

from onelip.core.arguments import check_integer
from onelip.core.lipschitz_module import LipschitzModule
from onelip.nn._base import along_axis, axis_length
from onelip.nn.normalize import Normalize


class _AllReduceSum(Function):
    """Sum over all processes; every process depends on every input, so the gradient is the same sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        return _AllReduceSum.apply(grad_outputs[0].contiguous())


class BatchCentering(LipschitzModule):
    """Subtract the mean of each channel (axis 1): that of the batch in training, the running mean in eval mode.

    With torch.distributed initialised the batch is that of all processes together, whatever their shares are.
    The constant 1 is that of eval mode; in training one sample's output depends on the others. `onelip.bake` adds it to
    the bias of the layer before it.

    Examples:
        >>> layer = BatchCentering(1)
        >>> layer(torch.tensor([[1.0], [3.0]])).T, layer.running_mean
        (tensor([[-1.,  1.]]), tensor([0.2000]))
    """

    proved_constant = 1.0

    running_mean: Tensor

    def __init__(self, num_features: int, momentum: float = 0.1) -> None:
        super().__init__()
        if not 0.0 <= momentum <= 1.0:
            raise ValueError(f"expected momentum in [0, 1], got {momentum!r}; it is the weight of the new batch")
        self.num_features = check_integer("num_features", num_features)
        self.momentum = momentum
        self.register_buffer("running_mean", torch.zeros(num_features))

    def _batch_mean(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean per channel over all samples of all processes, and their number."""
        axes = [i for i in range(x.dim()) if i != 1]
        dtype = torch.promote_types(x.dtype, self.running_mean.dtype)
        total = x.sum(axes, dtype=dtype)
        count = total.new_full((1,), x.numel() // self.num_features)
        if dist.is_available() and dist.is_initialized():
            # One message for sums and count; float64 counts exactly far beyond what float32 does.
            packed = _AllReduceSum.apply(torch.cat([total, count]).double())
            total, count = packed.to(dtype).split([self.num_features, 1])  # pyright: ignore[reportAttributeAccessIssue]
        return total / count.clamp(min=1), count

    def forward(self, x: Tensor) -> Tensor:
        n = axis_length(x, 1, "BatchCentering")
        if n != self.num_features:
            raise ValueError(
                f"BatchCentering expected {self.num_features} channels on axis 1, got {n} "
                f"(input of shape {tuple(x.shape)}); build it with num_features={n}"
            )
        mean = self.running_mean
        if self.training:
            mean, count = self._batch_mean(x)
            with torch.no_grad():  # an empty batch says nothing about the mean
                weight = self.momentum * (count > 0).to(self.running_mean.dtype)
                self.running_mean += weight * (mean.to(self.running_mean.dtype) - self.running_mean)
            # A sum, not a difference: its derivative does not negate a tensor of the size of x.
            return x + along_axis(-mean.to(x.dtype), x, 1)
        return x - along_axis(mean.to(x.dtype), x, 1)

    def plain_shift(self) -> Normalize:
        """The layer in eval mode; `onelip.bake` adds it to the bias of the layer before, or puts it in its place."""
        return Normalize(self.running_mean, torch.ones_like(self.running_mean))

    def extra_repr(self) -> str:
        return f"{self.num_features}, momentum={self.momentum}"


class LayerCentering(LipschitzModule):
    """Subtract from every sample its own mean over the axes `dim` (not the batch axis 0).

    Examples:
        >>> LayerCentering(1)(torch.tensor([[1.0, 2.0, 6.0]]))
        tensor([[-2., -1.,  3.]])
    """

    proved_constant = 1.0

    def __init__(self, dim: int | tuple[int, ...] = 1) -> None:
        super().__init__()
        self.dim = (dim,) if isinstance(dim, int) else tuple(dim)
        if not self.dim:
            raise ValueError("expected at least one axis, got (); name the axes to centre over, such as (1, 2, 3)")

    def forward(self, x: Tensor) -> Tensor:
        for dim in self.dim:
            axis_length(x, dim, "LayerCentering")
            if dim % x.dim() == 0:
                raise ValueError(
                    f"LayerCentering expected axes of one sample, got the batch axis 0 among {self.dim} for an input "
                    f"of shape {tuple(x.shape)}; leave it out, or use BatchCentering"
                )
        return x - x.mean(self.dim, keepdim=True)

    def extra_repr(self) -> str:
        return f"dim={self.dim}"
