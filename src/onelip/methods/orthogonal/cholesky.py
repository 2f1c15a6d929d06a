"""Orthogonalisation by a Cholesky factor: one factorisation, one triangular solve, no iteration."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from onelip.core.arguments import check_number
from onelip.core.geometry import LINEAR_LAYERS, Geometry
from onelip.methods.method import Layer, Method, attach_new
from onelip.methods.orthogonal.reshaped import ReshapedOrthogonal
from onelip.methods.orthogonal.steps import UNIT64, of_moderate_size, widest_type


class Cholesky(ReshapedOrthogonal):
    r"""The map from $P$ to a nearly orthogonal weight by a Cholesky factor; `cholesky` registers it.

    **Theorem.** For $X$ $(n, m)$ with $n \le m$ and $C C^\top = X X^\top + \varepsilon I$, $W = C^{-1} X$ satisfies
    $W W^\top = I - \varepsilon C^{-1} C^{-\top} \le I$. Convolutions are treated as reshaped kernels; see
    `ReshapedOrthogonal`.

    **Assumptions.** Zero padding of any amount, or circular padding of at most `dilation * (kernel_size - 1)` in total.

    **Guarantee.** Proved, with rounding, for every $P$. A singular value $s$ becomes $s / \sqrt{s^2 + \varepsilon}$:
    below 1, and near 1 unless $s$ is small.

    **Rounding.** All is computed in float64. The errors of the Gram matrix and its factor are at most
    $2 m n 2^{-53}\,\mathrm{tr}(X X^\top)$, far less than half of
    $\varepsilon = \mathrm{relative} \cdot \mathrm{tr}(X X^\top) / n$, so $X X^\top \le C C^\top$ holds for the computed
    factor. The error of the solve is at most
    $n 2^{-53} \| |C^{-1}| |C| |W| \| \le n^{5/2} 2^{-53} \sqrt{2 (1 + \mathrm{relative}) / \mathrm{relative}}$.

    Hu, Leino, Wang, Fredrikson, "A Recipe for Improved Certifiable Robustness", ICLR 2024.

    Args:
        geometry: how the weight acts, from `onelip.core.geometry.geometry_of`.
        weight_shape: shape of the weight.
        relative: epsilon, relative to the mean of the squared singular values, from 1e-6 to 1.
        lipschitz: the constant of the layer.
    """

    def __init__(
        self, geometry: Geometry, weight_shape: Sequence[int], *, relative: float = 1e-3, lipschitz: float = 1.0
    ) -> None:
        super().__init__(geometry, weight_shape, lipschitz=lipschitz)
        self.relative = check_number("relative", relative, 1e-6, 1)

    def orthogonal(self, M: Tensor, norm: float) -> Tensor:
        if M.shape[-2] > M.shape[-1]:  # on the smaller side
            return self.orthogonal(M.mT, norm).mT
        X = of_moderate_size(M.to(widest_type(M)))
        S = X @ X.mT  # (g, n, n)
        mean = S.diagonal(dim1=-2, dim2=-1).mean(-1)[:, None, None]
        shift = self.relative * torch.where(mean == 0, 1.0, mean)
        C, failed = torch.linalg.cholesky_ex(S + shift * torch.eye(S.shape[-1], dtype=S.dtype, device=S.device))
        W = torch.linalg.solve_triangular(C, X, upper=False)
        return W * torch.where(failed == 0, norm, torch.nan)[:, None, None]

    def excess(self, m: int, n: int) -> float:
        return 2 * n**2.5 * UNIT64 * math.sqrt(2 * (1 + self.relative) / self.relative)

    def describe(self) -> str:
        reshaped = f", reshaped kernel / sqrt({self.taps})" if self.taps > 1 else ""
        return f"Cholesky orthogonalisation{reshaped}"

    def extra_repr(self) -> str:
        return f"relative={self.relative}, lipschitz={self.lipschitz}"


def cholesky(
    module: Layer,
    name: str = "weight",
    *,
    relative: float = 1e-3,
    lipschitz: float = 1.0,
    input_size: int | Sequence[int] | None = None,
) -> Layer:
    """Make a linear layer 1-Lipschitz by a Cholesky factor, in place, and return it; see `Cholesky`.

    The current weight becomes the parameter.

    Args:
        module: Linear, Conv1d to Conv3d or ConvTranspose1d to ConvTranspose3d.
        name: name of the parameter to constrain.
        relative: number added to the squared singular values, relative to their mean, from 1e-6 to 1.
        lipschitz: the constant to guarantee instead of 1.
        input_size: for strided convolutions with circular padding only: spatial size of every input.

    Returns:
        The same module, with a parametrized weight.

    Raises:
        onelip.UnsupportedLayer: if the bound does not hold for this layer or its padding.
        ValueError: for options out of range.

    Examples:
        >>> from torch import nn
        >>> W = cholesky(nn.Linear(16, 4)).weight
        >>> bool((W @ W.T - torch.eye(4)).abs().max() < 0.01)
        True
    """
    return attach_new(Cholesky, module, name, input_size=input_size, relative=relative, lipschitz=lipschitz)


METHOD = Method(
    name="cholesky",
    title="Cholesky orthogonalisation (Hu et al., 2024)",
    citation="Kai Hu, Klas Leino, Zifan Wang, Matt Fredrikson, "
    '"A Recipe for Improved Certifiable Robustness", ICLR 2024.',
    mechanism="parametrization",
    guarantee="proved",
    layers=LINEAR_LAYERS,
    apply=cholesky,
    options=({"relative": 1e-6}, {"lipschitz": 0.5}),
    hyperparameters={"lr": 0.1, "weight_decay": 0.0},  # only the direction of a matrix matters
    note="convolutions as reshaped kernels, divided by the root of their overlap",
)
