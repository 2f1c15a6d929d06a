"""The constant of a network as training may use it, differentiable: LMT, GloRo, EMMA and CR put it into their losses.

A chain is split before its last linear layer. If the features have constant K and w_i are the rows of what follows,

    |(f_i - f_j)(x) - (f_i - f_j)(y)| <= K |w_i - w_j| |x - y|        (per pair; never more than sqrt(2) K ||W||).

Factors that are not known by construction are estimates of power iteration: for losses, never for certificates.
`pair_distances` is also what evaluation takes its distances from, with the stored weights in float64.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from onelip.geometry import LINEAR_LAYERS, geometry_of
from onelip.methods._parametrization import attach, find_parametrization, original_of, weight_of
from onelip.methods._sound import PowerIterated
from onelip.nn import ConcatenationPool2d, FirstChannels, LipschitzAvgPool2d, PadChannels

Layer = TypeVar("Layer", bound=nn.Module)

# What may follow the last linear layer: linear maps without weights.
_TAIL = (nn.Flatten, nn.Identity, FirstChannels, PadChannels, LipschitzAvgPool2d, ConcatenationPool2d)


class NotAChain(ValueError):
    """A network that is not one module after the other, or has one without a constant."""


class Tracked(PowerIterated):
    """The weight as it is, with a vector that follows its largest singular value through training."""

    def forward(self, P: Tensor) -> Tensor:
        return P

    def constant_in(self, dtype: torch.dtype) -> None:
        return None

    def estimated_constant(self, P: Tensor) -> Tensor:
        return self.estimate(P)

    def describe(self) -> str:
        return "free weights, with an estimate of their norm for the loss"


def track(module: Layer, *, iterations: int = 5, input_size: int | Sequence[int] | None = None) -> Layer:
    """Follow the norm of a layer for the loss, in place; the weight stays as it is; return the layer.

    Args:
        module: Linear, Conv1d to Conv3d, ConvTranspose1d to ConvTranspose3d.
        iterations: steps of the power method in each step of training.
        input_size: spatial size of the images that the layer sees.

    Example:
        >>> layer = track(nn.Linear(3, 3))
    """
    size = tuple(input_size) if isinstance(input_size, Sequence) else input_size
    geometry = geometry_of(module, size)
    weight = weight_of(module, geometry)
    made = Tracked(module, geometry, weight.shape, iterations=iterations, input_size=size)
    made.warm_up(module)
    return attach(module, made)


def links(model: nn.Module) -> Iterator[nn.Module]:
    """The modules of a chain in order, chains within chains taken apart.

    Example:
        >>> [type(link).__name__ for link in links(nn.Sequential(nn.Sequential(nn.ReLU()), nn.Flatten()))]
        ['ReLU', 'Flatten']
    """
    if type(model) is nn.Sequential:
        for child in model:
            yield from links(child)
    else:
        yield model


def split_head(model: nn.Module) -> tuple[list[nn.Module], list[nn.Module]] | None:
    """(features, head): the head is the last linear layer and the weightless linear maps after it; None if there is
    no such head.

    Example:
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


def estimated_constant(modules: Sequence[nn.Module]) -> Tensor | float:
    """The product of the constants of a chain, estimated where nothing is proved, differentiable."""
    from onelip.bounds.modules import vouch

    product: Tensor | float = 1.0
    for module in modules:
        found = find_parametrization(module) if isinstance(module, LINEAR_LAYERS) else None
        own: Callable[[], Tensor | float] | None = getattr(module, "estimated_constant", None)
        if found is not None:
            product = product * found.estimated_constant(original_of(module))
        elif own is not None:
            product = product * own()
        else:
            known = vouch(module)
            if known.constant is None:
                raise NotAChain(
                    f"expected a chain of modules with known constants, got {type(module).__name__}: {known.why}; "
                    "apply the method to the whole model with onelip.constrain, and use onelip's layers in between"
                )
            product = product * known.constant
    return product


def head_rows(head: Sequence[nn.Module], feature_shape: Sequence[int], like: Tensor) -> Tensor:
    """The rows w_i of a head as a linear map (classes, *feature_shape), differentiable in its weights.

    Row i is the derivative of score i; all come from one pass, sample i of the batch being asked for score i.
    """
    zeros = torch.zeros(1, *feature_shape, dtype=like.dtype, device=like.device)
    with torch.no_grad():
        classes = _run(head, zeros).shape[1]
    with torch.enable_grad():
        x = zeros.expand(classes, *feature_shape).clone().requires_grad_()
        (rows,) = torch.autograd.grad(_run(head, x).diagonal().sum(), x, create_graph=True)
    return rows


def pair_distances(rows: Tensor) -> Tensor:
    """|w_i - w_j| for all pairs (classes, classes); the derivative on the diagonal is zero.

    Example:
        >>> pair_distances(torch.eye(2))
        tensor([[0.0000, 1.4142],
                [1.4142, 0.0000]])
    """
    flat = rows.flatten(1)
    return torch.linalg.vector_norm(flat[:, None] - flat[None], dim=2)


class PairConstants:
    """K_ij of a model, for losses: call it with a model and images; remembers the shape of the features.

    Example:
        >>> model = nn.Sequential(track(nn.Linear(3, 3)), track(nn.Linear(3, 2)))
        >>> PairConstants()(model, torch.zeros(1, 3)).shape
        torch.Size([2, 2])
    """

    def __init__(self) -> None:
        self._shapes: dict[tuple[int, ...], tuple[int, ...]] = {}

    def __call__(self, model: nn.Module, images: Tensor) -> Tensor:
        """(classes, classes), differentiable in the weights."""
        parts = split_head(model)
        if parts is None:
            raise NotAChain(
                "expected a chain that ends with a linear layer (and perhaps Flatten, FirstChannels or an average), "
                f"got {type(list(links(model))[-1]).__name__} at its end"
            )
        features, head = parts
        shape = tuple(images.shape[1:])
        if shape not in self._shapes:
            self._shapes[shape] = output_shape(features, images)
        weight = next(p for p in head[0].parameters())
        rows = head_rows(head, self._shapes[shape], weight)
        return pair_distances(rows) * estimated_constant(features)


@torch.no_grad()
def output_shape(features: Sequence[nn.Module], images: Tensor) -> tuple[int, ...]:
    """Shape of a sample's features, found by a run that leaves no trace: in eval mode nothing is tracked."""
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
