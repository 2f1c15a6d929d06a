"""AOL, almost-orthogonal layers: the parametrization, the function that applies it, and drop-ins for torch.nn.

Citation: Bernd Prach, Christoph H. Lampert, "Almost-Orthogonal Layers for Efficient General-Purpose Lipschitz
Networks", ECCV 2022. The generalisations: column weights q from Araujo et al., "A Unified Algebraic Perspective on
Lipschitz Neural Networks" (SLL), ICLR 2023; several Gram steps from Delattre et al. (see `onelip.gram.rescale`); phases
for strides and the right inverse are our own.
"""

import math
from collections.abc import Sequence
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn

from onelip.core.arguments import check_integer
from onelip.core.geometry import Geometry, geometry_of
from onelip.core.parametrization import (
    LipschitzParametrization,
    attach,
    check_lipschitz,
    find_parametrization,
    original_of,
    weight_of,
    working_type,
)
from onelip.core.precision import full_precision
from onelip.gram.perron import balanced, balanced_for
from onelip.gram.rescale import column_weights, rescaled
from onelip.gram.row_sums import per_column
from onelip.nn.init import tight_weight

Side = Literal["inputs", "outputs", "auto"]
Layer = TypeVar("Layer", bound=nn.Module)
PaddingMode = Literal["zeros", "reflect", "replicate", "circular"]
_Size = int | tuple[int, ...]
_Kind = TypeVar("_Kind", bound=type[nn.Module])


