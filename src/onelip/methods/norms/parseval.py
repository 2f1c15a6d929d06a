"""Parseval networks.

Citation: Moustapha Cisse, Piotr Bojanowski, Edouard Grave, Yann Dauphin, Nicolas Usunier, "Parseval Networks: Improving
Robustness to Adversarial Examples", ICML 2017.

After each step of the optimizer one step down the gradient of beta/4 ||W W^T - I||_F^2 is made,
    W <- (1 + beta) W - beta W W^T W,
W being the kernel reshaped to (outputs, inputs * taps). It moves the singular values s to (1 + beta) s - beta s^3, so
towards 1 where s < sqrt(1 + 1 / beta). To save time the paper takes but a random part of the rows, W_S, in each step,
    W_S <- (1 + beta) W_S - beta W_S W_S^T W_S,
which draws any two rows towards orthonormal ones sooner or later; more rows than columns cannot be, and there the
singular values go towards sqrt(rows / columns) instead of 1.
The layer computes with W / sqrt(taps): ||J|| <= sqrt(taps) ||W||, so that a kernel with orthonormal rows has norm at
most 1. Residual sums are made convex: `onelip.nn.ConvexResidual`.
Assumes: zero padding, or circular padding of at most dilation * (kernel_size - 1) in total.
Guarantee: none, the singular values drift only slowly. Evaluation goes by the proved bound of the stored weights.
"""

import math
from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn

from onelip.core.geometry import LINEAR_LAYERS, Geometry, geometry_of
from onelip.core.parametrization import attach, weight_of, working_type
from onelip.core.precision import full_precision
from onelip.methods.method import Method, PaperRow
from onelip.methods.norms.estimated import overlap_of_rows
from onelip.methods.norms.projection import Projection, project_step
from onelip.nn.init import tight_weight

Layer = TypeVar("Layer", bound=nn.Module)

# Against a step of length d outwards s comes to rest where beta (s^3 - s) = d. The paper's 3e-4 held networks of batch
# normalisation through hundreds of epochs; on the digits, 20 epochs, it leaves s near 2 and a network of constant 24.
BETA = 0.3


