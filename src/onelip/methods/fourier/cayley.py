"""Orthogonal layers by the Cayley transform."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from onelip.methods.fourier.layer import SUPPORTED, replaced
from onelip.methods.fourier.maps import OrthogonalMap, shrunk
from onelip.methods.fourier.matrix_functions import inverse
from onelip.methods.method import Method, PaperRow
from onelip.methods.orthogonal.steps import UNIT64, of_moderate_size

# Largest alpha, in units of sqrt(columns): beyond it singular values are near -1 anyway, and the solver loses digits.
_LARGEST_SCALE = 16.0


class CayleyMap(OrthogonalMap):
    r"""Matrices $M$ to orthogonal $Q$ by the Cayley transform, with a learned scale; `cayley` uses it.

    **Theorem.** For $M = \begin{pmatrix} U \\ V \end{pmatrix}$ with square $U$, $A = U - U^* + V^* V$ and
    $X = (I + A)^{-1}$, the matrix $Q = \begin{pmatrix} 2X - I \\ -2 V X \end{pmatrix}$ satisfies $Q^* Q = I$. ($I + A$
    is never singular: its Hermitian part is at least $I$.) Convolutions: at each frequency; see `FrequencyMap`.

    **Assumptions.** Convolutions keep the spatial size and are built for one size of images; stride 1, or a kernel as
    large as the stride; one group. Convolutions are circular. Kernels of the result cover the whole image.

    **Guarantee.** Proved, with rounding: $\|Q^* Q - I\|$ is computed and divided out, whatever the rounding of the
    solver. $M$ is $\alpha K / \|K\|$ with a learned $\alpha$ for each group, which is a parameter from the beginning.

    Trockman, Kolter, "Orthogonalizing Convolutional Layers with the Cayley Transform", ICLR 2021.

    Args:
        kernel: initial kernel, (g, rows, columns, *taps).
    """

    title = "Cayley transform"

    def __init__(self, kernel: Tensor) -> None:
        super().__init__(kernel.shape[1], kernel.shape[2])
        self.largest = _LARGEST_SCALE * min(self.rows, self.columns) ** 0.5
        # In float64, so that squares of huge entries are in range; larger norms are clamped to the largest scale.
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


def cayley(module: nn.Module, *, input_size: int | Sequence[int] | None = None, lipschitz: float = 1.0) -> nn.Module:
    """Return an orthogonal layer by the Cayley transform in place of the given layer; see `CayleyMap`.

    Linear layers, 1x1 convolutions and convolutions whose kernel size is their stride are parametrized in place; other
    convolutions become a `onelip.methods.FourierConv`. The weight of the layer is kept as the matrix that
    is transformed.

    Args:
        module: Linear, or Conv1d to Conv3d.
        input_size: spatial size of the inputs; required for convolutions whose windows overlap.
        lipschitz: the constant to guarantee instead of 1.

    Returns:
        The same module, or a new one.

    Raises:
        onelip.UnsupportedLayer: for zero padding, groups, strides, padding that does not keep the size, and a missing
            input size.

    Examples:
        >>> layer = cayley(nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular", bias=False), input_size=6)
        >>> x = torch.randn(1, 4, 6, 6)
        >>> bool((layer(x).norm() - x.norm()).abs() < 1e-4)
        True
    """
    return replaced(module, CayleyMap, method="cayley", input_size=input_size, lipschitz=lipschitz)


METHOD = Method(
    name="cayley",
    title="Cayley convolutions (Trockman and Kolter, 2021)",
    citation="Asher Trockman, J. Zico Kolter, "
    '"Orthogonalizing Convolutional Layers with the Cayley Transform", ICLR 2021.',
    mechanism="parametrization",
    guarantee="proved",
    layers=SUPPORTED,
    apply=cayley,
    options=({"lipschitz": 0.5},),
    replaces=True,
    needs_input_size=True,
    paper=PaperRow(E="partly", F="yes", G="partly", M="yes", notes={"E": 5, "G": 6}),
    hyperparameters={"lr": 0.02, "weight_decay": 0.0, "schedule": "one-cycle"},
    note="circular, built for one image size",
)
