"""Cayley, LOT, BRO and ECO: maps from free matrices to matrices of norm at most 1, one for each frequency."""

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from onelip.core.errors import check_integer, check_number
from onelip.core.modes import full_precision, is_traced
from onelip.methods.fourier.layer import OrthogonalMap, replaced, shrunk
from onelip.methods.fourier.matrix_functions import inverse, skew_exponential
from onelip.methods.numerics import UNIT64, of_moderate_size, widest_type
from onelip.methods.registry import NOT_TRANSPOSED, Method, PaperRow, register_method

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

    The weight of the layer is kept as the matrix that is transformed.

    Args:
        module: Linear, or Conv1d to Conv3d.
        input_size: spatial size of the inputs; required for convolutions whose windows overlap.
        lipschitz: the constant to guarantee instead of 1.

    Returns:
        The same module, with a parametrized weight, if its windows do not overlap (Linear, 1x1, kernel size = stride);
        else a `FourierConv`.

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


register_method(
    Method(
        name="cayley",
        title="Cayley convolutions (Trockman and Kolter, 2021)",
        citation="Asher Trockman, J. Zico Kolter, "
        '"Orthogonalizing Convolutional Layers with the Cayley Transform", ICLR 2021.',
        guarantee="proved",
        layers=NOT_TRANSPOSED,
        apply=cayley,
        options=({"lipschitz": 0.5},),
        replaces=True,
        needs_input_size=True,
        paper=PaperRow(E="partly", F="yes", G="partly", M="yes", notes={"E": 5, "G": 6}),
        fast_lr=0.3,
        hyperparameters={"lr": 0.02, "weight_decay": 0.0, "schedule": "one-cycle"},
        note="circular, built for one image size",
    )
)


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

    def reset(self, kernel: Tensor) -> None:
        """Initialise with the identity, or the first channels: from Gaussian kernels training is unstable."""
        self.fill_with_units(kernel, min(self.rows, self.columns))

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

    The weight of the layer is kept as V.

    Args:
        module: Linear, or Conv1d to Conv3d.
        steps: largest number of steps of the iteration, 1 to 100; it stops early when the matrices are orthogonal.
        input_size: spatial size of the inputs; required for convolutions whose windows overlap.
        lipschitz: the constant to guarantee instead of 1.

    Returns:
        The same module, with a parametrized weight, if its windows do not overlap (Linear, 1x1, kernel size = stride);
        else a `FourierConv`.

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


register_method(
    Method(
        name="lot",
        title="LOT, layer-wise orthogonal training (Xu et al., 2022)",
        citation="Xiaojun Xu, Linyi Li, Bo Li, "
        '"LOT: Layer-wise Orthogonal Training on Improving l2 Certified Robustness", NeurIPS 2022.',
        guarantee="proved",
        layers=NOT_TRANSPOSED,
        apply=lot,
        options=({"steps": 1}, {"lipschitz": 0.5}),
        replaces=True,
        needs_input_size=True,
        fast_lr=0.9,
        hyperparameters={"lr": 0.02, "weight_decay": 0.0, "schedule": "one-cycle"},
        note="built for one image size; zero padding by a border that is cropped",
    )
)


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
        rank = max(1, self.channels // 2) if rank is None else rank
        self.rank = check_integer("rank", rank, 1, max(1, self.channels))
        self.relative = check_number("relative", relative, 1e-7, 1)

    def parameter(self, kernel: Tensor) -> Tensor:
        return self.squared(kernel)[:, :, : self.rank]

    def reset(self, kernel: Tensor) -> None:
        """Initialise with the first unit vectors, in the middle of the kernel: a reflection of the first channels."""
        self.fill_with_units(kernel, self.rank)

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

    The first columns of the weight of the layer are the initial V.

    Args:
        module: Linear, or Conv1d to Conv3d.
        rank: number of reflected directions; half of the channels by default.
        relative: epsilon, relative to the mean of the squared singular values of V, from 1e-7 to 1.
        input_size: spatial size of the inputs; required for convolutions whose windows overlap.
        lipschitz: the constant to guarantee instead of 1.

    Returns:
        The same module, with a parametrized weight, if its windows do not overlap (Linear, 1x1, kernel size = stride);
        else a `FourierConv`.

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


register_method(
    Method(
        name="bro",
        title="BRO, block reflector orthogonal layers (Lai et al., 2025)",
        citation="Bo-Han Lai, Pin-Han Huang, Bo-Han Kung, Shang-Tse Chen, "
        '"Enhancing Certified Robustness via Block Reflector Orthogonal Layers and Logit Annealing Loss", ICML 2025.',
        guarantee="proved",
        layers=NOT_TRANSPOSED,
        apply=bro,
        options=({"rank": 1, "relative": 1e-3}, {"lipschitz": 0.5}),
        replaces=True,
        needs_input_size=True,
        fast_lr=2.7,
        hyperparameters={"lr": 0.02, "weight_decay": 0.0, "schedule": "one-cycle"},
        note="built for one image size; zero padding by a border that is cropped",
    )
)


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

    def parameter(self, kernel: Tensor) -> Tensor:
        return self.squared(kernel)

    def prepare(self, kernel: Tensor) -> Tensor:
        # The scale matters here: only entries whose squares would overflow are clamped.
        return torch.where(kernel.isinf(), torch.nan, kernel.clamp(-(2.0**20), 2.0**20))

    def reset(self, kernel: Tensor) -> None:
        """Initialise with random rotations."""
        kernel.normal_(0, (self.channels * kernel[0, 0, 0].numel()) ** -0.5)

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

    The skew part of the weight of the layer is the initial exponent.

    Args:
        module: Linear, or Conv1d to Conv3d.
        input_size: spatial size of the inputs; required for convolutions whose windows overlap.
        lipschitz: the constant to guarantee instead of 1.

    Returns:
        The same module, with a parametrized weight, if its windows do not overlap (Linear, 1x1, kernel size = stride);
        else a `FourierConv`.

    Raises:
        onelip.UnsupportedLayer: for groups, strides, padding that does not keep the size, and a missing input size.

    Examples:
        >>> layer = eco(nn.Conv2d(2, 2, 3, padding=1, bias=False), input_size=6)
        >>> x = torch.randn(1, 2, 6, 6)
        >>> bool((layer(x).norm() - x.norm()).abs() < 1e-4)
        True
    """
    return replaced(module, ECOMap, method="eco", input_size=input_size, lipschitz=lipschitz, spaced=True)


register_method(
    Method(
        name="eco",
        title="ECO, explicitly constructed orthogonal convolutions (Yu et al., 2022)",
        citation="Tan Yu, Jun Li, Yunfeng Cai, Ping Li, "
        '"Constructing Orthogonal Convolutions in an Explicit Manner", ICLR 2022.',
        guarantee="proved",
        layers=NOT_TRANSPOSED,
        apply=eco,
        options=({"lipschitz": 0.5},),
        replaces=True,
        needs_input_size=True,
        paper=PaperRow(E="no", F="yes", G="partly", M="yes", notes={"E": 4, "G": 6}),
        fast_lr=0.9,
        hyperparameters={"lr": 0.1, "weight_decay": 0.0, "schedule": "one-cycle"},
        note="taps spread over the image, built for one image size; zero-padded to a multiple of the kernel size",
    )
)