class Parseval(Projection):
    """Rows drawn towards orthonormal ones; see the module's docstring, and `parseval` for the verb.

    Args:
        geometry: how the weight acts.
        weight_shape: shape of the weight.
        beta: size of the step after each step of the optimizer.
        rows: part of the rows that each step moves, chosen at random.
    """

    draws: Tensor

    def __init__(
        self, geometry: Geometry, weight_shape: Sequence[int], *, beta: float = BETA, rows: float = 1.0
    ) -> None:
        super().__init__(geometry, weight_shape)
        if isinstance(beta, bool) or not isinstance(beta, (int, float)) or not 0 < beta <= 0.5:
            raise ValueError(f"expected beta above 0 and at most 0.5, got {beta!r}; beyond that steps can diverge")
        if isinstance(rows, bool) or not isinstance(rows, (int, float)) or not 0 < rows <= 1:
            raise ValueError(f"expected rows, a part of them, above 0 and at most 1, got {rows!r}; 0.3 is three tenths")
        self.beta, self.rows = float(beta), float(rows)
        self.factor = 1 / math.sqrt(overlap_of_rows(geometry, weight_shape))
        if self.rows < 1:
            # In the state dict: with it every process chooses the same rows, and a run that is gone on with the next.
            self.register_buffer("draws", torch.randint(2**62, ()))

    def forward(self, P: Tensor) -> Tensor:
        return P if self.factor == 1 else P * self.factor

    def right_inverse(self, W: Tensor) -> Tensor:
        return W if self.factor == 1 else W / self.factor

    def project_(self, P: Tensor) -> None:
        with full_precision(P.device):
            M = self._matrix(P.to(working_type(P.dtype)))  # (g, outputs, inputs * taps)
            if self.rows == 1:
                P.copy_(self._weight(self._retracted(M), P))
                return
            chosen = self._choose(M.shape[1]).to(M.device)
            P.copy_(self._weight(M.index_copy(1, chosen, self._retracted(M[:, chosen])), P))

    def _retracted(self, M: Tensor) -> Tensor:
        # The smaller of the two products; (M M^T) M = M (M^T M).
        product = (M @ M.mT) @ M if M.shape[1] <= M.shape[2] else M @ (M.mT @ M)
        return torch.lerp(M, 2 * M - product, self.beta)

    def _choose(self, count: int) -> Tensor:
        """Numbers of the rows to move, other ones at each call."""
        generator = torch.Generator().manual_seed(int(self.draws))
        self.draws += 1
        return torch.randperm(count, generator=generator)[: max(1, round(self.rows * count))]

    def _matrix(self, W: Tensor) -> Tensor:
        grouped = W.unflatten(0, (self.geometry.groups, -1))
        if self.geometry.transposed:
            grouped = grouped.transpose(1, 2)
        return grouped.flatten(2)

    def _weight(self, M: Tensor, like: Tensor) -> Tensor:
        first, second, *taps = like.shape
        first //= self.geometry.groups
        if self.geometry.transposed:
            return M.unflatten(2, (first, *taps)).transpose(1, 2).flatten(0, 1)
        return M.unflatten(2, (second, *taps)).flatten(0, 1)

    @torch.no_grad()
    def reset(self, P: Tensor) -> None:
        """Orthonormal rows or columns, as the paper begins; on one tap if there is room, where no image is blurred."""
        if P.is_meta or not P.numel():
            return
        P.copy_(tight_weight(self.geometry, self.weight_shape, "outputs"))
        M = self._matrix(P).contiguous()
        rows, columns = M.shape[1:]
        if rows <= columns and not torch.allclose(M @ M.mT, torch.eye(rows, dtype=M.dtype, device=M.device), atol=1e-5):
            for matrix in M:
                nn.init.orthogonal_(matrix)
            P.copy_(self._weight(M, P))

    def describe(self) -> str:
        return "Parseval (rows drawn towards orthonormal ones)"

    def extra_repr(self) -> str:
        return f"beta={self.beta:g}" + ("" if self.rows == 1 else f", rows={self.rows:g}")


def parseval(module: Layer, *, beta: float = BETA, rows: float = 1.0) -> Layer:
    """Make a layer one of a Parseval network, in place; return it. Call `onelip.project` after each step.

    The layer's present weight is kept.

    Args:
        module: Linear, Conv1d to Conv3d, ConvTranspose1d to ConvTranspose3d.
        beta: size of the retraction after each step of the optimizer; 1e-4 to 3e-4 in the paper, 0.5 is Björck's step.
        rows: part of the rows that each retraction moves, chosen at random; the paper takes 0.3.

    Examples:
        >>> from onelip.methods.norms.projection import project
        >>> layer = parseval(nn.Linear(2, 2, bias=False), beta=0.5)
        >>> _ = [project(layer) for _ in range(50)]
        >>> torch.allclose(layer.weight @ layer.weight.T, torch.eye(2), atol=1e-5)
        True
    """
    geometry = geometry_of(module)
    weight = weight_of(module, geometry)
    return attach(module, Parseval(geometry, weight.shape, beta=beta, rows=rows))


METHOD = Method(
    name="parseval",
    title="Parseval networks (Cisse et al., 2017)",
    mechanism="projection",
    guarantee="none",
    layers=LINEAR_LAYERS,
    apply=parseval,
    options=({"beta": 3e-4}, {"rows": 0.3}),
    paper=PaperRow(E="yes", F="no", G="yes", M="partly", notes={"M": 1}),
    after_step=project_step,
    # A long step leaves the region that the retraction comes back from.
    hyperparameters={"lr": 0.2, "weight_decay": 0.0, "gradient_clip": 1.0},
    note="bound of the stored weights in evaluation",
)
