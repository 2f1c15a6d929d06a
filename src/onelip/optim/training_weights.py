r"""Weights of AOL layers that cost less in a training step than the exact ones.

AOL computes $W = P\,\mathrm{diag}(d)$ with $d_c = (\sum_j |P^\top P|_{cj})^{-1/2}$. The Gram matrix costs as much as a
forward pass with as many samples as the layer has rows, whatever the batch size. In training it can be left out where
$P$ is kept orthogonal (`unscaled`), or computed at every $k$-th step (`LazyRescaling`). Both act in training mode and
within their context only: evaluation, `onelip.bake`, audits and certificates always compute the exact weights.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from onelip.core.arguments import check_integer
from onelip.core.geometry import LINEAR_LAYERS
from onelip.core.parametrization import original_of, working_type
from onelip.gram.row_sums import per_column
from onelip.nn.aol import AOL, find_aol
from onelip.optim.layers import orthogonal_parameters


def _aol_layers(model: nn.Module) -> dict[AOL, Tensor]:
    """The AOL parametrizations of a model that no other context has taken, with their parameters."""
    found: dict[AOL, Tensor] = {}
    for module in model.modules():
        parametrization = find_aol(module) if isinstance(module, LINEAR_LAYERS) else None
        if parametrization is not None and parametrization.in_training is None:
            found[parametrization] = original_of(module)
    return found


@contextmanager
def unscaled(model: nn.Module) -> Iterator[None]:
    r"""Run AOL layers with P itself as their weight in training mode, within the context.

    After R2 at every step the norm of a matrix P is at most 1 and its columns are nearly orthonormal, so AOL would
    change it by less than the next step does: leaving it out saves the rescaling and its derivative. This affects only
    layers in training mode whose operator is a matrix with at most as many columns as rows (dense layers,
    1x1 convolutions, kernels as large as their stride). Evaluation, `onelip.bake`, audits and certificates always apply
    AOL, within the context too.

    Args:
        model: a model whose optimiser retracts by R2 at every step.

    Examples:
        >>> import onelip
        >>> model = onelip.nn.AOLLinear(4, 4)
        >>> optimizer = onelip.optim.LipschitzMuon(model, lr=0.05)
        >>> with unscaled(model):
        ...     loss = model(torch.ones(1, 4)).sum()
        >>> loss.backward()
        >>> optimizer.step()
    """
    matrices = {id(p.P) for p in orthogonal_parameters(model) if p.is_tall and p.has_one_tap}
    chosen = [layer for layer, P in _aol_layers(model).items() if layer.log_q is None and id(P) in matrices]
    for layer in chosen:
        layer.in_training = lambda P, L=layer.lipschitz: P if L == 1.0 else P * L
    try:
        yield
    finally:
        for layer in chosen:
            layer.in_training = None


class LazyRescaling:
    r"""Compute the exact scale of each AOL layer in every k-th forward pass of training; a context of the forward pass.

    The weight of a layer is $W = P\,\mathrm{diag}(d(P))$. With $c = \partial L / \partial d$, a vector with one number
    for each column, the gradient of the loss is

    $$\frac{\partial L}{\partial P} = \frac{\partial L}{\partial W}\,\mathrm{diag}(d)
      + \Big(\frac{\partial d}{\partial P}\Big)^{\!\top} c.$$

    The first term and $c$ cost one pass over the weights; $d$ and the second term need the Gram matrix. In $k - 1$ of
    $k$ passes the last $d$ is used, the first term is the gradient, and $c$ is added to a sum. In the $k$-th pass $d$
    is computed, and the second term is taken with the sum of all $k$ vectors $c$. So no part of the gradient is lost;
    some of it arrives up to $k - 1$ steps later. The layers take turns, so that all passes cost about the same.

    Between two exact passes the norm of a layer in training can exceed its constant by the change of $d$. Outside of
    training mode and outside of the context weights are exact.

    Args:
        model: the model, on its device. Layers that are in the context `unscaled` as well keep its weights.
        every: k, the number of passes from one exact scale of a layer to the next; 1 is AOL itself.

    Attributes:
        passes: number of completed passes.
        scales: the last scales d of all layers, one after the other.
        owed: the sums of c that were not used yet. With DistributedDataParallel each process has its own, which gives
            the right gradient; average them over the processes before a checkpoint.

    Examples:
        >>> import onelip
        >>> model = nn.Sequential(onelip.nn.AOLLinear(8, 8), onelip.nn.MaxMin(), onelip.nn.AOLLinear(8, 2))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        >>> lazy = LazyRescaling(model, every=4)
        >>> for _ in range(5):
        ...     optimizer.zero_grad()
        ...     with lazy:
        ...         loss = model(torch.ones(4, 8)).square().sum()
        ...     loss.backward()
        ...     optimizer.step()
        >>> bool(torch.linalg.matrix_norm(model[0].weight, 2) < 1 + 1e-6)  # exact outside of the context
        True
    """

    def __init__(self, model: nn.Module, every: int = 8) -> None:
        self.every = check_integer("every", every)
        found = {layer: P for layer, P in _aol_layers(model).items() if P.numel()}
        if not found:
            raise ValueError(
                "expected a model with AOL layers, got none; apply AOL first, such as onelip.constrain(model, 'aol')"
            )
        first = next(iter(found.values()))
        dtype = torch.float64 if any(P.dtype == torch.float64 for P in found.values()) else torch.float32
        counts = [layer.geometry.groups * layer.columns for layer in found]
        self.passes = torch.zeros((), dtype=torch.int64)
        self.scales = torch.zeros(sum(counts), dtype=dtype, device=first.device)
        self.owed = torch.zeros_like(self.scales)
        parts = zip(found.items(), self.scales.split(counts), self.owed.split(counts), strict=True)
        self._layers = [_LazyLayer(layer, P, scale, owed) for (layer, P), scale, owed in parts]
        self._entered: list[_LazyLayer] = []

    def __enter__(self) -> "LazyRescaling":
        if self._entered:
            raise RuntimeError("the context LazyRescaling is already entered; leave it before the next forward pass")
        done = int(self.passes)
        self._entered = [layer for layer in self._layers if layer.aol.in_training is None]
        for i, layer in enumerate(self._entered):
            if done == 0:
                layer.compute_scale()
            layer.is_exact = (done + i) % self.every == 0
            layer.aol.in_training = layer
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for layer in self._entered:
            layer.aol.in_training = None
        self._entered = []
        self.passes += 1

    def state_dict(self) -> dict[str, Tensor]:
        """The tensors that the next passes depend on; not copies."""
        return {"passes": self.passes, "scales": self.scales, "owed": self.owed}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore what `state_dict` returned.

        Raises:
            ValueError: if it is that of another model.
        """
        own = self.state_dict()
        shapes = {name: tuple(tensor.shape) for name, tensor in own.items()}
        if {name: tuple(tensor.shape) for name, tensor in state.items()} != shapes:
            raise ValueError(f"expected the tensors {shapes}; this state belongs to another model")
        for name, tensor in own.items():
            tensor.copy_(state[name])


