"""The bound of a module by itself, without its input: from its class, its settings and its fixed weights.

One rule per exact type: a subclass may have changed `forward`. Where no rule is known there is no bound, never a guess.
Weights that training changes are not read (`bound_module`) or read on request (`bound_stored`).
"""

import math
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.utils import parametrize

from onelip.bounds.fast import Effort
from onelip.bounds.linear import bound_layer
from onelip.core.errors import NonFiniteWeight, UnsoundBound, UnsupportedLayer
from onelip.core.geometry import LINEAR_LAYERS
from onelip.core.lipschitz_module import Bound, LipschitzModule, is_changed
from onelip.core.parametrization import bound_by_construction
from onelip.core.rounding import multiply_up
from onelip.graph.step import Refusal, bound_by_rule, why_batch


def bound_module(module: nn.Module, rank: int | None = None) -> Bound:
    """The bound of a module by itself.

    Args:
        module: the module.
        rank: number of axes of its input, with the batch; None if it is not known.

    Examples:
        >>> bound_module(nn.LeakyReLU(3.0))
        Bound(constant=3.0, why='slopes 1 and 3')
    """
    if changed := is_changed(module):
        return Bound(None, changed)
    try:
        if isinstance(module, LINEAR_LAYERS):
            found = bound_by_construction(module) or _bound_fixed(module)
        else:
            found = _stated(module, rank) if isinstance(module, LipschitzModule) else bound_by_rule(module)
        constant, why = found.constant, found.why
    except Refusal as refusal:
        return Bound(None, str(refusal))
    except UnsoundBound:
        raise
    except Exception as error:  # settings that torch refuses, too: a rule that fails proves nothing
        return Bound(None, f"its rule failed: {type(error).__name__}: {error}")
    is_number = isinstance(constant, int | float) and 0 <= constant < math.inf
    return Bound(constant, why) if constant is None or is_number else Bound(None, "its bound is no finite number")


_FIXED: WeakKeyDictionary[nn.Module, tuple[Tensor, list[str], Bound]] = WeakKeyDictionary()
_SETTINGS = (
    "stride", "padding", "dilation", "groups", "padding_mode", "kernel_size", "output_padding",
    "_reversed_padding_repeated_twice",
)  # fmt: skip


def _bound_fixed(module: nn.Module) -> Bound:
    """The bound of a linear layer without a parametrization, if its weight needs no gradient.

    It is computed once for each weight. The weight is compared with a copy, since `weight.data` can be changed without
    a trace in the version counter of torch.
    """
    if parametrize.is_parametrized(module):
        return Bound(None, "parametrized by something else: not bounded by construction")
    weight: Any = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.requires_grad:
        return Bound(None, "free weights: not bounded by construction")
    if weight.is_meta:
        return Bound(None, "fixed weights without values: load them first")
    settings = [repr(getattr(module, name, None)) for name in _SETTINGS]
    known = _FIXED.get(module)
    if known is None or known[1] != settings or not _same(known[0], weight):
        stored = bound_stored(module)
        why = "fixed weights" if stored.constant is not None else stored.why
        known = _FIXED[module] = weight.detach().clone(), settings, Bound(stored.constant, why)
    return known[2]


def _same(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and one.device == other.device and torch.equal(one, other)


def _stated(module: LipschitzModule, rank: int | None) -> Bound:
    """The bound that a layer states itself."""
    dim = getattr(module, "dim", None)
    axes = [axis for axis in (dim if isinstance(dim, tuple) else (dim,)) if isinstance(axis, int)]
    if why := why_batch(axes, rank):
        raise Refusal(why)
    return module.bound()


def bound_stored(module: nn.Module, effort: Effort = "normal") -> Bound:
    """The bound of a module with the weights that it stores: free weights are bounded, too."""
    if not isinstance(module, LINEAR_LAYERS) or is_changed(module):
        return bound_module(module)
    try:
        return Bound(bound_layer(module, effort=effort).value, "stored weights")
    except (UnsupportedLayer, NonFiniteWeight, OverflowError) as error:
        return Bound(None, str(error))


def links(model: nn.Module) -> Iterator[nn.Module]:
    """The modules of a chain in order; nested Sequentials are flattened, wrappers for several processes removed.

    Examples:
        >>> [type(link).__name__ for link in links(nn.Sequential(nn.Sequential(nn.ReLU()), nn.Flatten()))]
        ['ReLU', 'Flatten']
    """
    if type(model) in (DataParallel, DistributedDataParallel) and not is_changed(model):
        (model,) = model.children()
    if _is_compiled(model) and not (model._forward_hooks or model._forward_pre_hooks):
        (model,) = model.children()
    if type(model) is nn.Sequential and not is_changed(model):
        for child in model:
            yield from links(child)
    else:
        yield model


def _is_compiled(model: nn.Module) -> bool:
    """Whether torch.compile(model) has returned it; its class takes seconds to import, and is there if it is used."""
    kind = getattr(sys.modules.get("torch._dynamo.eval_frame"), "OptimizedModule", None)
    return type(model) is kind


def bound_chain(modules: Iterable[nn.Module], bound: Callable[[nn.Module], Bound] = bound_module) -> Bound:
    """The bound of modules applied one after the other: the product of their constants, if all are known.

    Args:
        modules: in order, such as `links(model)`.
        bound: of one module: `bound_module` by construction, `bound_stored` with the weights that it stores.

    Examples:
        >>> layer = nn.Linear(1, 1)
        >>> _ = nn.init.constant_(layer.weight, 2.0)
        >>> 2.0 <= bound_chain([layer, nn.ReLU()], bound_stored).constant < 2.0 + 1e-9
        True
    """
    product = 1.0
    for module in modules:
        found = bound(module)
        if found.constant is None:
            return Bound(None, f"{type(module).__name__}: {found.why}")
        product = multiply_up(product, found.constant)
    return Bound(product, "product of the modules")
