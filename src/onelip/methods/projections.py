r"""Projections after the step of the optimizer: weight clipping, LCC and Parseval networks.

The rule of a layer is a parametrization of its weight that is the identity in training. So it is part of copies, state
dicts and `bake`, and `onelip.project(model)` finds it.
"""

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.hooks import RemovableHandle

from onelip.core.errors import check_number
from onelip.core.geometry import Geometry
from onelip.core.modes import full_precision
from onelip.core.parametrization import (
    LipschitzParametrization,
    attach,
    check_lipschitz,
    find_parametrization,
    original_of,
    working_type,
)
from onelip.methods.power_iteration import PowerIterated, overlap_of_rows
from onelip.methods.registry import Layer, Method, PaperRow, attach_new, register_method
from onelip.nn.init import tight_weight


class Projection(LipschitzParametrization):
    """Base of methods by projection: override `project_`. In training the weight is the parameter itself.

    The arguments are those of `LipschitzParametrization`.

    Examples:
        >>> class Box(Projection):
        ...     def project_(self, P):
        ...         P.clamp_(-0.5, 0.5)
        >>> from onelip.core.geometry import geometry_of
        >>> from onelip.core.parametrization import attach
        >>> layer = nn.Linear(1, 1)
        >>> _ = nn.init.constant_(layer.weight, 2.0)
        >>> _ = project(attach(layer, Box(geometry_of(layer), layer.weight.shape)))
        >>> layer.weight.item()
        0.5
    """

    def forward(self, P: Tensor) -> Tensor:
        return P

    def project_(self, P: Tensor) -> None:
        """Move the parameter in place; called without gradients after each step of the optimizer."""
        raise NotImplementedError


def _projections(model: nn.Module) -> Iterator[tuple[Projection, Tensor]]:
    for module in model.modules():
        if not parametrize.is_parametrized(module):
            continue
        lists = module.parametrizations
        assert isinstance(lists, nn.ModuleDict)
        for name in lists:
            found = find_parametrization(module, name)
            if isinstance(found, Projection):
                yield found, original_of(module, name)


@torch.no_grad()
def project(model: nn.Module) -> int:
    """Project the weights of all layers with a method by projection (clipping, LCC, Parseval), in place.

    Call it after each step of the optimizer; `project_after` registers a hook that does so.

    Args:
        model: any module.

    Returns:
        The number of projected weights.

    Examples:
        >>> from onelip.methods.projections import clipping
        >>> model = nn.Sequential(clipping(nn.Linear(4, 4)))
        >>> project(model)
        1
    """
    count = 0
    for projection, parameter in _projections(model):
        projection.project_(parameter)
        count += 1
    return count


