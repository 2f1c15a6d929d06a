"""Modules that state a proved Lipschitz constant, and hooks that check the input shape which a bound assumes."""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from onelip.core.errors import UnsoundBound
from onelip.core.geometry import LINEAR_LAYERS

Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class Bound:
    """A proved Lipschitz constant (L2, one sample, eval mode, real arithmetic).

    Attributes:
        constant: the number; None if no bound is known.
        why: the argument for it, or the reason why no bound is known, in a few words.
    """

    constant: float | None
    why: str


class InputSizeGuard:
    """Forward pre-hook that raises if the spatial size of the input is not a multiple of `multiples`.

    Args:
        multiples: for each spatial axis, the number that must divide the size.
    """

    def __init__(self, multiples: tuple[int, ...]) -> None:
        self.multiples = multiples

    @property
    def __name__(self) -> str:
        """Read by `torch.jit.script`, which compiles hooks."""
        raise RuntimeError(
            "torch.jit.script cannot compile the check of the image size; use torch.jit.script(onelip.bake(model, "
            "guard=False)), which does not have it, or torch.jit.trace(model, images)"
        )

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = args[0] if args else kwargs.get("input")
        size = tuple(x.shape[-len(self.multiples) :]) if isinstance(x, Tensor) else ()
        if any(n % m for n, m in zip(size, self.multiples, strict=True)):
            raise ValueError(
                f"expected an input whose spatial size is a multiple of {self.multiples}, got {size}: with circular "
                "padding the stride-aware bound holds only if the stride divides the input size; apply the method "
                "without input_size to use the plain bound, which holds for every size"
            )


