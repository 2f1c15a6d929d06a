"""LMT, Lipschitz-margin training.

Citation: Yusuke Tsuzuku, Issei Sato, Masashi Sugiyama, "Lipschitz-Margin Training: Scalable Certification of
Perturbation Invariance for Deep Neural Networks", NeurIPS 2018.

If the features have constant K, a perturbation of norm c moves f_i - f_y by at most c K |w_i - w_y| (LMT++), which is
never more than sqrt(2) c L (LMT). So that much is added to every other score in training, and a right decision that
survives it is certified for c. Samples that are not right by that much yet get only the part kappa that they can bear,
    kappa = min(1, max(0, min_i (f_y - f_i) / (c K |w_i - w_y|))),    a constant for the derivative.
Assumes: a chain of modules; layers are free, their norms are followed by power iteration.
Guarantee: none in training. Evaluation goes by proved bounds of the stored weights, and the distances of the rows.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from onelip.geometry import LINEAR_LAYERS
from onelip.methods._method import Method, PaperRow, Step
from onelip.methods._tracking import PairConstants, estimated_constant, links, track


def lmt_scores(scores: Tensor, labels: Tensor, added: Tensor) -> Tensor:
    """Scores with kappa times `added` (N, classes) on all but the right class; see the module's docstring.

    Example:
        >>> lmt_scores(torch.tensor([[2.0, 0.0]]), torch.tensor([0]), torch.tensor([[0.0, 1.0]]))
        tensor([[2., 1.]])
    """
    right = labels[:, None]
    added = added.scatter(1, right, 0.0)
    with torch.no_grad():
        # 0/0 for the right class itself: infinity, so that it is never the smallest.
        parts = ((scores.gather(1, right) - scores) / added).scatter(1, right, math.inf)
        kappa = parts.amin(1, keepdim=True).clamp(0, 1).nan_to_num(0.0)
    return scores + kappa * added


class LipschitzMargin:
    """The loss: cross-entropy of `lmt_scores`.

    Args:
        radius: c, in units of the images, which lie in [0, 1].
        ramp: part of the run over which c rises to its value, straight.
        per_pair: distances of the last layer's rows (LMT++); else sqrt(2) times the whole constant (LMT).
    """

    def __init__(self, radius: float = 36 / 255, ramp: float = 0.3, per_pair: bool = True) -> None:
        if not 0 < radius < math.inf:
            raise ValueError(f"expected a positive radius, got {radius!r}")
        if not 0 <= ramp <= 1:
            raise ValueError(f"expected ramp to be a part of the run from 0 to 1, got {ramp!r}")
        self.radius, self.ramp, self.per_pair = float(radius), float(ramp), bool(per_pair)
        self.constants = PairConstants()

    def radius_at(self, progress: float) -> float:
        """c at a part of the run."""
        return self.radius if progress >= self.ramp else self.radius * progress / self.ramp

    def __call__(self, step: Step) -> Tensor:
        if self.per_pair:
            reach = self.constants(step.model, step.images).to(step.scores.dtype)[step.labels]  # (N, classes)
        else:
            reach = math.sqrt(2) * estimated_constant(list(links(step.model))) * torch.ones_like(step.scores)
        added = self.radius_at(step.progress) * reach
        return F.cross_entropy(lmt_scores(step.scores, step.labels, added), step.labels, reduction="none")


METHOD = Method(
    name="lmt",
    title="LMT, Lipschitz-margin training (Tsuzuku et al., 2018)",
    mechanism="loss",
    guarantee="none",
    layers=LINEAR_LAYERS,
    apply=track,
    options=({"iterations": 1},),
    paper=PaperRow(E="partly", F="no", G="yes", M="no", notes={"E": 3}),
    loss=LipschitzMargin,
    term_options=("radius", "ramp", "per_pair"),
    certificate="pairs",
    hyperparameters={"offset": 0.0, "temperature": 1.0, "lr": 5e-3, "weight_decay": 0.0},
    note="bound of the stored weights in evaluation, per pair of classes",
)
