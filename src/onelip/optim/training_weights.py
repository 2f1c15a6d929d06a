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

    The weight of a layer is $W = P\,\mathrm{diag}(d(P))$. With the norms $n_c = \|P_c\|$ of the columns it is

    $$W_c = \rho_c \frac{P_c}{n_c}, \qquad \rho_c(P) = n_c\,d_c(P) \le 1,$$

    where $\rho$ is 1 for orthogonal columns and changes only with the products of different columns. In $k - 1$ of $k$
    passes the columns are divided by their norms and multiplied by the last $\rho$, which costs a few passes over the
    weights and no Gram matrix. Their gradient is exact except for the part that goes through $\rho$. The gradient in
    $\rho$, one number for each column, is summed over the passes. In the $k$-th pass $\rho$ is computed, and the sum is
    passed on to $P$. So no part of the gradient is lost; some of it arrives up to $k - 1$ steps later. The layers take
    turns, so that all passes cost about the same.

    It is the norms that make this work: with the last $d$ itself, steps that only enlarge $P$ lower the loss until $d$
    is computed again, and the network learned half as much.

    Between two exact passes the norm of a layer in training can exceed its constant by the change of $\rho$. Outside of
    training mode and outside of the context weights are exact.

    Args:
        model: the model, on its device. Layers that are in the context `unscaled` as well keep its weights.
        every: k, the number of passes from one exact scale of a layer to the next; 1 is AOL itself.

    Attributes:
        passes: number of completed passes.
        norms: the last norms $\rho$ of the columns of all layers, one after the other.
        owed: the sums of gradients in $\rho$ that were not passed on yet. With DistributedDataParallel each process has
            its own, which gives the right gradient; average them over the processes before a checkpoint.

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
        self.norms = torch.zeros(sum(counts), dtype=dtype, device=first.device)
        self.owed = torch.zeros_like(self.norms)
        parts = zip(found.items(), self.norms.split(counts), self.owed.split(counts), strict=True)
        self._layers = [_LazyLayer(layer, P, norm, owed) for (layer, P), norm, owed in parts]
        self._entered: list[_LazyLayer] = []

    def __enter__(self) -> "LazyRescaling":
        if self._entered:
            raise RuntimeError("the context LazyRescaling is already entered; leave it before the next forward pass")
        done = int(self.passes)
        self._entered = [layer for layer in self._layers if layer.aol.in_training is None]
        for i, layer in enumerate(self._entered):
            if done == 0:
                layer.compute_norms()
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
        return {"passes": self.passes, "norms": self.norms, "owed": self.owed}

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
    """The weight of one layer in training; `norm` and `owed` are its parts of the tensors of `LazyRescaling`."""

    def __init__(self, aol: AOL, P: Tensor, norm: Tensor, owed: Tensor) -> None:
        self.aol, self.P, self.is_exact = aol, P, True
        self.norm, self.owed = (t.view(aol.geometry.groups, aol.columns) for t in (norm, owed))

    def __call__(self, P: Tensor) -> Tensor:
        if not self.is_exact:
            W = _Stale.apply(self._kernel(P), self)
        else:
            W = _Exact.apply(self._kernel(self.aol.rescale(P)), self._kernel(P), self)
        return self.aol.geometry.to_weight(W, self.aol.side).to(P.dtype)

    @torch.no_grad()
    def compute_norms(self) -> None:
        """Compute the exact norms of the columns, without a gradient."""
        self.norm.copy_(_column_norms(self._kernel(self.aol.rescale(self.P))))

    def _kernel(self, weight: Tensor) -> Tensor:
        """A weight as (g, rows, columns, *taps), at least in float32."""
        return self.aol.geometry.to_kernel(weight.to(working_type(weight.dtype)), self.aol.side)


class _Stale(Function):
    """rho P / n with the last rho; adds the gradient in rho to what is owed."""

    @staticmethod
    def forward(ctx: Any, kernel: Tensor, layer: _LazyLayer) -> Tensor:
        inverse = _inverse(_column_norms(kernel))
        d = layer.norm.to(kernel.dtype) * inverse
        ctx.save_for_backward(kernel, inverse, d)
        ctx.layer = layer
        return kernel * per_column(d, kernel)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, None]:
        kernel, inverse, d = ctx.saved_tensors
        g = grads[0]
        radial = _column_dots(g, kernel) * inverse  # <g, P / n>
        ctx.layer.owed += radial.detach()
        return g * per_column(d, g) - kernel * per_column(radial * inverse * d, kernel), None


class _Exact(Function):
    r"""The exact W, unchanged; stores the norms rho of its columns, and adds to its gradient what is owed.

    The gradient that W passes on to P for a gradient $g$ is $g\,\mathrm{diag}(d) + J^\top \langle g, P \rangle$ with
    the derivative $J$ of $d$. What is owed, $c$, belongs to $\rho = n d$, whose derivative is $n J + d P^\top / n$. For
    $J^\top n c$, the number $n c / p$ is added to $g$ at one entry $p$ of each column, the largest, and what that adds
    besides, $d n c / p$ at the entry, is taken off the gradient of P.
    """

    @staticmethod
    def forward(ctx: Any, W: Tensor, kernel: Tensor, layer: _LazyLayer) -> Tensor:
        layer.norm.copy_(_column_norms(W))
        ctx.save_for_backward(W, kernel)
        ctx.layer = layer
        return W.view_as(W)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor, Tensor | None, None]:
        g, owed = grads[0], ctx.layer.owed
        if not bool(owed.any()):
            return g, None, None
        W, kernel = ctx.saved_tensors
        n, rho, c = _column_norms(kernel), _column_norms(W), owed.to(g.dtype)
        columns = kernel.transpose(1, 2).flatten(2)  # (g, columns, rows * taps)
        index = columns.abs().argmax(2, keepdim=True)
        at_entry = (n * c)[..., None] * _inverse(columns.gather(2, index))
        d = rho * _inverse(n)
        more = _scattered(-at_entry * d[..., None], index, g) + kernel * per_column(d * c * _inverse(n), kernel)
        owed.zero_()
        return g + _scattered(at_entry, index, g), more, None


def _column_norms(kernel: Tensor) -> Tensor:
    """The norms (g, columns) of the columns of a kernel (g, rows, columns, *taps)."""
    return torch.linalg.vector_norm(kernel, dim=(1, *range(3, kernel.dim())))


def _column_dots(a: Tensor, b: Tensor) -> Tensor:
    """The inner products (g, columns) of the columns of two kernels."""
    return (a * b).sum((1, *range(3, a.dim())))


def _inverse(x: Tensor) -> Tensor:
    """1 / x, and 0 for 0: a zero column stays zero."""
    return torch.where(x == 0, 0.0, 1 / x)


def _scattered(values: Tensor, index: Tensor, like: Tensor) -> Tensor:
    """A kernel that is zero but for one entry of each column."""
    swapped = like.transpose(1, 2)  # (g, columns, rows, *taps)
    flat = torch.zeros(*swapped.shape[:2], swapped[0, 0].numel(), dtype=like.dtype, device=like.device)
    return flat.scatter_(2, index, values).reshape(swapped.shape).transpose(1, 2)