class ImageSizeGuard(InputSizeGuard):
    """Forward pre-hook that raises if the images do not have the shape that the network was built for.

    Without it, a convolutional network silently accepts larger images and returns several logits per class.

    Args:
        shape: (channels, height, width).
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        x = args[0] if args else kwargs.get("input")
        if isinstance(x, Tensor) and tuple(x.shape[1:]) != self.shape:
            wanted, got = ("x".join(map(str, shape)) for shape in (self.shape, x.shape[1:]))
            raise ValueError(
                f"expected images of shape (batch, channels, height, width) with {wanted}, got {got}; build the model "
                "with the in_channels and image_size of your images, or resize the images"
            )


def guard_image_shape(model: nn.Module, shape: tuple[int, ...]) -> None:
    """Make a network raise for images whose shape is not `shape` (channels, height, width)."""
    model.register_forward_pre_hook(ImageSizeGuard(shape), with_kwargs=True)


def guard_input_size(module: nn.Module, multiples: tuple[int, ...]) -> None:
    """Make a module raise for inputs whose spatial size is not a multiple of the given numbers."""
    module.register_forward_pre_hook(InputSizeGuard(multiples), with_kwargs=True)


def _checked(bound: "Callable[[Any], Bound]") -> "Callable[[Any], Bound]":
    """Let a method `bound` return None where the layer, or a parametrized tensor of it, may not be what it assumes."""

    @functools.wraps(bound)
    def checked(self: nn.Module) -> Bound:
        reason = is_changed(self) or why_other_map(self) or why_other_mode(self)
        reason = reason or _why_other_shape(self) or _why_not_finite(self)
        if reason is not None:
            return Bound(None, reason)
        try:
            return bound(self)
        except UnsoundBound:
            raise
        except Exception as error:  # such as tensors of the wrong shape: a bound that fails proves nothing
            return Bound(None, f"its bound failed: {type(error).__name__}: {error}")

    return checked


class LipschitzModule(nn.Module):
    r"""Base class of layers with a proved L2 Lipschitz constant.

    The constant is a number $L$ with $\lVert f(x) - f(y) \rVert_2 \le L \lVert x - y \rVert_2$ for all $x, y$. It
    describes the module as a map between whole samples (all axes but the batch axis flattened), in eval mode and in
    real arithmetic. Certificates account for rounding separately. Constants of a composition multiply,
    $L(f \circ g) \le L(f) L(g)$.

    Subclasses set `proved_constant`, or override `bound` if the constant depends on settings or weights. `bound` is
    not called, and the constant is None, if the layer has a hook or a replaced method (`is_changed`), if a
    parametrization of it was changed (`why_other_map`), if a part of it is not in eval mode (`why_other_mode`), if a
    tensor has another shape than in `tensor_shapes`, or if a parameter is not finite.

    Attributes:
        proved_constant: the constant, if it is the same for all instances; else None.
        is_scriptable: whether `torch.jit.script` can compile the layer.

    Examples:
        >>> class Mirror(LipschitzModule):
        ...     proved_constant = 1.0
        ...     def forward(self, x):
        ...         return -x
        >>> Mirror().lipschitz_constant
        1.0
        >>> class Scaled(LipschitzModule):
        ...     def __init__(self, factor):
        ...         super().__init__()
        ...         self.factor = factor
        ...     def bound(self):
        ...         return Bound(abs(self.factor), "the factor")
        ...     def forward(self, x):
        ...         return self.factor * x
        >>> Scaled(-2.0).lipschitz_constant
        2.0
    """

    proved_constant: ClassVar[float | None] = None
    is_scriptable: ClassVar[bool] = False
    __jit_unused_properties__: ClassVar[list[str]] = ["lipschitz_constant", "input_shape", "tensor_shapes"]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "bound" in vars(cls):
            cls.bound = _checked(cls.bound)

    @property
    def input_shape(self) -> tuple[int, ...] | None:
        """Shape of one sample, if the layer accepts only one shape; else None. Constants are measured at this shape."""
        return None

    @property
    def tensor_shapes(self) -> dict[str, tuple[int, ...]]:
        """Shapes of parameters and buffers without which the constant does not hold: others may copy the input."""
        return {}

    @_checked
    def bound(self) -> Bound:
        """Return the proved constant and the reason for it, or the reason why there is none.

        `onelip.summary` and `onelip.audit` read it. An override must never return a smaller number than it can prove.
        """
        if self.proved_constant is None:
            return Bound(None, f"{type(self).__name__} states no constant; set `proved_constant` or override `bound`")
        return Bound(self.proved_constant, "stated by the layer")

    @property
    def lipschitz_constant(self) -> float | None:
        """The proved L2 Lipschitz constant (eval mode, real arithmetic); None if no bound is known, see `bound`."""
        found: Any = self.bound()
        constant = found.constant if isinstance(found, Bound) else found
        is_number = isinstance(constant, int | float) and 0 <= constant < math.inf
        if not isinstance(found, Bound) or not (constant is None or is_number):
            raise TypeError(
                f"expected {type(self).__name__}.bound() to return Bound(constant, why) with a finite number of at "
                f"least 0, or None, got {found!r}"
            )
        return constant

    def __prepare_scriptable__(self) -> nn.Module:
        """Called by `torch.jit.script`. Layers that it can compile leave out the checks of inputs there."""
        if self.is_scriptable:
            return self
        raise RuntimeError(
            f"torch.jit.script cannot compile {type(self).__name__}; use torch.jit.trace(model, images), "
            "torch.export.export(model, (images,)) or onelip.export_onnx, with model = onelip.bake(...).eval()"
        )


_SAME_IN_EVAL: set[Any] = set()


def same_in_eval(function: Function) -> Function:
    """Decorate a method of a linear layer that computes in eval mode what the layer of torch does."""
    _SAME_IN_EVAL.add(function)
    return function


def is_changed(module: nn.Module) -> str | None:
    """Why the module may compute something else than its class is known for, or None."""
    if isinstance(module, torch.jit.ScriptModule):
        return "its code is TorchScript, which is not read; use the model that it was made from"
    if not module.__dict__.keys().isdisjoint(("forward", "_conv_forward", "_call_impl")):
        return "its forward was replaced"
    if not module.__dict__.keys().isdisjoint(module._parameters):
        return "an attribute has the name of a parameter and hides it"
    if nn.modules.module._global_forward_hooks or nn.modules.module._global_forward_pre_hooks:
        return "there are global forward hooks, which may change its input or output"
    compiled = getattr(module, "_compiled_call_impl", None)  # by module.compile()
    if compiled is not None and getattr(compiled, "_torchdynamo_orig_callable", None) != module._call_impl:
        return "its compiled call was replaced"
    hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
    if any(not isinstance(hook, InputSizeGuard) for hook in hooks):
        return "has a forward hook, which may change its input or output"
    kind = parametrize.type_before_parametrizations(module)
    if kind.__call__ is not nn.Module.__call__ or kind._call_impl is not nn.Module._call_impl:
        return "its class overrides __call__"
    if kind.__getattr__ is not nn.Module.__getattr__ or kind.__getattribute__ is not object.__getattribute__:
        return "its class overrides how attributes are read"
    if isinstance(module, LipschitzModule):
        if replaced := _replaced(module, kind):
            return f"its {replaced} was replaced"
        stated = ("proved_constant", "bound")
        own = "forward" if _depth(kind, "forward") < min(_depth(kind, n) for n in stated) else _override(kind, stated)
        if own is not None:
            return f"its class overrides {own} without stating its own constant"
    for torch_layer in LINEAR_LAYERS:
        if isinstance(module, torch_layer) and any(
            (own := getattr(kind, name, None)) is not getattr(torch_layer, name, None) and own not in _SAME_IN_EVAL
            for name in ("forward", "_conv_forward")
        ):
            return f"its class overrides the forward of {torch_layer.__name__}"
    return None


def why_other_map(module: nn.Module) -> str | None:
    """Why a parametrized tensor of the module may be another one than its parametrizations prove, or None."""
    for name, maps in _parametrizations(module).items():
        for part in maps.modules():
            kind = type(part)
            if part._forward_hooks or part._forward_pre_hooks:
                return f"the parametrization of {name!r} has a forward hook ({kind.__name__})"
            if replaced := _replaced(part, kind):
                return f"the parametrization of {name!r} has a replaced method ({kind.__name__}.{replaced})"
            if own := _override(kind, ("constant_in", "excess")):
                return f"{kind.__name__} overrides {own} without stating its own constant"
        expected = getattr(maps, "expected_shape", None)
        found = getattr(maps, "original", None)
        if expected is not None and isinstance(found, Tensor) and tuple(found.shape) != expected:
            return f"the parameter of {name!r} has shape {tuple(found.shape)} instead of {expected}"
    return None


def why_other_mode(module: nn.Module) -> str | None:
    """Why a module in eval mode computes something else than in eval mode, or None: a part of it is not in that mode.

    A module in training mode has no such reason: constants are those of eval mode.
    """
    if module.training:
        return None
    if (part := part_in_training(module)) is not None:
        return f"its part {part[0]!r} ({type(part[1]).__name__}) is in training mode; call eval() on the layer"
    lists = _parametrizations(module)
    if not lists:
        return None
    if any(part.training for part in module.parametrizations.modules()):  # pyright: ignore
        return "its parametrization is in training mode, and the layer is in eval mode; call eval() on the layer"
    cache: dict[tuple[int, str], Tensor | None] = parametrize._cache
    for name, maps in lists.items():
        cached = cache.get((id(module), name))
        if cached is None:
            continue
        with torch.no_grad():
            now = maps()
        if not (cached.shape == now.shape and cached.dtype == now.dtype and torch.equal(cached, now)):
            return (
                f"torch.nn.utils.parametrize.cached() has a value of {name!r} that is not the one in eval mode; leave "
                "the block first"
            )
    return None


# Layers of torch that compute something else in training mode.
_MODAL = (nn.modules.dropout._DropoutNd, nn.modules.batchnorm._NormBase, nn.RReLU, nn.MultiheadAttention)


def part_in_training(model: nn.Module) -> tuple[str, nn.Module] | None:
    """The name and the module of a part in training mode, where that may matter, of a model in eval mode; else None.

    Examples:
        >>> model = nn.Sequential(nn.ReLU(), nn.Dropout()).eval()
        >>> _ = model[1].train()
        >>> part_in_training(model)
        ('1', Dropout(p=0.5, inplace=False))
    """
    if model.training:  # constants are those of eval mode, which `model.eval()` gives all parts
        return None
    for name, module in model.named_modules():
        own = type(module).__module__.partition(".")[0] != "torch"  # what a class of others does is not known
        if module.training and ".parametrizations." not in f".{name}." and (own or isinstance(module, _MODAL)):
            return name, module
    return None


def _parametrizations(module: nn.Module) -> dict[str, Any]:
    """Return torch's lists of parametrizations by the name of the tensor."""
    if not parametrize.is_parametrized(module):
        return {}
    lists = module.parametrizations
    assert isinstance(lists, nn.ModuleDict)
    return dict(lists.items())


