"""Opaque operations of a trace: layers that stay single calls, and boolean masks as indices.

Note [Leaves]
    The bound of a linear layer is tighter as a module than as ATen calls: circular padding is part of one operator
    there, and a pad that copies, followed by a convolution, here. A layer of `onelip.nn` states its constant. Such
    layers stay single calls: during the trace their `forward` is one opaque operation. A layer with hooks or with a
    replaced forward is traced through, since it may compute something else. So is a layer that is called under
    autocast, under a mode of the user (TorchFunctionMode), with another class, or with replaced functions.
"""

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import unset_fake_temporarily
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from onelip.core.contents import is_library
from onelip.core.geometry import LINEAR_LAYERS
from onelip.core.lipschitz_module import LipschitzModule, is_changed

_WHOLE: set[type[nn.Module]] = set()


def keep_whole(*layers: type[nn.Module]) -> None:
    """Keep layers of torch as single calls: their rule is lost in ATen operations."""
    _WHOLE.update(layers)


def is_leaf(module: nn.Module) -> bool:
    """Note [Leaves]."""
    if is_changed(module):
        return False
    if isinstance(module, LINEAR_LAYERS):
        return True
    if isinstance(module, LipschitzModule):
        # One made of others, without a constant of its own, has to be looked into.
        return module.proved_constant is not None or next(module.children(), None) is None
    return type(module) in _WHOLE


def is_known(module: nn.Module) -> bool:
    """Whether a leaf is a layer of torch or onelip, whose forward stores no state."""
    kind = type(module)
    return is_library(kind.__module__, kind.__qualname__, kind)


# The functions that layers of torch call; a forward may replace one for a while.
_FUNCTIONS = dict(vars(nn.functional))


def _is_intercepted() -> bool:
    """Whether code outside of torch replaces the operations of torch, by a mode or by replaced functions."""
    modes = [*_get_current_function_mode_stack(), *_get_current_dispatch_mode_stack()]
    kinds = map(type, modes)
    if not all(is_library(kind.__module__, kind.__qualname__, kind) for kind in kinds):
        return True
    return any(getattr(nn.functional, name, None) is not function for name, function in _FUNCTIONS.items())


def as_one_operation(module: nn.Module, leaf: nn.Module, number: int) -> Callable[..., Tensor]:
    """Return the forward of a leaf in the copy that runs: it calls the operation that represents the leaf."""
    own = module.forward

    def forward(*args: Any, **kwargs: Any) -> Tensor:
        x = args[0] if len(args) == 1 and not kwargs else None
        if type(module) is not type(leaf):  # a forward may change the class of a layer for a while
            return type(module).forward(module, *args, **kwargs)
        if not isinstance(x, Tensor) or torch.is_autocast_enabled(x.device.type):
            return own(*args, **kwargs)
        if _is_intercepted() or not _is_set_like(module, leaf):
            return own(*args, **kwargs)
        # The tensors go along, so that the graph shows whether they are still the stored ones.
        return leaf_operation()(x, tensors_of(module), number)

    return forward


def tensors_of(module: nn.Module) -> list[Tensor]:
    """All parameters and buffers, in order."""
    return [*module.parameters(), *module.buffers()]


def _is_set_like(module: nn.Module, leaf: nn.Module) -> bool:
    """Whether the settings are those of the leaf: a forward may have changed them before it calls the layer."""
    return _settings(module) == _settings(leaf) and len(tensors_of(module)) == len(tensors_of(leaf))


def _settings(module: nn.Module) -> dict[str, Any]:
    numbers = (bool, int, float, str, tuple, list, type(None))
    found = {
        name: value if isinstance(value, numbers) else type(value)
        for name, value in module.__dict__.items()
        if not name.startswith("_") and name != "forward"
    }
    found["_reversed"] = getattr(module, "_reversed_padding_repeated_twice", None)
    found["_has"] = [name for name, parameter in module._parameters.items() if parameter is not None]
    return found


_LEAVES: ContextVar[list[nn.Module]] = ContextVar("leaves of the trace under way")


@contextlib.contextmanager
def leaves_are(leaves: list[nn.Module]) -> Iterator[None]:
    token = _LEAVES.set(leaves)
    try:
        yield
    finally:
        _LEAVES.reset(token)


class LeafRefused(Exception):
    """A refusal from inside the trace, whose words are for the user as they are."""