class AOL(LipschitzParametrization):
    r"""The map P -> W of AOL as a parametrization of `torch.nn.utils.parametrize`; `aol` registers it.

    $$W = P \,\mathrm{diag}(r)^{-1/2}, \qquad r_c = \sum_j |P^\top P|_{cj}$$

    has norm at most 1 for every P, where P is the linear operator of the layer. This assumes zero padding of any
    amount, or circular padding of at most dilation * (kernel_size - 1) in total. It is proved in real arithmetic. In
    floating point, W exceeds it by the rounding of its own entries and of the Gram operator: about 1e-7 for ordinary
    weights in float32, up to 1e-6 for constant ones.

    Args:
        geometry: how the weight acts, from `onelip.core.geometry.geometry_of`.
        weight_shape: shape of the weight.
        side: whose channels are rescaled: "inputs" as in the paper, "outputs" (the same theorem for the transpose),
            or "auto", the side with fewer channels, which is cheaper and can be tight.
        steps: Gram steps t; 1 is the paper's AOL, larger values give a tighter bound at a higher cost.
        learn_weights: learn positive weights q of the columns, kept as their logarithms `log_q`.
        lipschitz: the constant to guarantee instead of 1.
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
        self.steps = check_integer("steps", steps, 1, 6)
        columns = {s: geometry.kernel_shape(weight_shape, s)[2] for s in ("inputs", "outputs")}
        if side == "auto":
            side = "outputs" if columns["outputs"] < columns["inputs"] else "inputs"
        self.side = side
        self.columns, self.rows = columns[side], columns["outputs" if side == "inputs" else "inputs"]
        self.is_unscaled = False  # in training mode the weight is P itself: see `onelip.optim.unscaled`
        self.log_q: nn.Parameter | None = None
        if learn_weights:
            self.log_q = nn.Parameter(torch.zeros(geometry.groups, self.columns, device=device, dtype=dtype))

    @property
    def orthogonal_side(self) -> str:
        return self.side

    def forward(self, P: Tensor) -> Tensor:
        if P.numel() == 0:
            return P
        if self.is_unscaled and self.training:
            return P if self.lipschitz == 1.0 else P * self.lipschitz
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
        are stored (`onelip.audit`, the sound mode of `onelip.certify`), not stated here. Lower types move the norm
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
        """A short description for reports."""
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

    The current weight of the layer is kept up to a factor (one for each block of channels that meet, so one for
    almost every layer): the parameter is chosen such that the new weight is the old one divided by the square root of
    its bound, which also enlarges weights that are smaller than the bound allows. Assigning `module.weight = w` does
    the same, and so does `load_state_dict` with a plain `weight`. torch's own `module.reset_parameters()` fills a
    weight that is computed anew at the next access, so it has no lasting effect; that of the drop-in classes has.

    The weight is recomputed from the parameter at each access; within `torch.nn.utils.parametrize.cached()` once.
    Forward-mode derivatives in the parameter (jacfwd) are not supported. Gradients grow as one over the parameter: for
    entries below about 1e-37 they overflow float32, although W is right.

    Args:
        module: Linear, Conv1d, Conv2d, Conv3d, ConvTranspose1d, ConvTranspose2d or ConvTranspose3d.
        name: the parameter to constrain.
        side: whose channels are rescaled: "inputs" as in the paper, "outputs", or "auto" for the smaller side.
        steps: Gram steps; 1 is the paper's AOL, larger values give a tighter bound at a higher cost.
        learn_weights: learn positive weights of the channels as well (the generalisation of SLL).
        lipschitz: the constant to guarantee instead of 1.
        input_size: only for strided convolutions with circular padding: promise the spatial size of the input. If the
            stride divides it the stride-aware bound is used, and the layer will refuse inputs that break the promise.

    Returns:
        The same module, parametrized.

    Raises:
        onelip.UnsupportedLayer: if the bound does not hold for this layer or its padding.

    Examples:
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


class _AOLLayer(nn.Module):
    """What the drop-in classes share. The torch.nn class comes second among the bases, and `plain_class` names it."""

    plain_class: type[nn.Module]
    weight: Tensor
    bias: Tensor | None

    def _constrain(self, options: dict[str, Any]) -> None:
        aol(self, **options)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Identity where the layer preserves the size, else (repeated) orthogonal columns; bias zero."""
        parametrization = find_aol(self)
        if parametrization is None:
            # torch.nn's constructor calls this before AOL is on the weight; `_constrain` will call it again.
            nn.init.zeros_(self.weight)
        else:
            parametrization.reset(original_of(self))
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class AOLLinear(_AOLLayer, nn.Linear):
    """`torch.nn.Linear` with Lipschitz constant at most 1 by AOL, initialised as in the paper.

    Args:
        in_features: size of each input sample.
        out_features: size of each output sample.
        bias: whether to learn an additive bias.
        device: device of the parameters.
        dtype: type of the parameters.
        side: whose channels are rescaled: "inputs" as in the paper, "outputs", or "auto" for the smaller side.
        steps: Gram steps, 1 to 6; 1 is the AOL of the paper, larger values give a tighter bound at a higher cost.
        learn_weights: also learn positive weights of the channels (the generalisation of SLL).
        lipschitz: the constant to guarantee instead of 1.

    Shape:
        - Input: $(*, H_{in})$ with $H_{in}$ = in_features.
        - Output: $(*, H_{out})$ with $H_{out}$ = out_features.

    Examples:
        >>> layer = AOLLinear(64, 10, side="auto")
        >>> bool(torch.linalg.matrix_norm(layer.weight, 2) <= 1 + 1e-6)
        True
    """

    plain_class = nn.Linear

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        side: Side = "inputs",
        steps: int = 1,
        learn_weights: bool = False,
        lipschitz: float = 1.0,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self._constrain({"side": side, "steps": steps, "learn_weights": learn_weights, "lipschitz": lipschitz})


class _AOLConv(_AOLLayer):
    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: _Size,
        stride: _Size = 1,
        padding: _Size | str = 0,
        dilation: _Size = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: PaddingMode = "zeros",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        side: Side = "inputs",
        steps: int = 1,
        learn_weights: bool = False,
        lipschitz: float = 1.0,
        input_size: int | Sequence[int] | None = None,
    ) -> None:
        settings = (stride, padding, dilation, groups, bias, padding_mode, device, dtype)
        super().__init__(in_channels, out_channels, kernel_size, *settings)  # type: ignore[call-arg]
        options = {"side": side, "steps": steps, "learn_weights": learn_weights, "lipschitz": lipschitz}
        self._constrain({**options, "input_size": input_size})