def _why_other_shape(module: Any) -> str | None:
    """Why a tensor of a layer is not as `tensor_shapes` states, or None; a tensor that is None is left out."""
    for name, expected in module.tensor_shapes.items():
        found = getattr(module, name)
        if found is not None and tuple(found.shape) != expected:
            return f"its {name!r} has shape {tuple(found.shape)} instead of {expected}"
    return None


def _why_not_finite(module: nn.Module) -> str | None:
    """Why the layer computes no numbers, as after training has diverged, or None."""
    for name, parameter in module.named_parameters():
        if not parameter.is_meta and not bool(parameter.isfinite().all()):
            return f"its {name!r} has a NaN or an infinity; load an earlier checkpoint"
    return None


# Methods that do not act on what a layer, or a parametrization in eval mode, computes.
_HARMLESS = {
    "extra_repr", "describe", "advice", "input_shape", "right_inverse", "orthogonal_side", "estimated_constant",
    "reset", "reset_parameters", "proved_constant", "lipschitz_constant", "is_scriptable", "train",
}  # fmt: skip


def _replaced(module: nn.Module, kind: type) -> str | None:
    """The name of a method that an attribute of the module hides, or None."""
    return next((name for name in vars(module) if callable(getattr(kind, name, None))), None)


def _override(kind: type, statements: tuple[str, ...]) -> str | None:
    """What a class outside of onelip and torch overrides, but not the statement about its result; None if nothing.

    Not only `forward`: what a class of onelip computes may be in any of its methods and properties.
    """
    stated = min(_depth(kind, name) for name in statements)
    for depth, base in enumerate(kind.__mro__[:stated]):
        if base.__module__.startswith(("onelip.", "torch.")):
            continue
        above = [other for other in kind.__mro__[depth + 1 :] if other not in (nn.Module, object)]
        for name in vars(base):
            is_used = name not in _HARMLESS and not name.startswith("__")
            if is_used and any(name in vars(other) for other in above):
                return name
    return None


def _depth(kind: type, name: str) -> int:
    """How far up the bases an attribute is defined; 0 is the class itself."""
    return next((i for i, base in enumerate(kind.__mro__) if name in vars(base)), len(kind.__mro__))
