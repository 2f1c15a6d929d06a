"""LCC, Lipschitz continuity constraint: projection onto balls of a norm after each step."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from onelip.core.geometry import LINEAR_LAYERS, Geometry
from onelip.core.parametrization import attach, check_lipschitz, working_type
from onelip.methods.method import Layer, Method, PaperRow, attach_new
from onelip.methods.norms.power_iteration import PowerIterated
from onelip.methods.norms.projection import Projection, project


class SpectralBall(PowerIterated, Projection):
    r"""LCC with $p = 2$: the spectral norm is kept at most $L$; `lcc` registers it.

    **Rule.** $W \leftarrow W / \max(1, \|W\|_2 / L)$ after each step of the optimizer, with the norm of the operator of
    the layer estimated by power iteration.

    **Assumptions.** Zero padding of any amount, or circular padding of at most `dilation * (kernel_size - 1)` in total.

    **Guarantee.** In training the constant $L$ holds once the power iteration has converged. In evaluation the weight
    is scaled by a proved bound, so $L$ is proved for every weight.

    Gouk, Frank, Pfahringer, Cree, "Regularisation of neural networks by enforcing Lipschitz continuity", Machine
    Learning 110, 2021.

    Args:
        module: Linear, Conv1d to Conv3d or ConvTranspose1d to ConvTranspose3d.
        name: name of the weight.
        lipschitz: the constant $L$.
        iterations: steps of the power method after each step of the optimizer.
        input_size: spatial size of the inputs, for the estimate.
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

    Args:
        geometry: how the weight acts, from `onelip.core.geometry.geometry_of`.
        weight_shape: shape of the weight.
        p: 1 or `math.inf`.
        lipschitz: the constant $L$.
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


METHOD = Method(
    name="lcc",
    title="LCC, Lipschitz continuity constraint (Gouk et al., 2021)",
    citation="Henry Gouk, Eibe Frank, Bernhard Pfahringer, Michael J. Cree, "
    '"Regularisation of neural networks by enforcing Lipschitz continuity", Machine Learning 110, 2021.',
    mechanism="projection",
    guarantee="at convergence",
    layers=LINEAR_LAYERS,
    apply=lcc,
    options=({"p": 1}, {"p": math.inf}, {"lipschitz": 0.5}),
    train_equals_eval=False,
    paper=PaperRow(E="no", F="partly", G="yes", M="no", notes={"F": 2}),
    # Weight decay would move weights inside the ball, and the ball is the regulariser here. With a loss that always
    # rewards more margin, the largest singular value grows in each step, and the division makes all others shrink, in
    # 3x3 layers to a tenth. So the loss is nearly a hinge: images that have their margin contribute nothing.
    hyperparameters={"lr": 1e-3, "weight_decay": 0.0, "offset": 0.3, "temperature": 0.02},
    note="p = 2: eval mode divides by the proved bound; p = 1, inf: bound of the stored weights",
)