class _AOLConvTranspose(_AOLLayer):
    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: _Size,
        stride: _Size = 1,
        padding: _Size = 0,
        output_padding: _Size = 0,
        groups: int = 1,
        bias: bool = True,
        dilation: _Size = 1,
        padding_mode: PaddingMode = "zeros",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        side: Side = "inputs",
        steps: int = 1,
        learn_weights: bool = False,
        lipschitz: float = 1.0,
    ) -> None:
        settings = (stride, padding, output_padding, groups, bias, dilation, padding_mode, device, dtype)
        super().__init__(in_channels, out_channels, kernel_size, *settings)  # type: ignore[call-arg]
        self._constrain({"side": side, "steps": steps, "learn_weights": learn_weights, "lipschitz": lipschitz})


_CONVOLUTION = r"""`torch.nn.{name}` with Lipschitz constant at most 1 by AOL, initialised as in the paper.

    Zero padding of any amount is supported, circular padding of at most dilation * (kernel_size - 1) in total. The
    bound takes the stride into account.

    Args:
        in_channels: channels of the input.
        out_channels: channels of the output.
        kernel_size: size of the kernel.
        stride: stride of the convolution.
        padding: padding on both sides{same}.
{output_padding}        dilation: distance between the taps of the kernel.
        groups: number of blocks of channels that are not connected with each other.
        bias: whether to learn an additive bias.
        padding_mode: {modes}; other modes copy pixels, so that no bound of 1 holds.
        device: device of the parameters.
        dtype: type of the parameters.
        side: whose channels are rescaled: "inputs" as in the paper, "outputs", or "auto" for the smaller side.
        steps: Gram steps, 1 to 6; 1 is the AOL of the paper, larger values give a tighter bound at a higher cost.
        learn_weights: also learn positive weights of the channels (the generalisation of SLL).
        lipschitz: the constant to guarantee instead of 1.
{input_size}
    Shape:
        - Input: $(N, C_{{in}}, {axes})$ or $(C_{{in}}, {axes})$.
        - Output: $(N, C_{{out}}, {axes_out})$ or $(C_{{out}}, {axes_out})$, sizes as in `torch.nn.{name}`.

    Examples:
        >>> layer = AOL{name}(3, 16, 3, padding=1)
        >>> layer(torch.zeros(1, 3, {sizes})).shape
        torch.Size([1, 16, {sizes}])
    """
_INPUT_SIZE = """        input_size: for strided convolutions with circular padding only: spatial size of every input.
            If the stride divides it, the stride-aware bound is used, and other input sizes raise an error.
"""


def _documented(kind: _Kind) -> _Kind:
    """Fill in the one text that describes all convolutions; their signatures differ as those of torch.nn do."""
    name = kind.__name__.removeprefix("AOL")
    axes = int(name[-2])
    transposed = "Transpose" in name
    kind.__doc__ = _CONVOLUTION.format(
        name=name,
        axes=", ".join("DHW"[3 - axes :]),
        axes_out=", ".join(f"{axis}_{{out}}" for axis in "DHW"[3 - axes :]),
        sizes=", ".join(["8"] * axes),
        same="" if transposed else ', or "same" or "valid"',
        modes='only "zeros"' if transposed else '"zeros" or "circular"',
        output_padding="        output_padding: added to one side of the output.\n" if transposed else "",
        input_size="" if transposed else _INPUT_SIZE,
    )
    return kind


@_documented
class AOLConv1d(_AOLConv, nn.Conv1d):
    plain_class = nn.Conv1d


@_documented
class AOLConv2d(_AOLConv, nn.Conv2d):
    plain_class = nn.Conv2d


@_documented
class AOLConv3d(_AOLConv, nn.Conv3d):
    plain_class = nn.Conv3d


@_documented
class AOLConvTranspose1d(_AOLConvTranspose, nn.ConvTranspose1d):
    plain_class = nn.ConvTranspose1d


@_documented
class AOLConvTranspose2d(_AOLConvTranspose, nn.ConvTranspose2d):
    plain_class = nn.ConvTranspose2d


@_documented
class AOLConvTranspose3d(_AOLConvTranspose, nn.ConvTranspose3d):
    plain_class = nn.ConvTranspose3d
