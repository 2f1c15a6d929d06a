"""AOL: almost-orthogonal layers.

Citation: Bernd Prach, Christoph H. Lampert, "Almost-Orthogonal Layers for Efficient General-Purpose Lipschitz
Networks", ECCV 2022. The generalisations: column weights q from Araujo et al., "A Unified Algebraic Perspective on
Lipschitz Neural Networks" (SLL), ICLR 2023; several Gram steps from Delattre et al. (see `onelip.gram.rescale`); phases
for strides and the right inverse are our own.

Inequality: W = P diag(r)^(-1/2) with r_c = sum_j |P^T P|_cj has norm at most 1, P being the layer's linear operator.
Assumes: zero padding of any amount, or circular padding of at most dilation * (kernel_size - 1) in total.
Guarantee: proved, in real arithmetic, for every P. In floating point W misses it by the rounding of its own entries and
of the Gram operator: some 1e-7 for ordinary weights in float32, up to 1e-6 for constant ones.
"""

import math
from collections.abc import Sequence
from typing import Literal, TypeVar

import torch
from torch import Tensor, nn

from onelip._precision import full_precision
from onelip.geometry import LINEAR_LAYERS, Geometry, geometry_of
from onelip.gram.perron import balanced, balanced_for
from onelip.gram.rescale import column_weights, rescaled
from onelip.gram.row_sums import per_column
from onelip.methods._method import Method, PaperRow
from onelip.methods._parametrization import (
    LipschitzParametrization,
    attach,
    check_lipschitz,
    find_parametrization,
    original_of,
    weight_of,
    working_type,
)
from onelip.methods._tight import tight_weight

Side = Literal["inputs", "outputs", "auto"]
Layer = TypeVar("Layer", bound=nn.Module)


