"""ECO, explicitly constructed orthogonal convolutions."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from onelip.methods.fourier.layer import SUPPORTED, replaced
from onelip.methods.fourier.maps import OrthogonalMap, shrunk
from onelip.methods.fourier.matrix_functions import skew_exponential
from onelip.methods.method import Method, PaperRow
from onelip.methods.orthogonal.steps import UNIT64

# Largest Frobenius norm of the exponent, in units of sqrt(channels): each unitary matrix is the exponential of a matrix
# of norm at most pi.
_LARGEST = 4.0


class ECOMap(OrthogonalMap):
    r"""Matrices $M$ to $\exp((M - M^*) / 2)$, its first rows and columns; `eco` uses it.

    **Theorem.** A circular convolution of $n \times n$ pixels with $k \times k$ taps that are $n/k$ apart acts on
    $(n/k)^2$ interleaved images of $k \times k$ pixels, on each by the $k^2$ matrices of its frequencies. The
    exponential of a skew-Hermitian matrix is unitary, so the layer is orthogonal; see `FrequencyMap`.

    **Assumptions.** Convolutions keep the spatial size and are built for one size of images; stride 1, or a kernel as
    large as the stride; one group. If $k$ does not divide $n$, the image is padded with zeros to the next multiple and
    cropped afterwards; without that, the published layers have norms up to 1.6. Of the replaced layer only the kernel
    size matters, not its dilation. More and fewer channels by zero channels and by keeping the first ones.

    **Guarantee.** Proved, with rounding: $\|M_f^* M_f - I\|$ is computed and divided out, whatever the rounding of the
    exponential.

    Yu, Li, Cai, Li, "Constructing Orthogonal Convolutions in an Explicit Manner", ICLR 2022.

    Args:
        kernel: initial kernel, (g, rows, columns, *taps).
    """

    title = "ECO"

    def __init__(self, kernel: Tensor) -> None:
        super().__init__(kernel.shape[1], kernel.shape[2])
        self.channels = max(self.rows, self.columns)

    def parameter(self, kernel: Tensor) -> Tensor:
        taps = (0, 0) * (kernel.dim() - 3)
        return F.pad(kernel, (*taps, 0, self.channels - self.columns, 0, self.channels - self.rows))

    def prepare(self, kernel: Tensor) -> Tensor:
        # The scale matters here: only entries whose squares would overflow are clamped.
        return torch.where(kernel.isinf(), torch.nan, kernel.clamp(-(2.0**20), 2.0**20))

    @torch.no_grad()
    def reset(self, P: Tensor) -> None:
        """Initialise with random rotations."""
        taps = 1 if P.dim() == 3 else P[0, 0].numel()
        P.normal_(0, (self.channels * taps) ** -0.5)

    def forward(self, M: Tensor) -> Tensor:
        S = (M - M.mH) / 2
        size = (torch.view_as_real(S) if S.is_complex() else S).flatten(1).square().sum(1)
        largest = _LARGEST * self.channels**0.5
        # Scaled only where it is too large, so that the derivative at zero exists.
        above = size > largest**2
        S = S * torch.where(above, largest * torch.where(above, size, 1.0).rsqrt(), 1.0)[:, None, None]
        Q = skew_exponential(S)
        return (Q if self.training else shrunk(Q))[:, : self.rows, : self.columns]

    def excess(self) -> float:
        return 16 * self.channels**2 * UNIT64


def eco(module: nn.Module, *, input_size: int | Sequence[int] | None = None, lipschitz: float = 1.0) -> nn.Module:
    """Return an ECO layer in place of the given layer; see `ECOMap`.

    Linear layers, 1x1 convolutions and convolutions whose kernel size is their stride are parametrized in place; other
    convolutions become a `onelip.methods.FourierConv`. The skew part of the weight of the layer is the
    initial exponent.

    Args:
        module: Linear, or Conv1d to Conv3d.
        input_size: spatial size of the inputs; required for convolutions whose windows overlap.
        lipschitz: the constant to guarantee instead of 1.

    Returns:
        The same module, or a new one.

    Raises:
        onelip.UnsupportedLayer: for groups, strides, padding that does not keep the size, and a missing input size.

    Examples:
        >>> layer = eco(nn.Conv2d(2, 2, 3, padding=1, bias=False), input_size=6)
        >>> x = torch.randn(1, 2, 6, 6)
        >>> bool((layer(x).norm() - x.norm()).abs() < 1e-4)
        True
    """
    return replaced(module, ECOMap, method="eco", input_size=input_size, lipschitz=lipschitz, spaced=True)


METHOD = Method(
    name="eco",
    title="ECO, explicitly constructed orthogonal convolutions (Yu et al., 2022)",
    citation="Tan Yu, Jun Li, Yunfeng Cai, Ping Li, "
    '"Constructing Orthogonal Convolutions in an Explicit Manner", ICLR 2022.',
    mechanism="parametrization",
    guarantee="proved",
    layers=SUPPORTED,
    apply=eco,
    options=({"lipschitz": 0.5},),
    replaces=True,
    needs_input_size=True,
    paper=PaperRow(E="no", F="yes", G="partly", M="yes", notes={"E": 4, "G": 6}),
    hyperparameters={"lr": 0.1, "weight_decay": 0.0, "schedule": "one-cycle"},
    note="taps spread over the image, built for one image size; zero-padded to a multiple of the kernel size",
)
