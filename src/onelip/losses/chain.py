r"""Constants of a chain of modules, differentiable, for losses: LMT, GloRo, EMMA and certificate regularisation.

A chain is split before its last linear layer. If the features have the constant $K$ and $w_i$ are the rows of the rest,

$$ |(f_i - f_j)(x) - (f_i - f_j)(x')| \le K\,|w_i - w_j|\,|x - x'|, $$

which is never more than $\sqrt 2\,K\,\|W\|\,|x - x'|$. Factors that are not known by construction are estimated by
power iteration: for losses, never for certificates.
"""

import math
from collections.abc import Callable, Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from onelip.core.geometry import LINEAR_LAYERS
from onelip.core.parametrization import find_parametrization, original_of
from onelip.graph.modules import bound_module, links
from onelip.nn import ConcatenationPool2d, FirstChannels, LipschitzAvgPool2d, PadChannels

# Linear maps without weights, which may follow the last linear layer.
_TAIL = (nn.Flatten, nn.Identity, FirstChannels, PadChannels, LipschitzAvgPool2d, ConcatenationPool2d)


class NotAChain(ValueError):
    """A network with a module that has neither a known nor an estimated constant."""


def split_head(model: nn.Module) -> tuple[list[nn.Module], list[nn.Module]] | None:
    """Split a model into features and head: the last linear layer, and the linear maps without weights after it.

    Returns:
        The modules of both parts; None if the model does not end with such a head.

    Examples:
        >>> features, head = split_head(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2)))
        >>> len(features), len(head)
        (2, 1)
    """
    chain = list(links(model))
    last = len(chain) - 1
    while last >= 0 and type(chain[last]) in _TAIL:
        last -= 1
    if last < 0 or not isinstance(chain[last], LINEAR_LAYERS):
        return None
    return chain[:last], chain[last:]


def estimated_constant(model: nn.Module | Sequence[nn.Module]) -> Tensor | float:
    """Return the product of the constants of a chain, differentiable; estimated where none is known by construction.

    Raises:
        NotAChain: if a module has neither a constant nor an estimate.
    """
    product: Tensor | float = 1.0
    for module in links(model) if isinstance(model, nn.Module) else model:
        found = find_parametrization(module) if isinstance(module, LINEAR_LAYERS) else None
        own: Callable[[], Tensor | float] | None = getattr(module, "estimated_constant", None)
        if found is not None:
            product = product * found.estimated_constant(original_of(module))
        elif own is not None:
            product = product * own()
        else:
            known = bound_module(module)
            if known.constant is None:
                raise NotAChain(
                    f"expected a chain of modules with known constants, got {type(module).__name__}: {known.why}; "
                    "apply a method to the whole model with onelip.constrain, and use onelip's layers in between"
                )
            product = product * known.constant
    return product


def head_rows(head: Sequence[nn.Module], feature_shape: Sequence[int], like: Tensor) -> Tensor:
    """Return the rows w_i of a head as a linear map (classes, *feature_shape), differentiable in its weights.

    Row i is the derivative of score i. All rows come from one pass, in which sample i of the batch gives score i.
    """
    zeros = torch.zeros(1, *feature_shape, dtype=like.dtype, device=like.device)
    with torch.no_grad():
        classes = _run(head, zeros).shape[1]
    with torch.enable_grad():
        x = zeros.expand(classes, *feature_shape).clone().requires_grad_()
        (rows,) = torch.autograd.grad(_run(head, x).diagonal().sum(), x, create_graph=True)
    return rows


def pair_distances(rows: Tensor) -> Tensor:
    """Return |w_i - w_j| for all pairs (classes, classes); the derivative on the diagonal is zero.

    Examples:
        >>> pair_distances(torch.eye(2))
        tensor([[0.0000, 1.4142],
                [1.4142, 0.0000]])
    """
    flat = rows.flatten(1)
    return torch.linalg.vector_norm(flat[:, None] - flat[None], dim=2)


class PairConstants:
    """Constants K_ij of f_i - f_j of a model, for losses; the shapes of features are cached for each model.

    They are K |w_i - w_j| for a model that ends with a linear layer, and sqrt(2) times its constant for any other.

    Examples:
        >>> import onelip
        >>> model = nn.Sequential(onelip.nn.AOLLinear(3, 3), onelip.nn.AOLLinear(3, 2))
        >>> PairConstants()(model, torch.zeros(1, 3)).shape
        torch.Size([2, 2])
    """

    def __init__(self) -> None:
        self._shapes: WeakKeyDictionary[nn.Module, dict[tuple[int, ...], tuple[int, ...]]] = WeakKeyDictionary()

    def __call__(self, model: nn.Module, images: Tensor) -> Tensor:
        """Return the constants (classes, classes), differentiable in the weights."""
        chain = list(links(model))
        features, head = split_head(model) or (chain, [])
        known, shape = self._shapes.setdefault(model, {}), tuple(images.shape[1:])
        if shape not in known:
            known[shape] = output_shape(features, images)
        if not head:
            others = 1 - torch.eye(known[shape][0], device=images.device)
            return others * (math.sqrt(2) * estimated_constant(chain))
        weight = next(p for p in head[0].parameters())
        rows = head_rows(head, known[shape], weight)
        return pair_distances(rows) * estimated_constant(features)


@torch.no_grad()
def output_shape(features: Sequence[nn.Module], images: Tensor) -> tuple[int, ...]:
    """Return the shape of the features of a sample, from a run in eval mode, which changes no state."""
    modules = [inner for module in features for inner in module.modules()]
    modes = [module.training for module in modules]
    for module in features:
        module.eval()
    try:
        weight = next((p for module in features for p in module.parameters()), images)
        one = torch.zeros(1, *images.shape[1:], dtype=weight.dtype, device=weight.device)
        return tuple(_run(features, one).shape[1:])
    finally:
        for module, mode in zip(modules, modes, strict=True):
            module.training = mode


def _run(modules: Sequence[nn.Module], x: Tensor) -> Tensor:
    for module in modules:
        x = module(x)
    return x
