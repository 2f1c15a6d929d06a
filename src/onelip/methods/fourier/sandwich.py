"""Sandwich layers.

Citation: Ruigang Wang, Ian R. Manchester, "Direct Parameterization of Lipschitz-Bounded Deep Networks", ICML 2023.

Inequality: y = sqrt(2) A^T relu(sqrt(2) B x + b) with P = [A B]. For two inputs the differences obey
f(x) - f(x') = 2 A^T D B (x - x') with a diagonal D of entries in [0, 1]. With ||P|| <= c, P^T D P lies between 0 and
c^2 I, so ||2 P^T D P - c^2 I|| <= c^2; and 2 A^T D B is a block of this matrix, beside its diagonal. Hence

    ||f(x) - f(x')|| <= c^2 ||x - x'||,        1 for P P^T = I.                                                  (1)

The published y = sqrt(2) A^T S relu(sqrt(2) S^-1 B x + b), S diagonal and positive, is this with b' = S b: relu takes
positive factors out. So S adds nothing but a factor of the bias, and is left out.
P is made by the Cayley transform, as published. Convolutions: at each frequency; `onelip.methods.fourier.maps`, (1).
Assumes: convolutions larger than 1x1 are circular, keep the size and are made for one size of images; one group.
Guarantee: proved, with its rounding, for every weight.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from onelip.bounds import bound_weight
from onelip.core.errors import NonFiniteWeight, UnknownLipschitzConstant, UnsupportedLayer
from onelip.core.geometry import Geometry, geometry_of, padding_of
from onelip.core.lipschitz_module import LipschitzModule
from onelip.core.parametrization import (
    attach,
    check_lipschitz,
    find_parametrization,
    parametrization_list,
    weight_of,
    working_type,
)
from onelip.core.precision import full_precision
from onelip.core.rounding import multiply_up
from onelip.methods.fourier.cayley import CayleyMap
from onelip.methods.fourier.layer import SERVED, check_periodic, stored_norm
from onelip.methods.fourier.maps import DenseMap, FrequencyMap
from onelip.methods.fourier.period import Period
from onelip.methods.fourier.plain_relu import plain_by_frequency, plain_dense
from onelip.methods.method import Method

_DENSE = Geometry(False, 1, (), (), ())


class Sandwich(LipschitzModule):
    """sqrt(2) A^T relu(sqrt(2) B x + b), times a constant; `sandwich` makes it.

    `onelip.bake` makes two linear layers with MaxMin between of it, by `onelip.methods.fourier.plain_relu`; their
    constants are proved from what is stored.

    Args:
        layer: what it stands for: its kind, its channels, its bias if there are as many hidden channels as outputs.
        hidden: rows of P.
        input_size: spatial size of the inputs; () where that does not matter.
        lipschitz: the constant that the layer is to have instead of 1.
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

    def forward(self, x: Tensor) -> Tensor:
        expected = (self.inputs, *self.input_size)
        channels = 1 if self.axes else x.dim() - 1
        fits = x.dim() == self.axes + 2 if self.axes else x.dim() >= 1
        if not fits or tuple(x.shape[channels : channels + len(expected)]) != expected:
            raise ValueError(
                f"expected an input with {self.inputs} channels{self._sized()}, got shape {tuple(x.shape)}; make the "
                "layer anew for your input, with input_size where it is a convolution"
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
            A, B = torch.view_as_complex(self.weight).split([self.outputs, self.inputs], 2)
            h = period(x.to(working_type(x.dtype)) * math.sqrt(2), B)
            if self.bias is not None:
                h = h + self.bias.reshape(-1, *(1 for _ in self.input_size))
            return period(F.relu(h), A.mH).to(x.dtype)

    @property
    def lipschitz_constant(self) -> float:
        """Proved, by (1): from what the parametrization of P claims, or for a baked layer from what is stored."""
        norm = self._norm_of_weight()
        # The factor sqrt(2) is a float, and used twice: two units for it.
        square = multiply_up(norm, norm) * (1 + 2.0**-50)
        if not square < math.inf:
            raise UnknownLipschitzConstant(f"expected a weight of moderate norm, got one of norm up to {norm}")
        return multiply_up(square, self.lipschitz)

    def plain_form(self, tensors: Mapping[str, Tensor]) -> nn.Module | None:
        """For `onelip.bake`; None where nobody says that ||P|| is at most 1."""
        try:
            if not self._norm_of_weight() <= 1 + 2.0**-10:
                return None
        except UnknownLipschitzConstant:
            return None
        # With z = [0 x] the layer is that part of -(z - 2 P^T relu(P z + b / sqrt 2)) that belongs to A.
        P, bias = tensors["weight"], None if self.bias is None else self.bias.detach() * math.sqrt(0.5)
        inputs, outputs, factor = slice(self.outputs, None), slice(0, self.outputs), -self.lipschitz
        if self.input_size:
            return plain_by_frequency(P, bias, inputs, outputs, factor, size=self.input_size)
        return plain_dense(P, bias, inputs, outputs, factor, axes=self.axes)

    def _norm_of_weight(self) -> float:
        if not parametrize.is_parametrized(self, "weight"):
            if self.input_size:
                return stored_norm(self.weight.detach())
            try:
                return bound_weight(self.weight.detach(), _DENSE).value
            except (NonFiniteWeight, OverflowError) as error:
                raise UnknownLipschitzConstant(str(error)) from error
        found, maps = find_parametrization(self), parametrization_list(self)
        if not isinstance(found, (DenseMap, FrequencyMap)) or maps is None or len(maps) != 1:
            raise UnknownLipschitzConstant("expected a layer with its own parametrization, got another one")
        return found.constant_in(self.weight.dtype)

    def _sized(self) -> str:
        return f" and spatial size {self.input_size}, for which it was made" if self.input_size else ""

    def extra_repr(self) -> str:
        sized = f", input_size={self.input_size}" if self.input_size else ""
        return f"{self.inputs}, {self.outputs}, hidden={self.hidden}{sized}, lipschitz={self.lipschitz}"


def sandwich(
    layer: nn.Module,
    *,
    hidden: int | None = None,
    input_size: int | Sequence[int] | None = None,
    lipschitz: float = 1.0,
) -> Sandwich:
    """A Sandwich layer in the place of the given one; its weights begin anew, as its authors begin.

    Args:
        layer: Linear, Conv1d, Conv2d or Conv3d.
        hidden: channels between the two maps, at most inputs + outputs; as many as outputs by default.
        input_size: spatial size of the images; needed by convolutions larger than 1x1.
        lipschitz: the constant to guarantee instead of 1.

    Raises:
        onelip.UnsupportedLayer: for zero padding, groups, strides, and where the size is not kept or not given.

    Examples:
        >>> layer = sandwich(nn.Linear(4, 3)).eval()
        >>> layer(torch.randn(2, 4)).shape, round(layer.lipschitz_constant, 5)
        (torch.Size([2, 3]), 1.0)
    """
    if not isinstance(layer, SERVED):
        names = ", ".join(kind.__name__ for kind in SERVED)
        raise UnsupportedLayer(f"expected one of {names} for sandwich, got {type(layer).__name__}; use 'bcop' or 'aoc'")
    geometry = geometry_of(layer)
    weight = weight_of(layer, geometry)
    outputs, inputs = weight.shape[:2]
    rows = outputs if hidden is None else hidden
    if isinstance(rows, bool) or not isinstance(rows, int) or not 1 <= rows <= inputs + outputs:
        raise ValueError(f"expected hidden to be a whole number from 1 to {inputs + outputs}, got {hidden!r}")
    size = _size(layer, input_size)
    made = Sandwich(layer, hidden=rows, input_size=size, lipschitz=lipschitz)
    shape = tuple(made.weight.shape)
    orthogonal = CayleyMap(made.weight[None])
    if not size:
        return attach(made, DenseMap(_DENSE, shape, orthogonal))
    assert isinstance(layer, nn.modules.conv._ConvNd)
    shifts = tuple(
        tuple(d * t - left for t in range(k))
        for k, d, (left, _) in zip(layer.kernel_size, layer.dilation, padding_of(layer), strict=True)
    )
    return attach(made, FrequencyMap(geometry, shape, orthogonal, size=size, shifts=shifts))


def _size(layer: nn.Module, input_size: int | Sequence[int] | None) -> tuple[int, ...]:
    """The spatial size that the layer needs, () if it needs none."""
    if isinstance(layer, nn.Linear):
        return ()
    assert isinstance(layer, nn.modules.conv._ConvNd)
    pointwise = all(n == 1 for n in (*layer.kernel_size, *layer.stride, layer.groups))
    if pointwise and all(sum(p) == 0 for p in padding_of(layer)):
        return ()
    return check_periodic(layer, "sandwich", input_size, False)


METHOD = Method(
    name="sandwich",
    title="Sandwich layers (Wang and Manchester, 2023)",
    mechanism="parametrization",
    guarantee="proved",
    layers=SERVED,
    apply=sandwich,
    options=({"hidden": 2}, {"lipschitz": 0.5}),
    replaces=True,
    needs_input_size=True,
    hyperparameters={"lr": 0.1, "weight_decay": 0.0, "schedule": "one-cycle"},
    note="two maps with relu between; convolutions circular, made for one image size",
)
