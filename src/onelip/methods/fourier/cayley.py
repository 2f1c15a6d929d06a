"""Orthogonal layers by the Cayley transform.

Citation: Asher Trockman, J. Zico Kolter, "Orthogonalizing Convolutional Layers with the Cayley Transform", ICLR 2021.

Inequality: for M = [U; V] with U square and A = U - U* + V* V, the matrix Q = [2 X - I; -2 V X], X = (I + A)^-1, has
Q* Q = I. (The real part of I + A is at least I: it is never singular.) Convolutions: at each frequency;
`onelip.methods.fourier.maps`, (1).
Assumes: convolutions are circular, keep the size, and are made for one size of images; stride 1, or the kernel's size;
one group. Kernels of the result cover the whole image.
Guarantee: proved, with its rounding: whatever the solver's rounding was, ||Q* Q - I|| is computed and divided out.
M is alpha K / ||K||, alpha learned; it is a parameter from the beginning, not from the first input on.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from onelip.methods.fourier.inverse import inverse
from onelip.methods.fourier.layer import SERVED, replaced
from onelip.methods.fourier.maps import OrthogonalMap, shrunk
from onelip.methods.method import Method, PaperRow
from onelip.methods.orthogonal.steps import UNIT64, of_moderate_size

# alpha up to this times sqrt(columns): beyond, singular values are next to -1 anyway, and the solver would lose digits.
_LARGEST_SCALE = 16.0


class CayleyMap(OrthogonalMap):
    """M (b, rows, columns) -> Q, with a learned scale alpha for each group of the kernel; `cayley` makes it.

    Args:
        kernel: what is begun with, (g, rows, columns, *taps).
    """

    title = "Cayley transform"

    def __init__(self, kernel: Tensor) -> None:
        super().__init__(kernel.shape[1], kernel.shape[2])
        self.largest = _LARGEST_SCALE * min(self.rows, self.columns) ** 0.5
        # In float64, so that the squares of huge entries are in range; those beyond meet the largest scale.
        norm = torch.linalg.vector_norm(kernel.detach().double().flatten(1), dim=1)
        start = torch.where(norm == 0, 1.0, norm.nan_to_num(posinf=self.largest).clamp(max=self.largest))
        self.alpha = nn.Parameter(start.to(kernel.dtype))  # (g)

    def prepare(self, kernel: Tensor) -> Tensor:
        K = of_moderate_size(kernel.flatten(1)[:, None])[:, 0]  # (g, ...)
        square = K.square().sum(1, keepdim=True)
        length = torch.where(square == 0, 1.0, square).sqrt()
        alpha = self.alpha.to(K.dtype).clamp(-self.largest, self.largest)
        return (K * (alpha[:, None] / length)).reshape(kernel.shape)

    def forward(self, M: Tensor) -> Tensor:
        if M.shape[-2] < M.shape[-1]:
            return self.forward(M.mH).mH
        n = M.shape[-1]
        U, V = M[:, :n], M[:, n:]
        eye = torch.eye(n, dtype=M.dtype, device=M.device)
        X = inverse(eye + U - U.mH + V.mH @ V)
        Q = torch.cat([2 * X - eye, -2 * V @ X], 1)
        return Q if self.training else shrunk(Q)

    def excess(self) -> float:
        return 16 * self.rows * self.columns * UNIT64


def cayley(layer: nn.Module, *, input_size: int | Sequence[int] | None = None, lipschitz: float = 1.0) -> nn.Module:
    """An orthogonal layer by the Cayley transform in the place of the given one.

    Linear layers, 1x1 convolutions and those whose kernel size is their stride keep their kind and get a parametrized
    weight, in place; all other convolutions become a `onelip.methods.fourier.layer.FourierConv`. The layer's weight is
    kept as what is transformed.

    Args:
        layer: Linear, Conv1d, Conv2d or Conv3d.
        input_size: spatial size of the images; needed by convolutions that are not dense.
        lipschitz: the constant to guarantee instead of 1.

    Raises:
        onelip.UnsupportedLayer: for zero padding, groups, strides, and where the size is not kept or not given.

    Examples:
        >>> layer = cayley(nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular", bias=False), input_size=6)
        >>> x = torch.randn(1, 4, 6, 6)
        >>> bool((layer(x).norm() - x.norm()).abs() < 1e-4)
        True
    """
    return replaced(layer, CayleyMap, method="cayley", input_size=input_size, lipschitz=lipschitz)


METHOD = Method(
    name="cayley",
    title="Cayley convolutions (Trockman and Kolter, 2021)",
    mechanism="parametrization",
    guarantee="proved",
    layers=SERVED,
    apply=cayley,
    options=({"lipschitz": 0.5},),
    replaces=True,
    needs_input_size=True,
    paper=PaperRow(E="partly", F="yes", G="partly", M="yes", notes={"E": 5, "G": 6}),
    hyperparameters={"lr": 0.02, "weight_decay": 0.0, "schedule": "one-cycle"},
    note="circular, made for one image size",
)
