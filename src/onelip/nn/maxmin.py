"""MaxMin: sort pairs of channels, with a derivative that is a permutation everywhere."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from onelip.core.lipschitz_module import LipschitzModule
from onelip.core.tracing import is_compiling
from onelip.graph.kinds import Sort
from onelip.graph.lowering import Lowering, lowers
from onelip.nn._base import halves

_WORD = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def _swap(x: Tensor, mask: Tensor, dim: int) -> Tensor:
    """Exchange the halves of `x` where `mask` is set."""
    try:
        return _swap_in_place(x, mask, dim)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        # `jacobian(..., vectorize=True)` and tensor subclasses may support neither `out=` nor views of another type.
        return _swap_plain(x, mask, dim)


def _swap_plain(x: Tensor, mask: Tensor, dim: int) -> Tensor:
    a, b = halves(x, dim, "maxmin")
    return torch.cat([torch.where(mask, b, a), torch.where(mask, a, b)], dim)


def _swap_in_place(x: Tensor, mask: Tensor, dim: int) -> Tensor:
    out = torch.empty_like(x)
    word = _WORD.get(x.element_size())
    if x.device.type != "cpu" or word is None:
        (a, b), (p, q) = halves(x, dim, "maxmin"), halves(out, dim, "maxmin")
        torch.where(mask, b, a, out=p)
        torch.where(mask, a, b, out=q)
        return out
    # On a CPU, `where` of torch is not vectorised. The same exchange by exclusive or of the bit patterns takes about a
    # quarter of the time, and moves all values unchanged, also infinities and NaN.
    (a, b), (p, q) = halves(x.view(word), dim, "maxmin"), halves(out.view(word), dim, "maxmin")
    torch.bitwise_xor(a, b, out=q)
    q.mul_(mask)
    torch.bitwise_xor(a, q, out=p)
    q.bitwise_xor_(b)
    return out


def _sort(x: Tensor, dim: int) -> Tensor:
    """Like `_swap` with the mask of `x` itself, in two passes; a NaN in a pair makes both values NaN."""
    a, b = halves(x, dim, "maxmin")
    try:
        out = torch.empty_like(x)  # keeps channels_last
        p, q = halves(out, dim, "maxmin")
        torch.maximum(a, b, out=p)
        torch.minimum(a, b, out=q)
        return out
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:  # as in `_swap`; also forward mode and vmap without gradients
        return _sort_plain(x, dim)


def _sort_plain(x: Tensor, dim: int) -> Tensor:
    a, b = halves(x, dim, "maxmin")
    return torch.cat([torch.maximum(a, b), torch.minimum(a, b)], dim)


class _Swap(Function):
    """The swap, which is its own derivative of every order; with `own` the mask is that of `x` itself."""

    @staticmethod
    def forward(x: Tensor, mask: Tensor, dim: int, own: bool) -> Tensor:
        return _sort(x, dim) if own else _swap(x, mask, dim)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, Tensor, int, bool], output: Tensor) -> None:
        _, mask, ctx.dim, _ = inputs
        ctx.save_for_backward(mask)
        ctx.save_for_forward(mask)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        (mask,) = ctx.saved_tensors
        return _Swap.apply(grad_outputs[0], mask, ctx.dim, False), None, None, None

    @staticmethod
    def jvp(ctx: Any, *grad_inputs: Any) -> Any:
        (mask,) = ctx.saved_tensors
        return _Swap.apply(grad_inputs[0], mask, ctx.dim, False)

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        x, mask, dim, own = args

        def batched(t: Tensor, axis: int | None) -> Tensor:
            return t.expand(info.batch_size, *t.shape) if axis is None else t.movedim(axis, 0)

        return _Swap.apply(batched(x, in_dims[0]), batched(mask, in_dims[1]), dim + 1, own), 0


def maxmin(x: Tensor, dim: int = 1) -> Tensor:
    """Sort each pair `(x[i], x[i + n/2])` of an axis of even length; see `MaxMin`.

    Args:
        x: the input.
        dim: axis of the channels, of even length $n$.

    Returns:
        A tensor of the shape of `x`: the maxima in the first half of the axis, the minima in the second.

    Raises:
        ValueError: if the axis has an odd length.

    Examples:
        >>> maxmin(torch.tensor([[1.0, 5.0, 3.0, 4.0]]))
        tensor([[3., 5., 1., 4.]])
    """
    a, b = halves(x, dim, "maxmin")
    if torch.compiler.is_exporting() or torch.jit.is_tracing():  # pyright: ignore[reportPrivateImportUsage]
        return _sort_plain(x, dim)
    if is_compiling():
        # `where` instead of `maximum`, so that the compiled derivative is the same permutation.
        return _swap_plain(x, a < b, dim)
    if not torch.is_grad_enabled():
        return _sort(x, dim)
    return _Swap.apply(x, a < b, dim % x.dim(), True)  # pyright: ignore[reportReturnType]


class MaxMin(LipschitzModule):
    r"""Sort pairs of channels: $(a, b) \mapsto (\max(a, b), \min(a, b))$ for $a = x_i$, $b = x_{i + n/2}$.

    The layer is 1-Lipschitz because sorting both of two pairs never increases their distance (rearrangement
    inequality). It is exact in floating point: values are moved, not computed.

    Given the mask of the pairs that are out of order, the map is a swap $S$: linear, symmetric, a permutation. So the
    derivative of every order is $S$ applied to the gradient, also at ties, where that of `torch.maximum` would halve
    gradients. One bit per pair is stored for the backward pass.

    From Anil, Lucas, Grosse, "Sorting out Lipschitz function approximation", ICML 2019; it is the activation of AOL.

    Args:
        dim: axis of the channels, of even length.

    Shape:
        - Input: $(N, C, *)$ with even $C$, or any shape whose axis `dim` has an even length.
        - Output: same shape as the input; the maxima in the first half of the channels, the minima in the second.

    Examples:
        >>> MaxMin()(torch.tensor([[1.0, 2.0, 4.0, 0.0]]))
        tensor([[4., 2., 1., 0.]])
    """

    proved_constant = 1.0

    def __init__(self, dim: int = 1) -> None:
        super().__init__()
        self.dim = dim

    def forward(self, x: Tensor) -> Tensor:
        return maxmin(x, self.dim)

    def extra_repr(self) -> str:
        return f"dim={self.dim}"


@lowers(MaxMin)
def _lower(low: Lowering) -> int:
    return low.emit(Sort, low.source, axis=low.sample_axis, group_size=2)
