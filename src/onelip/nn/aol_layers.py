"""Drop-in layers: torch.nn's names, arguments and state, with AOL on the weight and the paper's initialisation.

Each class only repeats the signature of its torch.nn namesake and adds AOL's options, keyword-only; see
`onelip.methods.aol.aol` for what they mean.
"""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import nn

from onelip.methods.aol import Side, aol, find_aol, original_of

PaddingMode = Literal["zeros", "reflect", "replicate", "circular"]


class _AOLLayer(nn.Module):
    """What the drop-in classes share. The torch.nn class comes second among the bases, and `plain_class` names it."""

    plain_class: type[nn.Module]
    weight: torch.Tensor
    bias: torch.Tensor | None

    def _constrain(
        self,
        side: Side,
        steps: int,
        learn_weights: bool,
        lipschitz: float,
        input_size: int | Sequence[int] | None,
    ) -> None:
        aol(
            self,
            side=side,
            steps=steps,
            learn_weights=learn_weights,
            lipschitz=lipschitz,
            input_size=input_size,
        )
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Identity where the layer preserves the size, else (repeated) orthogonal columns; bias zero."""
        parametrization = find_aol(self)
        if parametrization is None:
            # torch.nn's constructor calls this before AOL is on the weight: `_constrain` will call it again.
            nn.init.zeros_(self.weight)
        else:
            parametrization.reset(original_of(self))
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class AOLLinear(_AOLLayer, nn.Linear):
    """`torch.nn.Linear` with Lipschitz constant at most 1.

    Example:
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
        device: Any = None,
        dtype: Any = None,
        *,
        side: Side = "inputs",
        steps: int = 1,
        learn_weights: bool = False,
        lipschitz: float = 1.0,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self._constrain(side, steps, learn_weights, lipschitz, None)


class AOLConv1d(_AOLLayer, nn.Conv1d):
    """`torch.nn.Conv1d` with Lipschitz constant at most 1, for zero padding and for moderate circular padding."""

    plain_class = nn.Conv1d

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int],
        stride: int | tuple[int] = 1,
        padding: str | int | tuple[int] = 0,
        dilation: int | tuple[int] = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: PaddingMode = "zeros",
        device: Any = None,
        dtype: Any = None,
        *,
        side: Side = "inputs",
        steps: int = 1,
        learn_weights: bool = False,
        lipschitz: float = 1.0,
        input_size: int | Sequence[int] | None = None,
    ) -> None:
        super().__init__(
            in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, padding_mode, device, dtype
        )
        self._constrain(side, steps, learn_weights, lipschitz, input_size)


class AOLConv2d(_AOLLayer, nn.Conv2d):
    """`torch.nn.Conv2d` with Lipschitz constant at most 1, for zero padding and for moderate circular padding."""

    plain_class = nn.Conv2d

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int],
        stride: int | tuple[int, int] = 1,
        padding: str | int | tuple[int, int] = 0,
        dilation: int | tuple[int, int] = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: PaddingMode = "zeros",
        device: Any = None,
        dtype: Any = None,
        *,
        side: Side = "inputs",
        steps: int = 1,
        learn_weights: bool = False,
        lipschitz: float = 1.0,
        input_size: int | Sequence[int] | None = None,
    ) -> None:
        super().__init__(
            in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, padding_mode, device, dtype
        )
        self._constrain(side, steps, learn_weights, lipschitz, input_size)


class AOLConv3d(_AOLLayer, nn.Conv3d):
    """`torch.nn.Conv3d` with Lipschitz constant at most 1, for zero padding and for moderate circular padding."""

    plain_class = nn.Conv3d

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int, int],
        stride: int | tuple[int, int, int] = 1,
        padding: str | int | tuple[int, int, int] = 0,
        dilation: int | tuple[int, int, int] = 1,
        groups: int = 1,
        bias: bool = True,
        padding_mode: PaddingMode = "zeros",
        device: Any = None,
        dtype: Any = None,
        *,
        side: Side = "inputs",
        steps: int = 1,
        learn_weights: bool = False,
        lipschitz: float = 1.0,
        input_size: int | Sequence[int] | None = None,
    ) -> None:
        super().__init__(
            in_channels, out_channels, kernel_size, stride, padding, dilation, groups, bias, padding_mode, device, dtype
        )
        self._constrain(side, steps, learn_weights, lipschitz, input_size)


class AOLConvTranspose1d(_AOLLayer, nn.ConvTranspose1d):
    """`torch.nn.ConvTranspose1d` with Lipschitz constant at most 1."""

    plain_class = nn.ConvTranspose1d

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int],
        stride: int | tuple[int] = 1,
        padding: int | tuple[int] = 0,
        output_padding: int | tuple[int] = 0,
        groups: int = 1,
        bias: bool = True,
        dilation: int | tuple[int] = 1,
        padding_mode: PaddingMode = "zeros",
        device: Any = None,
        dtype: Any = None,
        *,
        side: Side = "inputs",
        steps: int = 1,
        learn_weights: bool = False,
        lipschitz: float = 1.0,
    ) -> None:
        super().__init__(
            in_channels,
            out_channels,
            kernel_size,
            stride,
            padding,
            output_padding,
            groups,
            bias,
            dilation,
            padding_mode,
            device,
            dtype,
        )
        self._constrain(side, steps, learn_weights, lipschitz, None)


class AOLConvTranspose2d(_AOLLayer, nn.ConvTranspose2d):
    """`torch.nn.ConvTranspose2d` with Lipschitz constant at most 1."""

    plain_class = nn.ConvTranspose2d

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int],
        stride: int | tuple[int, int] = 1,
        padding: int | tuple[int, int] = 0,
        output_padding: int | tuple[int, int] = 0,
        groups: int = 1,
        bias: bool = True,
        dilation: int | tuple[int, int] = 1,
        padding_mode: PaddingMode = "zeros",
        device: Any = None,
        dtype: Any = None,
        *,
        side: Side = "inputs",
        steps: int = 1,
        learn_weights: bool = False,
        lipschitz: float = 1.0,
    ) -> None:
        super().__init__(
            in_channels,
            out_channels,
            kernel_size,
            stride,
            padding,
            output_padding,
            groups,
            bias,
            dilation,
            padding_mode,
            device,
            dtype,
        )
        self._constrain(side, steps, learn_weights, lipschitz, None)


class AOLConvTranspose3d(_AOLLayer, nn.ConvTranspose3d):
    """`torch.nn.ConvTranspose3d` with Lipschitz constant at most 1."""

    plain_class = nn.ConvTranspose3d

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: int | tuple[int, int, int],
        stride: int | tuple[int, int, int] = 1,
        padding: int | tuple[int, int, int] = 0,
        output_padding: int | tuple[int, int, int] = 0,
        groups: int = 1,
        bias: bool = True,
        dilation: int | tuple[int, int, int] = 1,
        padding_mode: PaddingMode = "zeros",
        device: Any = None,
        dtype: Any = None,
        *,
        side: Side = "inputs",
        steps: int = 1,
        learn_weights: bool = False,
        lipschitz: float = 1.0,
    ) -> None:
        super().__init__(
            in_channels,
            out_channels,
            kernel_size,
            stride,
            padding,
            output_padding,
            groups,
            bias,
            dilation,
            padding_mode,
            device,
            dtype,
        )
        self._constrain(side, steps, learn_weights, lipschitz, None)
