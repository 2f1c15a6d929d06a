"""LCC, Lipschitz continuity constraint.

Citation: Henry Gouk, Eibe Frank, Bernhard Pfahringer, Michael J. Cree, "Regularisation of neural networks by enforcing
Lipschitz continuity", Machine Learning 110, 2021.

Inequality: W <- W / max(1, ||W||_p / L) after each step, so that ||W||_p <= L.
    p = 1     the largest sum of magnitudes over what one input channel is read by
    p = inf   the largest sum of magnitudes over what one output channel reads
    p = 2     the largest singular value; in training estimated from below by power iteration on the layer's operator
Certificates here are about L2. For p = 2 evaluation scales by the proved bound of the stored weight instead of the
estimate. For p = 1 and p = inf the sums are no bound on the L2 norm: nothing is proved by construction, and evaluation
goes by the proved bound of the stored weights.
BatchNorm in eval mode multiplies channel i by g_i / sqrt(v_i + e): g <- g / max(1, max_i |g_i| / sqrt(v_i + e) / L), by
`limit_batch_norm`. The running variance v goes on changing, so `onelip.audit` and evaluation go by what is stored.
Assumes: zero padding, or circular padding of at most dilation * (kernel_size - 1) in total.
Guarantee: at convergence in training (p = 2); proved in evaluation.
"""

import math
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from onelip.core.geometry import LINEAR_LAYERS, geometry_of
from onelip.core.parametrization import attach, check_lipschitz, original_of, weight_of, working_type
from onelip.methods.method import Method, PaperRow
from onelip.methods.norms.estimated import PowerIterated
from onelip.methods.norms.projection import Projection, project_step

Layer = TypeVar("Layer", bound=nn.Module)


class SpectralBall(PowerIterated, Projection):
    """p = 2: the spectral norm kept at most L; see the module's docstring, and `lcc` for the verb."""

    def forward(self, P: Tensor) -> Tensor:
        return P if self.training else self.scaled_by_proof(P, only_down=True)

    def project_(self, P: Tensor) -> None:
        norm = self.estimate(P)
        P.div_((norm / self.lipschitz).clamp(min=1.0).to(P.dtype))

    def describe(self) -> str:
        return "LCC (p = 2), by its proved bound in eval mode (an estimate in training)"


class SumBall(Projection):
    """p = 1 or inf: sums of magnitudes kept at most L."""

    def __init__(self, *args: Any, p: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.p = p

    def project_(self, P: Tensor) -> None:
        norm = self.norm(P)
        P.div_((norm / self.lipschitz).clamp(min=1.0).to(P.dtype))

    def norm(self, P: Tensor) -> Tensor:
        """||W||_1 or ||W||_inf of the operator, without its borders (where it can only be less)."""
        # Phases of a stride are channels of their own: a pixel is read by the taps of its phase only.
        kernel = self.geometry.to_kernel(P.to(working_type(P.dtype)), "inputs").abs()  # (g, outputs, inputs, *taps)
        if not kernel.numel():
            return P.new_zeros(())
        taps = tuple(range(3, kernel.dim()))
        return kernel.sum((1 if self.p == 1 else 2, *taps)).amax()

    def describe(self) -> str:
        return f"LCC (p = {'1' if self.p == 1 else 'inf'}), no L2 constant"


def lcc(
    module: Layer,
    *,
    p: float | str = 2,
    lipschitz: float = 1.0,
    iterations: int = 2,
    input_size: int | Sequence[int] | None = None,
) -> Layer:
    """Keep the p-norm of a layer at most `lipschitz`, in place; return it. Call `onelip.project` after each step.

    Args:
        module: Linear, Conv1d to Conv3d, ConvTranspose1d to ConvTranspose3d.
        p: 1, 2 or inf.
        lipschitz: the constant, called lambda in the paper.
        iterations: p = 2: steps of the power method after each step of the optimizer.
        input_size: p = 2: spatial size of the images, for the estimate in training.

    Examples:
        >>> layer = lcc(nn.Linear(4, 4), p="inf")
        >>> bool(layer.weight.abs().sum(1).max() <= 1 + 1e-6)
        True
    """
    order = math.inf if p in ("inf", math.inf) else p
    if order not in (1, 2, math.inf):
        raise ValueError(f"expected p to be 1, 2 or inf, got {p!r}")
    size = tuple(input_size) if isinstance(input_size, Sequence) else input_size
    geometry = geometry_of(module, size)
    weight = weight_of(module, geometry)
    made: Projection
    if order == 2:
        ball = SpectralBall(module, geometry, weight.shape, lipschitz=lipschitz, iterations=iterations, input_size=size)
        ball.warm_up(module)
        made = ball
    else:
        made = SumBall(geometry, weight.shape, p=float(order), lipschitz=lipschitz)
    attach(module, made)
    with torch.no_grad():
        original = original_of(module)
        if not original.is_meta:
            made.project_(original)
    return module


@torch.no_grad()
def limit_batch_norm(model: nn.Module, *, lipschitz: float = 1.0) -> int:
    """Scale the weights of each BatchNorm layer down to the constant in eval mode; returns how many layers there are.

    Call it after each step of the optimizer, besides `onelip.project`. In training they have no constant at all.

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
                "make it with affine=True and track_running_stats=True"
            )
        gain = float((module.weight.double().abs() * (module.running_var.double() + module.eps).rsqrt()).max())
        module.weight.div_(max(1.0, gain / limit))
        count += 1
    return count


METHOD = Method(
    name="lcc",
    title="LCC, Lipschitz continuity constraint (Gouk et al., 2021)",
    mechanism="projection",
    guarantee="at convergence",
    layers=LINEAR_LAYERS,
    apply=lcc,
    options=({"p": 1}, {"p": "inf"}, {"lipschitz": 0.5}),
    train_equals_eval=False,
    paper=PaperRow(E="no", F="partly", G="yes", M="no", notes={"F": 2}),
    after_step=project_step,
    # Decay would pull every weight below the constraint, which is the regulariser here. A loss that goes on asking for
    # more margin makes the largest singular value grow in each step, and dividing by it wears the others away, in 3x3
    # layers to a tenth. So the loss is nearly a hinge: images that have their margin do not pull.
    hyperparameters={"lr": 1e-3, "weight_decay": 0.0, "offset": 0.3, "temperature": 0.02},
    note="p = 2 in eval mode by the proved bound; p = 1, inf by the bound of the stored weights",
)