class _LazyLayer:
    """The weight of one layer in training; `scale` and `owed` are its parts of the tensors of `LazyRescaling`."""

    def __init__(self, aol: AOL, P: Tensor, scale: Tensor, owed: Tensor) -> None:
        self.aol, self.P, self.is_exact = aol, P, True
        self.scale, self.owed = (t.view(aol.geometry.groups, aol.columns) for t in (scale, owed))

    def __call__(self, P: Tensor) -> Tensor:
        if not self.is_exact:
            W = _Stale.apply(self._kernel(P), self)
        else:
            W = _Exact.apply(self._kernel(self.aol.rescale(P)), self._kernel(P), self)
        return self.aol.geometry.to_weight(W, self.aol.side).to(P.dtype)

    @torch.no_grad()
    def compute_scale(self) -> None:
        """Compute the exact scale, without a gradient."""
        kernel = self._kernel(self.P)
        index, p = _largest_entries(kernel)
        self.scale.copy_(_scale(self._kernel(self.aol.rescale(self.P)), index, p)[..., 0])

    def _kernel(self, weight: Tensor) -> Tensor:
        """A weight as (g, rows, columns, *taps), at least in float32."""
        return self.aol.geometry.to_kernel(weight.to(working_type(weight.dtype)), self.aol.side)


class _Stale(Function):
    """P diag(d) with the last d; adds the gradient of d to what is owed."""

    @staticmethod
    def forward(ctx: Any, kernel: Tensor, layer: _LazyLayer) -> Tensor:
        d = layer.scale.to(kernel.dtype, copy=True)
        ctx.save_for_backward(kernel, d)
        ctx.layer = layer
        return kernel * per_column(d, kernel)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        kernel, d = ctx.saved_tensors
        g = grads[0]
        ctx.layer.owed += (g * kernel).detach().transpose(1, 2).flatten(2).sum(2)
        return g * per_column(d, g), None


class _Exact(Function):
    r"""The exact W, unchanged; stores its scale d, and adds to its gradient what is owed.

    The gradient that W passes on to P for a gradient $g$ is $g\,\mathrm{diag}(d) + J^\top c$ with $c = \langle g_c, P_c
    \rangle$. For an entry $p$ of each column (the largest), $g$ plus $c' / p$ at this entry gives $c + c'$, and
    $c' d / p$ too much at the entry, which is taken off the gradient of P.
    """

    @staticmethod
    def forward(ctx: Any, W: Tensor, kernel: Tensor, layer: _LazyLayer) -> Tensor:
        index, p = _largest_entries(kernel)
        d = _scale(W, index, p)
        layer.scale.copy_(d[..., 0])
        ctx.save_for_backward(index, p, d)
        ctx.layer = layer
        return W.view_as(W)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor | None, None]:
        g, owed = grads[0], ctx.layer.owed
        if not bool(owed.any()):
            return g, None, None
        index, p, d = ctx.saved_tensors
        at_entry = torch.where(p == 0, 0.0, owed[..., None].to(g.dtype) / p)
        owed.zero_()
        return g + _scattered(at_entry, index, g), _scattered(-at_entry * d, index, g), None


def _largest_entries(kernel: Tensor) -> tuple[Tensor, Tensor]:
    """Place (g, columns, 1) and value of the largest entry of each column of a kernel."""
    columns = kernel.transpose(1, 2).flatten(2)  # (g, columns, rows * taps)
    index = columns.abs().argmax(2, keepdim=True)
    return index, columns.gather(2, index)


def _scale(W: Tensor, index: Tensor, p: Tensor) -> Tensor:
    """d (g, columns, 1) with W = P diag(d), read off the entries p of P; zero for zero columns."""
    return torch.where(p == 0, 0.0, W.transpose(1, 2).flatten(2).gather(2, index) / p)


def _scattered(values: Tensor, index: Tensor, like: Tensor) -> Tensor:
    """A kernel that is zero but for one entry of each column."""
    swapped = like.transpose(1, 2)  # (g, columns, rows, *taps)
    flat = torch.zeros(*swapped.shape[:2], swapped[0, 0].numel(), dtype=like.dtype, device=like.device)
    return flat.scatter_(2, index, values).reshape(swapped.shape).transpose(1, 2)
