"""Weight clipping.

Citation: Martin Arjovsky, Soumith Chintala, Leon Bottou, "Wasserstein Generative Adversarial Networks", ICML 2017.

Inequality: a layer all of whose weights have magnitude at most c has norm at most c sqrt(N), where N is the number of
weights that one output reads times the number that one input is read by (Schur test: ||J||^2 <= ||J||_1 ||J||_inf):
    Linear m x n                        N = m n
    convolution of k^D taps, stride s   N = (inputs k^D) (outputs ceil(k / s)^D), channels counted within a group
It is attained by a constant kernel. So c = L / sqrt(N) guarantees L, and any other c gives a bound all the same.
Assumes: zero padding, or circular padding of at most dilation * (kernel_size - 1) in total.
Guarantee: proved, for every weight: training clips after each step, evaluation clips too (which then changes nothing).
"""

import math
from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from onelip.core.geometry import LINEAR_LAYERS, Geometry, geometry_of
from onelip.core.parametrization import attach, check_lipschitz, weight_of
from onelip.methods.method import Method, PaperRow
from onelip.methods.norms.projection import Projection, project_step

Layer = TypeVar("Layer", bound=nn.Module)


class Clipped(Projection):
    """Weights in [-c, c]; see the module's docstring, and `clipping` for the verb.

    Args:
        geometry: how the weight acts.
        weight_shape: shape of the weight.
        lipschitz: the constant that c is chosen for.
        clip: c itself; the constant then follows from it.
    """

    def __init__(
        self, geometry: Geometry, weight_shape: Sequence[int], *, lipschitz: float = 1.0, clip: float | None = None
    ) -> None:
        count = schur_count(geometry, weight_shape)
        # Both directions are rounded to the safe side: c down, the bound that follows from a given c up.
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
        """Uniform in the box."""
        if not P.is_meta:
            P.copy_(self._clipped(P.uniform_(-1, 1) * self.clip))

    def _clipped(self, W: Tensor) -> Tensor:
        limit = largest_not_above(self.clip, W.dtype)
        return W.clamp(-limit, limit)

    def constant_in(self, dtype: torch.dtype) -> float:
        return self.lipschitz  # weights in the box stay in it when they are rounded: its end is a number of the type

    def describe(self) -> str:
        return f"weights clipped to +-{self.clip:.3g}"

    def extra_repr(self) -> str:
        return f"clip={self.clip:.6g}, lipschitz={self.lipschitz:.6g}"


def schur_count(geometry: Geometry, weight_shape: Sequence[int]) -> int:
    """N of the module's docstring.

    Examples:
        >>> layer = nn.Conv2d(2, 3, 3)
        >>> schur_count(geometry_of(layer), layer.weight.shape)  # (2 * 9) * (3 * 9)
        486
    """
    first, second, *taps = weight_shape
    # One side meets every tap; the other only those of one phase of the stride, see Note [Phases].
    in_a_phase = math.prod(-(-k // s) for k, s in zip(geometry.kernel_size, geometry.phases, strict=True))
    return (first // geometry.groups) * second * math.prod(taps) * in_a_phase


def largest_not_above(value: float, dtype: torch.dtype) -> float:
    """The largest number of the type that is not above a non-negative value."""
    rounded = torch.tensor(value, dtype=torch.float64).to(dtype)
    if float(rounded) > value:
        rounded = torch.nextafter(rounded, torch.zeros_like(rounded))
    return float(rounded)


def clipping(module: Layer, *, lipschitz: float = 1.0, clip: float | None = None) -> Layer:
    """Keep a layer's weights in [-c, c], in place; return the layer. Call `onelip.project` after each step.

    Args:
        module: Linear, Conv1d to Conv3d, ConvTranspose1d to ConvTranspose3d.
        lipschitz: the constant to guarantee; c follows from it.
        clip: c itself, such as 0.01 in the paper; the constant follows from it.

    Examples:
        >>> layer = clipping(nn.Linear(4, 9))
        >>> round(float(layer.parametrizations.weight[0].clip), 6)  # 1 / sqrt(4 * 9)
        0.166667
    """
    geometry = geometry_of(module)
    weight = weight_of(module, geometry)
    return attach(module, Clipped(geometry, weight.shape, lipschitz=lipschitz, clip=clip))


METHOD = Method(
    name="clipping",
    title="WGAN weight clipping (Arjovsky et al., 2017)",
    mechanism="projection",
    guarantee="proved",
    layers=LINEAR_LAYERS,
    apply=clipping,
    options=({"clip": 0.01}, {"lipschitz": 0.5}),
    paper=PaperRow(E="yes", F="yes", G="yes", M="no"),
    after_step=project_step,
    note="the clip value of each layer guarantees the constant, or a given one gives it",
    # Momentum goes on pushing against the walls of the box, and decay away from them.
    hyperparameters={"momentum": 0.0, "nesterov": False, "weight_decay": 0.0},
)
