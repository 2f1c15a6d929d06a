"""Sandwich layers: two linear maps with a relu between them."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from onelip.core.errors import check_integer
from onelip.core.geometry import geometry_of, padding_of
from onelip.core.lipschitz_module import Bound, LipschitzModule, why_other_map
from onelip.core.modes import full_precision
from onelip.core.parametrization import (
    attach,
    check_lipschitz,
    find_parametrization,
    original_of,
    parametrization_list,
    weight_of,
    working_type,
)
from onelip.core.rounding import multiply_up
from onelip.methods.fourier.frequencies import Period
from onelip.methods.fourier.layer import (
    OTHER_PERIOD,
    DenseMap,
    FrequencyMap,
    check_periodic,
    stored_norm,
    supported_geometry,
    tap_shifts,
)
from onelip.methods.fourier.maps import CayleyMap
from onelip.methods.fourier.plain import plain_by_frequency, plain_dense
from onelip.methods.numerics import MATRIX, stored_bound
from onelip.methods.registry import NOT_TRANSPOSED, Method, register_method


class Sandwich(LipschitzModule):
    r"""The layer $y = L \sqrt 2 A^\top \mathrm{relu}(\sqrt 2 B x + b)$ with $P = (A\ B)$; `sandwich` makes it.

    **Theorem.** For two inputs, $f(x) - f(x') = 2 A^\top D B (x - x')$ with a diagonal matrix $D$ of entries in
    $[0, 1]$. If $\|P\| \le c$, the eigenvalues of $P^\top D P$ are in $[0, c^2]$, so
    $\|2 P^\top D P - c^2 I\| \le c^2$, and $2 A^\top D B$ is an off-diagonal block of this matrix. Hence

    $$\|f(x) - f(x')\|_2 \le L c^2 \|x - x'\|_2,$$

    which is $L$ for $P P^\top = I$. The published layer $\sqrt 2 A^\top S\,\mathrm{relu}(\sqrt 2 S^{-1} B x + b)$ with
    a positive diagonal $S$ is this one with the bias $S b$, so $S$ is omitted. $P$ is computed by the Cayley transform,
    as published; convolutions at each frequency, see `FrequencyMap`.

    **Assumptions.** Convolutions larger than 1x1 are circular, keep the spatial size and are built for one size of
    images; one group.

    **Guarantee.** Proved, with rounding, for every weight.

    `onelip.bake` turns the layer into two linear layers with MaxMin between them (`onelip.methods.fourier.plain`),
    whose constants are proved from the stored weights.

    Wang, Manchester, "Direct Parameterization of Lipschitz-Bounded Deep Networks", ICML 2023.

    Args:
        layer: the layer that is replaced: its kind and channels are used, and its bias if `hidden` is the number of
            outputs.
        hidden: rows of $P$.
        input_size: spatial size of the inputs; () for Linear and 1x1 convolutions.
        lipschitz: the constant $L$.

    Shape:
        - Input: $(*, H_{in})$ for Linear, $(N, C_{in}, *)$ for convolutions.
        - Output: $(*, H_{out})$ or $(N, C_{out}, *)$, with the spatial size of the input.

    Attributes:
        weight: $P$, or its matrices at each frequency.
        bias: $b$ (hidden,), or None.
    """

    bias: nn.Parameter | None

    def __init__(self, layer: nn.Module, *, hidden: int, input_size: tuple[int, ...], lipschitz: float = 1.0) -> None:
        super().__init__()
        weight = weight_of(layer, geometry_of(layer))
        self.outputs, self.inputs, self.hidden = weight.shape[0], weight.shape[1], hidden
        self.axes = weight.dim() - 2
        self.input_size = input_size
        self.period = Period(input_size) if input_size else None
        self.lipschitz = check_lipschitz(lipschitz, weight.dtype)
        taps = weight.shape[2:] if input_size else ()
        P = torch.empty(hidden, self.outputs + self.inputs, *taps, dtype=weight.dtype, device=weight.device)
        self.weight = nn.Parameter(nn.init.xavier_normal_(P))
        bias = layer.bias
        if isinstance(bias, Tensor) and hidden != self.outputs:
            bias = nn.Parameter(bias.new_zeros(hidden))
        self.register_parameter("bias", bias if isinstance(bias, nn.Parameter) else None)
        self.train(layer.training)

    @property
    def input_shape(self) -> tuple[int, ...] | None:
        """Shape of one sample; 1x1 convolutions accept every size."""
        return None if self.axes and not self.input_size else (self.inputs, *self.input_size)

    def forward(self, x: Tensor) -> Tensor:
        expected = (self.inputs, *self.input_size)
        channels = 1 if self.axes else x.dim() - 1
        fits = x.dim() == self.axes + 2 if self.axes else x.dim() >= 1
        if not fits or tuple(x.shape[channels : channels + len(expected)]) != expected:
            raise ValueError(
                f"expected an input with {self.inputs} channels{self._sized()}, got shape {tuple(x.shape)}; "
                "rebuild the layer for your input (input_size for convolutions)"
            )
        y = self._dense(x) if self.period is None else self._by_frequency(x, self.period)
        return y * (math.sqrt(2) * self.lipschitz)

    def _dense(self, x: Tensor) -> Tensor:
        A, B = self.weight.split([self.outputs, self.inputs], 1)
        ones = (1,) * self.axes
        linear: Any = (F.linear, F.conv1d, F.conv2d, F.conv3d)[self.axes]
        h = F.relu(linear(x * math.sqrt(2), B.reshape(*B.shape, *ones), self.bias))
        return linear(h, A.T.reshape(self.outputs, self.hidden, *ones))

    def _by_frequency(self, x: Tensor, period: Period) -> Tensor:
        with full_precision(x.device):
            weight = self.weight.to(working_type(self.weight.dtype))
            A, B = torch.view_as_complex(weight).split([self.outputs, self.inputs], 2)
            h = period(x.to(working_type(x.dtype)) * math.sqrt(2), B)
            if self.bias is not None:
                h = h + self.bias.reshape(-1, *(1 for _ in self.input_size))
            return period(F.relu(h), A.mH).to(x.dtype)

    def bound(self) -> Bound:
        """The proved constant: from the parametrization of P, or for a baked layer from the stored P."""
        is_built = not self.input_size if self.period is None else self.period.is_for(self.input_size)
        if not is_built:
            return Bound(None, OTHER_PERIOD)
        found = self._norm_of_weight()
        if (norm := found.constant) is None:
            return found
        # The float sqrt(2) is rounded and used twice: two units of rounding.
        square = multiply_up(norm, norm) * (1 + 2.0**-50)
        if not square < math.inf:
            return Bound(None, f"the norm of its weight, up to {norm}, is too large")
        return Bound(multiply_up(square, self.lipschitz), found.why)

    def plain_form(self, tensors: Mapping[str, Tensor]) -> nn.Module | None:
        """Return the plain layers for `onelip.bake`; None if ||P|| <= 1 is not proved, and in half precision."""
        norm = self._norm_of_weight().constant
        if why_other_map(self) or norm is None or not norm <= 1 + 2.0**-12:
            return None
        # With z = [0 x] the layer is the part of -(z - 2 P^T relu(P z + b / sqrt 2)) that belongs to A.
        P, bias = tensors["weight"], None if self.bias is None else self.bias.detach() * math.sqrt(0.5)
        inputs, outputs, factor = slice(self.outputs, None), slice(0, self.outputs), -self.lipschitz
        if self.input_size:
            return plain_by_frequency(P, bias, inputs, outputs, factor, size=self.input_size)
        return plain_dense(P, bias, inputs, outputs, factor, axes=self.axes)

    def _norm_of_weight(self) -> Bound:
        if not parametrize.is_parametrized(self, "weight"):
            weight = self.weight.detach()
            return stored_norm(weight) if self.input_size else stored_bound(weight, MATRIX)
        found, maps = find_parametrization(self), parametrization_list(self)
        if not isinstance(found, (DenseMap, FrequencyMap)) or maps is None or len(maps) != 1:
            return Bound(None, "Sandwich with another parametrization than its own")
        return Bound(found.constant_in(original_of(self).dtype), found.describe())

    def _sized(self) -> str:
        return f" and spatial size {self.input_size}, for which it was built" if self.input_size else ""

    def extra_repr(self) -> str:
        sized = f", input_size={self.input_size}" if self.input_size else ""
        return f"{self.inputs}, {self.outputs}, hidden={self.hidden}{sized}, lipschitz={self.lipschitz}"


def sandwich(
    module: nn.Module,
    *,
    hidden: int | None = None,
    input_size: int | Sequence[int] | None = None,
    lipschitz: float = 1.0,
) -> Sandwich:
    """Return a Sandwich layer in place of the given layer; its weights are initialised as the authors do.

    See `Sandwich`.

    Args:
        module: Linear, or Conv1d to Conv3d.
        hidden: channels between the two maps, at most inputs + outputs; the number of outputs by default.
        input_size: spatial size of the inputs; required for convolutions larger than 1x1.
        lipschitz: the constant to guarantee instead of 1.

    Returns:
        A new module.

    Raises:
        onelip.UnsupportedLayer: for zero padding, groups, strides, padding that does not keep the size, and a missing
            input size.
        ValueError: for options out of range.

    Examples:
        >>> layer = sandwich(nn.Linear(4, 3)).eval()
        >>> layer(torch.randn(2, 4)).shape, round(layer.lipschitz_constant, 5)
        (torch.Size([2, 3]), 1.0)
    """
    geometry = supported_geometry(module, "sandwich")
    outputs, inputs = weight_of(module, geometry).shape[:2]
    rows = check_integer("hidden", outputs if hidden is None else hidden, 1, inputs + outputs)
    size = _size(module, input_size)
    made = Sandwich(module, hidden=rows, input_size=size, lipschitz=lipschitz)
    shape = tuple(made.weight.shape)
    orthogonal = CayleyMap(made.weight[None])
    if not size:
        return attach(made, DenseMap(MATRIX, shape, orthogonal))
    assert isinstance(module, nn.modules.conv._ConvNd)
    shifts = tap_shifts(module.kernel_size, module.dilation, [-left for left, _ in padding_of(module)])
    return attach(made, FrequencyMap(geometry, shape, orthogonal, size=size, shifts=shifts))


def _size(layer: nn.Module, input_size: int | Sequence[int] | None) -> tuple[int, ...]:
    """Return the spatial size that the layer needs; () if it needs none."""
    if isinstance(layer, nn.Linear):
        return ()
    assert isinstance(layer, nn.modules.conv._ConvNd)
    pointwise = all(n == 1 for n in (*layer.kernel_size, *layer.stride, layer.groups))
    if pointwise and all(sum(p) == 0 for p in padding_of(layer)):
        return ()
    return check_periodic(layer, "sandwich", input_size, False)


register_method(
    Method(
        name="sandwich",
        title="Sandwich layers (Wang and Manchester, 2023)",
        citation="Ruigang Wang, Ian R. Manchester, "
        '"Direct Parameterization of Lipschitz-Bounded Deep Networks", ICML 2023.',
        guarantee="proved",
        layers=NOT_TRANSPOSED,
        apply=sandwich,
        options=({"hidden": 2}, {"lipschitz": 0.5}),
        replaces=True,
        needs_input_size=True,
        fast_lr=2.7,
        hyperparameters={"lr": 0.1, "weight_decay": 0.0, "schedule": "one-cycle"},
        note="two maps with a relu between; convolutions circular, built for one image size",
    )
)