def project_after(optimizer: torch.optim.Optimizer, model: nn.Module) -> RemovableHandle:
    """Project the model after each step of the optimizer.

    Args:
        optimizer: a torch optimizer.
        model: a module with layers that have a method by projection.

    Returns:
        A handle; `.remove()` stops the projections.

    Raises:
        ValueError: if no layer of the model has a method by projection.

    Examples:
        >>> from onelip.methods.projections import clipping
        >>> model = clipping(nn.Linear(4, 4))
        >>> optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        >>> handle = project_after(optimizer, model)
        >>> model(torch.ones(1, 4)).sum().backward()
        >>> optimizer.step()
        >>> round(float(model.weight.detach().abs().max()), 6)  # 1 / sqrt(4 * 4)
        0.25
    """
    if not any(True for _ in _projections(model)):
        raise ValueError(
            "the model has no layer with a method by projection; apply a method by projection first, "
            "e.g. onelip.constrain(model, 'lcc')"
        )

    def hook(optimizer: torch.optim.Optimizer, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
        project(model)

    return optimizer.register_step_post_hook(hook)


class Clipped(Projection):
    r"""Weights in $[-c, c]$, for a constant that follows from $c$; `clipping` registers it.

    **Theorem** (Schur test, $\|J\|_2^2 \le \|J\|_1 \|J\|_\infty$). A layer whose weights have magnitude at most $c$ has
    norm at most $c \sqrt N$, where $N$ is the number of weights that one output reads times the number of weights that
    read one input: $N = mn$ for Linear, and
    $N = (\mathrm{inputs} \cdot k^D)(\mathrm{outputs} \cdot \lceil k / s \rceil^D)$ for a convolution with $k^D$ taps
    and stride $s$, channels counted in a group. A constant kernel attains it.

    **Assumptions.** Zero padding of any amount, or circular padding of at most `dilation * (kernel_size - 1)` in total.

    **Guarantee.** Proved for every weight. In training the weight is clipped after each step (`onelip.project`), in
    evaluation at each access.

    Arjovsky, Chintala, Bottou, "Wasserstein Generative Adversarial Networks", ICML 2017.

    The arguments are those of `LipschitzParametrization`, and the options of `clipping`.

    Attributes:
        clip: $c$.
    """

    def __init__(
        self, geometry: Geometry, weight_shape: Sequence[int], *, lipschitz: float = 1.0, clip: float | None = None
    ) -> None:
        count = schur_count(geometry, weight_shape)
        # Rounded to the safe side: c down, the bound of a given c up.
        root = math.sqrt(count) * (1 + 2.0**-50)
        super().__init__(geometry, weight_shape, lipschitz=lipschitz)
        if clip is None:
            self.clip = self.lipschitz / root * (1 - 2.0**-50) if count else math.inf
        else:
            self.clip = check_lipschitz(clip) if clip else 0.0
            self.lipschitz = self.clip * root * (1 + 2.0**-50) if count else 0.0

    def forward(self, P: Tensor) -> Tensor:
        return P if self.training else self._clipped(P)

    def right_inverse(self, W: Tensor) -> Tensor:
        return self._clipped(super().right_inverse(W))

    def project_(self, P: Tensor) -> None:
        P.copy_(self._clipped(P))

    @torch.no_grad()
    def reset(self, P: Tensor) -> None:
        """Initialise uniformly in [-c, c]."""
        if not P.is_meta:
            P.copy_(self._clipped(P.uniform_(-1, 1) * self.clip))

    def _clipped(self, W: Tensor) -> Tensor:
        limit = largest_not_above(self.clip, W.dtype)
        return W.clamp(-limit, limit)

    def constant_in(self, dtype: torch.dtype) -> float:
        return self.lipschitz  # c is rounded down to the type, so rounded weights stay in [-c, c]

    def describe(self) -> str:
        return f"weights clipped to +-{self.clip:.3g}"


def schur_count(geometry: Geometry, weight_shape: Sequence[int]) -> int:
    """Return N of `Clipped`.

    Examples:
        >>> from torch import nn
        >>> from onelip.core.geometry import geometry_of
        >>> layer = nn.Conv2d(2, 3, 3)
        >>> schur_count(geometry_of(layer), layer.weight.shape)  # (2 * 9) * (3 * 9)
        486
    """
    first, second, *taps = weight_shape
    # One side reads all taps, the other those of one phase of the stride: Note [Phases] of onelip.core.geometry.
    in_a_phase = math.prod(-(-k // s) for k, s in zip(geometry.kernel_size, geometry.phases, strict=True))
    return (first // geometry.groups) * second * math.prod(taps) * in_a_phase


def largest_not_above(value: float, dtype: torch.dtype) -> float:
    """Return the largest number of the type that is not above a non-negative value."""
    rounded = torch.tensor(value, dtype=torch.float64, device="cpu").to(dtype)  # not the default device
    if float(rounded) > value:
        rounded = torch.nextafter(rounded, torch.zeros_like(rounded))
    return float(rounded)


def clipping(module: Layer, name: str = "weight", *, lipschitz: float = 1.0, clip: float | None = None) -> Layer:
    """Keep the weights of a layer in [-c, c], in place, and return it; see `Clipped`.

    Call `onelip.project(model)` after each step of the optimizer.

    Args:
        module: Linear, Conv1d to Conv3d or ConvTranspose1d to ConvTranspose3d.
        name: name of the parameter to constrain.
        lipschitz: the constant to guarantee; c follows from it.
        clip: c itself, e.g. 0.01 in the paper; the constant follows from it.

    Returns:
        The same module, with a parametrized weight.

    Raises:
        onelip.UnsupportedLayer: if the bound does not hold for this layer or its padding.

    Examples:
        >>> from torch import nn
        >>> layer = clipping(nn.Linear(4, 9))
        >>> round(float(layer.parametrizations.weight[0].clip), 6)  # 1 / sqrt(4 * 9)
        0.166667
    """
    return attach_new(Clipped, module, name, lipschitz=lipschitz, clip=clip)


register_method(
    Method(
        name="clipping",
        title="WGAN weight clipping (Arjovsky et al., 2017)",
        citation="Martin Arjovsky, Soumith Chintala, Leon Bottou, "
        '"Wasserstein Generative Adversarial Networks", ICML 2017.',
        mechanism="projection",
        guarantee="proved",
        apply=clipping,
        options=({"clip": 0.01}, {"lipschitz": 0.5}),
        paper=PaperRow(E="yes", F="yes", G="yes", M="no"),
        note="the clip value follows from the constant, or the constant from the clip value",
        # Momentum keeps pushing against the ends of the interval, and weight decay away from them.
        hyperparameters={"momentum": 0.0, "nesterov": False, "weight_decay": 0.0},
    )
)


class SpectralBall(PowerIterated, Projection):
    r"""LCC with $p = 2$: the spectral norm is kept at most $L$; `lcc` registers it.

    **Rule.** $W \leftarrow W / \max(1, \|W\|_2 / L)$ after each step of the optimizer, with the norm of the operator of
    the layer estimated by power iteration.

    **Assumptions.** Zero padding of any amount, or circular padding of at most `dilation * (kernel_size - 1)` in total.

    **Guarantee.** In training the constant $L$ holds once the power iteration has converged. In evaluation the weight
    is scaled by a proved bound, so $L$ is proved for every weight.

    Gouk, Frank, Pfahringer, Cree, "Regularisation of neural networks by enforcing Lipschitz continuity", Machine
    Learning 110, 2021.

    The arguments are those of `lcc`, without `p`.
    """

    def forward(self, P: Tensor) -> Tensor:
        return P if self.training else self.scaled_by_proof(P, only_down=True)

    def project_(self, P: Tensor) -> None:
        norm = self.estimate(P)
        P.div_((norm / self.lipschitz).clamp(min=1.0).to(P.dtype))

    def describe(self) -> str:
        return "LCC (p = 2), by its proved bound in eval mode (an estimate in training)"


class SumBall(Projection):
    r"""LCC with $p = 1$ or $p = \infty$: sums of magnitudes are kept at most $L$; `lcc` registers it.

    **Rule.** $W \leftarrow W / \max(1, \|W\|_p / L)$ after each step of the optimizer. $\|W\|_1$ is the largest sum of
    magnitudes over the weights that read one input channel, $\|W\|_\infty$ over those of one output channel.

    **Guarantee.** None for L2: the sums do not bound the spectral norm, so no constant is known by construction.
    Evaluation uses the proved bound of the stored weights.

    The arguments are those of `LipschitzParametrization`, and `p` of `lcc`.
    """

    def __init__(self, geometry: Geometry, weight_shape: Sequence[int], *, p: float, lipschitz: float = 1.0) -> None:
        super().__init__(geometry, weight_shape, lipschitz=lipschitz)
        self.p = float(p)

    def project_(self, P: Tensor) -> None:
        norm = self.norm(P)
        P.div_((norm / self.lipschitz).clamp(min=1.0).to(P.dtype))

    def norm(self, P: Tensor) -> Tensor:
        """Return the p-norm of the operator on an unbounded image; borders can only make it smaller."""
        # Phases of a stride are separate channels: a pixel is read by the taps of its phase only.
        kernel = self.geometry.to_kernel(P.to(working_type(P.dtype)), "inputs").abs()  # (g, outputs, inputs, *taps)
        if not kernel.numel():
            return P.new_zeros(())
        taps = tuple(range(3, kernel.dim()))
        return kernel.sum((1 if self.p == 1 else 2, *taps)).amax()

    def describe(self) -> str:
        return f"LCC (p = {'1' if self.p == 1 else 'inf'}), no L2 constant"


def lcc(
    module: Layer,
    name: str = "weight",
    *,
    p: float = 2,
    lipschitz: float = 1.0,
    iterations: int = 2,
    input_size: int | Sequence[int] | None = None,
) -> Layer:
    """Keep the p-norm of a layer at most `lipschitz`, in place, and return it; see `SpectralBall` and `SumBall`.

    Call `onelip.project(model)` after each step of the optimizer.

    Args:
        module: Linear, Conv1d to Conv3d or ConvTranspose1d to ConvTranspose3d.
        name: name of the parameter to constrain.
        p: 1, 2 or `math.inf`.
        lipschitz: the constant, called lambda in the paper.
        iterations: p = 2: steps of the power method after each step of the optimizer.
        input_size: p = 2: spatial size of the inputs, for the estimate in training; the proof needs none.

    Returns:
        The same module, with a parametrized weight.

    Raises:
        onelip.UnsupportedLayer: if no bound is known for this layer or its padding.
        ValueError: for another p, or other options out of range.

    Examples:
        >>> layer = lcc(nn.Linear(4, 4), p=math.inf)
        >>> bool(layer.weight.abs().sum(1).max() <= 1 + 1e-6)
        True
    """
    if p not in (1, 2, math.inf):
        raise ValueError(f"expected p to be 1, 2 or inf, got {p!r}")
    if p == 2:
        ball = SpectralBall(module, name, lipschitz=lipschitz, iterations=iterations, input_size=input_size)
        attach(module, ball, name)
    else:
        attach_new(SumBall, module, name, input_size=input_size, p=p, lipschitz=lipschitz)
    project(module)
    return module


@torch.no_grad()
def limit_batch_norm(model: nn.Module, *, lipschitz: float = 1.0) -> int:
    r"""Scale the weights $g$ of BatchNorm layers down, in place, such that the constant in eval mode is at most $L$.

    $$g \leftarrow g / \max\!\Big(1, \max_i \frac{|g_i|}{L \sqrt{v_i + \varepsilon}}\Big)$$

    Call it after each step of the optimizer, in addition to `onelip.project`. The running variance $v$ keeps changing,
    so `onelip.audit` and evaluation use the stored one. In training BatchNorm has no Lipschitz constant.

    Args:
        model: any module.
        lipschitz: the constant $L$.

    Returns:
        The number of BatchNorm layers.

    Raises:
        ValueError: for a BatchNorm layer without weight or running statistics.

    Examples:
        >>> layer = nn.BatchNorm1d(2, eps=0.0)
        >>> _ = layer.running_var.copy_(torch.tensor([0.25, 1.0]))
        >>> limit_batch_norm(layer, lipschitz=1.5), layer.weight.tolist()
        (1, [0.75, 0.75])
    """
    limit, count = check_lipschitz(lipschitz), 0
    for module in model.modules():
        if not isinstance(module, nn.modules.batchnorm._BatchNorm):
            continue
        if module.weight is None or module.running_var is None:
            raise ValueError(
                f"expected BatchNorm with a weight and running statistics, got {module}; "
                "build it with affine=True and track_running_stats=True"
            )
        gain = float((module.weight.double().abs() * (module.running_var.double() + module.eps).rsqrt()).max())
        module.weight.div_(max(1.0, gain / limit))
        count += 1
    return count


register_method(
    Method(
        name="lcc",
        title="LCC, Lipschitz continuity constraint (Gouk et al., 2021)",
        citation="Henry Gouk, Eibe Frank, Bernhard Pfahringer, Michael J. Cree, "
        '"Regularisation of neural networks by enforcing Lipschitz continuity", Machine Learning 110, 2021.',
        mechanism="projection",
        guarantee="at convergence",
        apply=lcc,
        options=({"p": 1}, {"p": math.inf}, {"lipschitz": 0.5}),
        train_equals_eval=False,
        paper=PaperRow(E="no", F="partly", G="yes", M="no", notes={"F": 2}),
        fast_lr=0.3,
        # Weight decay would move weights inside the ball, and the ball is the regulariser here. With a loss that
        # always rewards more margin, the largest singular value grows in each step, and the division makes all others
        # shrink, in 3x3 layers to a tenth. So the loss is nearly a hinge: images with their margin contribute nothing.
        hyperparameters={"lr": 1e-3, "weight_decay": 0.0, "offset": 0.3, "temperature": 0.02},
        note="p = 2: eval mode divides by the proved bound; p = 1, inf: bound of the stored weights",
    )
)


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

    The arguments are those of `LipschitzParametrization`, and the options of `parseval`.

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
        W = super().right_inverse(W)
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
        """Initialise with orthonormal rows or columns, as in the paper; on a single tap if possible."""
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


register_method(
    Method(
        name="parseval",
        title="Parseval networks (Cisse et al., 2017)",
        citation="Moustapha Cisse, Piotr Bojanowski, Edouard Grave, Yann Dauphin, Nicolas Usunier, "
        '"Parseval Networks: Improving Robustness to Adversarial Examples", ICML 2017.',
        mechanism="projection",
        apply=parseval,
        options=({"beta": 3e-4}, {"rows": 0.3}),
        paper=PaperRow(E="yes", F="no", G="yes", M="partly", notes={"M": 1}),
        fast_lr=0.9,
        # After a long step the retraction may not converge.
        hyperparameters={"lr": 0.2, "weight_decay": 0.0, "gradient_clip": 1.0},
        note="bound of the stored weights in evaluation",
    )
)
