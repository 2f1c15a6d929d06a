"""ECO, explicitly constructed orthogonal convolutions.

Citation: Tan Yu, Jun Li, Yunfeng Cai, Ping Li, "Constructing Orthogonal Convolutions in an Explicit Manner", ICLR 2022.

Inequality: a circular convolution of n x n pixels with k x k taps that lie n / k apart acts on (n / k)^2 interleaved
images of k x k pixels, each by the k^2 matrices M_f of its frequencies. They are exp((P_f - P_f*) / 2): unitary, so
the layer is orthogonal; `onelip.methods.fourier.maps`, (1).
Assumes: images of one size; stride 1, or the kernel's size; one group; padding that keeps the size. Where k does not
divide n the image is filled up with zeros to the next multiple and cut afterwards. Without that the norm of the
published layers is up to 1.6. Of the layer that is replaced only the kernel's size matters, not its dilation.
Guarantee: proved, with its rounding: whatever that of the exponential was, ||M_f* M_f - I|| is computed and divided
out. More and fewer channels by zeros and by keeping the first ones.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from onelip.methods.fourier.exponential import skew_exponential
from onelip.methods.fourier.layer import SERVED, replaced
from onelip.methods.fourier.maps import OrthogonalMap, shrunk
from onelip.methods.method import Method, PaperRow
from onelip.methods.orthogonal.steps import UNIT64

# Norm of what is exponentiated, at most this times sqrt(channels) in the Frobenius norm: every unitary matrix is the
# exponential of one whose norm is at most pi.
_LARGEST = 4.0


class ECOMap(OrthogonalMap):
    """M (b, c, c) -> exp((M - M*) / 2), its first rows and columns; `eco` makes it.

    Args:
        kernel: what is begun with, (g, rows, columns, *taps).
    """

    title = "ECO"

    def __init__(self, kernel: Tensor) -> None:
        super().__init__(kernel.shape[1], kernel.shape[2])
        self.channels = max(self.rows, self.columns)

    def parameter(self, kernel: Tensor) -> Tensor:
        taps = (0, 0) * (kernel.dim() - 3)
        return F.pad(kernel, (*taps, 0, self.channels - self.columns, 0, self.channels - self.rows))

    def prepare(self, kernel: Tensor) -> Tensor:
        # The size matters here: only entries whose squares would leave the range are brought back into it.
        return torch.where(kernel.isinf(), torch.nan, kernel.clamp(-(2.0**20), 2.0**20))

    @torch.no_grad()
    def reset(self, P: Tensor) -> None:
        """Random rotations."""
        taps = 1 if P.dim() == 3 else P[0, 0].numel()
        P.normal_(0, (self.channels * taps) ** -0.5)

    def forward(self, M: Tensor) -> Tensor:
        S = (M - M.mH) / 2
        size = (torch.view_as_real(S) if S.is_complex() else S).flatten(1).square().sum(1)
        largest = _LARGEST * self.channels**0.5
        # Where it is too large it is scaled; elsewhere it is left alone, and so is the derivative at zero.
        above = size > largest**2
        S = S * torch.where(above, largest * torch.where(above, size, 1.0).rsqrt(), 1.0)[:, None, None]
        Q = skew_exponential(S)
        return (Q if self.training else shrunk(Q))[:, : self.rows, : self.columns]

    def excess(self) -> float:
        return 16 * self.channels**2 * UNIT64


def eco(layer: nn.Module, *, input_size: int | Sequence[int] | None = None, lipschitz: float = 1.0) -> nn.Module:
    """An ECO layer in the place of the given one.

    Linear layers, 1x1 convolutions and those whose kernel size is their stride keep their kind and get a parametrized
    weight, in place; all other convolutions become a `onelip.methods.fourier.layer.FourierConv`. The skew part of the
    layer's weight is what is exponentiated at first.

    Args:
        layer: Linear, Conv1d, Conv2d or Conv3d.
        input_size: spatial size of the images; needed by convolutions that are not dense.
        lipschitz: the constant to guarantee instead of 1.

    Raises:
        onelip.UnsupportedLayer: for groups, strides, and where the size is not kept or not given.

    Examples:
        >>> layer = eco(nn.Conv2d(2, 2, 3, padding=1, bias=False), input_size=6)
        >>> x = torch.randn(1, 2, 6, 6)
        >>> bool((layer(x).norm() - x.norm()).abs() < 1e-4)
        True
    """
    return replaced(layer, ECOMap, method="eco", input_size=input_size, lipschitz=lipschitz, spaced=True)


METHOD = Method(
    name="eco",
    title="ECO, explicitly constructed orthogonal convolutions (Yu et al., 2022)",
    mechanism="parametrization",
    guarantee="proved",
    layers=SERVED,
    apply=eco,
    options=({"lipschitz": 0.5},),
    replaces=True,
    needs_input_size=True,
    paper=PaperRow(E="no", F="yes", G="partly", M="yes", notes={"E": 4, "G": 6}),
    hyperparameters={"lr": 0.1, "weight_decay": 0.0, "schedule": "one-cycle"},
    note="taps spread over the image, made for one size; filled up to a multiple of the kernel's size",
)
