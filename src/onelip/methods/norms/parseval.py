"""Parseval networks: rows of the reshaped kernel are moved towards orthonormal ones after each step."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from onelip.core.arguments import check_number
from onelip.core.geometry import LINEAR_LAYERS, Geometry
from onelip.core.parametrization import working_type
from onelip.core.precision import full_precision
from onelip.methods.method import Layer, Method, PaperRow, attach_new
from onelip.methods.norms.power_iteration import overlap_of_rows
from onelip.methods.norms.projection import Projection
from onelip.nn.init import tight_weight

# With steps of length d outwards, the singular value s converges to beta (s^3 - s) = d. The paper uses 3e-4 for
# networks with batch normalisation and hundreds of epochs. On digits, in 20 epochs, it leaves s near 2 and the
# constant of the network at 24.
BETA = 0.3


class Parseval(Projection):
    r"""Move the rows of the reshaped kernel towards orthonormal ones after each step; `parseval` registers it.

    **Rule.** With $W$ the kernel reshaped to (outputs, inputs * taps), one step down the gradient of
    $\frac\beta4 \|W W^\top - I\|_F^2$ after each step of the optimizer:

    $$W \leftarrow (1 + \beta) W - \beta W W^\top W.$$

    It maps a singular value $s$ to $(1 + \beta) s - \beta s^3$, hence towards 1 if $s < \sqrt{1 + 1/\beta}$. To save
    time the paper updates a random part of the rows in each step. If there are more rows than columns, the singular
    values then approach $\sqrt{\mathrm{rows} / \mathrm{columns}}$ instead of 1. The layer computes with $W / \sqrt T$,
    where $T$ is the number of taps that read one input, because $\|J\| \le \sqrt T \|W\|$. For residual sums use
    `onelip.nn.ConvexResidual`.

    **Guarantee.** None: the singular values move only slowly. Evaluation uses the proved bound of the stored weights,
    for zero padding, or circular padding of at most `dilation * (kernel_size - 1)` in total.

    Cisse, Bojanowski, Grave, Dauphin, Usunier, "Parseval Networks: Improving Robustness to Adversarial Examples", ICML
    2017.

    Args:
        geometry: how the weight acts, from `onelip.core.geometry.geometry_of`.
        weight_shape: shape of the weight.
        beta: size of the step, at most 0.5.
        rows: fraction of the rows that each step moves, chosen at random.

    Attributes:
        draws: buffer, the state of the random choice, if `rows` is below 1. With it in the state dict all processes
            choose the same rows, and so does a resumed run.
    """

    draws: Tensor

    def __init__(
        self, geometry: Geometry, weight_shape: Sequence[int], *, beta: float = BETA, rows: float = 1.0
    ) -> None:
        super().__init__(geometry, weight_shape)
        self.beta = check_number("beta", beta, 0, 0.5, open_low=True)  # larger steps can diverge
        self.rows = check_number("rows", rows, 0, 1, open_low=True)
        self.factor = 1 / math.sqrt(overlap_of_rows(geometry, weight_shape))
        if self.rows < 1:
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
        """Return the indices of the rows to move, different ones at each call."""
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
        """Initialise with orthonormal rows or columns, as in the paper; on one tap if possible, to blur no image."""
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
        return "Parseval (rows moved towards orthonormal ones)"

    def extra_repr(self) -> str:
        return f"beta={self.beta:g}" + ("" if self.rows == 1 else f", rows={self.rows:g}")


def parseval(module: Layer, name: str = "weight", *, beta: float = BETA, rows: float = 1.0) -> Layer:
    """Make a layer one of a Parseval network, in place, and return it; see `Parseval`. The weight is kept.

    Call `onelip.project(model)` after each step of the optimizer.

    Args:
        module: Linear, Conv1d to Conv3d or ConvTranspose1d to ConvTranspose3d.
        name: name of the parameter to constrain.
        beta: size of the step towards orthonormal rows; 1e-4 to 3e-4 in the paper, 0.5 is a step of Björck's iteration.
        rows: fraction of the rows that each step moves, chosen at random; 0.3 in the paper.

    Returns:
        The same module, with a parametrized weight.

    Raises:
        onelip.UnsupportedLayer: if no bound is known for this layer or its padding.
        ValueError: for options out of range.

    Examples:
        >>> import onelip
        >>> from torch import nn
        >>> layer = parseval(nn.Linear(2, 2, bias=False), beta=0.5)
        >>> _ = [onelip.project(layer) for _ in range(50)]
        >>> torch.allclose(layer.weight @ layer.weight.T, torch.eye(2), atol=1e-5)
        True
    """
    return attach_new(Parseval, module, name, beta=beta, rows=rows)


METHOD = Method(
    name="parseval",
    title="Parseval networks (Cisse et al., 2017)",
    citation="Moustapha Cisse, Piotr Bojanowski, Edouard Grave, Yann Dauphin, Nicolas Usunier, "
    '"Parseval Networks: Improving Robustness to Adversarial Examples", ICML 2017.',
    mechanism="projection",
    guarantee=None,
    layers=LINEAR_LAYERS,
    apply=parseval,
    options=({"beta": 3e-4}, {"rows": 0.3}),
    paper=PaperRow(E="yes", F="no", G="yes", M="partly", notes={"M": 1}),
    # After a long step the retraction may not converge.
    hyperparameters={"lr": 0.2, "weight_decay": 0.0, "gradient_clip": 1.0},
    note="bound of the stored weights in evaluation",
)
