"""Promises about the input that a bound rests on, checked at every call."""

from typing import Any

from torch import Tensor, nn


class InputSizeGuard:
    """Forward pre-hook that refuses inputs whose spatial size is not a multiple of what the bound assumed."""

    def __init__(self, multiples: tuple[int, ...]) -> None:
        self.multiples = multiples

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = args[0] if args else kwargs.get("input")
        size = tuple(x.shape[-len(self.multiples) :]) if isinstance(x, Tensor) else ()
        if any(n % m for n, m in zip(size, self.multiples, strict=True)):
            raise ValueError(
                f"expected an input whose spatial size is a multiple of {self.multiples}, got {size}: the layer's "
                "stride-aware bound holds for circular padding only where the phases close; apply the method without "
                "input_size to use the plain bound, which holds for every size"
            )


def guard_input_size(module: nn.Module, multiples: tuple[int, ...]) -> None:
    """Make the module refuse inputs whose spatial size is not a multiple of the given numbers."""
    module.register_forward_pre_hook(InputSizeGuard(multiples), with_kwargs=True)
