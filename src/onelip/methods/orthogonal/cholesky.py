"""Orthogonalisation by Cholesky factors: one factorisation, one triangular solve, no iteration.

Citation: Kai Hu, Klas Leino, Zifan Wang, Matt Fredrikson, "A Recipe for Improved Certifiable Robustness", ICLR 2024.

Inequality: for X (n, m) with n <= m and C C^T = X X^T + e I, W = C^-1 X has W W^T = I - e C^-1 C^-T <= I.
Assumes: zero padding of any amount, or circular padding of at most dilation * (kernel_size - 1) in total.
Guarantee: proved, with its rounding, for every P. A singular value s of X becomes s / sqrt(s^2 + e): below 1, next to
it unless s is small. Convolutions are taken as reshaped kernels, divided by the root of their overlap.

Note [Rounding]
    All is computed in float64. The Gram matrix and its factor are off by at most 2 m n 2^-53 tr(X X^T), far less than
    half of e = relative * tr(X X^T) / n, so X X^T <= C C^T holds for the computed factor. The solve is off by at most
    n 2^-53 || |C^-1| |C| |W| || <= n^2 2^-53 ||C^-1|| ||C||_F <= n^(5/2) 2^-53 sqrt(2 (1 + relative) / relative).
"""

import math
from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from onelip.core.geometry import LINEAR_LAYERS, Geometry, geometry_of
from onelip.core.parametrization import attach, weight_of
from onelip.methods.method import Method
from onelip.methods.orthogonal.reshaped import ReshapedOrthogonal
from onelip.methods.orthogonal.steps import UNIT64, of_moderate_size, widest_type

Layer = TypeVar("Layer", bound=nn.Module)


class Cholesky(ReshapedOrthogonal):
    """The map P -> W; `cholesky` registers it.

    Args:
        geometry: how the weight acts, from `onelip.core.geometry.geometry_of`.
        weight_shape: shape of the weight.
        relative: e as a part of the mean of the squared singular values.
        lipschitz: the constant that the layer is to have instead of 1.
    """

    def __init__(
        self, geometry: Geometry, weight_shape: Sequence[int], *, relative: float = 1e-3, lipschitz: float = 1.0
    ) -> None:
        super().__init__(geometry, weight_shape, lipschitz=lipschitz)
        if isinstance(relative, bool) or not isinstance(relative, (int, float)) or not 1e-6 <= relative <= 1:
            raise ValueError(f"expected relative to be a number from 1e-6 to 1, got {relative!r}; 1e-3 is ordinary")
        self.relative = float(relative)

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
    """Make a linear layer 1-Lipschitz by a Cholesky factor, in place; the present weight stays as the parameter.

    Args:
        module: Linear, Conv1d, Conv2d, Conv3d, ConvTranspose1d, ConvTranspose2d or ConvTranspose3d.
        name: the parameter to constrain.
        relative: what is added to the squared singular values, as a part of their mean.
        lipschitz: the constant to guarantee instead of 1.
        input_size: only for strided convolutions with circular padding: promise the spatial size of the input.

    Raises:
        onelip.UnsupportedLayer: if the bound does not hold for this layer or its padding.

    Examples:
        >>> W = cholesky(nn.Linear(16, 4)).weight
        >>> bool((W @ W.T - torch.eye(4)).abs().max() < 0.01)
        True
    """
    geometry = geometry_of(module, input_size)
    weight = weight_of(module, geometry, name)
    return attach(module, Cholesky(geometry, weight.shape, relative=relative, lipschitz=lipschitz), name)


METHOD = Method(
    name="cholesky",
    title="Cholesky orthogonalisation (Hu et al., 2024)",
    mechanism="parametrization",
    guarantee="proved",
    layers=LINEAR_LAYERS,
    apply=cholesky,
    options=({"relative": 1e-6}, {"lipschitz": 0.5}),
    hyperparameters={"lr": 0.1, "weight_decay": 0.0},  # only the direction of a matrix matters
    note="convolutions as reshaped kernels, divided by the root of their overlap",
)