@functools.cache
def leaf_operation() -> Callable[[Tensor, list[Tensor], int], Tensor]:
    """The operation that represents a leaf."""

    def compute(x: Tensor, tensors: list[Tensor], number: int) -> Tensor:
        module = _LEAVES.get()[number]
        y = module.forward(x)
        if not isinstance(y, Tensor):
            raise LeafRefused(
                f"expected {type(module).__name__} to give one tensor, got {type(y).__name__}; return a tensor"
            )
        return y.clone()  # of its own memory, as torch wants it of an operation

    def shape_of(x: Tensor, tensors: list[Tensor], number: int) -> Tensor:
        # On true numbers: a layer that states its constant may look at values as it likes.
        with unset_fake_temporarily(), torch.no_grad():
            n = min(4, x.shape[0]) if isinstance(x.shape[0], int) else 2
            size = (n, *map(int, x.shape[1:]))
            sample = torch.randn(size, generator=torch.Generator().manual_seed(0)).to(x.device, x.dtype)
            before = sample.clone()
            y = compute(sample, [], number)
            if not torch.equal(before, sample):
                kind = type(_LEAVES.get()[number]).__name__
                raise LeafRefused(
                    f"expected {kind} not to change its input, got one that writes into it; clone the input first"
                )
        if y.shape[:1] != (n,) and n != x.shape[0]:
            kind = type(_LEAVES.get()[number]).__name__
            raise LeafRefused(f"expected {kind} to keep the batch as first axis, got {tuple(y.shape)} of {n} samples")
        first = (x.shape[0],) if y.shape[:1] == (n,) else y.shape[:1]
        return x.new_empty((*first, *y.shape[1:]), dtype=y.dtype)

    types = {"x": Tensor, "tensors": list[Tensor], "number": int, "return": Tensor}
    compute.__annotations__, shape_of.__annotations__ = types, types
    leaf = torch.library.custom_op("onelip::leaf", compute, mutates_args=())
    leaf.register_fake(shape_of)
    return torch.ops.onelip.leaf.default


# ---- Boolean masks as indices: the shape of `x[:, mask]` depends on values, which a trace does not have
#
# Example: with mask = [True, False, True], `x[:, mask]` is `x[:, [0, 2]]`. If a forward indexes with masks, it is run
# once on numbers to count the entries that each mask picks, here 2. Then it is traced with the operation
# `onelip::places` in place of each mask, which returns that many indices. The reader computes the indices of a constant
# mask, and checks their number. It refuses a mask that depends on the input.


PLACES = "onelip.places.default"


class Masks(TorchFunctionMode):
    """Counts the entries that masks pick; in a trace, where they have no values, replaces masks by their places.

    Args:
        counts: the number of entries that each mask picks, in order; None to count them.
    """

    def __init__(self, counts: list[int] | None = None) -> None:
        super().__init__()
        self.counts = counts
        self.found: list[int] = []
        self.is_used = False
        self._depth = 0  # of layers that are single calls, whose masks the graph does not show

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (Tensor.__getitem__, Tensor.__setitem__):
            given = args[1] if isinstance(args[1], tuple) else (args[1],)
            index = [part for one in given for part in self._places(one, args[0])]
            args = (args[0], tuple(index), *args[2:])
        elif func in (Tensor.nonzero, torch.nonzero) and args[0].dtype == torch.bool and self.counts is not None:
            places = self._places(args[0], args[0])
            return tuple(places) if kwargs.get("as_tuple") else torch.stack(places, 1)
        elif func in (Tensor.nonzero, torch.nonzero):
            self._places(args[0], args[0])
        return func(*args, **kwargs)

    def _places(self, index: Any, x: Tensor) -> list[Any]:
        if isinstance(index, list) and index and all(isinstance(flag, bool) for flag in index):
            index = torch.tensor(index, device=x.device)
        if not isinstance(index, Tensor) or index.dtype != torch.bool or index.dim() == 0 or self._depth:
            return [index]
        self.is_used = True
        is_trace = torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None
        if not is_trace:
            if self.counts is None:
                self.found.append(int(index.sum()))
            return [index]
        if not self.counts:
            return [index]
        return list(_operation()(index, self.counts.pop(0)).unbind(1))

    def count(self, model: nn.Module, example: Tensor, leaves: list[str]) -> list[int]:
        """Run a model and count the entries that each of its masks picks, except in layers that are single calls."""
        for path in leaves:
            leaf = model.get_submodule(path)
            leaf.register_forward_pre_hook(lambda *_: self._go(1))
            leaf.register_forward_hook(lambda *_: self._go(-1))
        with self:
            model(example)
        return self.found

    def _go(self, by: int) -> None:
        self._depth += by


@functools.cache
def _operation() -> Callable[[Tensor, int], Tensor]:
    def places(mask: Tensor, count: int) -> Tensor:
        found = mask.nonzero()
        if len(found) != count:
            raise ValueError(f"expected a mask that picks {count} entries, got one that picks {len(found)}")
        return found

    def shape_of(mask: Tensor, count: int) -> Tensor:
        return mask.new_empty((count, mask.dim()), dtype=torch.long)

    types = {"mask": Tensor, "count": int, "return": Tensor}
    places.__annotations__, shape_of.__annotations__ = types, types
    op = torch.library.custom_op("onelip::places", places, mutates_args=())
    op.register_fake(shape_of)
    return torch.ops.onelip.places.default