class AOL(LipschitzParametrization):
    """The map P -> W as a parametrization in the sense of `torch.nn.utils.parametrize`; `aol` registers it.

    Args:
        geometry: how the weight acts, from `onelip.geometry.geometry_of`.
        weight_shape: shape of the weight.
        side: whose channels are rescaled: "inputs" as in the paper, "outputs" (the same theorem for the transpose),
            or "auto", the side with fewer channels, which is cheaper and can be tight.
        steps: Gram steps t; 1 is the paper's AOL, more are tighter and dearer.
        learn_weights: learn positive weights q of the columns, kept as their logarithms `log_q`.
        lipschitz: the constant that the layer is to have instead of 1.
    """

    def __init__(
        self,
        geometry: Geometry,
        weight_shape: Sequence[int],
        *,
        side: Side = "inputs",
        steps: int = 1,
        learn_weights: bool = False,
        lipschitz: float = 1.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(geometry, weight_shape, lipschitz=check_lipschitz(lipschitz, dtype))
        if side not in ("inputs", "outputs", "auto"):
            raise ValueError(f"expected side to be 'inputs', 'outputs' or 'auto', got {side!r}")
        if isinstance(steps, bool) or not isinstance(steps, int) or not 1 <= steps <= 6:
            raise ValueError(f"expected steps to be a whole number from 1 to 6, got {steps!r}")
        self.steps = steps
        columns = {s: geometry.kernel_shape(weight_shape, s)[2] for s in ("inputs", "outputs")}
        if side == "auto":
            side = "outputs" if columns["outputs"] < columns["inputs"] else "inputs"
        self.side = side
        self.columns, self.rows = columns[side], columns["outputs" if side == "inputs" else "inputs"]
        self.log_q: nn.Parameter | None = None
        if learn_weights:
            self.log_q = nn.Parameter(torch.zeros(geometry.groups, self.columns, device=device, dtype=dtype))

    def forward(self, P: Tensor) -> Tensor:
        if P.numel() == 0:
            return P
        with full_precision(P.device):
            # Lower precisions are widened: a Gram matrix in bfloat16 proves nothing.
            kernel = self.geometry.to_kernel(P.to(working_type(P.dtype)), self.side)
            log_q = None if self.log_q is None else self.log_q.to(kernel.dtype)
            kernel = rescaled(kernel, steps=self.steps, log_q=log_q)
            if self.lipschitz != 1.0:
                kernel = kernel * self.lipschitz
            return self.geometry.to_weight(kernel, self.side).to(P.dtype)

    @torch.no_grad()
    def right_inverse(self, W: Tensor) -> Tensor:
        """A parameter P for which forward(P) is W up to one factor per connected block of channels.

        The factor is 1 for every weight that AOL itself can produce; see `onelip.gram.perron`.
        """
        if tuple(W.shape) != self.weight_shape:
            raise ValueError(f"expected a weight of shape {self.weight_shape}, got {tuple(W.shape)}")
        if W.is_meta or not W.any() or not W.isfinite().all():
            return W.clone()  # nothing to balance; a NaN or an infinity stays one
        kernel = self.geometry.to_kernel(W.to(working_type(W.dtype)), self.side)
        if self.steps == 1:
            kernel = balanced(kernel)
            if self.log_q is not None:  # q is then only a factor on the columns
                kernel = kernel / per_column(column_weights(self.log_q).to(kernel.dtype), kernel)
        else:
            log_q = None if self.log_q is None else self.log_q.double()
            kernel = balanced_for(kernel, lambda P: rescaled(P, steps=self.steps, log_q=log_q))
        return self.geometry.to_weight(kernel, self.side).to(W.dtype).contiguous()

    @torch.no_grad()
    def reset(self, P: Tensor) -> None:
        """Fill the parameter P such that the bound is tight, as the paper does: identity or (repeated) orthogonal."""
        if not P.is_meta:
            P.copy_(tight_weight(self.geometry, tuple(P.shape), self.side))
        if self.log_q is not None:
            self.log_q.zero_()

    def constant_in(self, dtype: torch.dtype) -> float:
        """The constant of the layer with its weight stored in this type.

        For float32 and float64 the nominal one, of real arithmetic: what rounding adds is proved from the weights that
        are stored (`onelip.lipschitz`, the sound mode of `onelip.certify`), not stated here. Lower types move the norm
        by u || |W| || <= u sqrt(channels * taps) of it, because columns and rows are not longer than 1.
        """
        if dtype in (torch.float32, torch.float64):
            return self.lipschitz
        _, rows, columns, *taps = self.geometry.kernel_shape(self.weight_shape, "inputs")
        entries = min(rows, columns) * math.prod(taps)
        return self.lipschitz * (1 + torch.finfo(dtype).eps / 2 * entries**0.5)

    def extra_repr(self) -> str:
        extras = [f"side={self.side!r}", f"steps={self.steps}", f"lipschitz={self.lipschitz}"]
        if self.log_q is not None:
            extras.append("learn_weights=True")
        if any(phase > 1 for phase in self.geometry.phases):
            extras.append(f"phases={self.geometry.phases}")
        return ", ".join(extras)

    def describe(self) -> str:
        """The same in words, for reports."""
        words = [f"AOL on the {self.side}"]
        if self.steps > 1:
            words.append(f"{self.steps} Gram steps")
        if self.log_q is not None:
            words.append("learned channel weights")
        if any(phase > 1 for phase in self.geometry.phases):
            words.append(f"{'x'.join(map(str, self.geometry.phases))} phases of the stride")
        elif self.geometry.strided:
            words.append("plain bound for its stride")
        return ", ".join(words)

    def advice(self) -> str | None:
        """A hint where the other side would serve better, else None."""
        if self.columns <= self.rows:
            return None
        other = "outputs" if self.side == "inputs" else "inputs"
        return (
            f"side={other!r} can be tighter ({self.columns} columns cannot be orthogonal in {self.rows} dimensions) "
            f"and is {self.columns / self.rows:.3g} times cheaper"
        )


def aol(
    module: Layer,
    name: str = "weight",
    *,
    side: Side = "inputs",
    steps: int = 1,
    learn_weights: bool = False,
    lipschitz: float = 1.0,
    input_size: int | Sequence[int] | None = None,
) -> Layer:
    """Make a linear layer 1-Lipschitz by AOL, in place, and return it.

    The layer's present weight is kept up to a factor (one for each block of channels that meet, so one for almost every
    layer): the parameter is chosen such that the new weight is the old one divided by the square root of its bound,
    which also enlarges weights that are smaller than the bound allows. Assigning `module.weight = w` does the same, and
    so does `load_state_dict` with a plain `weight`. torch's own `module.reset_parameters()` fills a weight that is
    computed anew at the next access, so it has no lasting effect; that of the drop-in classes of `onelip.nn` has.

    The weight is recomputed from the parameter at each access; within `torch.nn.utils.parametrize.cached()` once.
    Forward-mode derivatives in the parameter (jacfwd) are not supported. Gradients grow as one over the parameter: for
    entries below some 1e-37 (1e-44, say) they overflow float32, although W is right.

    Args:
        module: Linear, Conv1d, Conv2d, Conv3d, ConvTranspose1d, ConvTranspose2d or ConvTranspose3d.
        name: the parameter to constrain.
        side: whose channels are rescaled: "inputs" as in the paper, "outputs", or "auto" for the smaller side.
        steps: Gram steps; 1 is the paper's AOL, more are tighter and dearer.
        learn_weights: learn positive weights of the channels as well (the generalisation of SLL).
        lipschitz: the constant to guarantee instead of 1.
        input_size: only for strided convolutions with circular padding: promise the spatial size of the input. If the
            stride divides it the stride-aware bound is used, and the layer will refuse inputs that break the promise.

    Returns:
        The same module, parametrized.

    Raises:
        onelip.UnsupportedLayer: if the bound does not hold for this layer or its padding.

    Example:
        >>> layer = aol(nn.Conv2d(16, 32, 3, padding=1))
        >>> y = layer(torch.randn(1, 16, 8, 8))  # no input can be stretched
    """
    geometry = geometry_of(module, input_size)
    weight = weight_of(module, geometry, name)
    parametrization = AOL(
        geometry,
        weight.shape,
        side=side,
        steps=steps,
        learn_weights=learn_weights,
        lipschitz=lipschitz,
        device=weight.device,
        dtype=weight.dtype,
    )
    return attach(module, parametrization, name)


def find_aol(module: nn.Module, name: str = "weight") -> AOL | None:
    """The AOL parametrization of a layer, or None."""
    found = find_parametrization(module, name)
    return found if isinstance(found, AOL) else None


METHOD = Method(
    name="aol",
    title="AOL, almost-orthogonal layers (Prach and Lampert, 2022)",
    mechanism="parametrization",
    guarantee="proved",
    layers=LINEAR_LAYERS,
    apply=aol,
    options=(
        {"side": "outputs"},
        {"side": "auto"},
        {"steps": 2},
        {"steps": 3, "side": "outputs"},
        {"learn_weights": True},
        {"learn_weights": True, "steps": 2},
        {"lipschitz": 0.5},
    ),
    paper=PaperRow(E="yes", F="yes", G="yes", M="yes"),
)

__all__ = ["AOL", "METHOD", "aol", "find_aol", "original_of"]
