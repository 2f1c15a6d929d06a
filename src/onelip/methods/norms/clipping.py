"""Weight clipping (WGAN)."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from onelip.core.geometry import LINEAR_LAYERS, Geometry
from onelip.core.parametrization import check_lipschitz
from onelip.methods.method import Layer, Method, PaperRow, attach_new
from onelip.methods.norms.projection import Projection


class Clipped(Projection):
    r"""Weights in $[-c, c]$, for a constant that follows from $c$; `clipping` registers it.

    **Theorem** (Schur test, $\|J\|_2^2 \le \|J\|_1 \|J\|_\infty$). A layer whose weights have magnitude at most $c$ has
    norm at most $c \sqrt N$, where $N$ is the number of weights that one output reads times the number of weights that
    read one input: $N = mn$ for Linear, and
    $N = (\mathrm{inputs} \cdot k^D)(\mathrm{outputs} \cdot \lceil k / s \rceil^D)$ for a convolution with $k^D$ taps
    and stride $s$, channels counted in a group. A constant kernel attains it.

    **Assumptions.** Zero padding of any amount, or circular padding of at most `dilation * (kernel_size - 1)` in total.

    **Guarantee.** Proved for every weight. In training the weight is clipped after each step (`onelip.project`), in
    evaluation at each access.

    Arjovsky, Chintala, Bottou, "Wasserstein Generative Adversarial Networks", ICML 2017.

    Args:
        geometry: how the weight acts, from `onelip.core.geometry.geometry_of`.
        weight_shape: shape of the weight.
        lipschitz: the constant $L$; then $c = L / \sqrt N$.
        clip: $c$ itself; then the constant is $c \sqrt N$.

    Attributes:
        clip: $c$.
    """

    def __init__(
        self, geometry: Geometry, weight_shape: Sequence[int], *, lipschitz: float = 1.0, clip: float | None = None
    ) -> None:
        count = schur_count(geometry, weight_shape)
        # Rounded to the safe side: c down, the bound of a given c up.
        root = math.sqrt(count) * (1 + 2.0**-50)
        super().__init__(geometry, weight_shape, lipschitz=lipschitz)
        if clip is None:
            self.clip = self.lipschitz / root * (1 - 2.0**-50) if count else math.inf
        else:
            self.clip = check_lipschitz(clip) if clip else 0.0
            self.lipschitz = self.clip * root * (1 + 2.0**-50) if count else 0.0

    def forward(self, P: Tensor) -> Tensor:
        return P if self.training else self._clipped(P)

    def right_inverse(self, W: Tensor) -> Tensor:
        return self._clipped(W)

    def project_(self, P: Tensor) -> None:
        P.copy_(self._clipped(P))

    @torch.no_grad()
    def reset(self, P: Tensor) -> None:
        """Initialise uniformly in [-c, c]."""
        if not P.is_meta:
            P.copy_(self._clipped(P.uniform_(-1, 1) * self.clip))

    def _clipped(self, W: Tensor) -> Tensor:
        limit = largest_not_above(self.clip, W.dtype)
        return W.clamp(-limit, limit)

    def constant_in(self, dtype: torch.dtype) -> float:
        return self.lipschitz  # c is rounded down to the type, so rounded weights stay in [-c, c]

    def describe(self) -> str:
        return f"weights clipped to +-{self.clip:.3g}"

    def extra_repr(self) -> str:
        return f"clip={self.clip:.6g}, lipschitz={self.lipschitz:.6g}"


def schur_count(geometry: Geometry, weight_shape: Sequence[int]) -> int:
    """Return N of `Clipped`.

    Examples:
        >>> from torch import nn
        >>> from onelip.core.geometry import geometry_of
        >>> layer = nn.Conv2d(2, 3, 3)
        >>> schur_count(geometry_of(layer), layer.weight.shape)  # (2 * 9) * (3 * 9)
        486
    """
    first, second, *taps = weight_shape
    # One side reads all taps, the other those of one phase of the stride: Note [Phases] of onelip.core.geometry.
    in_a_phase = math.prod(-(-k // s) for k, s in zip(geometry.kernel_size, geometry.phases, strict=True))
    return (first // geometry.groups) * second * math.prod(taps) * in_a_phase


def largest_not_above(value: float, dtype: torch.dtype) -> float:
    """Return the largest number of the type that is not above a non-negative value."""
    rounded = torch.tensor(value, dtype=torch.float64, device="cpu").to(dtype)  # not the default device
    if float(rounded) > value:
        rounded = torch.nextafter(rounded, torch.zeros_like(rounded))
    return float(rounded)


def clipping(module: Layer, name: str = "weight", *, lipschitz: float = 1.0, clip: float | None = None) -> Layer:
    """Keep the weights of a layer in [-c, c], in place, and return it; see `Clipped`.

    Call `onelip.project(model)` after each step of the optimizer.

    Args:
        module: Linear, Conv1d to Conv3d or ConvTranspose1d to ConvTranspose3d.
        name: name of the parameter to constrain.
        lipschitz: the constant to guarantee; c follows from it.
        clip: c itself, e.g. 0.01 in the paper; the constant follows from it.

    Returns:
        The same module, with a parametrized weight.

    Raises:
        onelip.UnsupportedLayer: if the bound does not hold for this layer or its padding.

    Examples:
        >>> from torch import nn
        >>> layer = clipping(nn.Linear(4, 9))
        >>> round(float(layer.parametrizations.weight[0].clip), 6)  # 1 / sqrt(4 * 9)
        0.166667
    """
    return attach_new(Clipped, module, name, lipschitz=lipschitz, clip=clip)


METHOD = Method(
    name="clipping",
    title="WGAN weight clipping (Arjovsky et al., 2017)",
    citation="Martin Arjovsky, Soumith Chintala, Leon Bottou, "
    '"Wasserstein Generative Adversarial Networks", ICML 2017.',
    mechanism="projection",
    guarantee="proved",
    layers=LINEAR_LAYERS,
    apply=clipping,
    options=({"clip": 0.01}, {"lipschitz": 0.5}),
    paper=PaperRow(E="yes", F="yes", G="yes", M="no"),
    note="the clip value follows from the constant, or the constant from the clip value",
    # Momentum keeps pushing against the ends of the interval, and weight decay away from them.
    hyperparameters={"momentum": 0.0, "nesterov": False, "weight_decay": 0.0},
)
