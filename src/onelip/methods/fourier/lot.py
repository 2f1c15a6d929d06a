"""LOT, layer-wise orthogonal training.

Citation: Xiaojun Xu, Linyi Li, Bo Li, "LOT: Layer-wise Orthogonal Training on Improving l2 Certified Robustness",
NeurIPS 2022.

Inequality: W = (V V*)^(-1/2) V has singular values 1. The authors' coupled Newton iteration for the inverse root is,
multiplied with V, the same as X <- X (3/2 I - 1/2 X* X); and that has norm at most 1 after one step from ||X||^2 <= 2,
converged or not (`onelip.methods.orthogonal.steps`, (1)). Convolutions: at each frequency;
`onelip.methods.fourier.maps`, (1).
Assumes: convolutions keep the size and are made for one size of images; stride 1,
or the kernel's size; one group. Zero padding becomes a border of zeros that is cut off afterwards, as the authors do;
circular padding is exact.
Guarantee: proved, with its rounding, for every V and every number of steps: too few cost
orthogonality, not soundness. No epsilon is added anywhere: a zero stays a zero.

Note [Rounding]
    As in `onelip.methods.orthogonal.steps`, Note [Rounding], for real matrices of twice the size: 8 (2 m) (2 n) 2^-53.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from onelip.methods.fourier.layer import SERVED, replaced
from onelip.methods.fourier.maps import OrthogonalMap
from onelip.methods.method import Method
from onelip.methods.orthogonal.reshaped import check_steps
from onelip.methods.orthogonal.steps import UNIT64


class LOTMap(OrthogonalMap):
    """V (b, rows, columns) -> (V V*)^(-1/2) V, as far as the steps go; `lot` makes it.

    Args:
        kernel: what is begun with, (g, rows, columns, *taps).
        steps: of the iteration.
    """

    title = "LOT"

    def __init__(self, kernel: Tensor, *, steps: int) -> None:
        super().__init__(kernel.shape[1], kernel.shape[2])
        self.steps = check_steps(steps)

    @torch.no_grad()
    def reset(self, P: Tensor) -> None:
        """The identity, or the first channels: from Gaussian kernels training is unstable."""
        dense = P.dim() == 3
        P.zero_()
        middle = tuple((k - 1) // 2 for k in P.shape[2:]) if not dense else ()
        for j in range(min(self.rows, self.columns)):
            P[(slice(None), j, j) if dense else (j, j, *middle)] = 1

    def forward(self, M: Tensor) -> Tensor:
        if M.shape[-2] < M.shape[-1]:
            return self.forward(M.mH).mH
        X = M * _inverse_root(_divisor(M.mH @ M))[:, None, None]
        for _ in range(self.steps):
            G = X.mH @ X
            X = torch.baddbmm(X, X, G, beta=1.5, alpha=-0.5)
            if _was_near(G):
                break
        return X

    def excess(self) -> float:
        return 8 * (2 * self.rows) * (2 * self.columns) * UNIT64


def _divisor(G: Tensor) -> Tensor:
    """The squares (b) by whose roots to divide: ||G|| / 2 at least, by proved bounds; the mean of its eigenvalues."""
    mean = G.diagonal(dim1=-2, dim2=-1).real.mean(-1)
    bound = torch.minimum(torch.linalg.matrix_norm(G), G.abs().sum(-1).amax(-1))
    return torch.maximum(mean, bound / 2)


@torch.no_grad()
def _was_near(G: Tensor) -> bool:
    """Whether the step from X with G = X* X gave an orthogonal matrix to the precision of its type: steps square the
    distance. The authors begin with the identity, so this saves most steps of most of the training."""
    if G.device.type != "cpu" or torch.compiler.is_compiling():
        return False  # to look at a value would stall a GPU, and a compiler cannot
    distance = torch.linalg.matrix_norm(G - torch.eye(G.shape[-1], dtype=G.dtype))
    return bool((distance <= torch.finfo(G.dtype).eps ** 0.5).all())


def _inverse_root(square: Tensor) -> Tensor:
    """square^(-1/2), and 0 where products may have left the range; NaN < x is false, so NaN stays NaN."""
    nothing = square < torch.finfo(square.dtype).tiny * 2.0**40
    return torch.where(nothing, 0.0, torch.where(nothing, 1.0, square).rsqrt())


def lot(
    layer: nn.Module,
    *,
    steps: int = 10,
    input_size: int | Sequence[int] | None = None,
    lipschitz: float = 1.0,
) -> nn.Module:
    """A LOT layer in the place of the given one.

    Linear layers, 1x1 convolutions and those whose kernel size is their stride keep their kind and get a parametrized
    weight, in place; all other convolutions become a `onelip.methods.fourier.layer.FourierConv`. The layer's weight is
    kept as V.

    Args:
        layer: Linear, Conv1d, Conv2d or Conv3d.
        steps: of the iteration at most; it ends early where the matrices are orthogonal.
        input_size: spatial size of the images; needed by convolutions that are not dense.
        lipschitz: the constant to guarantee instead of 1.

    Raises:
        onelip.UnsupportedLayer: for groups, strides, and where the size is not kept or not given.

    Examples:
        >>> W = lot(nn.Linear(8, 4), steps=20).weight
        >>> bool((W @ W.T - torch.eye(4)).abs().max() < 1e-4)
        True
    """

    def make(kernel: Tensor) -> LOTMap:
        return LOTMap(kernel, steps=steps)

    return replaced(layer, make, method="lot", input_size=input_size, lipschitz=lipschitz, zero_padding=True)


METHOD = Method(
    name="lot",
    title="LOT, layer-wise orthogonal training (Xu et al., 2022)",
    mechanism="parametrization",
    guarantee="proved",
    layers=SERVED,
    apply=lot,
    options=({"steps": 1}, {"lipschitz": 0.5}),
    replaces=True,
    needs_input_size=True,
    hyperparameters={"lr": 0.02, "weight_decay": 0.0, "schedule": "one-cycle"},
    note="made for one image size; zero padding by a border that is cut off",
)
