"""GloRo, globally-robust networks.

Citation: Klas Leino, Zifan Wang, Matt Fredrikson, "Globally-Robust Neural Networks", ICML 2021.

With K_ij = K |w_i - w_j| (K the constant of the features, w the last layer's rows) and j the predicted class, the
"bottom" class scores
    f_bottom = max_{i != j} (f_i + epsilon K_ij),
what the best rival can reach within epsilon. A decision is certified where f_j > f_bottom. The loss is cross-entropy
over the classes and the bottom class, or in the form of TRADES
    CE(f, y) + lambda KL(softmax(f) || softmax([f, f_bottom])),    the KL being log(sum e^f + e^f_bottom) - log sum e^f.
Assumes: a chain of modules; layers are free, their norms are followed by power iteration.
Guarantee: none in training. Evaluation goes by proved bounds of the stored weights, and the distances of the rows.
"""

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from onelip.geometry import LINEAR_LAYERS
from onelip.methods._method import Method, PaperRow, Step
from onelip.methods._tracking import PairConstants, track


def bottom_score(scores: Tensor, reach: Tensor) -> Tensor:
    """f_bottom (N, 1) of scores (N, classes) and reach = epsilon K (classes, classes).

    Example:
        >>> bottom_score(torch.tensor([[2.0, 0.0]]), torch.tensor([[0.0, 0.5], [0.5, 0.0]]))
        tensor([[0.5000]])
    """
    predicted = scores.argmax(1)
    rivals = (scores + reach[predicted]).scatter(1, predicted[:, None], -math.inf)
    return rivals.amax(1, keepdim=True)


class GloRoLoss:
    """The loss, see the module's docstring.

    Args:
        epsilon: the radius to be certified, in units of the images, which lie in [0, 1].
        form: "trades", or "cross-entropy" over the classes and the bottom class.
        weight: lambda of the TRADES form.
        ramp: part of the run over which epsilon rises from 0.01 to `overshoot` times its value, evenly in its log.
        overshoot: training asks for a little more than evaluation.
    """

    def __init__(
        self,
        epsilon: float = 36 / 255,
        form: Literal["trades", "cross-entropy"] = "trades",
        weight: float = 1.5,
        ramp: float = 0.5,
        overshoot: float = 1.1,
    ) -> None:
        if not 0 < epsilon < math.inf or not overshoot > 0:
            raise ValueError(f"expected a positive epsilon and overshoot, got {epsilon!r} and {overshoot!r}")
        if form not in ("trades", "cross-entropy"):
            raise ValueError(f"expected form to be 'trades' or 'cross-entropy', got {form!r}")
        if not weight >= 0 or not 0 <= ramp <= 1:
            raise ValueError(f"expected weight of at least 0 and ramp from 0 to 1, got {weight!r} and {ramp!r}")
        self.epsilon, self.form, self.weight = float(epsilon), form, float(weight)
        self.ramp, self.overshoot = float(ramp), float(overshoot)
        self.constants = PairConstants()

    def epsilon_at(self, progress: float) -> float:
        """epsilon at a part of the run."""
        end = self.epsilon * self.overshoot
        start = min(0.01, end)
        return end if progress >= self.ramp else start * (end / start) ** (progress / self.ramp)

    def __call__(self, step: Step) -> Tensor:
        reach = self.epsilon_at(step.progress) * self.constants(step.model, step.images).to(step.scores.dtype)
        extended = torch.cat([step.scores, bottom_score(step.scores, reach)], 1)  # (N, classes + 1)
        if self.form == "cross-entropy":
            return F.cross_entropy(extended, step.labels, reduction="none")
        divergence = extended.logsumexp(1) - step.scores.logsumexp(1)
        return F.cross_entropy(step.scores, step.labels, reduction="none") + self.weight * divergence


METHOD = Method(
    name="gloro",
    title="GloRo, globally-robust networks (Leino et al., 2021)",
    mechanism="loss",
    guarantee="none",
    layers=LINEAR_LAYERS,
    apply=track,
    options=({"iterations": 1},),
    paper=PaperRow(E="partly", F="partly", G="yes", M="no", notes={"E": 3, "F": 2}),
    loss=GloRoLoss,
    term_options=("epsilon", "form", "weight", "ramp", "overshoot"),
    certificate="pairs",
    hyperparameters={"offset": 0.0, "temperature": 1.0, "lr": 0.01, "weight_decay": 0.0},
    note="bound of the stored weights in evaluation, per pair of classes",
)
