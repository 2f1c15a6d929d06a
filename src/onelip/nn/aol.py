"""AOL, almost-orthogonal layers: the parametrization, the function that applies it, and drop-ins for torch.nn."""

import math
from collections.abc import Sequence
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize

from onelip.core.docstrings import like
from onelip.core.errors import check_integer
from onelip.core.geometry import Geometry, geometry_of
from onelip.core.lipschitz_module import same_in_eval
from onelip.core.modes import full_precision, is_compiling
from onelip.core.parametrization import (
    LipschitzParametrization,
    attach,
    check_lipschitz,
    find_parametrization,
    original_of,
    weight_of,
    working_type,
)
from onelip.gram.products import per_column
from onelip.gram.rescale import balanced, balanced_for, column_weights, rescaled
from onelip.nn.init import tight_weight

Side = Literal["inputs", "outputs", "auto"]
Layer = TypeVar("Layer", bound=nn.Module)
PaddingMode = Literal["zeros", "reflect", "replicate", "circular"]
_Size = int | tuple[int, ...]


class AOL(LipschitzParametrization):
    r"""The map from a parameter $P$ to the weight $W$ of AOL, as a torch parametrization; `aol` registers it.

    $$W = P \,\mathrm{diag}(r)^{-1/2}, \qquad r_c = \sum_j |P^\top P|_{cj} \frac{q_j}{q_c},$$

    where $P$ also denotes the linear operator of the layer, and $q = 1$ unless the weights of the channels are learned.

    **Theorem.** $\|W\|_2 \le 1$ for every $P$ and every $q > 0$.

    **Assumptions.** Zero padding of any amount, or circular padding of at most `dilation * (kernel_size - 1)` in total.

    **Guarantee.** Proved in real arithmetic. In floating point the norm of $W$ can exceed 1 by the rounding of its
    entries and of the Gram operator: about 1e-7 for ordinary weights in float32, up to 1e-6 for constant ones. The
    bound that `onelip.audit` and `onelip.certify` prove from the stored weights contains it.

    Bernd Prach, Christoph H. Lampert, "Almost-Orthogonal Layers for Efficient General-Purpose Lipschitz Networks", ECCV
    2022. The weights $q$ are from Araujo et al., "A Unified Algebraic Perspective on Lipschitz Neural Networks" (SLL),
    ICLR 2023; several Gram steps from Delattre et al. (see `onelip.gram.rescale`). The stride-aware bound and the right
    inverse are our own.

    Args:
        geometry: how the weight acts, from `onelip.core.geometry.geometry_of`.
        weight_shape: shape of the weight.
        side: whose channels are rescaled: "inputs" as in the paper, "outputs" (the same theorem for the transpose),
            or "auto", the side with fewer channels, which is cheaper and can be tight.
        steps: Gram steps, 1 to 6; 1 is the AOL of the paper, larger values give a tighter bound at a higher cost.
        learn_weights: learn the weights $q$ of the channels, as the parameter `log_q`.
        lipschitz: the constant to guarantee instead of 1.
        device: device of `log_q`.
        dtype: type of `log_q`.

    Raises:
        ValueError: for options out of range.

    Examples:
        >>> layer = nn.Linear(2, 2, bias=False)
        >>> parametrization = AOL(geometry_of(layer), layer.weight.shape)
        >>> parametrization(torch.tensor([[3.0, 0.0], [0.0, 0.5]]))
        tensor([[1., 0.],
                [0., 1.]])
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
        # Within `parametrize.cached()` the weight may be used again in evaluation mode: it is the exact one then.
        if self.is_unscaled and self.training and not parametrize._cache_enabled:
            return P if self.lipschitz == 1.0 else P * self.lipschitz
        with full_precision(P.device):
            # Half precision is widened: a Gram matrix in bfloat16 is too inaccurate for the bound.
            kernel = self.geometry.to_kernel(P.to(working_type(P.dtype)), self.side)
            log_q = None if self.log_q is None else self.log_q.to(kernel.dtype)
            kernel = rescaled(kernel, steps=self.steps, log_q=log_q)
            if self.lipschitz != 1.0:
                kernel = kernel * self.lipschitz
            return self.geometry.to_weight(kernel, self.side).to(P.dtype)

    @torch.no_grad()
    def right_inverse(self, W: Tensor) -> Tensor:
        """Return a parameter P such that forward(P) is W up to one factor per connected block of channels.

        The factor is 1 for each weight that AOL itself can produce; see `onelip.gram.rescale`.
        """
        W = super().right_inverse(W)
        if W.is_meta or not W.any() or not W.isfinite().all():
            return W.clone()  # nothing to balance; NaN and infinity are kept
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
        """Initialise P such that the bound is tight, as in the paper: identity or (repeated) orthogonal columns."""
        if not P.is_meta:
            P.copy_(tight_weight(self.geometry, tuple(P.shape), self.side))
        if self.log_q is not None:
            self.log_q.zero_()

    def constant_in(self, dtype: torch.dtype) -> float:
        r"""Return the constant of the layer with its weight stored in this type.

        For float32 and float64 it is the nominal one, of real arithmetic; `onelip.audit` and the sound mode of
        `onelip.certify` prove the rounding from the stored weights. In lower types, with unit roundoff $u$, rounding
        the entries changes the norm by at most $u \,\| |W| \| \le u \sqrt{\mathrm{channels} \cdot \mathrm{taps}}$ times
        the constant, because no row or column is longer than 1.
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
        """Return a short description for reports."""
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
        """Return a hint if the other side would be better, else None."""
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
    r"""Make a linear layer 1-Lipschitz by AOL, in place, and return it; see `AOL` for the theorem.

    The current weight is kept up to one factor (one per block of connected channels, hence one for almost every layer):
    the new weight is the old one divided by the square root of its bound, which also enlarges weights that are smaller
    than the bound allows. Assigning `module.weight = w` does the same, and so does `load_state_dict` with a plain
    `weight`. `reset_parameters()` of the torch.nn classes has no lasting effect, because the weight is recomputed from
    the parameter; that of `onelip.nn.AOLConv2d` and the other drop-ins has.

    The weight is recomputed from the parameter at each access, or once within
    `torch.nn.utils.parametrize.cached()`. Forward-mode derivatives in the parameter (jacfwd) are not supported. The
    gradient grows as one over the parameter: for entries below about 1e-37 it overflows in float32.

    Args:
        module: Linear, Conv1d to Conv3d or ConvTranspose1d to ConvTranspose3d.
        name: name of the parameter to constrain.
        side: whose channels are rescaled: "inputs" as in the paper, "outputs", or "auto" for the smaller side.
        steps: Gram steps, 1 to 6; 1 is the AOL of the paper, larger values give a tighter bound at a higher cost.
        learn_weights: also learn positive weights of the channels (the generalisation of SLL).
        lipschitz: the constant to guarantee instead of 1.
        input_size: for strided convolutions with circular padding only: spatial size of every input. If the stride
            divides it, the stride-aware bound is used, and inputs of other sizes raise an error.

    Returns:
        The same module, with a parametrized weight.

    Raises:
        onelip.UnsupportedLayer: if the bound does not hold for this layer or its padding.
        ValueError: for options out of range.

    Examples:
        >>> layer = aol(nn.Conv2d(16, 32, 3, padding=1))
        >>> x = torch.randn(1, 16, 8, 8)
        >>> bool((layer(x) - layer(0 * x)).norm() <= x.norm())
        True
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


def find_aol(module: nn.Module) -> AOL | None:
    """Return the AOL parametrization of the weight of a layer, or None."""
    found = find_parametrization(module)
    return found if isinstance(found, AOL) else None


class _AOLLayer(nn.Module):
    """Base of the drop-in classes. The second base is the torch.nn class, which is also `plain_class`."""

    plain_class: type[nn.Module]
    weight: Tensor
    bias: Tensor | None

    def _constrain(self, options: dict[str, Any]) -> None:
        aol(self, **options)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise: identity for as many outputs as inputs, else (repeated) orthogonal columns; bias zero."""
        parametrization = find_aol(self)
        if parametrization is None:
            # Called by the constructor of torch.nn before AOL is registered; `_constrain` calls it again.
            nn.init.zeros_(self.weight)
        else:
            parametrization.reset(original_of(self))
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class AOLLinear(_AOLLayer, nn.Linear):
    r"""`torch.nn.Linear` with Lipschitz constant at most 1 by AOL, initialised as in the paper.

    The weight is $W = P\,\mathrm{diag}(r)^{-1/2}$ as in `AOL`, where $P$ is the parameter.

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

    Raises:
        ValueError: for options out of range.

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

    @same_in_eval
    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if self.training and _tiles(self, input):
            return _convolve_tiles(input, weight, bias)
        return super()._conv_forward(input, weight, bias)  # type: ignore[misc]


def _tiles(layer: nn.Module, x: Tensor) -> bool:
    """Whether `_convolve_tiles` computes this layer: 2d, kernel and stride equal, channels last, on a CPU.

    Examples:
        >>> x = torch.zeros(1, 3, 8, 8).to(memory_format=torch.channels_last)
        >>> _tiles(nn.Conv2d(3, 4, 2, stride=2), x), _tiles(nn.Conv2d(3, 4, 2), x)
        (True, False)
    """
    if not isinstance(layer, nn.Conv2d) or x.dim() != 4 or x.device.type != "cpu" or is_compiling():
        return False
    if layer.kernel_size != layer.stride or layer.groups != 1 or layer.padding not in ((0, 0), "valid"):
        return False
    return x.movedim(1, -1).is_contiguous() and not any(n % k for n, k in zip(x.shape[2:], layer.stride, strict=True))


def _convolve_tiles(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """The convolution of channels-last images with a kernel as large as its stride.

    Args:
        x: (N, in, H, W), channels last.
        weight: (out, in, k, m); H and W are multiples of k and m.
        bias: (out), or None.

    Returns:
        (N, out, H / k, W / m), channels last.

    Examples:
        >>> x, weight = torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last), torch.randn(5, 3, 2, 2)
        >>> bool((_convolve_tiles(x, weight, None) - F.conv2d(x, weight, stride=2)).abs().max() < 1e-5)
        True
    """
    count, channels, height, width = x.shape
    k, m = weight.shape[2:]
    rows = x.movedim(1, -1)
    if torch.is_autocast_enabled("cpu"):
        rows = rows.to(torch.get_autocast_dtype("cpu"))  # before the pixels are moved, which then takes half the time
    if k > 1 or m > 1:
        rows = rows.reshape(count, height // k, k, width // m, m, channels).transpose(2, 3)
        rows = rows.reshape(count, height // k, width // m, k * m * channels)
    matrix = weight.permute(0, 2, 3, 1).reshape(len(weight), -1)  # without a copy if the kernel is channels last
    return F.linear(rows, matrix, bias).movedim(-1, 1)


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


class AOLConv2d(_AOLConv, nn.Conv2d):
    r"""`torch.nn.Conv2d` with Lipschitz constant at most 1 by AOL, initialised as in the paper.

    The weight is $W = P\,\mathrm{diag}(r)^{-1/2}$ as in `AOL`, where $P$ is the parameter. The bound holds for inputs
    of every size, for zero padding of any amount, and for circular padding of at most
    `dilation * (kernel_size - 1)` in total. It takes the stride into account.

    Args:
        in_channels: number of channels of the input.
        out_channels: number of channels of the output.
        kernel_size: size of the kernel, one integer or one per axis.
        stride: stride of the convolution.
        padding: padding on both sides, or "same" or "valid".
        dilation: distance between the taps of the kernel.
        groups: number of groups of channels that are not connected with each other.
        bias: whether to learn an additive bias.
        padding_mode: "zeros" or "circular". Other modes copy pixels, so that the bound does not hold.
        device: device of the parameters.
        dtype: type of the parameters.
        side: whose channels are rescaled: "inputs" as in the paper, "outputs", or "auto" for the smaller side.
        steps: Gram steps, 1 to 6; 1 is the AOL of the paper, larger values give a tighter bound at a higher cost.
        learn_weights: also learn positive weights of the channels (the generalisation of SLL).
        lipschitz: the constant to guarantee instead of 1.
        input_size: for strided convolutions with circular padding only: spatial size of every input. If the stride
            divides it, the stride-aware bound is used, and inputs of other sizes raise an error.

    Shape:
        - Input: $(N, C_{in}, H, W)$ or $(C_{in}, H, W)$.
        - Output: $(N, C_{out}, H_{out}, W_{out})$ or $(C_{out}, H_{out}, W_{out})$, sizes as in `torch.nn.Conv2d`.

    Raises:
        onelip.UnsupportedLayer: for a padding mode or an amount of circular padding for which the bound does not hold.
        ValueError: for options out of range.

    Examples:
        >>> layer = AOLConv2d(3, 16, 3, stride=2, padding=1)
        >>> layer(torch.zeros(1, 3, 8, 8)).shape
        torch.Size([1, 16, 4, 4])
    """

    plain_class = nn.Conv2d


@like(AOLConv2d, axes=1)
class AOLConv1d(_AOLConv, nn.Conv1d):
    plain_class = nn.Conv1d


@like(AOLConv2d, axes=3)
class AOLConv3d(_AOLConv, nn.Conv3d):
    plain_class = nn.Conv3d


class AOLConvTranspose2d(_AOLConvTranspose, nn.ConvTranspose2d):
    r"""`torch.nn.ConvTranspose2d` with Lipschitz constant at most 1 by AOL, initialised as in the paper.

    The weight is $W = P\,\mathrm{diag}(r)^{-1/2}$ as in `AOL`, where $P$ is the parameter. The bound holds for inputs
    of every size and for every padding and output padding. It takes the stride into account.

    Args:
        in_channels: number of channels of the input.
        out_channels: number of channels of the output.
        kernel_size: size of the kernel, one integer or one per axis.
        stride: stride of the convolution.
        padding: `dilation * (kernel_size - 1) - padding` zeros are added on both sides of the input.
        output_padding: additional size on one side of the output.
        groups: number of groups of channels that are not connected with each other.
        bias: whether to learn an additive bias.
        dilation: distance between the taps of the kernel.
        padding_mode: only "zeros".
        device: device of the parameters.
        dtype: type of the parameters.
        side: whose channels are rescaled: "inputs" as in the paper, "outputs", or "auto" for the smaller side.
        steps: Gram steps, 1 to 6; 1 is the AOL of the paper, larger values give a tighter bound at a higher cost.
        learn_weights: also learn positive weights of the channels (the generalisation of SLL).
        lipschitz: the constant to guarantee instead of 1.

    Shape:
        - Input: $(N, C_{in}, H, W)$ or $(C_{in}, H, W)$.
        - Output: $(N, C_{out}, H_{out}, W_{out})$ or $(C_{out}, H_{out}, W_{out})$, sizes as in
            `torch.nn.ConvTranspose2d`.

    Raises:
        ValueError: for options out of range.

    Examples:
        >>> layer = AOLConvTranspose2d(16, 3, 2, stride=2)
        >>> layer(torch.zeros(1, 16, 4, 4)).shape
        torch.Size([1, 3, 8, 8])
    """

    plain_class = nn.ConvTranspose2d


@like(AOLConvTranspose2d, axes=1)
class AOLConvTranspose1d(_AOLConvTranspose, nn.ConvTranspose1d):
    plain_class = nn.ConvTranspose1d


@like(AOLConvTranspose2d, axes=3)
class AOLConvTranspose3d(_AOLConvTranspose, nn.ConvTranspose3d):
    plain_class = nn.ConvTranspose3d
