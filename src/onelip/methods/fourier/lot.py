"""LOT, layer-wise orthogonal training."""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from onelip.core.arguments import check_integer
from onelip.methods.fourier.layer import SUPPORTED, replaced
from onelip.methods.fourier.maps import OrthogonalMap
from onelip.methods.method import Method
from onelip.methods.orthogonal.steps import UNIT64


class LOTMap(OrthogonalMap):
    r"""Matrices $V$ to $(V V^*)^{-1/2} V$ by Newton's iteration; `lot` uses it.

    **Theorem.** $W = (V V^*)^{-1/2} V$ has singular values 1. The coupled Newton iteration of the authors for the
    inverse root, multiplied by $V$, is $X \leftarrow X (\frac32 I - \frac12 X^* X)$. Its norm is at most 1 after one
    step from $\|X\| \le 2$, converged or not; see `onelip.methods.orthogonal.steps.bjorck_steps`. Convolutions: at each
    frequency; see `FrequencyMap`.

    **Assumptions.** Convolutions keep the spatial size and are built for one size of images; stride 1, or a kernel as
    large as the stride; one group. Zero padding becomes a border of zeros that is cropped afterwards, as the authors
    do; circular padding is exact.

    **Guarantee.** Proved, with rounding, for every $V$ and every number of steps: too few steps cost orthogonality, not
    soundness. Nothing is added to the diagonal, so a zero matrix stays zero. Rounding is that of `bjorck_steps` for
    real matrices of twice the size, $8 (2m)(2n) 2^{-53}$.

    Xu, Li, Li, "LOT: Layer-wise Orthogonal Training on Improving l2 Certified Robustness", NeurIPS 2022.

    Args:
        kernel: initial kernel, (g, rows, columns, *taps).
        steps: steps of the iteration.
    """

    title = "LOT"

    def __init__(self, kernel: Tensor, *, steps: int) -> None:
        super().__init__(kernel.shape[1], kernel.shape[2])
        self.steps = check_integer("steps", steps, 1, 100)

    @torch.no_grad()
    def reset(self, P: Tensor) -> None:
        """Initialise with the identity, or the first channels: from Gaussian kernels training is unstable."""
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
    """Return the squared divisors (b,): the mean of the eigenvalues of G, and at least a proved bound of ||G|| / 2."""
    mean = G.diagonal(dim1=-2, dim2=-1).real.mean(-1)
    bound = torch.minimum(torch.linalg.matrix_norm(G), G.abs().sum(-1).amax(-1))
    return torch.maximum(mean, bound / 2)


@torch.no_grad()
def _was_near(G: Tensor) -> bool:
    """Return whether the step from X with G = X* X gave an orthogonal matrix to the precision of its type.

    A step squares the distance. Training starts from the identity, so this saves most steps."""
    if G.device.type != "cpu" or torch.compiler.is_compiling():
        return False  # reading a value would stall a GPU, and a compiler cannot
    distance = torch.linalg.matrix_norm(G - torch.eye(G.shape[-1], dtype=G.dtype))
    return bool((distance <= torch.finfo(G.dtype).eps ** 0.5).all())


def _inverse_root(square: Tensor) -> Tensor:
    """Return square^(-1/2), and 0 where products may have underflowed; NaN < x is false, so NaN stays NaN."""
    nothing = square < torch.finfo(square.dtype).tiny * 2.0**40
    return torch.where(nothing, 0.0, torch.where(nothing, 1.0, square).rsqrt())


def lot(
    module: nn.Module,
    *,
    steps: int = 10,
    input_size: int | Sequence[int] | None = None,
    lipschitz: float = 1.0,
) -> nn.Module:
    """Return a LOT layer in place of the given layer; see `LOTMap`.

    Linear layers, 1x1 convolutions and convolutions whose kernel size is their stride are parametrized in place; other
    convolutions become a `onelip.methods.FourierConv`. The weight of the layer is kept as V.

    Args:
        module: Linear, or Conv1d to Conv3d.
        steps: largest number of steps of the iteration, 1 to 100; it stops early when the matrices are orthogonal.
        input_size: spatial size of the inputs; required for convolutions whose windows overlap.
        lipschitz: the constant to guarantee instead of 1.

    Returns:
        The same module, or a new one.

    Raises:
        onelip.UnsupportedLayer: for groups, strides, padding that does not keep the size, and a missing input size.
        ValueError: for options out of range.

    Examples:
        >>> W = lot(nn.Linear(8, 4), steps=20).weight
        >>> bool((W @ W.T - torch.eye(4)).abs().max() < 1e-4)
        True
    """
    make = functools.partial(LOTMap, steps=steps)
    return replaced(module, make, method="lot", input_size=input_size, lipschitz=lipschitz, zero_padding=True)


METHOD = Method(
    name="lot",
    title="LOT, layer-wise orthogonal training (Xu et al., 2022)",
    citation="Xiaojun Xu, Linyi Li, Bo Li, "
    '"LOT: Layer-wise Orthogonal Training on Improving l2 Certified Robustness", NeurIPS 2022.',
    mechanism="parametrization",
    guarantee="proved",
    layers=SUPPORTED,
    apply=lot,
    options=({"steps": 1}, {"lipschitz": 0.5}),
    replaces=True,
    needs_input_size=True,
    hyperparameters={"lr": 0.02, "weight_decay": 0.0, "schedule": "one-cycle"},
    note="built for one image size; zero padding by a border that is cropped",
)
