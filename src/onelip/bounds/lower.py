"""How far a constant is reached: lower bounds, measured and not proved.

A ratio ||f(x) - f(y)|| / ||x - y|| that was seen is a lower bound of every Lipschitz constant of f. For linear maps the
power method finds the largest; for networks it is run on the derivative at several points, which move uphill. All in
float64, less what rounding can pretend: these numbers say how loose a proof is at most, and prove nothing.
"""

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from onelip.bounds.graph import Node, Ref
from onelip.bounds.rules._step import operation
from onelip.geometry import LINEAR_LAYERS

_STEP = 1e-4  # ||x - y|| in the search; small for a derivative, large against rounding
_ROUNDING = 2.0**-40  # of values; some thousand float64 operations deep
_SINGLE = 2.0**-20  # of slopes, where a forward works in float32 whatever it is given

_LINEAR = {
    f"aten.{name}"
    for name in [
        "linear.default",
        "addmm.default",
        "matmul.default",
        "mm.default",
        "bmm.default",
        "einsum.default",
        "conv1d.default",
        "conv2d.default",
        "conv3d.default",
        "conv1d.padding",
        "conv2d.padding",
        "conv3d.padding",
        "convolution.default",
        "conv_transpose1d.default",
        "conv_transpose2d.input",
        "conv_transpose3d.input",
    ]
}


def is_linear(node: Node) -> bool:
    """Whether the node is affine with stored weights: what `lower_of_linear` takes."""
    return isinstance(node.module, LINEAR_LAYERS) or (node.op in _LINEAR and len(node.inputs) == 1)


def lower_of_linear(node: Node, input_shape: tuple[int, ...], *, steps: int = 25, seed: int = 0) -> float:
    """A ratio ||A v|| / ||v|| of a linear node at its true input size, by the power method.

    Args:
        node: one for which `is_linear`.
        input_shape: of its operand, with the batch axis.
        steps: of the power method.
        seed: of its first vector.

    Example:
        >>> from onelip.bounds.graph import trace
        >>> graph = trace(torch.nn.Linear(3, 3, bias=False).requires_grad_(False).double(), torch.zeros(2, 3).double())
        >>> lower_of_linear(graph.nodes[1], (2, 3)) <= float(graph.nodes[1].module.weight.norm())
        True
    """
    apply = _linear_part(node)
    shape = (1, *input_shape[1:]) if node.module is not None else input_shape
    v = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    best = 0.0
    for _ in range(steps):
        size = v.norm()
        if not 0 < float(size) < torch.inf:
            break
        x = (v / size).requires_grad_()
        with torch.enable_grad():
            y = apply(x)
            (v,) = torch.autograd.grad(y, x, y.detach())  # A^T A x
        ratio = float(y.detach().norm() / x.detach().norm())
        best = max(best, ratio * (1 - _ROUNDING)) if ratio < torch.inf else best
    return best


def _linear_part(node: Node) -> Callable[[Tensor], Tensor]:
    if node.module is not None:
        layer = copy.deepcopy(node.module).cpu().double().requires_grad_(False)
        layer.register_parameter("bias", None)
        return layer.forward
    op = operation(node.op)

    def affine(x: Tensor) -> Tensor:
        def fill(argument: Any) -> Any:
            if isinstance(argument, Ref):
                return x
            return argument.detach().cpu().double() if isinstance(argument, Tensor) else argument

        return op(*tree_map(fill, tuple(node.arguments)), **tree_map(fill, dict(node.keywords)))

    def linear(x: Tensor) -> Tensor:
        return affine(x) - affine(torch.zeros_like(x)).detach()

    return linear


def lower_of_network(model: nn.Module, example: Tensor, *, steps: int = 24, seed: int = 0) -> float:
    """The largest ratio ||f(x) - f(y)|| / ||x - y|| found by power steps on the derivative, uphill from several points.

    Args:
        model: as it is to be measured: eval mode, plain weights.
        example: where to begin, with a batch axis; points near it and anywhere in [0, 1] are tried, too.
        steps: of the search.
        seed: of its random numbers.

    Example:
        >>> lower_of_network(nn.LeakyReLU(3.0).double(), torch.zeros(1, 4)) > 2.99
        True
    """
    generator = torch.Generator().manual_seed(seed)
    start = example[:2].detach().double().cpu()
    uniform = torch.rand((2, *start.shape[1:]), dtype=torch.float64, generator=generator)
    noise = torch.randn((2, *start.shape[1:]), dtype=torch.float64, generator=generator)
    points = torch.cat([start, uniform, start[:1] + 0.1 * noise, noise])
    model = copy.deepcopy(model).cpu().double().eval().requires_grad_(False)
    return _search(model, points, steps, generator)


def _search(f: Callable[[Tensor], Tensor], x: Tensor, steps: int, generator: torch.Generator) -> float:
    v = _unit(torch.randn(x.shape, dtype=x.dtype, generator=generator))
    best = 0.0
    for step in range(steps):
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            moved = x + _STEP * v
            here, there = f(x), f(moved)
            change = (there - here).detach()
            ratios = _ratios(x.detach(), moved.detach(), here.detach(), there.detach())
            u = _unit(change)
            (v_next,) = torch.autograd.grad((here * u).sum(), x, retain_graph=True)  # J^T u
            best = max(best, _best(ratios, v_next.flatten(1).norm(dim=1)))
            (uphill,) = torch.autograd.grad((there * u).sum() - (here * u).sum(), x)
        # Power steps find the direction; every third step also moves the points to where the slope is larger.
        if step % 3 == 2:
            x = x.detach() + 0.1 * _unit(uphill)
        v = torch.where(torch.isfinite(v_next), v_next, 0.0)
        v = _unit(v + 1e-9 * torch.randn(v.shape, dtype=v.dtype, generator=generator))
    return best


def _unit(x: Tensor) -> Tensor:
    """Every sample divided by its norm; zero, and what is not finite, becomes zero."""
    norms = x.flatten(1).norm(dim=1).reshape(-1, *(1,) * (x.dim() - 1))
    return torch.where((norms > 0) & torch.isfinite(norms), x / norms, 0.0)


def _ratios(x: Tensor, y: Tensor, fx: Tensor, fy: Tensor) -> Tensor:
    """Of every sample, less what rounding of the values may have added."""
    distance = (y - x).flatten(1).norm(dim=1)
    seen = (fy - fx).flatten(1).norm(dim=1)
    blur = _ROUNDING * (fx.flatten(1).norm(dim=1) + fy.flatten(1).norm(dim=1))
    return (seen - blur) / distance


def _best(ratios: Tensor, slopes: Tensor) -> float:
    """The largest ratio. Large numbers that cancel inside a network, and float32 there, blur it a little: so where it
    is next to the slope ||J^T u||, which they hardly touch, the smaller one counts. Far from it there is a jump."""
    ratios = torch.where(ratios <= 1.01 * slopes, torch.minimum(ratios, slopes * (1 - _SINGLE)), ratios)
    ratios = ratios[torch.isfinite(ratios)]
    return max(0.0, float(ratios.max()) * (1 - 1e-9)) if len(ratios) else 0.0
