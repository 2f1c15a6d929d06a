"""Layers as dense matrices on a torus: what an operator is, whatever the optimiser makes of its kernel."""

from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn import functional as F

from onelip.core.geometry import geometry_of

_CONVOLVE = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}


@dataclass
class Torus:
    """A layer kind with its torus: `matrix` of a weight, and `weight` nearest to a matrix."""

    kind: str
    in_channels: int
    out_channels: int
    kernel: int = 1
    stride: int = 1
    dilation: int = 1
    groups: int = 1
    size: int = 0
    side: str = "inputs"
    layer: nn.Module = field(init=False)

    def __post_init__(self):
        if self.kind == "Linear":
            self.layer = nn.Linear(self.in_channels, self.out_channels)
        else:
            self.layer = getattr(nn, self.kind)(
                self.in_channels,
                self.out_channels,
                self.kernel,
                stride=self.stride,
                dilation=self.dilation,
                groups=self.groups,
            )
        self.geometry = geometry_of(self.layer)
        torch.manual_seed(len(repr(self)))

    def random(self):
        return torch.randn(self.layer.weight.shape, dtype=torch.float64) / self.layer.weight[0].numel() ** 0.5

    def kernel_of(self, weight):
        return self.geometry.to_kernel(weight, self.side)

    def weight_of(self, kernel):
        return self.geometry.to_weight(kernel, self.side)

    def matrix(self, weight):
        """The operator with the columns of `side`: (rows, columns), made by applying it to unit vectors."""
        if self.kind == "Linear":
            return weight if self.side == "inputs" else weight.T
        transposed = self.kind.startswith("ConvTranspose")
        dims = int(self.kind[-2])
        inputs = weight.shape[1] * self.groups
        units = torch.eye(inputs * self.size**dims, dtype=torch.float64).reshape(-1, inputs, *(self.size,) * dims)
        reach = self.dilation * (self.kernel - 1)
        # Circular on the right alone: the same operator up to a shift.
        padded = F.pad(units, (0, reach) * dims, mode="circular")
        settings = {"stride": self.stride, "dilation": self.dilation, "groups": self.groups}
        J = _CONVOLVE[dims](padded, weight, **settings).flatten(1).T
        # The adjoint of a convolution is the transposed convolution with the same weight.
        return J if (self.side == "inputs") != transposed else J.T

    def weight(self, matrix):
        """The weight whose matrix is nearest in the Frobenius norm."""
        w = torch.zeros(self.layer.weight.shape, dtype=torch.float64, requires_grad=True)
        J = self.matrix(w)
        (adjoint,) = torch.autograd.grad((J * matrix).sum(), w)
        ones = torch.ones_like(w).requires_grad_()
        (count,) = torch.autograd.grad(self.matrix(ones).sum(), ones)
        return adjoint / count


LAYERS = [
    Torus("Linear", 5, 7),
    Torus("Linear", 6, 6),
    Torus("Linear", 7, 5, side="outputs"),
    Torus("Conv1d", 3, 4, 3, size=12),
    Torus("Conv1d", 4, 3, 3, size=12, side="outputs"),
    Torus("Conv1d", 2, 6, 4, stride=2, size=16),
    Torus("Conv1d", 2, 6, 5, stride=2, size=24),
    Torus("Conv1d", 2, 4, 3, stride=2, dilation=2, size=24),
    Torus("Conv1d", 2, 4, 3, stride=2, dilation=3, size=36),
    Torus("Conv2d", 2, 3, 3, size=8),
    Torus("Conv2d", 4, 6, 3, groups=2, size=8),
    Torus("Conv2d", 2, 9, 2, stride=2, size=4),
    Torus("Conv2d", 6, 5, 2, stride=2, size=4, side="outputs"),
    Torus("Conv2d", 3, 4, 1, size=3),
    Torus("Conv2d", 2, 2, 3, dilation=2, size=14),
    Torus("Conv3d", 1, 2, 2, size=5),
    Torus("Conv3d", 1, 8, 2, stride=2, size=4),
    Torus("ConvTranspose1d", 4, 4, 3, size=12),
    Torus("ConvTranspose1d", 6, 2, 4, stride=2, size=16, side="outputs"),
    Torus("ConvTranspose2d", 4, 4, 2, stride=2, groups=2, size=4, side="outputs"),
    Torus("ConvTranspose2d", 3, 3, 3, size=8),
    Torus("ConvTranspose3d", 2, 1, 2, size=5, side="outputs"),
]


def name(torus):
    return "-".join(str(v) for v in (torus.kind, torus.kernel, torus.stride, torus.dilation, torus.groups, torus.side))
