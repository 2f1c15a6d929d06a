"""BRO, block reflector orthogonal layers."""

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from onelip.core.arguments import check_integer, check_number
from onelip.core.precision import full_precision
from onelip.core.tracing import is_traced
from onelip.methods.fourier.layer import SUPPORTED, replaced
from onelip.methods.fourier.maps import OrthogonalMap
from onelip.methods.method import Method
from onelip.methods.orthogonal.steps import UNIT64, widest_type

# Smallest pivot of float32 factors, relative to the trace, for which about four of seven digits are left.
_SURE_PIVOT = 2.0**-14


class BROMap(OrthogonalMap):
    r"""Matrices $V$ to $I - 2 V (V^* V + \varepsilon I)^{-1} V^*$, its first rows and columns; `bro` uses it.

    **Theorem.** With $C C^* = V^* V + \varepsilon I$ and $Z = C^{-1} V^*$, $W = I - 2 Z^* Z$ is Hermitian, and
    $0 \le Z^* Z \le I$ gives $-I \le W \le I$. Convolutions: at each frequency; see `FrequencyMap`.

    **Assumptions.** Convolutions keep the spatial size and are built for one size of images; stride 1, or a kernel as
    large as the stride; one group. Zero padding becomes a border of zeros that is cropped afterwards, as the authors
    do; circular padding is exact. More and fewer channels by zero channels and by keeping the first ones.

    **Guarantee.** Proved, with rounding, for every $V$; $\varepsilon$ is a fraction of the mean of the squared singular
    values of $V$. Evaluation computes in float64. As in `Cholesky`, for real matrices of twice the size,
    $\|Z\| \le 1 + x$. Then $\|I - 2 Z^* Z\| \le 2 (1 + x)^2 - 1 \le 1 + 5x$, however large $V$ is, and the last product
    adds at most $4\,\mathrm{rank}\,c\,2^{-53} \|Z\|^2$ in each of $c$ rows. In training, wide layers on a CPU are
    computed in float32 where the smallest pivot of the factorisation shows that it suffices.

    Lai, Huang, Kung, Chen, "Enhancing Certified Robustness via Block Reflector Orthogonal Layers and Logit Annealing
    Loss", ICML 2025.

    Args:
        kernel: initial kernel, (g, rows, columns, *taps); its first columns become V.
        rank: columns of V; None for half of the channels.
        relative: epsilon, relative to the mean of the squared singular values.
    """

    title = "BRO"

    def __init__(self, kernel: Tensor, *, rank: int | None, relative: float) -> None:
        super().__init__(kernel.shape[1], kernel.shape[2])
        self.channels = max(self.rows, self.columns)
        rank = max(1, self.channels // 2) if rank is None else rank
        self.rank = check_integer("rank", rank, 1, max(1, self.channels))
        self.relative = check_number("relative", relative, 1e-7, 1)

    def parameter(self, kernel: Tensor) -> Tensor:
        taps = (0, 0) * (kernel.dim() - 3)
        around = (*taps, 0, self.channels - self.columns, 0, self.channels - self.rows)
        return F.pad(kernel, around)[:, :, : self.rank]

    @torch.no_grad()
    def reset(self, P: Tensor) -> None:
        """Initialise with the first unit vectors, in the middle of the kernel: a reflection of the first channels."""
        dense = P.dim() == 3
        P.zero_()
        middle = tuple((k - 1) // 2 for k in P.shape[2:]) if not dense else ()
        for j in range(self.rank):
            P[(slice(None), j, j) if dense else (j, j, *middle)] = 1

    def forward(self, M: Tensor) -> Tensor:
        if M.device.type == "cpu" and not is_traced(M):
            W = _Reflection.apply(M, self.relative)
        else:
            W = _reflected(M.to(_wide(M)), self.relative)[0].to(M.dtype)
        return W[:, : self.rows, : self.columns]

    def excess(self) -> float:
        of_factor = 2 * (2 * self.rank) ** 2.5 * UNIT64 * math.sqrt(2 * (1 + self.relative) / self.relative)
        return 5 * of_factor + 8 * self.rank * self.channels**1.5 * UNIT64


def _wide(V: Tensor) -> torch.dtype:
    return torch.promote_types(V.dtype, widest_type(V))


def _reflected(V: Tensor, relative: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return W = I - 2 V (V* V + e I)^-1 V* (b, c, c), C, Z = C^-1 V*, and the smallest pivot relative to the trace.

    W is NaN where the factorisation fails.
    """
    S = V.mH @ V  # (b, rank, rank)
    eye = torch.eye(S.shape[-1], dtype=S.dtype, device=S.device)
    diagonal = S.diagonal(dim1=-2, dim2=-1).real
    mean = diagonal.mean(-1)
    # Below this, products may have underflowed: V is treated as zero, which gives W = I.
    nothing = mean < torch.finfo(mean.dtype).tiny * 2.0**60
    V = torch.where(nothing[:, None, None], 0.0, V)
    S = torch.where(nothing[:, None, None], 0.0, S)
    shift = relative * torch.where(nothing, 1.0, mean)
    C, failed = torch.linalg.cholesky_ex(S + shift[:, None, None] * eye)
    Z = torch.linalg.solve_triangular(C, V.mH, upper=False)  # (b, rank, c)
    Z = torch.where((failed == 0)[:, None, None], Z, torch.nan)
    W = torch.eye(V.shape[-2], dtype=S.dtype, device=S.device) - 2 * Z.mH @ Z
    pivots = C.detach().diagonal(dim1=-2, dim2=-1).real.square().amin(-1)
    return W, C, Z, torch.where(nothing, 1.0, pivots / diagonal.detach().sum(-1))


class _Reflection(torch.autograd.Function):
    """`_reflected`, in float32 where that suffices, with a derivative that needs half the products of autograd.

    With Y = S^-1 V* and S = V* V + e I, dW = -2 (dV Y + Y* dV* - Y* dS Y). Let G be the gradient at W, K = (G + G*) Y*
    and B = Y K. The gradient at S is B, and as e is `relative` times the mean of the diagonal, the gradient at V is
    -2 K + 2 V (B + relative tr(B) / rank I).
    """

    @staticmethod
    def forward(ctx: Any, V: Tensor, relative: float) -> Tensor:
        used = V
        W, C, Z, pivot = _reflected(V, relative)
        if V.dtype != _wide(V) and not bool((pivot >= _SURE_PIVOT).all()):
            used = V.to(_wide(V))
            W, C, Z, _ = _reflected(used, relative)
        ctx.relative = relative
        ctx.save_for_backward(V, used, C, Z)
        return W.to(V.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        V, used, C, Z = ctx.saved_tensors
        (G,) = gradients
        with full_precision(V.device):
            if torch.is_grad_enabled():  # for second derivatives
                W = _reflected(V.to(used.dtype), ctx.relative)[0].to(V.dtype)
                return torch.autograd.grad(W, V, G, create_graph=True)[0], None
            G = G.to(used.dtype)
            Y = torch.linalg.solve_triangular(C.mH, Z, upper=True)
            K = (G + G.mH) @ Y.mH
            B = Y @ K
            mean = B.diagonal(dim1=-2, dim2=-1).real.mean(-1)
            B = B + (ctx.relative * mean)[:, None, None] * torch.eye(B.shape[-1], dtype=B.dtype, device=B.device)
            return torch.baddbmm(K, used, B, beta=-2, alpha=2).to(V.dtype), None


def bro(
    module: nn.Module,
    *,
    rank: int | None = None,
    relative: float = 1e-5,
    input_size: int | Sequence[int] | None = None,
    lipschitz: float = 1.0,
) -> nn.Module:
    """Return a block reflector in place of the given layer; see `BROMap`.

    Linear layers, 1x1 convolutions and convolutions whose kernel size is their stride are parametrized in place; other
    convolutions become a `onelip.methods.FourierConv`. The first columns of the weight of the layer are
    the initial V.

    Args:
        module: Linear, or Conv1d to Conv3d.
        rank: number of reflected directions; half of the channels by default.
        relative: epsilon, relative to the mean of the squared singular values of V, from 1e-7 to 1.
        input_size: spatial size of the inputs; required for convolutions whose windows overlap.
        lipschitz: the constant to guarantee instead of 1.

    Returns:
        The same module, or a new one.

    Raises:
        onelip.UnsupportedLayer: for groups, strides, padding that does not keep the size, and a missing input size.
        ValueError: for options out of range.

    Examples:
        >>> layer = bro(nn.Linear(6, 6))
        >>> bool((layer.weight @ layer.weight.T - torch.eye(6)).abs().max() < 0.01)
        True
    """
    make = functools.partial(BROMap, rank=rank, relative=relative)
    return replaced(module, make, method="bro", input_size=input_size, lipschitz=lipschitz, zero_padding=True)


METHOD = Method(
    name="bro",
    title="BRO, block reflector orthogonal layers (Lai et al., 2025)",
    citation="Bo-Han Lai, Pin-Han Huang, Bo-Han Kung, Shang-Tse Chen, "
    '"Enhancing Certified Robustness via Block Reflector Orthogonal Layers and Logit Annealing Loss", ICML 2025.',
    mechanism="parametrization",
    guarantee="proved",
    layers=SUPPORTED,
    apply=bro,
    options=({"rank": 1, "relative": 1e-3}, {"lipschitz": 0.5}),
    replaces=True,
    needs_input_size=True,
    hyperparameters={"lr": 0.02, "weight_decay": 0.0, "schedule": "one-cycle"},
    note="built for one image size; zero padding by a border that is cropped",
)
